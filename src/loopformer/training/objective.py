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

from collections.abc import Callable, Mapping, Sequence
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
from loopformer.device import to_device_async
from loopformer.model import LoopedLM
from loopformer.model.looped import Output
from loopformer.scoring import token_logprobs
from loopformer.training.fused.ops import Precision, add_matmul
from loopformer.training.fused.passes import FusedStack
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
        trajectories: Sequence[Mapping[int, Trajectory]],
        divisors: Sequence[float],
        exits: Sequence[Mapping[int, int]] = (),
        loops: int = 0,
    ) -> Losses:
        """The losses for inputs and targets [B, T].

        trajectories   for each entry of the objective, the trajectory of each row that trains on it
        divisors       for each entry, its number of targets in the whole step, over all ranks and micro-batches
        exits          for each entry, the loop after which a row is read as well
        loops          run at least so many loops, because another rank does

        Losses are sums over tokens, so dividing by counts of the whole step makes micro-batches and ranks add up to
        the loss of one large batch.
        """
        packed = pack_rows(trajectories, loops)
        # (loop, entry, row), in the order in which the model returns the states of exits.
        exiting = sorted((loop, index, row) for index, entry in enumerate(exits) for row, loop in entry.items())
        exits_by_loop: dict[int, list[int]] = {}
        for loop, index, row in exiting:
            exits_by_loop.setdefault(loop, []).append(packed.positions[index][row])
        packed_documents = None if documents is None else _select(documents, packed.rows)
        out = self._run(_select(inputs, packed.rows), packed_documents, packed.trajectories, exits_by_loop)

        # The padding row is part of the total, so that backward runs its loops, too.
        total = 0.0 * out.hidden[-1].sum() if packed.has_padding else out.hidden.new_zeros((), dtype=torch.float32)
        terms = torch.zeros(3, len(trajectories), dtype=torch.float32, device=inputs.device)
        # Rows that train on the same entries go through the head together. Keys are the indices of these entries.
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in range(len(inputs)):
            indices = tuple(index for index, entry in enumerate(trajectories) if row in entry)
            groups.setdefault(indices, []).append(row)
        groups.pop((), None)
        for indices, group in groups.items():
            states = [_select(out.hidden, [packed.positions[index][row] for row in group]) for index in indices]
            losses = self._losses(states, _select(targets, group), indices, divisors)
            total = total + losses.total
            for number, index in enumerate(indices):
                terms[:2, index] += losses.terms[:, number]
        for index in sorted({index for _, index, _ in exiting}):
            assert out.exits is not None
            numbers = [number for number, (_, other, _) in enumerate(exiting) if other == index]
            exit_targets = _select(targets, [exiting[number][2] for number in numbers])
            losses = self._exit_losses(_select(out.exits, numbers), exit_targets, index, divisors)
            total = total + losses.total
            terms[2, index] += losses.terms[0, 0]
        return Losses(total, terms)

    def _losses(
        self, states: list[Tensor], targets: Tensor, indices: Sequence[int], divisors: Sequence[float]
    ) -> Losses:
        """The losses of rows that train on the same entries: their states [b, T, D], one for each of `indices`."""
        entries = [self.config.trajectories[index] for index in indices]
        kind = self.config.consistency
        teacher = next((number for number, entry in enumerate(entries) if entry.budget == "full"), None)
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
        for number, (state, weight) in enumerate(zip(states, matches, strict=True)):
            if weight:
                per_token = (state - states[teacher].detach()).float().square().mean(-1)  # [b, T]
                distance = (per_token * (targets != IGNORE_INDEX)).sum()
                total, terms[1, number] = total + weight * distance, distance.detach()
        return Losses(total, terms)

    def _exit_losses(self, states: Tensor, targets: Tensor, index: int, divisors: Sequence[float]) -> Losses:
        """The cross-entropy of an entry's rows after earlier loops, from their states [b, T, D] there."""
        weight = LossWeights(self.config.trajectories[index].exits / divisors[index])
        head, chunk = self.model.tokens.weight, self.config.chunk
        return head_losses(head, [states.flatten(0, 1)], targets.flatten(), [weight], None, chunk)

    def logprobs(self, inputs: Tensor, targets: Tensor, documents: Tensor | None, trajectory: Trajectory) -> Tensor:
        """log p [N] of the targets that count, as in `loopformer eval`: padding rows of the head are left out."""
        hidden = self._run(inputs, documents, trajectory).hidden  # [B, T, D]
        counted = targets != IGNORE_INDEX
        return token_logprobs(self.model, hidden[counted], targets[counted])[0]

    def _stack(self) -> Callable[..., Tensor] | None:
        """What runs a loop; None is the model's stack. Made for each forward, as the fused loops cast weights."""
        if self.fused is not None and torch.is_grad_enabled():
            return FusedStack(self.model.stack, self.fused, self.checkpoint_loops)
        return partial(checkpoint, self.model.stack, use_reentrant=False) if self.checkpoint_loops else None

    def _run(
        self,
        inputs: Tensor,
        documents: Tensor | None,
        trajectory: Trajectory | list[Trajectory],
        exits: Mapping[int, Sequence[int]] | None = None,
    ) -> Output:
        out: Output = self.model(
            inputs, trajectory, documents=documents, logits=False, check=False, stack=self._stack(), exits=exits
        )
        return out


@dataclass(frozen=True)
class PackedRows:
    """The rows that one pass runs: those of each entry, one entry after another.

    Loop i of the pass is one call for all rows that still take it. A row that trains on several entries is here
    several times.
    """

    rows: list[int]  # of the micro-batch
    trajectories: list[Trajectory]
    positions: list[dict[int, int]]  # for each entry, where its rows lie in these lists
    has_padding: bool  # the last row has no loss


def pack_rows(entries: Sequence[Mapping[int, Trajectory]], loops: int) -> PackedRows:
    """Pack the rows of all entries, with a padding row if none of them takes so many loops."""
    rows, trajectories, positions = list[int](), list[Trajectory](), list[dict[int, int]]()
    for entry in entries:
        positions.append({row: len(rows) + number for number, row in enumerate(entry)})
        rows += entry.keys()
        trajectories += entry.values()
    has_padding = max(trajectory.budget for trajectory in trajectories) < loops
    padding = ([0], [Trajectory.uniform(loops)]) if has_padding else ([], [])
    return PackedRows(rows + padding[0], trajectories + padding[1], positions, has_padding)


def _select(x: Tensor, rows: list[int]) -> Tensor:
    """The rows of x, without a copy if they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return x[to_device_async(rows, x.device)]


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
