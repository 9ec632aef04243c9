"""The KV cache: keys and values of earlier tokens in one preallocated tensor per loop.

cache = model.cache("2-1-2-3", rows=2)                # or a trajectory for each row
hidden = model.extend(prompts, cache, counts=[5, 9])  # prompts padded at the end; hidden [B, T, D]
hidden = model.extend(next_tokens, cache)             # one more token each

Every (loop, block) has its own keys and values, because each loop sees a different state. They cannot be reused
under another trajectory: a short one is not a prefix of a longer one, because its step sizes differ. So each row
of a cache belongs to one trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopformer.config.model import ModelConfig
from loopformer.device import to_device_async
from loopformer.errors import LoopformerError
from loopformer.model.conditioning import Condition
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class SequenceKV:
    """The keys and values of one row along its trajectory."""

    trajectory: Trajectory
    loops: list[Tensor]  # [k, 2, H, T, D/H] for each loop: few tensors, because each copy costs a launch


@dataclass(frozen=True)
class LoopPlan:
    """The loops of a batch: how many rows take part in each, longest trajectories first, and their conditions."""

    rows: list[int]
    conditions: list[Condition]  # per loop: with one row for each row that takes part, or one row for all
    order: list[int] | None  # the rows, longest trajectories first; None where they already lie so


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one (loop, block) during a forward pass over new tokens. A `KVStore` (block.py)."""

    keys: Tensor  # [rows, H, capacity, D/H]
    values: Tensor
    positions: Tensor  # [rows or 1, T], the positions of the new tokens
    start: int | None  # the first new position; None if rows differ in length
    end: int  # attention sees positions before this one

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [rows, H, T, D/H]; return all up to the end of the longest row."""
        for stored, new in ((self.keys, k), (self.values, v)):
            if self.start is not None:  # a slice copy, which is cheaper than a scatter
                stored[:, :, self.start : self.end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                stored[rows, :, self.positions] = new.transpose(1, 2)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class KVCache:
    """The KV cache of some sequences, each along its own trajectory."""

    def __init__(
        self,
        config: ModelConfig,
        trajectories: Sequence[Trajectory],
        plan: LoopPlan,
        capacity: int,
        weight: Tensor,
    ) -> None:
        """`weight` is the model's token embedding: it identifies the model, and sets device and dtype."""
        if not 1 <= capacity <= config.context:
            raise LoopformerError(f"A cache holds 1 to {config.context} tokens (the context), not {capacity}.")
        self.trajectories, self.plan, self.capacity, self._weight = tuple(trajectories), plan, capacity, weight
        self.lengths = [0] * len(trajectories)
        self._order = list(range(len(trajectories))) if plan.order is None else plan.order
        self._blocks, self._shape = config.blocks, (config.heads, capacity, config.head_width)
        # One tensor [k, 2, rows, H, capacity, D/H] per loop, for the rows that run it, longest trajectories first.
        self.loops = [self._empty_loop(rows) for rows in plan.rows]
        # Set by positions_and_mask for the next tokens, and read by `layers`.
        self._positions = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self._start: int | None = 0
        self._end = 0

    @property
    def bytes(self) -> int:
        """The memory of all keys and values."""
        return sum(loop.nbytes for loop in self.loops)

    def require_model(self, weight: Tensor) -> None:
        """Refuse a model other than the one the cache was made for."""
        if weight is not self._weight:
            raise LoopformerError("This cache was made for another model; make one with this model's cache(…).")

    def check_room(self, count: int) -> None:
        """Refuse more new tokens than fit behind the longest row."""
        longest = max(self.lengths)
        if longest + count > self.capacity:
            raise LoopformerError(
                f"{longest} tokens and {count} more do not fit the cache of {self.capacity}; "
                "the model's context is the limit."
            )

    def positions_and_mask(self, count: int) -> tuple[Tensor, Tensor | None]:
        """The positions of `count` new tokens [B or 1, T], and their attention mask [B or 1, 1, T, end], if any.

        Call it before `layers`, which stores at these positions.
        """
        self.check_room(count)
        self._end = max(self.lengths) + count
        new = torch.arange(count, device=self._weight.device)
        if len(set(self.lengths)) == 1:
            self._start = self.lengths[0]
            positions = (new + self._start)[None]
        else:
            self._start = None
            positions = to_device_async(self.lengths, new.device)[:, None] + new
        self._positions = positions
        if self._start is not None and (count == 1 or self._start == 0):
            return positions, None  # one token may attend to all stored ones; a prompt is plain causal attention
        keys = torch.arange(self._end, device=new.device)
        return positions, keys <= positions[:, None, :, None]

    def layers(self, loop: int) -> list[LayerKV]:
        """Where the blocks of a loop store the new tokens, at the positions of the last `positions_and_mask`."""
        rows, positions = self.plan.rows[loop], self._positions
        if len(positions) > 1:
            first = self._order[:rows]  # positions are in the caller's order, keys in the plan's
            in_order = first == list(range(rows))
            positions = positions[:rows] if in_order else positions[to_device_async(first, positions.device)]
        return [LayerKV(k[:rows], v[:rows], positions, self._start, self._end) for k, v in self.loops[loop]]

    def read(self, row: int) -> SequenceKV:
        """The keys and values of a row, as views."""
        index, length = self._order.index(row), self.lengths[row]
        loops = self.loops[: self.trajectories[row].budget]
        return SequenceKV(self.trajectories[row], [loop[:, :, index, :, :length] for loop in loops])

    def write(self, row: int, source: SequenceKV, length: int) -> None:
        """Copy the first `length` tokens of a sequence with the same trajectory to the start of a row."""
        if source.trajectory != self.trajectories[row]:
            raise LoopformerError(
                f"Row {row} of this cache follows {self.trajectories[row]}, not {source.trajectory}; "
                "make a new cache for it."
            )
        self._fill(self._order.index(row), source, length)
        self.lengths[row] = length

    def _fill(self, index: int, source: SequenceKV, length: int) -> None:
        """Copy `length` tokens to the row at `index` of the tensors, which is in the plan's order."""
        targets = [loop[:, :, index, :, :length] for loop in self.loops[: len(source.loops)]]
        if targets:
            torch._foreach_copy_(targets, [loop[:, :, :, :length] for loop in source.loops])

    def _empty_loop(self, rows: int) -> Tensor:
        """Keys and values of one loop [k, 2, rows, H, capacity, D/H]."""
        # Zeros, since attention multiplies masked values by 0: they must be finite.
        return self._weight.detach().new_zeros(self._blocks, 2, rows, *self._shape)

    def advance(self, counts: Sequence[int]) -> None:
        """Add the tokens just stored to the lengths. Without this, the next forward pass overwrites them."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
