"""The kernels against what ops.py says in PyTorch: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor

from loopformer.training.fused import ops
from loopformer.training.fused.ops import (
    GateBackward,
    NormBackward,
    Operand,
    Precision,
    add_matmul,
    quantise,
    transpose_fp8,
)

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
from loopformer.training.fused import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter rounds 127 to 64 in fp8, so that is compared on a GPU only.
PRECISIONS = [Precision(torch.bfloat16), *([Precision(torch.bfloat16, fp8=True)] if DEVICE == "cuda" else [])]
TOKENS, WIDTH, FFN = 37, 48, 1100  # widths that fill no block


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def there(tensor: Tensor) -> Tensor:
    return tensor.clone().to(DEVICE)


def same(mine: Operand | Tensor, theirs: Operand | Tensor) -> None:
    """Within one step of rounding of the dtype; a few fp8 values may lie on the other side of one."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        low = mine.dtype != torch.float32
        rtol, atol = (0.01, 1e-4) if low else (1e-4, 1e-5)
        torch.testing.assert_close(mine.cpu(), theirs, rtol=rtol, atol=atol)
        return
    assert isinstance(mine, Operand)
    assert isinstance(theirs, Operand)
    assert (mine.values.dtype, mine.scales is None) == (theirs.values.dtype, theirs.scales is None)
    if mine.scales is None:
        same(mine.values, theirs.values)
    else:
        same(mine.values_and_scales[1], theirs.values_and_scales[1])
        assert (torch.frexp(mine.values_and_scales[1].cpu()).mantissa == 0.5).all()  # powers of two
        one, two = mine.values_and_scales[0].cpu().float(), theirs.values_and_scales[0].float()
        assert one.isfinite().all()
        assert ((one - two).abs() <= 0.13 * two.abs() + 0.002).all()
        assert (one != two).float().mean() < 0.02


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("add", [False, True])
def test_norm_forward(precision: Precision, add: bool) -> None:
    x, change, gate, gain = (
        draw(TOKENS, WIDTH),
        draw(TOKENS, WIDTH, seed=1).bfloat16(),
        draw(WIDTH),
        draw(WIDTH, seed=2),
    )
    change, gate = (change, gate) if add else (None, None)  # type: ignore[assignment]
    mine = kernels.norm_forward(
        there(x), there(change) if add else None, there(gate) if add else None, there(gain), precision
    )
    theirs = ops.norm_forward(x, change, gate, gain, precision)
    same(mine[0], theirs[0])
    same(mine[1], theirs[1])
    same(mine[2], theirs[2])


def test_add_change() -> None:
    x, change, gate = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=1).bfloat16(), draw(WIDTH)
    same(kernels.add_change(there(x), there(change), there(gate)), ops.add_change(x, change, gate))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gelu(precision: Precision) -> None:
    u, da = (3 * draw(TOKENS, FFN)).bfloat16(), draw(TOKENS, FFN, seed=1).bfloat16()
    same(kernels.gelu_forward(there(u), precision), ops.gelu_forward(u, precision))
    mine, theirs = kernels.gelu_backward(there(u), there(da), precision), ops.gelu_backward(u, da, precision)
    same(mine[1], theirs[1])
    if not precision.fp8:
        same(mine[0], theirs[0])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", ["norm", "gate", "both"])
def test_residual_backward(precision: Precision, which: str) -> None:
    x, dx = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=1)
    inverse = (x.square().mean(-1) + 1e-7).rsqrt()
    norm = NormBackward(draw(TOKENS, WIDTH, seed=2).bfloat16(), x, inverse, draw(WIDTH), (1, 2))
    gated = GateBackward(draw(TOKENS, WIDTH, seed=3).bfloat16(), draw(WIDTH, seed=4), (0, 1))
    norms, gates = norm if which != "gate" else None, gated if which != "norm" else None
    sums, others = torch.zeros(1, 2, 4, WIDTH), there(torch.zeros(5, 2, 4, WIDTH))
    theirs = ops.residual_backward(dx, norms, gates, sums, precision)
    if norms is not None:
        norms = NormBackward(there(norms.dh), there(norms.x), there(norms.inverse), there(norms.gain), norms.index)
    if gates is not None:
        gates = GateBackward(there(gates.change), there(gates.gate), gates.index)
    mine = kernels.residual_backward(there(dx), norms, gates, others, precision)
    same(mine[0], theirs[0])
    if norms is not None and not precision.fp8:
        same(mine[1], theirs[1])
    if gates is not None:
        same(mine[2], theirs[2])
    torch.testing.assert_close(others.sum(0).cpu(), sums.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(len(PRECISIONS) == 1, reason="needs a GPU")
def test_quantise() -> None:
    values = draw(TOKENS, FFN)
    values[3] = 0
    same(kernels.quantise(there(values)), quantise(values))
    parts = [draw(TOKENS, WIDTH, seed=seed) for seed in range(3)]
    same(kernels.quantise(*map(there, parts)), quantise(torch.cat(parts, dim=1)))


@pytest.mark.skipif(len(PRECISIONS) == 1, reason="needs a GPU")
def test_transposing_loses_nothing() -> None:
    """But for what is far below the largest value of all rows."""
    sizes = torch.logspace(-2, 2, TOKENS)[:, None]
    several = [quantise(draw(TOKENS, FFN, seed=seed) * sizes) for seed in range(2)]
    turned, scale = transpose_fp8(*(Operand(*(there(part) for part in rows.values_and_scales)) for rows in several))
    meant = torch.cat(
        [values.float() * scales for values, scales in (rows.values_and_scales for rows in several)]
    ).t()
    found = turned.cpu().float() * scale.cpu()
    large = meant.abs() > 2.0**-6 * scale.cpu()
    assert torch.equal(found[large], meant[large])
    assert (found - meant).abs().max() <= 2.0**-10 * scale.cpu()


def test_matmuls_add_up_in_fp32() -> None:
    left, right = draw(64, TOKENS).bfloat16(), draw(TOKENS, 32).bfloat16()
    total = add_matmul(None, there(left), there(right))
    again = add_matmul(total, there(left), there(right))
    assert again.data_ptr() == total.data_ptr()
    assert again.dtype == torch.float32
    torch.testing.assert_close(again.cpu(), 2 * (left.float() @ right.float()), rtol=1e-4, atol=1e-4)
