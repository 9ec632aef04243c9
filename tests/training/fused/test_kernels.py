"""The kernels against what ops.py says in PyTorch: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor

from loopformer.model.block import rotary_angles
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
TOKENS, WIDTH, FFN = 39, 48, 1100  # widths that fill no block
# All tokens share a vector, or each of three sequences has one of its own, as views of a table.
SEQUENCES = [1, 3]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def there(tensor: Tensor) -> Tensor:
    return tensor.clone().to(DEVICE)


def vectors(table: Tensor) -> tuple[Tensor, Tensor]:
    """A gate and a gain for each sequence [S, D], as views of a table [S, 2, 4, D]."""
    return table[:, 0, 1], table[:, 1, 2]


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


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("add", [False, True])
def test_norm_forward(precision: Precision, add: bool, sequences: int) -> None:
    x, change = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=1).bfloat16() if add else None
    table = draw(sequences, 2, 4, WIDTH)
    mine_change, (mine_gate, mine_gain) = there(change) if change is not None else None, vectors(there(table))
    gate, gain = vectors(table)
    mine = kernels.norm_forward(there(x), mine_change, mine_gate if add else None, mine_gain, precision)
    theirs = ops.norm_forward(x, change, gate if add else None, gain, precision)
    same(mine[0], theirs[0])
    same(mine[1], theirs[1])
    same(mine[2], theirs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [torch.arange(13)[None], torch.tensor([[0, 1, 2] + [0, 1] * 5] * 3)])
def test_rotate(positions: Tensor, dtype: torch.dtype) -> None:
    """Queries and keys lie beside values, which stay as they are; rotating back restores them."""
    rotary = rotary_angles(positions, head_width=12, dtype=torch.float32)
    qkv = draw(3, 13, 3 * WIDTH).to(dtype)
    expected, mine = qkv.clone(), there(qkv)
    ops.rotate_(expected[..., : 2 * WIDTH], rotary)
    on_device = there(rotary[0]), there(rotary[1])
    kernels.rotate_(mine[..., : 2 * WIDTH], on_device)
    same(mine, expected)
    assert not torch.equal(mine.cpu(), qkv)
    kernels.rotate_(mine[..., : 2 * WIDTH], on_device, inverse=True)
    torch.testing.assert_close(mine.cpu(), qkv, atol=0.03 if dtype == torch.bfloat16 else 1e-6, rtol=0)


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_add_change(sequences: int) -> None:
    x, change = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=1).bfloat16()
    table = draw(sequences, 2, 4, WIDTH)
    mine = kernels.add_change(there(x), there(change), vectors(there(table))[0])
    same(mine, ops.add_change(x, change, vectors(table)[0]))


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
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_residual_backward(precision: Precision, which: str, sequences: int) -> None:
    x, dx = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH, seed=1)
    inverse = (x.square().mean(-1) + 1e-7).rsqrt()
    table = draw(sequences, 2, 4, WIDTH)
    gate, gain = vectors(table)
    norm = NormBackward(draw(TOKENS, WIDTH, seed=2).bfloat16(), x, inverse, gain, (1, 2))
    gated = GateBackward(draw(TOKENS, WIDTH, seed=3).bfloat16(), gate, (0, 1))
    norms, gates = norm if which != "gate" else None, gated if which != "norm" else None
    sums, others = torch.zeros(sequences, 1, 2, 4, WIDTH), there(torch.zeros(sequences, 5, 2, 4, WIDTH))
    theirs = ops.residual_backward(dx, norms, gates, sums, precision)
    if norms is not None:
        mine_gain = vectors(there(table))[1]
        norms = NormBackward(there(norms.dh), there(norms.x), there(norms.inverse), mine_gain, norms.index)
    if gates is not None:
        gates = GateBackward(there(gates.change), vectors(there(table))[0], gates.index)
    mine = kernels.residual_backward(there(dx), norms, gates, others, precision)
    same(mine[0], theirs[0])
    if norms is not None and not precision.fp8:
        same(mine[1], theirs[1])
    if gates is not None:
        same(mine[2], theirs[2])
    torch.testing.assert_close(others.sum(1).cpu(), sums.sum(1), rtol=1e-4, atol=1e-4)


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
