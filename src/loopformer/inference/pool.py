"""A cache whose rows come and go: the memory of continuous batching.

pool = Pool(model, rows=16)
place = pool.admit(state, table, cache.read(0), length)   # a prompt that was run elsewhere
hidden = model.extend(last_tokens, pool)                  # all rows, in the order of pool.tags
pool.retire(place)                                        # its memory is the next one's

Rows lie longest trajectory first, so that those still in the loop are always the first ones. One that comes or goes
moves at most one row of each shorter budget.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loopformer.model import LoopedLM
from loopformer.model.cache import Cache, Passes, RowKeys
from loopformer.trajectory import Trajectory


class Tag(Protocol):
    """What a row belongs to."""

    @property
    def route(self) -> Trajectory: ...


T = TypeVar("T", bound=Tag)


class Pool(Cache, Generic[T]):
    """At most `rows` sequences; `tags[place]` says whose row it is. A loop takes memory when it is first used."""

    def __init__(self, model: LoopedLM, rows: int) -> None:
        super().__init__(model.config, [], Passes([], [], []), model.config.context, model.tokens.weight)
        self.most = rows
        self.tags: list[T] = []
        self._order = torch.arange(rows, device=model.tokens.weight.device)
        self._told: list[Tensor | None] = []  # of each loop [rows, k, 4, D]
        self._blocks = model.config.blocks

    @property
    def used_bytes(self) -> int:
        """Memory that belongs to rows, of what was taken."""
        counts = self.passes.rows
        return sum(rows * k[0].nbytes * 2 for loop, rows in zip(self._kept, counts, strict=False) for k, _ in loop)

    def admit(self, tag: T, table: Tensor | None, kept: RowKeys, length: int) -> int:
        """Take in a row that has run `length` tokens, with its modulations [M, k, 4, D]; its place."""
        while len(self._kept) < tag.route.budget:
            self._take_a_loop(table is not None)
        place = len(self.tags)
        self.tags.append(tag)
        self.lengths.append(0)
        for budget in sorted({one.route.budget for one in self.tags[:-1]}):  # the shortest routes make room
            if budget < tag.route.budget:
                first = next(number for number, one in enumerate(self.tags) if one.route.budget == budget)
                self._move(first, place)
                place = first
        self.tags[place] = tag
        self._settle()
        self.write(place, kept, length)
        for loop, told in enumerate(self._told[: tag.route.budget]):
            if told is not None and table is not None:
                told[place] = table[loop]
        return place

    def retire(self, place: int) -> None:
        """Let a row go."""
        mine = self.tags[place].route.budget
        for budget in sorted({one.route.budget for one in self.tags if one.route.budget <= mine}, reverse=True):
            last = max(number for number, one in enumerate(self.tags) if one.route.budget == budget)
            if last != place:
                self._move(last, place)
                place = last
        del self.tags[-1], self.lengths[-1]
        self._settle()

    def _place_of(self, row: int) -> int:
        return row  # rows lie in their own order

    def _move(self, source: int, target: int) -> None:
        """Put one row's keys, values, modulations and tag over another's."""
        length = self.lengths[source]
        for loop in range(self.tags[source].route.budget):
            for pair in self._kept[loop]:
                for tensor in pair:
                    tensor[target, :, :length] = tensor[source, :, :length]
            told = self._told[loop]
            if told is not None:
                told[target] = told[source]
        self.tags[target], self.lengths[target] = self.tags[source], length

    def _settle(self) -> None:
        """The passes of the rows that are here now."""
        budgets = [tag.route.budget for tag in self.tags]
        counts = [sum(budget > loop for budget in budgets) for loop in range(max(budgets, default=0))]
        told = [None if (all_ := self._told[loop]) is None else all_[:rows] for loop, rows in enumerate(counts)]
        self.passes = Passes(counts, told, list(range(len(budgets))))
        self.routes = tuple(tag.route for tag in self.tags)

    def _take_a_loop(self, conditioned: bool) -> None:
        self._kept.append(self._empty_loop(self.most, self._blocks))
        told = self._weight.detach().new_zeros(self.most, self._blocks, 4, self._weight.shape[1])
        self._told.append(told if conditioned else None)
