"""Head and losses in chunks of tokens, so that full logits never exist.

    sums = head_losses(weight, full, targets, short, weights)

For each chunk of tokens the logits, their losses and their gradients are computed at once, inside forward;
only the gradients with respect to the hidden states and the head weight are kept. Memory is one chunk of logits
instead of all of them, and nothing is computed twice. On a GPU with Triton the two cross-entropies are one kernel
each (fused/kernels.py), which leaves room for chunks four times as long.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.data.loader import NO_LOSS
from loopformer.training.fused.ops import add_matmul

FUSED_CHUNKS = 4  # the fused kernel holds one copy of the logits where the plain path holds four


@dataclass(frozen=True)
class LossWeights:
    """What each summed term is multiplied by in the total that is differentiated."""

    full: float = 1.0
    short: float = 0.0
    logits: float = 0.0  # squared difference of the logits, mean over the vocabulary
    distribution: float = 0.0  # cross-entropy to the full trajectory's distribution


@dataclass(frozen=True)
class HeadSums:
    """Sums over tokens; `total` carries the gradient, the others are for logging."""

    total: Tensor
    full: Tensor
    short: Tensor
    consistency: Tensor


def head_losses(
    weight: Tensor, full: Tensor, targets: Tensor, short: Tensor | None, weights: LossWeights, chunk: int
) -> HeadSums:
    """Losses of hidden states `full` [N, D], and `short` [N, D] if given, against targets [N] (-100: ignored).

    weight is the head [V, D]. With autocast on, matmuls run in its dtype; losses are always fp32.
    """
    apply: Any = _ChunkedHead.apply
    return HeadSums(*apply(weight, full, short, targets, weights, chunk, torch.is_grad_enabled()))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        full: Tensor,
        short: Tensor | None,
        targets: Tensor,
        weights: LossWeights,
        chunk: int,
        grad_enabled: bool,  # grad mode is always off in here, so the caller has to say
    ) -> tuple[Tensor, ...]:
        needs_grad = grad_enabled and any(ctx.needs_input_grad)
        sums = torch.zeros(4, dtype=torch.float32, device=full.device)  # total, full, short, consistency
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        grad_full = torch.zeros_like(full) if needs_grad else None
        grad_short = torch.zeros_like(short) if needs_grad and short is not None else None
        # Cast once for all chunks; their gradients in the matmuls' dtype are summed in the weight's.
        leaf = weight.detach().to(_matmul_dtype(weight))
        fused = _can_fuse(weight, weights)
        chunk = FUSED_CHUNKS * chunk if fused else chunk
        for start in range(0, len(full), chunk):
            part = slice(start, start + chunk)
            if fused:
                ce_full = _fused(leaf, full[part], targets[part], weights.full, grad_weight, grad_full, part)
                ce_short = zero = torch.zeros_like(ce_full)
                if short is not None:
                    ce_short = _fused(
                        leaf, short[part], targets[part], weights.short, grad_weight, grad_short, part
                    )
                sums += torch.stack([weights.full * ce_full + weights.short * ce_short, ce_full, ce_short, zero])
                continue
            rows = [full[part].detach()] + ([] if short is None else [short[part].detach()])
            with torch.set_grad_enabled(needs_grad):
                inputs = [row.requires_grad_(needs_grad) for row in rows]
                terms = _terms(leaf.requires_grad_(needs_grad), inputs, targets[part], weights)
            sums += torch.stack([term.detach() for term in terms])
            if grad_weight is not None and grad_full is not None:
                grads = torch.autograd.grad(terms[0], [leaf, *inputs], allow_unused=True)
                if grads[0] is not None:
                    grad_weight += grads[0]
                if grads[1] is not None:
                    grad_full[part] = grads[1]
                if grad_short is not None and grads[2] is not None:
                    grad_short[part] = grads[2]
        ctx.grads = (grad_weight, grad_full, grad_short)
        ctx.mark_non_differentiable(*(out := sums.unbind())[1:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("The chunked head keeps its gradients once; backward cannot run through it twice.")
        # Scaled in place and let go: a second copy of the head's gradient would double the peak.
        grads = [saved if saved is None else saved.mul_(grad) for saved in ctx.grads]
        ctx.grads = None
        return grads[0], grads[1], grads[2], None, None, None, None


def _can_fuse(weight: Tensor, weights: LossWeights) -> bool:
    """Whether the two cross-entropies are all there is, and the kernel can run."""
    only_cross_entropy = not weights.logits and not weights.distribution
    return only_cross_entropy and weight.device.type == "cuda" and find_spec("triton") is not None


def _fused(
    head: Tensor,
    hidden: Tensor,
    targets: Tensor,
    scale: float,
    grad_weight: Tensor | None,
    grad_hidden: Tensor | None,
    part: slice,
) -> Tensor:
    """The summed loss of a chunk's hidden states [n, D]; their gradients are put where they belong."""
    from loopformer.training.fused.kernels import cross_entropy_

    inputs = hidden.detach().to(head.dtype)
    logits = F.linear(inputs, head)  # [n, V]
    losses = cross_entropy_(logits, targets, scale if grad_weight is not None else None)
    if grad_weight is not None and grad_hidden is not None:
        grad_hidden[part] = logits @ head
        add_matmul(grad_weight, logits.t(), inputs)
    return losses.sum()


def _matmul_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _terms(head: Tensor, hidden: list[Tensor], targets: Tensor, weights: LossWeights) -> tuple[Tensor, ...]:
    """total, full, short and consistency of one chunk, each summed over its tokens."""
    counted = targets != NO_LOSS
    zero = torch.zeros((), dtype=torch.float32, device=targets.device)
    full_logits = F.linear(hidden[0], head).float()  # [n, V]
    full = F.cross_entropy(full_logits, targets, ignore_index=NO_LOSS, reduction="sum")
    if len(hidden) == 1:
        return weights.full * full, full, zero, zero
    short_logits = F.linear(hidden[1], head).float()
    teacher = full_logits.detach()
    short = F.cross_entropy(short_logits, targets, ignore_index=NO_LOSS, reduction="sum")
    total = weights.full * full + weights.short * short
    consistency = zero
    if weights.logits:
        consistency = ((short_logits - teacher).square().mean(-1) * counted).sum()
        total = total + weights.logits * consistency
    elif weights.distribution:
        per_token = F.cross_entropy(short_logits, teacher.softmax(-1), reduction="none")
        consistency = (per_token * counted).sum()
        total = total + weights.distribution * consistency
    return total, full, short, consistency
