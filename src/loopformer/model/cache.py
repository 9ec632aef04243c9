"""The KV cache: keys and values of earlier tokens in one preallocated tensor per loop.

cache = model.cache("4-2-1-1", rows=2)                # or a trajectory for each row
hidden = model.extend(prompts, cache, counts=[5, 9])  # prompts padded at the end; hidden [B, T, D]
hidden = model.extend(next_tokens, cache)             # one more token each

Every (loop, block) has keys and values of its own, since each loop sees another state. Those of one trajectory mean
nothing under another: a short trajectory is not a prefix of a longer one, as its step sizes differ. So each row of
a cache is bound to the trajectory it was made for.
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
    loops: list[Tensor]  # [k, 2, H, T, D/H] for each loop: few tensors, since many small copies take long to launch

    def copy(self) -> "SequenceKV":
        """The same keys and values in new memory."""
        return SequenceKV(self.trajectory, list(torch.stack(self.loops)) if self.loops else [])


@dataclass(frozen=True)
class LoopPlan:
    """The loops of a batch: how many rows take part in each, longest trajectories first, and their conditions."""

    rows: list[int]
    conditions: list[Condition]  # of each loop: with one entry per row that takes part, or one for all rows
    order: list[int] | None  # the rows, longest trajectories first; None where all have the same trajectory


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one (loop, block), as the `KVStore` (block.py) of a forward pass over new tokens."""

    keys: Tensor  # [rows, H, capacity, D/H]
    values: Tensor
    positions: Tensor  # [rows or 1, T], of the new tokens
    start: int | None  # the first of them, where all rows have the same length
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
        passes: LoopPlan,
        capacity: int,
        weight: Tensor,
    ) -> None:
        """`weight` is the model's token embedding: it identifies the model, and gives device and dtype."""
        if not 1 <= capacity <= config.context:
            raise LoopformerError(f"A cache holds 1 to {config.context} tokens (the context), not {capacity}.")
        self.trajectories, self.passes, self.capacity, self._weight = tuple(trajectories), passes, capacity, weight
        self.lengths = [0] * len(trajectories)
        self._order = list(range(len(trajectories))) if passes.order is None else passes.order
        self._blocks, self._shape = config.blocks, (config.heads, capacity, config.head_width)
        # Of each loop [k, 2, rows, H, capacity, D/H]: keys and values of each block.
        self.loops = [self._empty_loop(rows) for rows in passes.rows]
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
        """The positions of `count` new tokens [B or 1, T], and their attention mask [B or 1, 1, T, end], if any."""
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
        """The keys and values of each block in a loop, for the tokens of the last call of `positions_and_mask`."""
        rows, positions = self.passes.rows[loop], self._positions
        if len(positions) > 1:
            first = self._order[:rows]  # positions are in the order of the caller, keys in that of the loop
            in_order = first == list(range(rows))
            positions = positions[:rows] if in_order else positions[to_device_async(first, positions.device)]
        return [LayerKV(k[:rows], v[:rows], positions, self._start, self._end) for k, v in self.loops[loop]]

    def read(self, row: int) -> SequenceKV:
        """The keys and values of a row, as views."""
        index, length = self._order.index(row), self.lengths[row]
        loops = self.loops[: self.trajectories[row].budget]
        return SequenceKV(self.trajectories[row], [loop[:, :, index, :, :length] for loop in loops])

    def write(self, row: int, source: SequenceKV, length: int) -> None:
        """Start a row with the first `length` tokens of another one along the same trajectory."""
        if source.trajectory != self.trajectories[row]:
            raise LoopformerError(
                f"Row {row} of this cache follows {self.trajectories[row]}, not {source.trajectory}; "
                "make a new cache for it."
            )
        self._fill(self._order.index(row), source, length)
        self.lengths[row] = length

    def _fill(self, index: int, source: SequenceKV, length: int) -> None:
        """Copy keys and values of `length` tokens to the row at `index` in the tensors."""
        targets = [loop[:, :, index, :, :length] for loop in self.loops[: len(source.loops)]]
        if targets:
            torch._foreach_copy_(targets, [loop[:, :, :, :length] for loop in source.loops])

    def _empty_loop(self, rows: int) -> Tensor:
        """Keys and values of one loop [k, 2, rows, H, capacity, D/H]."""
        # Zeros, since attention multiplies masked values by 0: they must be finite.
        return self._weight.detach().new_zeros(self._blocks, 2, rows, *self._shape)

    def advance(self, counts: Sequence[int]) -> None:
        """Count the tokens that were stored last as part of their rows."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
