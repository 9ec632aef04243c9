"""The loss of one micro-batch: CE(full) + λ₁·CE(short) + λ₂·consistency.

The full trajectory is uniform(L); the short one is drawn by batches.py. Consistency pulls the short trajectory
towards the full one, which gets no gradient from it: `hidden` is the squared difference after the final norm (the
authors' code), `logits` that of the logits (the paper's text), `distribution` the cross-entropy to the full
trajectory's next-token distribution. λ₁ = λ₂ = 0 is a fixed-depth model.

Both trajectories, head and loss are one module's forward, so that data-parallel wrappers see a single call.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loopformer.config import ObjectiveConfig, RunConfig
from loopformer.data.loader import NO_LOSS
from loopformer.inference.score import token_logprobs
from loopformer.model import LoopedLM
from loopformer.training.fused.passes import FusedStack
from loopformer.training.fused.types import Precision
from loopformer.training.head_loss import LossWeights, head_losses
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class Divisors:
    """How many counted targets the whole step has, over all ranks and micro-batches: on all rows, on short rows."""

    full: float
    short: float


@dataclass(frozen=True)
class Losses:
    """One micro-batch's share of the step's mean losses; `total` carries the gradient, summed over a step."""

    total: Tensor
    terms: Tensor  # [3]: full, short, consistency, detached


class Objective(nn.Module):
    """A model and its loss in one forward."""

    def __init__(
        self,
        model: LoopedLM,
        config: ObjectiveConfig,
        checkpoint_loops: bool = False,
        fused: Precision | None = None,
    ) -> None:
        """`fused` runs passes through training/fused; `checkpoint_loops` keeps only the state between passes."""
        super().__init__()
        self.model = model
        self.config = config
        self.checkpoint_loops = checkpoint_loops
        self.fused = fused

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        divisors: Divisors,
        trajectory: Trajectory | None = None,
        short: Trajectory | None = None,
        short_rows: tuple[int, ...] = (),
    ) -> Losses:
        """inputs, targets [B, T]; all rows follow `trajectory` (None: the full one), `short_rows` also `short`."""
        config, model, stack = self.config, self.model, self._stack()
        full = self._hidden(inputs, documents, trajectory, stack)  # [B, T, D]
        elastic = [] if short is None else list(short_rows)
        fixed = sorted(set(range(len(inputs))) - set(elastic))
        # Each part is a sum over its tokens, divided by the whole step's count of tokens.
        total = full.new_zeros((), dtype=torch.float32)
        terms = torch.zeros(3, dtype=torch.float32, device=inputs.device)
        if fixed:
            rows = slice(None) if len(fixed) == len(inputs) else fixed
            sums = head_losses(
                model.tokens.weight,
                full[rows].flatten(0, 1),
                targets[rows].flatten(),
                None,
                LossWeights(full=1 / divisors.full),
                config.chunk,
            )
            total = total + sums.total
            terms[0] += sums.full / divisors.full
        if elastic:
            rows = slice(None) if len(elastic) == len(inputs) else elastic
            student = self._hidden(inputs[rows], None if documents is None else documents[rows], short, stack)
            teacher, wanted = full[rows], targets[rows]
            consistency = config.consistency_weight / divisors.short
            sums = head_losses(
                model.tokens.weight,
                teacher.flatten(0, 1),
                wanted.flatten(),
                student.flatten(0, 1),
                LossWeights(
                    full=1 / divisors.full,
                    short=config.short_weight / divisors.short,
                    logits=consistency if config.consistency == "logits" else 0.0,
                    distribution=consistency if config.consistency == "distribution" else 0.0,
                ),
                config.chunk,
            )
            total = total + sums.total
            distance = sums.consistency
            if config.consistency == "hidden":
                per_token = (student - teacher.detach()).float().square().mean(-1)  # [b, T]
                distance = (per_token * (wanted != NO_LOSS)).sum()
                total = total + consistency * distance
            terms += torch.stack(
                [sums.full / divisors.full, sums.short / divisors.short, distance.detach() / divisors.short]
            )
        return Losses(total, terms)

    def logprobs(self, inputs: Tensor, targets: Tensor, documents: Tensor | None, trajectory: Trajectory) -> Tensor:
        """log p of the counted targets [N], as `loopformer eval` computes it: padding rows are no tokens."""
        hidden = self._hidden(inputs, documents, trajectory, self._stack())  # [B, T, D]
        counted = targets != NO_LOSS
        return token_logprobs(self.model, hidden[counted], targets[counted])[0]

    def _stack(self) -> Callable[..., Tensor] | None:
        """How passes are run: once per call, so that all of them share what is prepared."""
        if self.fused is not None and torch.is_grad_enabled():
            return FusedStack(self.model.stack, self.fused, self.checkpoint_loops)
        return partial(checkpoint, self.model.stack, use_reentrant=False) if self.checkpoint_loops else None

    def _hidden(
        self,
        inputs: Tensor,
        documents: Tensor | None,
        trajectory: Trajectory | None,
        stack: Callable[..., Tensor] | None,
    ) -> Tensor:
        out = self.model(inputs, trajectory, documents=documents, logits=False, check=False, stack=stack)
        hidden: Tensor = out.hidden
        return hidden


def autocast(device: torch.device, run: RunConfig) -> Any:
    """bf16 matmuls over fp32 weights, or nothing."""
    if run.training.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
