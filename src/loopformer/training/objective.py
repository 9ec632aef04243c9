"""The loss of one micro-batch: a weighted sum over the objective's trajectories.

    total = Σ weight · CE(trajectory) + match · distance(trajectory, the full one) + exits · CE(an earlier loop)

The distance pulls a trajectory towards the full one, which gets no gradient from it. `hidden` is the squared
difference after the final norm (as in the published code), `logits` that of the logits (as in the paper), and
`distribution` the cross-entropy to the full trajectory's next-token distribution.

`Objective` is one module whose forward runs all trajectories, head and loss, so that data-parallel wrappers see a
single call. `head_losses` computes head and losses in chunks of tokens, so that full logits never exist:

    weights = [LossWeights(), LossWeights(0.1, match=0.5)]
    losses = head_losses(head, [full, short], targets, weights, Match("distribution"), chunk=1024)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loopformer.config import ObjectiveConfig, RunConfig
from loopformer.data.loader import IGNORE_INDEX
from loopformer.model import LoopedLM
from loopformer.model.cache import LoopPlan
from loopformer.model.conditioning import Condition
from loopformer.scoring import token_logprobs
from loopformer.training.fused.ops import Precision, add_matmul
from loopformer.training.fused.passes import FusedStack
from loopformer.training.packing import PackedRows
from loopformer.trajectory import Trajectory

# The fused kernel holds one copy of a chunk's logits where PyTorch holds four, so its chunks can be longer.
FUSED_CHUNK_FACTOR = 4


@dataclass(frozen=True)
class LossWeights:
    """The factors of one trajectory's summed losses in the total."""

    cross_entropy: float = 1.0
    match: float = 0.0  # of the distance to the teacher's logits or distribution


@dataclass(frozen=True)
class Match:
    """The kind of distance to the teacher, and the teacher's index among the trajectories."""

    kind: Literal["logits", "distribution"]
    teacher: int = 0


@dataclass(frozen=True)
class Losses:
    """Losses summed over tokens; `total` carries the gradient."""

    total: Tensor
    terms: Tensor  # [3, E], detached, not weighted: cross-entropy, distance and cross-entropy of exits per entry


class Objective(nn.Module):
    """A model and its loss in one forward."""

    def __init__(
        self,
        model: LoopedLM,
        config: ObjectiveConfig,
        checkpoint_loops: bool = False,
        fused: Precision | None = None,
    ) -> None:
        """`fused` runs loops through training/fused; `checkpoint_loops` keeps only the state between loops."""
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
        packed: PackedRows,
        divisors: Sequence[float],
    ) -> Losses:
        """The losses for inputs and targets [B, T] of the rows that are packed.

        `divisors` has for each entry its number of targets in the whole step, over all ranks and micro-batches.
        Losses are sums over tokens, so dividing by counts of the whole step makes micro-batches and ranks add up to
        the loss of one large batch.
        """
        shape = packed.shape
        hidden, exits = self._run_packed(inputs, documents, packed)
        # The padding row is part of the total, so that backward runs its loops, too.
        total = 0.0 * hidden[0].sum() if shape.has_padding else hidden.new_zeros((), dtype=torch.float32)
        terms = torch.zeros(3, len(divisors), dtype=torch.float32, device=inputs.device)
        ordered = hidden if shape.in_order else hidden.index_select(0, packed.loss_rows)
        states = iter(ordered.split_with_sizes([rows for indices, rows in shape.groups for _ in indices]))
        group_targets = targets.index_select(0, packed.target_rows).split_with_sizes(
            [rows for _, rows in shape.groups]
        )
        for (indices, _), of_group in zip(shape.groups, group_targets, strict=True):
            losses = self._losses([next(states) for _ in indices], of_group, indices, divisors)
            total = total + losses.total
            for number, index in enumerate(indices):
                terms[:2, index] += losses.terms[:, number]
        if exits is not None:
            counts = [count for _, count in shape.exits]
            by_entry = exits.index_select(0, packed.exit_order).split_with_sizes(counts)
            exit_targets = targets.index_select(0, packed.exit_target_rows).split_with_sizes(counts)
            for (index, _), state, of_entry in zip(shape.exits, by_entry, exit_targets, strict=True):
                losses = self._exit_losses(state, of_entry, index, divisors)
                total = total + losses.total
                terms[2, index] += losses.terms[0, 0]
        return Losses(total, terms)

    def _run_packed(
        self, inputs: Tensor, documents: Tensor | None, packed: PackedRows
    ) -> tuple[Tensor, Tensor | None]:
        """The states after the last loops [R, T, D] and after the exits [E, T, D], both after the final norm."""
        model, shape = self.model, packed.shape
        packed_documents = None if documents is None else documents.index_select(0, packed.input_rows)
        x, rotary, mask, start = model.embed(inputs.index_select(0, packed.input_rows), packed_documents)
        table = Condition() if model.conditioner is None else model.conditioner(packed.scalars)
        plan = LoopPlan(list(shape.active), table.split(shape.active), order=None)
        stack, early = self._stack() or model.stack, list[Tensor]()
        exiting = packed.exit_rows.split_with_sizes(list(shape.exiting))

        def step(number: int, *loop_inputs: Any) -> Tensor:
            state: Tensor = stack(*loop_inputs)
            if shape.exiting[number]:
                early.append(state.index_select(0, exiting[number]))
            return state

        x = model.run_loops(step, x, start, plan, rotary, mask)
        return model.final_norm(x), model.final_norm(torch.cat(early)) if early else None

    def _losses(
        self, states: list[Tensor], targets: Tensor, indices: Sequence[int], divisors: Sequence[float]
    ) -> Losses:
        """The losses of rows that train on the same entries: their states [b, T, D], one for each of `indices`."""
        entries = [self.config.trajectories[index] for index in indices]
        kind = self.config.consistency
        teacher = next((position for position, entry in enumerate(entries) if entry.budget == "full"), None)
        match = None if teacher is None or kind == "hidden" else Match(kind, teacher)
        matches = [entry.match / divisors[index] for entry, index in zip(entries, indices, strict=True)]
        weights = [
            LossWeights(entry.weight / divisors[index], match_weight if match else 0.0)
            for entry, index, match_weight in zip(entries, indices, matches, strict=True)
        ]
        flat = [state.flatten(0, 1) for state in states]  # [b · T, D]
        losses = head_losses(self.model.tokens.weight, flat, targets.flatten(), weights, match, self.config.chunk)
        if teacher is None or kind != "hidden":
            return losses
        total, terms = losses.total, losses.terms
        for position, (state, weight) in enumerate(zip(states, matches, strict=True)):
            if weight:
                per_token = (state - states[teacher].detach()).float().square().mean(-1)  # [b, T]
                distance = (per_token * (targets != IGNORE_INDEX)).sum()
                total, terms[1, position] = total + weight * distance, distance.detach()
        return Losses(total, terms)

    def _exit_losses(self, states: Tensor, targets: Tensor, index: int, divisors: Sequence[float]) -> Losses:
        """The cross-entropy of an entry's rows after earlier loops, from their states [b, T, D] there."""
        weight = LossWeights(self.config.trajectories[index].exits / divisors[index])
        head, chunk = self.model.tokens.weight, self.config.chunk
        return head_losses(head, [states.flatten(0, 1)], targets.flatten(), [weight], None, chunk)

    def logprobs(self, inputs: Tensor, targets: Tensor, documents: Tensor | None, trajectory: Trajectory) -> Tensor:
        """log p [N] of the targets that count, as in `loopformer eval`: padding rows of the head are left out."""
        out = self.model(inputs, trajectory, documents=documents, logits=False, check=False, stack=self._stack())
        hidden = out.hidden  # [B, T, D]
        counted = targets != IGNORE_INDEX
        return token_logprobs(self.model, hidden[counted], targets[counted])[0]

    def _stack(self) -> Callable[..., Tensor] | None:
        """What runs a loop; None is the model's stack. Made for each forward, as the fused loops cast weights."""
        if self.fused is not None and torch.is_grad_enabled():
            return FusedStack(self.model.stack, self.fused, self.checkpoint_loops)
        if not self.checkpoint_loops:
            return None
        # Nothing in a loop is random, and the random state cannot be read while a CUDA graph is recorded.
        return partial(checkpoint, self.model.stack, use_reentrant=False, preserve_rng_state=False)


def autocast(device: torch.device, run: RunConfig) -> Any:
    """A context for bf16 matmuls with fp32 weights; it does nothing if the run is in fp32."""
    if run.training.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def head_losses(
    head: Tensor,
    states: Sequence[Tensor],
    targets: Tensor,
    weights: Sequence[LossWeights],
    match: Match | None,
    chunk: int,
) -> Losses:
    """Losses of the hidden states of E trajectories, each [N, D], against targets [N]; IGNORE_INDEX is skipped.

    head is [V, D]. With autocast on, matmuls run in its dtype. Losses are always fp32.
    """
    apply: Any = _ChunkedHead.apply
    match = match if any(weight.match for weight in weights) else None
    return Losses(*apply(head, targets, list(weights), match, chunk, torch.is_grad_enabled(), *states))


class _ChunkedHead(torch.autograd.Function):
    """Computes gradients inside forward, chunk by chunk, and keeps only those of the states and the head.

    So only one chunk of logits exists at a time, and backward recomputes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        targets: Tensor,
        weights: list[LossWeights],
        match: Match | None,
        chunk: int,
        grad_enabled: bool,  # the caller's grad mode, because autograd disables it in here
        *states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        device = head.device.type
        total = torch.zeros((), dtype=torch.float32, device=head.device)
        terms = torch.zeros(2, len(states), dtype=torch.float32, device=head.device)
        grad_head = torch.zeros_like(head) if needs_grad else None
        grads_states = [torch.zeros_like(state) for state in states] if needs_grad else []
        # The head is cast once for all chunks. Its gradient is summed in the dtype of the weight.
        matmul_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        cast_head = head.detach().to(matmul_dtype)
        fused = match is None and device == "cuda" and find_spec("triton") is not None
        chunk = FUSED_CHUNK_FACTOR * chunk if fused else chunk
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            if fused:
                for index, (state, weight) in enumerate(zip(states, weights, strict=True)):
                    grad_state = grads_states[index][part] if needs_grad else None
                    loss = _fused_loss(
                        cast_head, state[part], targets[part], weight.cross_entropy, grad_head, grad_state
                    )
                    total += weight.cross_entropy * loss
                    terms[0, index] += loss
                continue
            rows = [state[part].detach() for state in states]
            with torch.set_grad_enabled(needs_grad):
                inputs = [cast_head.requires_grad_(needs_grad), *(row.requires_grad_(needs_grad) for row in rows)]
                chunk_total, chunk_terms = _chunk_losses(inputs[0], inputs[1:], targets[part], weights, match)
            total += chunk_total.detach()
            terms += chunk_terms.detach()
            if grad_head is not None:
                grads = torch.autograd.grad(chunk_total, inputs, allow_unused=True)
                sums = [grad_head, *(grad_state[part] for grad_state in grads_states)]
                for grad_sum, grad in zip(sums, grads, strict=True):
                    if grad is not None:
                        grad_sum += grad
        ctx.grads = (grad_head, grads_states)
        ctx.mark_non_differentiable(terms)
        return total, terms

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("The chunked head keeps its gradients once; backward cannot run through it twice.")
        grad_head, grads_states = ctx.grads
        ctx.grads = None
        # Scaled in place and released, because a second copy of the head's gradient would double the peak.
        return grad_head.mul_(grad), None, None, None, None, None, *(each.mul_(grad) for each in grads_states)


def _fused_loss(
    head: Tensor, state: Tensor, targets: Tensor, scale: float, grad_head: Tensor | None, grad_state: Tensor | None
) -> Tensor:
    """The summed loss of a chunk of states [n, D]; their gradients times `scale` go to the given tensors.

    The logits must not outlive this call, or those of two chunks would exist at the same time.
    """
    from loopformer.training.fused.kernels import cross_entropy_

    inputs = state.detach().to(head.dtype)
    logits = F.linear(inputs, head)  # [n, V]
    losses = cross_entropy_(logits, targets, scale if grad_head is not None else None, IGNORE_INDEX)
    if grad_head is not None and grad_state is not None:  # logits now holds its own gradient
        grad_state.copy_(logits @ head)
        add_matmul(grad_head, logits.t(), inputs)
    return losses.sum()


def _chunk_losses(
    head: Tensor, states: list[Tensor], targets: Tensor, weights: list[LossWeights], match: Match | None
) -> tuple[Tensor, Tensor]:
    """The weighted total of a chunk and its terms [2, E], summed over tokens."""
    counted = targets != IGNORE_INDEX
    logits = [F.linear(state, head).float() for state in states]  # each [n, V]
    losses = [F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum") for scores in logits]
    weighted = (weight.cross_entropy * loss for weight, loss in zip(weights, losses, strict=True))
    total = sum(weighted, losses[0].new_zeros(()))
    distances = [loss.new_zeros(()) for loss in losses]
    if match is not None:
        teacher = logits[match.teacher].detach()
        probabilities = teacher.softmax(-1) if match.kind == "distribution" else None
        for index, weight in enumerate(weights):
            if weight.match == 0:
                continue
            if probabilities is not None:
                per_token = F.cross_entropy(logits[index], probabilities, reduction="none")
            else:
                per_token = (logits[index] - teacher).square().mean(-1)
            distances[index] = (per_token * counted).sum()
            total = total + weight.match * distances[index]
    return total, torch.stack([torch.stack(losses), torch.stack(distances)])
