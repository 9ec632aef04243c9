"""Prompts on a GPU: all loops of a prompt, or of a chunk of a long one, in one CUDA graph.

prompts = PromptGraphs(model)
hidden = prompts.extend(ids, cache)                   # as model.extend does, for a cache of one row

Two graphs are recorded for each budget and each power of two of tokens: one for the first chunk of a prompt, with
plain causal attention, and one for later chunks, with a mask. Tokens are padded at the end to the size of the
graph. In a first chunk causal attention hides the padding. In a later one its keys go to a spare position behind
the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopformer.cuda_graphs import record
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

MIN_GRAPH_TOKENS = 32  # of the smallest graph
# Positions behind the context. The first takes the keys of padding; the others keep a row of keys aligned.
SPARE_POSITIONS = 16


class DevicePositionsCache(KVCache):
    """A cache of one row whose length is on the device, so that one graph serves prompts of any length."""

    def __init__(
        self, model: LoopedLM, trajectory: Trajectory, kv: Tensor, start: Tensor | None, count: Tensor
    ) -> None:
        """`kv` [L, K, 2, 1, H, context and spare, D/H]. The new tokens go to positions from `start` [] on. Those
        behind the first `count` [] are padding. None as `start` means position 0, where plain causal attention is
        much faster than a mask."""
        super().__init__(
            model.config, [trajectory], LoopPlan([], [], None), model.config.context, model.tokens.weight
        )
        plan = model.plan_loops(trajectory, 1)
        # Copies, because the graph reads them at each replay, and each prompt writes its own conditions there.
        self.plan = LoopPlan(plan.rows, [condition.map(torch.clone) for condition in plan.conditions], None)
        self.loops = list(kv[: trajectory.budget])
        self._device_start, self._device_count = start, count

    def positions_and_mask(self, count: int) -> tuple[Tensor, Tensor | None]:
        if self._device_start is None:
            return super().positions_and_mask(count)
        new = torch.arange(count, device=self._device_start.device)
        # Padding goes to the first spare position. Each real token precedes it, so the mask hides it from them.
        positions = torch.where(new < self._device_count, self._device_start + new, self.capacity)[None]
        self._start, self._end, self._positions = None, self.capacity + SPARE_POSITIONS, positions
        keys = torch.arange(self._end, device=new.device)
        # Position embeddings and angles end at the context, so padding takes those of the last position.
        return positions.clamp(max=self.capacity - 1), keys <= positions[:, None, :, None]

    def advance(self, counts: Sequence[int]) -> None:
        """Do nothing: the length is on the device."""


@dataclass(frozen=True)
class PromptGraph:
    """A graph and the tensors that it reads and writes at each replay."""

    ids: Tensor  # [1, T]
    conditions: list[Condition]
    hidden: Tensor  # [1, T, D]
    replay: Callable[[], None]


class PromptGraphs:
    """The graphs of a model's prompts, and the memory in which they run.

    All graphs share their buffers. So prompts must run one after the other, on one stream: two at a time would
    overwrite each other's keys.
    """

    def __init__(self, model: LoopedLM) -> None:
        config, like = model.config, model.tokens.weight.detach()
        self.model = model
        positions = config.context + SPARE_POSITIONS
        self._kv = like.new_zeros(config.loops, config.blocks, 2, 1, config.heads, positions, config.head_width)
        self._start, self._count = (torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))
        # By budget, tokens, and whether it is for first chunks.
        self._graphs: dict[tuple[int, int, bool], PromptGraph] = {}
        self._graph_memory: Any = None

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run tokens [1, T] on top of a cache of one row, which takes their keys: normed hidden states [1, T, D].

        The next call overwrites `hidden`, so take the logits of a prompt before the next one runs.
        """
        (trajectory,), (start,), count = cache.trajectories, cache.lengths, ids.shape[1]
        cache.check_room(count)
        budget = trajectory.budget
        tokens = min(self.model.config.context, max(MIN_GRAPH_TOKENS, triton.next_power_of_2(count)))
        graph = self._graph(budget, tokens, is_first_chunk=start == 0)
        graph.ids[:, :count] = ids
        graph.ids[:, count:] = ids[:, :1]  # padding: any token of the vocabulary
        # The graph was recorded for a budget. The prompt's own trajectory comes in by its conditions.
        recorded, own = _tensors(graph.conditions), _tensors(cache.plan.conditions)
        if recorded:  # none in an unconditioned model
            torch._foreach_copy_(recorded, own)
        kv = self._kv[:budget, :, :, 0]  # [M, k, 2, H, context and spare, D/H]
        if start:
            self._start.fill_(start)
            self._count.fill_(count)
            # Zeroed first: masked values are multiplied by 0, so a NaN that an earlier prompt left would spread.
            kv.zero_()
            torch._foreach_copy_(list(kv[..., :start, :]), cache.read(0).loops)
        graph.replay()
        # Copied at once, on the same stream: the next prompt overwrites these buffers.
        cache.write(0, SequenceKV(trajectory, list(kv)), start + count)
        return graph.hidden[:, :count]

    def _graph(self, budget: int, tokens: int, is_first_chunk: bool) -> PromptGraph:
        """The graph for this many tokens, which is recorded at its first use."""
        if (budget, tokens, is_first_chunk) not in self._graphs:
            start = None if is_first_chunk else self._start
            cache = DevicePositionsCache(self.model, Trajectory.uniform(budget), self._kv, start, self._count)
            ids = self._start.new_zeros(1, tokens)
            hidden = self._kv.new_zeros(1, tokens, self.model.config.width)

            def launch() -> None:
                hidden.copy_(self.model.extend(ids, cache, check=False))

            replay = launch
            if ids.device.type == "cuda":
                self._graph_memory = self._graph_memory or torch.cuda.graph_pool_handle()
                # A purpose of its own, because these graphs run at the same time as those of decoding.
                replay = record(ids.device, launch, [], "prompts", self._graph_memory).replay
            self._graphs[budget, tokens, is_first_chunk] = PromptGraph(ids, cache.plan.conditions, hidden, replay)
        return self._graphs[budget, tokens, is_first_chunk]


def _tensors(conditions: list[Condition]) -> list[Tensor]:
    """All tensors of the conditions of some loops."""
    return [tensor for condition in conditions for tensor in condition.tensors]
