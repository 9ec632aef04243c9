"""Pack the rows of a micro-batch, each with its trajectories, into one pass through the stack.

    packed = pack_rows(run.model, micro_batch.trajectories, micro_batch.exits)
    losses = objective(inputs, targets, documents, packed.to(device), divisors)

The pass has a row for each trajectory that a row of the micro-batch trains on, the longest trajectories first. Loop
i is then one call for all rows that still take it, whatever their trajectories.

All that a pass needs to know on the host is its `PackedShape`. What else differs from step to step lies in
tensors, which a background thread can make and which a CUDA graph can read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.model.conditioning import loop_scalars
from loopformer.trajectory import Trajectory


class PackedShape(NamedTuple):
    """The sizes of a pass."""

    active: tuple[int, ...]  # rows that take each loop
    exiting: tuple[int, ...]  # rows that exit after each loop
    groups: tuple[tuple[tuple[int, ...], int], ...]  # rows that train on the same entries: which, how many rows
    exits: tuple[tuple[int, int], ...]  # entries with exits: which, how many rows
    in_order: bool  # `loss_rows` counts 0, 1, 2, …: the states need no copy
    has_padding: bool  # the first row has no loss


@dataclass(frozen=True)
class PackedRows:
    """What packs a micro-batch: R rows in the pass, G of them with a loss, E exits, N loops of all rows."""

    shape: PackedShape
    input_rows: Tensor  # [R] → row of the micro-batch
    scalars: Tensor  # [N, 3], what conditions each loop (`loop_scalars`): loop 1 of all rows, loop 2, …
    loss_rows: Tensor  # [G] → row of the pass, group by group; in a group entry by entry
    target_rows: Tensor  # → row of the micro-batch, group by group
    exit_rows: Tensor  # [E] → row of the pass, loop by loop
    exit_order: Tensor  # [E] → position in `exit_rows`, entry by entry
    exit_target_rows: Tensor  # [E] → row of the micro-batch, entry by entry

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self) if field.name != "shape"]

    def map(self, fn: Callable[[Tensor], Tensor]) -> PackedRows:
        """The same with `fn` applied to each tensor."""
        return PackedRows(self.shape, *map(fn, self.tensors))

    def to(self, device: torch.device) -> PackedRows:
        """The same on a device; copies from pinned memory do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def pack_rows(
    config: ModelConfig,
    trajectories: Sequence[Mapping[int, Trajectory]],
    exits: Sequence[Mapping[int, int]] = (),
    loops: int = 0,
) -> PackedRows:
    """Pack the rows of all entries of an objective.

    trajectories   for each entry, the trajectory of each row that trains on it
    exits          for each entry, the loop after which a row is read as well
    loops          run at least so many loops, because another rank does; a padding row takes them
    """
    # The longest first, and among equals entry by entry.
    sort_keys = sorted(
        (-each.budget, index, row) for index, entry in enumerate(trajectories) for row, each in entry.items()
    )
    order = [trajectories[index][row] for _, index, row in sort_keys]
    input_rows = [row for _, _, row in sort_keys]
    if has_padding := order[0].budget < loops:
        order, input_rows = [Trajectory.uniform(loops), *order], [0, *input_rows]
    position = {(index, row): number for number, (_, index, row) in enumerate(sort_keys, start=int(has_padding))}
    loop_numbers = range(order[0].budget)

    entries_of: dict[int, tuple[int, ...]] = {}
    for index, entry in enumerate(trajectories):
        for row in entry:
            entries_of[row] = (*entries_of.get(row, ()), index)
    # Rows that train on the same entries go through the head together. Sorted, so that groups of the same sizes
    # have the same shape whichever rows they have.
    groups: dict[tuple[int, ...], list[int]] = {}
    for indices, row in sorted((indices, row) for row, indices in entries_of.items()):
        groups.setdefault(indices, []).append(row)
    loss_rows = [position[index, row] for indices, group in groups.items() for index in indices for row in group]

    exits_by_loop = sorted((loop, index, row) for index, entry in enumerate(exits) for row, loop in entry.items())
    exit_order = sorted(range(len(exits_by_loop)), key=lambda number: exits_by_loop[number][1])
    exiting = Counter(loop for loop, _, _ in exits_by_loop)

    scalars = [loop_scalars(trajectory, config.time_scale) for trajectory in order]
    by_loop = [[each[number] for each in scalars if number < len(each)] for number in loop_numbers]
    shape = PackedShape(
        active=tuple(map(len, by_loop)),
        exiting=tuple(exiting[number + 1] for number in loop_numbers),
        groups=tuple((indices, len(group)) for indices, group in groups.items()),
        exits=tuple((index, len(entry)) for index, entry in enumerate(exits) if entry),
        in_order=loss_rows == list(range(len(input_rows))),
        has_padding=has_padding,
    )
    return PackedRows(
        shape,
        input_rows=torch.tensor(input_rows),
        scalars=torch.tensor([scalar for each in by_loop for scalar in each]),
        loss_rows=torch.tensor(loss_rows),
        target_rows=torch.tensor([row for group in groups.values() for row in group]),
        exit_rows=torch.tensor([position[index, row] for _, index, row in exits_by_loop], dtype=torch.int64),
        exit_order=torch.tensor(exit_order, dtype=torch.int64),
        exit_target_rows=torch.tensor([exits_by_loop[number][2] for number in exit_order], dtype=torch.int64),
    )
