"""The loss of one micro-batch: a weighted sum over the objective's trajectories.

    total = Σ weight · CE(trajectory) + match · distance(trajectory, the full one)

The match pulls a trajectory towards the full one, which gets no gradient from it: `hidden` is the squared
difference after the final norm (the authors' code), `logits` that of the logits (the paper's text), `distribution`
the cross-entropy to the full trajectory's next-token distribution.

All trajectories, head and loss are one module's forward, so that data-parallel wrappers see a single call.
"""

from collections.abc import Callable, Iterable, Sequence
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
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import FusedStack
from loopformer.training.head_loss import LossWeights, Match, head_losses
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class Losses:
    """One micro-batch's share of a step's loss; `total` carries the gradient."""

    total: Tensor
    terms: Tensor  # [2, E], detached: cross-entropy and match of each trajectory, summed over tokens, not weighted


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
        followed: Sequence[Trajectory | None],
        rows: Sequence[Sequence[int]],
        divisors: Sequence[float],
    ) -> Losses:
        """inputs, targets [B, T]; of each trajectory of the objective: the one drawn, its rows, its divisor.

        A trajectory that is None is not followed. Losses are sums over tokens; the divisors are the counted targets
        of each trajectory in the whole step, over all ranks and micro-batches.
        """
        stack, everyone = self._stack(), list(range(len(inputs)))
        hidden: dict[int, Tensor] = {}  # of each trajectory that is followed: its rows [b, T, D]
        for place, trajectory in enumerate(followed):
            if trajectory is not None and rows[place]:
                own = slice(None) if list(rows[place]) == everyone else list(rows[place])
                hidden[place] = self._hidden(
                    inputs[own], None if documents is None else documents[own], trajectory, stack
                )
        total = torch.zeros((), dtype=torch.float32, device=inputs.device)
        terms = torch.zeros(2, len(followed), dtype=torch.float32, device=inputs.device)
        for places, group in _groups(hidden, rows, len(inputs)).items():
            states = [
                hidden[place] if len(hidden[place]) == len(group) else hidden[place][_places(group, rows[place])]
                for place in places
            ]
            losses = self._losses(states, targets if group == everyone else targets[group], places, divisors)
            total = total + losses.total
            for number, place in enumerate(places):
                terms[:, place] += losses.terms[:, number]
        return Losses(total, terms)

    def _losses(
        self, states: list[Tensor], targets: Tensor, places: Sequence[int], divisors: Sequence[float]
    ) -> Losses:
        """The losses of rows that follow the same trajectories: states [b, T, D] of those in `places`."""
        config = self.config
        entries = [config.trajectories[place] for place in places]
        weights = [entry.weight / divisors[place] for entry, place in zip(entries, places, strict=True)]
        matches = [entry.match / divisors[place] for entry, place in zip(entries, places, strict=True)]
        teacher = next((number for number, entry in enumerate(entries) if entry.budget == "full"), None)
        match = None
        if teacher is not None and config.consistency != "hidden":
            match = Match(config.consistency, teacher)
        sums = head_losses(
            self.model.tokens.weight,
            [state.flatten(0, 1) for state in states],
            targets.flatten(),
            [LossWeights(weight, own if match else 0.0) for weight, own in zip(weights, matches, strict=True)],
            match,
            config.chunk,
        )
        total, distances = sums.total, list(sums.match.unbind())
        if teacher is not None and config.consistency == "hidden":
            for number, (state, weight) in enumerate(zip(states, matches, strict=True)):
                if weight:
                    per_token = (state - states[teacher].detach()).float().square().mean(-1)  # [b, T]
                    distance = (per_token * (targets != NO_LOSS)).sum()
                    total, distances[number] = total + weight * distance, distance.detach()
        return Losses(total, torch.stack([sums.cross_entropy, torch.stack(distances)]))

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
        trajectory: Trajectory,
        stack: Callable[..., Tensor] | None,
    ) -> Tensor:
        out = self.model(inputs, trajectory, documents=documents, logits=False, check=False, stack=stack)
        hidden: Tensor = out.hidden
        return hidden


def _groups(followed: Iterable[int], rows: Sequence[Sequence[int]], count: int) -> dict[tuple[int, ...], list[int]]:
    """The rows of a micro-batch by which trajectories they follow."""
    own = {place: frozenset(rows[place]) for place in followed}
    if all(len(some) == count for some in own.values()):  # as nearly always
        return {tuple(own): list(range(count))} if own else {}
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(count):
        groups.setdefault(tuple(place for place in own if row in own[place]), []).append(row)
    groups.pop((), None)
    return groups


def _places(group: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Where the rows of a group lie among those of a trajectory."""
    return [list(rows).index(row) for row in group]


def autocast(device: torch.device, run: RunConfig) -> Any:
    """bf16 matmuls over fp32 weights, or nothing."""
    if run.training.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
