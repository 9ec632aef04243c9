"""A training step, run eagerly: the gradients of its micro-batches, then the update.

    steps = Steps(run_pass, model, optimizer, training, StepCounts())
    terms = steps.backward(batch, packed, divisors)     # once for each micro-batch
    norm = steps.update()                               # clip, update the weights, clear the gradients
    counts = steps.read_counts()

graphs.py replays the same as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.config import TrainingConfig
from loopformer.data.loader import Batch
from loopformer.model import LoopedLM
from loopformer.training.distributed import full_tensor
from loopformer.training.optimizer import ModelOptimizer
from loopformer.training.packing import PackedRows

RunPass = Callable[[Batch, PackedRows, list[float]], Tensor]  # adds to the gradients and returns loss terms [3, E]


class StepCounts(NamedTuple):
    """Counts of the whole run. A bad step is one whose gradient is not finite."""

    steps: int = 0
    updates: int = 0
    bad_in_a_row: int = 0


class Steps:
    """The training steps of a model."""

    is_queued = False  # whether `update` returns before the device has finished, so that `read_counts` waits

    def __init__(
        self,
        run_pass: RunPass,
        model: LoopedLM,
        optimizer: ModelOptimizer,
        training: TrainingConfig,
        counts: StepCounts,
    ) -> None:
        """`counts` are those of the steps before."""
        self._run_pass, self._model, self._optimizer, self._training = run_pass, model, optimizer, training
        self._device, self._counts = model.device, counts

    def backward(self, batch: Batch, packed: PackedRows, divisors: list[float]) -> Tensor:
        """Add the gradients of a micro-batch; return its loss terms [3, E], valid until the next call."""
        return self._run_pass(batch.to(self._device), packed.to(self._device), divisors)

    def update(self) -> Tensor:
        """Clip the gradients, update the weights if they are finite, and clear them. Returns their norm.

        Every rank has the same norm, so all ranks decide alike. Otherwise their weights would drift apart.
        """
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._training.clip))
        steps, updates, bad = self._counts
        if is_finite := bool(torch.isfinite(norm)):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._counts = StepCounts(steps + 1, updates + is_finite, 0 if is_finite else bad + 1)
        return norm

    def read_counts(self) -> StepCounts:
        """The counts after the last step."""
        return self._counts
