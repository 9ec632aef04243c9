"""Cross-entropy and its gradient in one Triton kernel: it reads the logits once and writes the gradient over them.

losses = cross_entropy_(logits, targets, scale)      # [n] in fp32; logits [n, V] are now scale · d loss / d logits

A program holds a whole row of logits, so the vocabulary may have at most 65,536 rows. TRITON_INTERPRET=1 runs it on
the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.data.loader import NO_LOSS

MOST_LOGITS = 65_536


@triton.jit
def _kernel(logits, targets, losses, scale, V, NO_TARGET: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    v = tl.arange(0, BLOCK)
    place = logits + row * V + v
    x = tl.load(place, mask=v < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(x)
    powers = tl.exp(x - largest)
    total = tl.sum(powers)
    counted = target != NO_TARGET
    wanted = tl.sum(tl.where(v == target, x, 0.0))
    tl.store(losses + row, tl.where(counted, largest + tl.log(total) - wanted, 0.0))
    if GRAD:
        grad = (powers / total - tl.where(v == target, 1.0, 0.0)) * tl.where(counted, scale, 0.0)
        tl.store(place, grad, mask=v < V)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """The losses [n] of logits [n, V], which become their own gradient times `scale`; None leaves them alone."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(vocab)
    _kernel[(rows,)](
        logits,
        targets,
        losses,
        0.0 if scale is None else scale,
        vocab,
        NO_TARGET=NO_LOSS,
        BLOCK=block,
        GRAD=scale is not None,
        num_warps=min(32, max(4, block // 2048)),
    )
    return losses
