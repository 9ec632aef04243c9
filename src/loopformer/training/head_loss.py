"""Head and losses in chunks of tokens, so that full logits never exist.

    weights = [LossWeights(), LossWeights(0.1, match=0.5)]
    sums = head_losses(head, [full, short], targets, weights, Match("distribution"), chunk=1024)

For each chunk of tokens the logits, their losses and their gradients are computed at once, inside forward;
only the gradients with respect to the hidden states and the head weight are kept. Memory is one chunk of logits
instead of all of them, and nothing is computed twice. On a GPU with Triton cross-entropies without a match are one
kernel each (fused/kernels.py), which leaves room for chunks four times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.data.loader import NO_LOSS
from loopformer.training.fused.ops import add_matmul

FUSED_CHUNKS = 4  # the fused kernel holds one copy of the logits where the plain path holds four


@dataclass(frozen=True)
class LossWeights:
    """What the summed terms of one trajectory are multiplied by in the total that is differentiated."""

    cross_entropy: float = 1.0
    match: float = 0.0  # with the teacher's logits or distribution


@dataclass(frozen=True)
class Match:
    """What is matched, and with which trajectory: `logits` by the squared difference, mean over the vocabulary;
    `distribution` by the cross-entropy to the teacher's. The teacher gets no gradient."""

    kind: Literal["logits", "distribution"]
    teacher: int = 0


@dataclass(frozen=True)
class HeadSums:
    """Sums over tokens; `total` carries the gradient, the others [E], of each trajectory, are for logging."""

    total: Tensor
    cross_entropy: Tensor
    match: Tensor


def head_losses(
    weight: Tensor,
    hidden: Sequence[Tensor],
    targets: Tensor,
    weights: Sequence[LossWeights],
    match: Match | None,
    chunk: int,
) -> HeadSums:
    """Losses of the hidden states of E trajectories, each [N, D], against targets [N] (-100: ignored).

    weight is the head [V, D]. With autocast on, matmuls run in its dtype; losses are always fp32.
    """
    apply: Any = _ChunkedHead.apply
    match = match if any(one.match for one in weights) else None
    return HeadSums(*apply(weight, targets, list(weights), match, chunk, torch.is_grad_enabled(), *hidden))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        targets: Tensor,
        weights: list[LossWeights],
        match: Match | None,
        chunk: int,
        grad_enabled: bool,  # grad mode is always off in here, so the caller has to say
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        device = weight.device
        total = torch.zeros((), dtype=torch.float32, device=device)
        logged = torch.zeros(2, len(hidden), dtype=torch.float32, device=device)  # cross-entropies, matches
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        grads_hidden = [torch.zeros_like(one) for one in hidden] if needs_grad else []
        # Cast once for all chunks; their gradients in the matmuls' dtype are summed in the weight's.
        leaf = weight.detach().to(_matmul_dtype(weight))
        fused = match is None and device.type == "cuda" and find_spec("triton") is not None
        chunk = FUSED_CHUNKS * chunk if fused else chunk
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            if fused:
                for place, (one, own) in enumerate(zip(hidden, weights, strict=True)):
                    grad_hidden = grads_hidden[place][part] if needs_grad else None
                    loss = _fused(leaf, one[part], targets[part], own.cross_entropy, grad_weight, grad_hidden)
                    total += own.cross_entropy * loss
                    logged[0, place] += loss
                continue
            rows = [one[part].detach() for one in hidden]
            with torch.set_grad_enabled(needs_grad):
                inputs = [row.requires_grad_(needs_grad) for row in rows]
                chunk_total, terms = _terms(leaf.requires_grad_(needs_grad), inputs, targets[part], weights, match)
            total += chunk_total.detach()
            logged += terms.detach()
            if grad_weight is not None:
                grads = torch.autograd.grad(chunk_total, [leaf, *inputs], allow_unused=True)
                for kept, grad in zip([grad_weight, *(one[part] for one in grads_hidden)], grads, strict=True):
                    if grad is not None:
                        kept += grad
        ctx.grads = (grad_weight, grads_hidden)
        cross_entropies, matches = logged.unbind()
        ctx.mark_non_differentiable(cross_entropies, matches)
        return total, cross_entropies, matches

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("The chunked head keeps its gradients once; backward cannot run through it twice.")
        grad_weight, grads_hidden = ctx.grads
        ctx.grads = None
        # Scaled in place and let go: a second copy of the head's gradient would double the peak.
        return grad_weight.mul_(grad), None, None, None, None, None, *(one.mul_(grad) for one in grads_hidden)


def _fused(
    head: Tensor,
    hidden: Tensor,
    targets: Tensor,
    scale: float,
    grad_weight: Tensor | None,
    grad_hidden: Tensor | None,
) -> Tensor:
    """The summed loss of a chunk's hidden states [n, D]; their gradients are put where they belong."""
    from loopformer.training.fused.kernels import cross_entropy_

    inputs = hidden.detach().to(head.dtype)
    logits = F.linear(inputs, head)  # [n, V]
    losses = cross_entropy_(logits, targets, scale if grad_weight is not None else None, NO_LOSS)
    if grad_weight is not None and grad_hidden is not None:
        grad_hidden.copy_(logits @ head)
        add_matmul(grad_weight, logits.t(), inputs)
    return losses.sum()


def _matmul_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _terms(
    head: Tensor, hidden: list[Tensor], targets: Tensor, weights: list[LossWeights], match: Match | None
) -> tuple[Tensor, Tensor]:
    """The weighted total of one chunk, and the terms themselves [2, E]; each summed over the tokens."""
    counted = targets != NO_LOSS
    logits = [F.linear(one, head).float() for one in hidden]  # each [n, V]
    losses = [F.cross_entropy(one, targets, ignore_index=NO_LOSS, reduction="sum") for one in logits]
    total = sum(
        (own.cross_entropy * loss for own, loss in zip(weights, losses, strict=True)), losses[0].new_zeros(())
    )
    matches = [loss.new_zeros(()) for loss in losses]
    if match is not None:
        teacher = logits[match.teacher].detach()
        wanted = teacher.softmax(-1) if match.kind == "distribution" else teacher
        for place, own in enumerate(weights):
            if own.match == 0:
                continue
            if match.kind == "distribution":
                per_token = F.cross_entropy(logits[place], wanted, reduction="none")
            else:
                per_token = (logits[place] - wanted).square().mean(-1)
            matches[place] = (per_token * counted).sum()
            total = total + own.match * matches[place]
    return total, torch.stack([torch.stack(losses), torch.stack(matches)])
