"""Cross-entropy and its gradient in one Triton kernel, which writes the gradient over the logits.

losses = cross_entropy_(logits, targets, scale)      # [n] in fp32; logits [n, V] are now scale · d loss / d logits

A program reads its row of logits in pieces, twice: the second time it lies in the cache. Each lane keeps a largest
logit and a sum of its own, so that nothing is exchanged before the end of the row. TRITON_INTERPRET=1 runs it on
the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.data.loader import NO_LOSS

PIECE = 2048  # with 4 warps the fastest of six on an H200
LOWEST = tl.constexpr(-1e30)  # where a lane has seen nothing yet; minus infinity would make differences NaN


@triton.jit
def _kernel(logits, targets, losses, scale, V, NO_TARGET: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != NO_TARGET
    start_of_row = logits + row * V
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, x)
        total = total * tl.exp(largest - above) + tl.exp(x - above)
        largest = above
    top = tl.max(largest)
    normaliser = top + tl.log(tl.sum(total * tl.exp(largest - top)))
    wanted = tl.load(start_of_row + target, mask=counted, other=0).to(tl.float32)
    tl.store(losses + row, tl.where(counted, normaliser - wanted, 0.0))
    if GRAD:
        tl.debug_barrier()  # the target's logit is read before it is written over
        factor = tl.where(counted, scale, 0.0)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(start_of_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
            grad = (tl.exp(x - normaliser) - tl.where(v == target, 1.0, 0.0)) * factor
            tl.store(start_of_row + v, grad, mask=v < V)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """The losses [n] of logits [n, V], which become their own gradient times `scale`; None leaves them alone."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _kernel[(rows,)](
        logits,
        targets,
        losses,
        0.0 if scale is None else scale,
        vocab,
        NO_TARGET=NO_LOSS,
        BLOCK=min(triton.next_power_of_2(vocab), PIECE),
        GRAD=scale is not None,
        num_warps=4,
    )
    return losses
