"""Keys and values of earlier tokens: one preallocated tensor for each loop, each row bound to its trajectory.

cache = model.cache("4-2-1-1", rows=2)                # or a trajectory for each row
hidden = model.extend(prompts, cache, counts=[5, 9])  # prompts padded at the end; hidden [B, T, D]
hidden = model.extend(next_tokens, cache)             # one more token each

A short trajectory is not a prefix of a longer one (Δ differs), so keys of one mean nothing under another: a cache
follows the trajectories it was made for, and no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.device import sent
from loopformer.errors import LoopformerError
from loopformer.model.conditioning import Condition
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class RowKeys:
    """What is kept of one row along its trajectory: keys and values of each loop."""

    trajectory: Trajectory
    loops: list[Tensor]  # [k, 2, H, T, D/H] each; few tensors, as many small launches take long

    def copy(self) -> "RowKeys":
        """The same in memory of its own."""
        return RowKeys(self.trajectory, list(torch.stack(self.loops)) if self.loops else [])


@dataclass(frozen=True)
class Passes:
    """The passes of a batch: how many rows take part in each, longest trajectories first, and their conditions."""

    rows: list[int]
    conditions: list[Condition]  # each of the rows in its pass, or of 1 for all
    order: list[int] | None  # the rows, longest trajectories first; None where all are the same


@dataclass(frozen=True)
class Place:
    """A `Slot` (block.py): one (loop, block) of the cache, for the tokens that are being run."""

    keys: Tensor  # [rows, H, capacity, D/H]
    values: Tensor
    positions: Tensor  # [rows or 1, T]: where the new tokens go
    start: int | None  # the first of them where all rows have the same length
    end: int  # keys up to here are looked at

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [rows, H, T, D/H]; return all up to the longest row's end."""
        for kept, new in ((self.keys, k), (self.values, v)):
            if self.start is not None:
                kept[:, :, self.start : self.end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                kept[rows, :, self.positions] = new.transpose(1, 2)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class Cache:
    """The state of some sequences: what has been run of each, along its own trajectory."""

    def __init__(
        self,
        config: ModelConfig,
        trajectories: Sequence[Trajectory],
        passes: Passes,
        capacity: int,
        weight: Tensor,
    ) -> None:
        """`weight`, the model's token embedding, says whose cache this is; its device and dtype are the cache's."""
        if not 1 <= capacity <= config.context:
            raise LoopformerError(f"A cache holds 1 to {config.context} tokens (the context), not {capacity}.")
        self.trajectories, self.passes, self.capacity, self._weight = tuple(trajectories), passes, capacity, weight
        self.lengths = [0] * len(trajectories)
        self._order = list(range(len(trajectories))) if passes.order is None else passes.order
        self._blocks, self._shape = config.blocks, (config.heads, capacity, config.head_width)
        self._kept = [self._empty_loop(rows) for rows in passes.rows]
        self._positions = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self._start: int | None = 0
        self._end = 0

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(loop.nbytes for loop in self._kept)

    def require_model(self, weight: Tensor) -> None:
        """Refuse another model than the cache was made for, known by its token embedding."""
        if weight is not self._weight:
            raise LoopformerError("This cache was made for another model; make one with this model's cache(…).")

    def need_room(self, count: int) -> None:
        """Refuse more new tokens than the longest row has places for."""
        longest = max(self.lengths)
        if longest + count > self.capacity:
            raise LoopformerError(
                f"{longest} tokens and {count} more do not fit the cache of {self.capacity}; "
                "the model's context is the limit."
            )

    def place(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Where `count` new tokens go [B or 1, T], and who may look at whom [B or 1, 1, T, end]; None: plain."""
        self.need_room(count)
        self._end = max(self.lengths) + count
        new = torch.arange(count, device=self._weight.device)
        if len(set(self.lengths)) == 1:
            self._start = self.lengths[0]
            positions = (new + self._start)[None]
        else:
            self._start = None
            positions = sent(self.lengths, new.device)[:, None] + new
        self._positions = positions
        if self._start is not None and (count == 1 or self._start == 0):
            return positions, None
        looked_at = torch.arange(self._end, device=new.device)
        return positions, looked_at <= positions[:, None, :, None]

    def slots(self, loop: int) -> list[Place]:
        """The slots of a loop's blocks, for the tokens that were placed last."""
        rows, positions = self.passes.rows[loop], self._positions
        if len(positions) > 1:
            first = self._order[:rows]
            in_order = first == list(range(rows))
            positions = positions[:rows] if in_order else positions[sent(first, positions.device)]
        return [Place(k[:rows], v[:rows], positions, self._start, self._end) for k, v in self._kept[loop]]

    def tensors(self, loop: int, block: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a (loop, block), each [rows, H, capacity, D/H]."""
        keys, values = self._kept[loop][block]
        return keys, values

    def read(self, row: int) -> RowKeys:
        """What is kept of a row, not copied."""
        place, length = self._place_of(row), self.lengths[row]
        loops = self._kept[: self.trajectories[row].budget]
        return RowKeys(self.trajectories[row], [loop[:, :, place, :, :length] for loop in loops])

    def write(self, row: int, kept: RowKeys, length: int) -> None:
        """Let a row begin with the first `length` tokens of another one along the same trajectory."""
        if kept.trajectory != self.trajectories[row]:
            raise LoopformerError(
                f"Row {row} of this cache follows {self.trajectories[row]}, not {kept.trajectory}; "
                "make a new cache for it."
            )
        self._fill(self._place_of(row), kept, length)
        self.lengths[row] = length

    def _fill(self, place: int, kept: RowKeys, length: int) -> None:
        mine = [loop[:, :, place, :, :length] for loop in self._kept[: len(kept.loops)]]
        if mine:
            torch._foreach_copy_(mine, [loop[:, :, :, :length] for loop in kept.loops])

    def _empty_loop(self, rows: int) -> Tensor:
        """Keys and values of one loop [k, 2, rows, H, capacity, D/H]."""
        # Zeros, as a masked place is still multiplied: what lies there must be finite.
        return self._weight.detach().new_zeros(self._blocks, 2, rows, *self._shape)

    def _place_of(self, row: int) -> int:
        """Where a row lies in the tensors: longest trajectories first."""
        return self._order.index(row)

    def advance(self, counts: Sequence[int]) -> None:
        """The tokens that were run now belong to their rows."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
