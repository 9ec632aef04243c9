"""Prompts on a GPU: all loops of a prompt in one CUDA graph.

prompts = PromptGraphs(model)
hidden = prompts.extend(ids, cache)                   # as model.extend does, for a cache of one row

A graph is recorded for each budget and each power of two of tokens, once for prompts that begin a text and once for
those that continue one. Padding comes last, or writes its keys where none are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopformer.inference.fused.graphs import record
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

MIN_GRAPH_TOKENS = 32  # of the smallest graph
SPARE = 16  # positions beyond the context, so that a row of keys stays aligned; the first takes the keys of padding


class PlacedOnDevice(KVCache):
    """A cache of one row that writes new tokens at positions given on the device."""

    def __init__(
        self, model: LoopedLM, trajectory: Trajectory, keys: Tensor, start: Tensor | None, count: Tensor
    ) -> None:
        """`keys` [L, K, 2, 1, H, context and spare, D/H]; tokens from `start` [] on, of which `count` [] count.
        Without `start` they begin a text: attention that is only causal is much faster than with a mask."""
        super().__init__(
            model.config, [trajectory], LoopPlan([], [], None), model.config.context, model.tokens.weight
        )
        passes = model.plan_loops(trajectory, 1)
        self.passes = LoopPlan(passes.rows, [one.map(torch.clone) for one in passes.conditions], None)
        self.loops = list(keys[: trajectory.budget])
        self._from, self._count = start, count

    def positions_and_mask(self, count: int) -> tuple[Tensor, Tensor | None]:
        if self._from is None:
            return super().positions_and_mask(count)
        new = torch.arange(count, device=self._from.device)
        positions = torch.where(new < self._count, self._from + new, self.capacity)[None]
        self._start, self._end, self._positions = None, self.capacity + SPARE, positions
        looked_at = torch.arange(self._end, device=new.device)
        # Padding, too, must have a position that the table of positions has.
        return positions.clamp(max=self.capacity - 1), looked_at <= positions[:, None, :, None]

    def advance(self, counts: Sequence[int]) -> None:
        """Do nothing: the length is on the device."""


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
    def extend(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run tokens [1, T] on top of a cache of one row, which keeps them: hidden [1, T, D] after the final norm,
        valid until the next call."""
        (trajectory,), (start,), count = cache.trajectories, cache.lengths, ids.shape[1]
        cache.check_room(count)
        budget = trajectory.budget
        tokens = min(self.model.config.context, max(MIN_GRAPH_TOKENS, triton.next_power_of_2(count)))
        graph = self._graph(budget, tokens, begins=start == 0)
        graph.ids[:, :count] = ids
        graph.ids[:, count:] = ids[:, :1]
        recorded, wanted = (
            [tensor for condition in conditions for tensor in condition.tensors]
            for conditions in (graph.conditions, cache.passes.conditions)
        )
        if recorded:
            torch._foreach_copy_(recorded, wanted)
        keys = self._keys[:budget, :, :, 0]  # [M, k, 2, H, context and spare, D/H]
        if start:
            self._start.fill_(start)
            self._count.fill_(count)
            keys.zero_()  # what lies beyond the prompt is multiplied by 0, and must be finite
            torch._foreach_copy_(list(keys[..., :start, :]), cache.read(0).loops)
        graph.replay()
        cache.write(0, SequenceKV(trajectory, list(keys)), start + count)
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
