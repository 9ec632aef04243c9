"""Prompts on a GPU: all passes of one as a single graph, since launching them one by one takes longer than they do.

prompts = PromptGraphs(model)
hidden = prompts.extend(ids, cache)                # as model.extend does, for a cache of one row

A graph is recorded for each budget and each power of two of tokens, one for those that begin a text and one for
those that follow others. What differs from prompt to prompt lies on the device: what the passes are told, and where
tokens that follow others go and how many count. Those that fill up a graph come last, or write their keys where
nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopformer.inference.fused.decoder import record
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache, Passes, RowKeys
from loopformer.model.conditioning import Condition
from loopformer.trajectory import Trajectory

FEWEST = 32  # tokens of the smallest graph
SPARE = (
    16  # places beyond the context, so that a row of keys stays aligned; the first takes what counts for nothing
)


class PlacedOnDevice(Cache):
    """A cache of one row whose new tokens go where numbers on the device say."""

    def __init__(
        self, model: LoopedLM, trajectory: Trajectory, keys: Tensor, start: Tensor | None, count: Tensor
    ) -> None:
        """`keys` [L, K, 2, 1, H, context and spare, D/H]; tokens from `start` [] on, of which `count` [] count.
        Without `start` they begin a text: attention that is only causal is much faster than with a mask."""
        super().__init__(
            model.config, [trajectory], Passes([], [], None), model.config.context, model.tokens.weight
        )
        passes = model.passes(trajectory, 1)
        self.passes = Passes(passes.rows, [one.map(torch.clone) for one in passes.conditions], None)
        self._kept = list(keys[: trajectory.budget])
        self._from, self._count = start, count

    def place(self, count: int) -> tuple[Tensor, Tensor | None]:
        if self._from is None:
            return super().place(count)
        new = torch.arange(count, device=self._from.device)
        positions = torch.where(new < self._count, self._from + new, self.capacity)[None]
        self._start, self._end, self._positions = None, self.capacity + SPARE, positions
        looked_at = torch.arange(self._end, device=new.device)
        # Those that count for nothing have a place in the table of positions, too.
        return positions.clamp(max=self.capacity - 1), looked_at <= positions[:, None, :, None]

    def advance(self, counts: Sequence[int]) -> None:
        """It is as long as the device says."""


@dataclass(frozen=True)
class PromptGraph:
    """A graph and what it reads and writes."""

    ids: Tensor  # [1, T]
    conditions: list[Condition]
    hidden: Tensor  # [1, T, D]
    replay: Callable[[], None]


class PromptGraphs:
    """The graphs of a model's prompts, and the memory in which they run."""

    def __init__(self, model: LoopedLM) -> None:
        config, like = model.config, model.tokens.weight.detach()
        self.model = model
        places = config.context + SPARE
        self._keys = like.new_zeros(config.loops, config.blocks, 2, 1, config.heads, places, config.head_width)
        self._start, self._count = (torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))
        self._recorded: dict[tuple[int, int, bool], PromptGraph] = {}
        self._pool: Any = None  # the memory that all of them compute in, one at a time

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: Cache) -> Tensor:
        """Run tokens [1, T] on top of a cache of one row, which keeps them: hidden [1, T, D] after the final norm,
        valid until the next call."""
        (trajectory,), (start,), count = cache.trajectories, cache.lengths, ids.shape[1]
        cache.need_room(count)
        budget = trajectory.budget
        tokens = min(self.model.config.context, max(FEWEST, triton.next_power_of_2(count)))
        graph = self._graph(budget, tokens, begins=start == 0)
        graph.ids[:, :count] = ids
        graph.ids[:, count:] = ids[:, :1]
        told, telling = (
            [tensor for condition in conditions for tensor in condition.tensors]
            for conditions in (graph.conditions, cache.passes.conditions)
        )
        if told:
            torch._foreach_copy_(told, telling)
        keys = self._keys[:budget, :, :, 0]  # [M, k, 2, H, places, D/H]
        if start:
            self._start.fill_(start)
            self._count.fill_(count)
            keys.zero_()  # what lies beyond the prompt is multiplied by 0, and must be finite
            torch._foreach_copy_(list(keys[..., :start, :]), cache.read(0).loops)
        graph.replay()
        cache.write(0, RowKeys(trajectory, list(keys)), start + count)
        return graph.hidden[:, :count]

    def _graph(self, budget: int, tokens: int, begins: bool) -> PromptGraph:
        if (budget, tokens, begins) not in self._recorded:
            start = None if begins else self._start
            cache = PlacedOnDevice(self.model, Trajectory.uniform(budget), self._keys, start, self._count)
            ids = self._start.new_zeros(1, tokens)
            hidden = self._keys.new_zeros(1, tokens, self.model.config.width)

            def launch() -> None:
                hidden.copy_(self.model.extend(ids, cache, check=False))

            replay = launch
            if ids.device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                replay = record(ids.device, launch, [], "prompts", self._pool).replay
            self._recorded[budget, tokens, begins] = PromptGraph(ids, cache.passes.conditions, hidden, replay)
        return self._recorded[budget, tokens, begins]
