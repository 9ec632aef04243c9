"""Training steps as CUDA graphs on one GPU. A step is replayed with a few calls, so the host runs ahead of the GPU.

A pass is recorded when its shape comes back in a later step. The update is one graph: it tests on the GPU whether
the gradients are finite, and changes no weight if they are not. After `bad_steps` such steps in a row it changes
nothing any more, because the host has already queued steps by the time it finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopformer.config import TrainingConfig
from loopformer.cuda_graphs import record
from loopformer.data.loader import Batch
from loopformer.model import LoopedLM
from loopformer.training.optimizer import ModelOptimizer
from loopformer.training.packing import PackedRows
from loopformer.training.steps import RunPass, StepCounts, Steps

MAX_PASSES = 64  # graphs of passes; those of further shapes run eagerly
MAX_SHAPES = 256  # shapes that are remembered until they come back


class _RecordedPass(NamedTuple):
    graph: Any
    inputs: list[Tensor]  # of the graph: the tensors of a batch and of its packed rows
    terms: Tensor  # what it writes, outside of the memory that graphs share


class StepGraphs(Steps):
    """The steps of a model as graphs: its passes by shape, and the update."""

    is_queued = True

    def __init__(
        self,
        run_pass: RunPass,
        model: LoopedLM,
        optimizer: ModelOptimizer,
        training: TrainingConfig,
        counts: StepCounts,
    ) -> None:
        """`optimizer` must be capturable."""
        super().__init__(run_pass, model, optimizer, training, counts)
        self._parameters = list(model.parameters())
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # never replaced: graphs add to this memory, and would miss another
        moments = optimizer.tensors(model)
        optimizer.set_updates(counts.updates)
        self._state = [*moments.values(), *optimizer.step_counts()]
        # The counts live on the GPU. Steps are no longer counted once a run must end.
        self._steps, self._updates, self._bad = (torch.tensor(count, device=self._device) for count in counts)
        self._norm = torch.zeros((), device=self._device)
        self._step = 0  # that the host is queueing
        self._first_seen: dict[Hashable, int] = {}  # the step in which a shape came first
        self._passes: dict[Hashable, _RecordedPass] = {}
        self._update_graph: Any = None
        # Graphs that never run at the same time share their memory.
        self._memory = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def backward(self, batch: Batch, packed: PackedRows, divisors: list[float]) -> Tensor:
        # All that the host decides: sizes of tensors, and the weights of losses, which kernels take as numbers.
        key = (packed.shape, batch.inputs.shape, tuple(divisors))
        if key not in self._passes:
            if len(self._passes) == MAX_PASSES or self._first_seen.get(key, self._step) == self._step:
                if len(self._first_seen) == MAX_SHAPES:
                    self._first_seen.clear()
                self._first_seen.setdefault(key, self._step)
                return super().backward(batch, packed, divisors)
            self._passes[key] = self._record_pass(batch, packed, divisors)
        recorded = self._passes[key]
        for static, given in zip(recorded.inputs, [*batch.tensors, *packed.tensors], strict=True):
            static.copy_(given, non_blocking=True)
        recorded.graph.replay()
        return recorded.terms

    def _record_pass(self, batch: Batch, packed: PackedRows, divisors: list[float]) -> _RecordedPass:
        batch, packed = batch.to(self._device), packed.to(self._device)
        terms = torch.zeros(3, len(divisors), device=self._device)

        def launch() -> None:
            terms.copy_(self._run_pass(batch, packed, divisors))

        return _RecordedPass(self._record(launch, self._gradients), [*batch.tensors, *packed.tensors], terms)

    def update(self) -> Tensor:
        self._step += 1
        if self._update_graph is None:
            counts = [self._steps, self._updates, self._bad]
            state = [*self._parameters, *self._gradients, *self._state, *counts]
            self._update_graph = self._record(self._launch_update, state)
        self._update_graph.replay()
        return self._norm

    @torch.no_grad()
    def _launch_update(self) -> None:
        self._norm.copy_(torch.nn.utils.clip_grad_norm_(self._parameters, self._training.clip))
        is_running = self._bad < self._training.bad_steps
        applies = self._norm.isfinite() & is_running
        self._optimizer.step(applies)
        self._optimizer.zero_grad(set_to_none=False)
        self._steps += is_running
        self._updates += applies
        self._bad.copy_(torch.where(applies, 0, self._bad + is_running))

    def read_counts(self) -> StepCounts:
        """The counts after the steps that are queued, for which it waits."""
        return StepCounts(*torch.stack([self._steps, self._updates, self._bad]).tolist())

    def _record(self, launch: Callable[[], None], state: list[Tensor]) -> Any:
        restored = [tensor.detach() for tensor in state]  # in place, which parameters do not allow themselves
        return record(self._device, launch, restored, "training", self._memory)
