"""Triton kernels of what lies between the matmuls of a block in training, their launchers, and cross-entropy.

A program takes whole rows (tokens). With `FP8`, operands of matmuls go out in fp8 with a scale for each row
instead of their plain dtype, and what backward could make again is not made, since it is kept. The launchers
have the names and parameters of ops.py, which says in PyTorch what each computes. TRITON_INTERPRET=1 runs all
of it on the CPU.

    losses = cross_entropy_(logits, targets, scale)   # [n] in fp32; logits [n, V] are now scale · d loss / d logits

Cross-entropy and its gradient are one kernel, which writes the gradient over the logits. A program reads its
row of logits in chunks, twice: the second time it lies in the cache. Each lane keeps a largest logit and a sum
of its own, so that nothing is exchanged before the end of the row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.data.loader import NO_LOSS
from loopformer.model.block import EPSILON
from loopformer.training.fused import types
from loopformer.training.fused.types import (
    FP8,
    LEAST_GELU,
    MOST_SLOPE,
    GateBackward,
    ModulationGradient,
    NormBackward,
    Operand,
    Precision,
)

LARGEST_FP8 = tl.constexpr(types.LARGEST_FP8)
SMALLEST_SCALE = tl.constexpr(types.SMALLEST_SCALE)


@triton.jit
def _scale(bound):
    """A power of two, by which the largest value of a row is divided to stay within fp8."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(bound / LARGEST_FP8, SMALLEST_SCALE))))


@triton.jit
def _put_fp8(values, scale, place, mask):
    """A logarithm's last bit may lift the largest value over the edge, beyond which fp8 has only NaN."""
    # NaN stays NaN, so that a step that went wrong is seen.
    scaled = tl.clamp(values * (1.0 / scale), -LARGEST_FP8, LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
    tl.store(place, scaled.to(tl.float8e4nv), mask=mask)


@triton.jit
def _gelu_parts(u):
    """The normal distribution at u and its density; erf by Abramowitz and Stegun 7.1.26, right to 1.5e-7."""
    z = tl.abs(u) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    bell = tl.exp(-z * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell
    return tl.where(u < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def norm_forward_kernel(
    x,
    change,
    gate,
    gain,
    new_x,
    inverse_rms,
    h,
    h8,
    scales,
    D,
    EPSILON: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    value = tl.load(x + row * D + d, mask=inside, other=0.0)
    if ADD:
        added = tl.load(change + row * D + d, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(gate + d, mask=inside, other=0.0) * added
        tl.store(new_x + row * D + d, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value) / D + EPSILON)
    tl.store(inverse_rms + row, inverse)
    out = value * inverse * tl.load(gain + d, mask=inside, other=0.0)
    if FP8:
        scale = _scale(tl.max(tl.abs(out)))
        tl.store(scales + row, scale)
        _put_fp8(out, scale, h8 + row * D + d, inside)
    else:
        tl.store(h + row * D + d, out, mask=inside)


@triton.jit
def add_change_kernel(x, change, gate, out, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    added = tl.load(change + row * D + d, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * D + d, mask=inside, other=0.0) + tl.load(gate + d, mask=inside, other=0.0) * added
    tl.store(out + row * D + d, value, mask=inside)


@triton.jit
def residual_backward_kernel(
    dh,
    x,
    inverse_rms,
    gain,
    dx,
    change,
    gate,
    new_dx,
    h,
    dchange,
    dchange8,
    scales,
    dgain,
    dgate,
    N,
    D,
    stride,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Back through h = x / rms(x) · gain into the residual's gradient, then on through x = … + gate · change.

    Each program takes every so-many-th row and keeps its own sums over them for dgain and dgate.
    """
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    if NORM:
        gains = tl.load(gain + d, mask=inside, other=0.0)
        sum_gain = tl.zeros((BLOCK_D,), tl.float32)
    if GATE:
        gates = tl.load(gate + d, mask=inside, other=0.0)
        sum_gate = tl.zeros((BLOCK_D,), tl.float32)
    for number in range(program, N, tl.num_programs(0)):
        place = tl.cast(number, tl.int64) * D + d
        grad = tl.load(dx + place, mask=inside, other=0.0)
        if NORM:
            above = tl.load(dh + place, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(inverse_rms + number)
            normed = tl.load(x + place, mask=inside, other=0.0) * inverse
            sum_gain += above * normed
            if not FP8:
                tl.store(h + place, normed * gains, mask=inside)
            above *= gains
            grad += inverse * (above - normed * (tl.sum(above * normed) / D))
            tl.store(new_dx + place, grad, mask=inside)
        if GATE:
            sum_gate += grad * tl.load(change + place, mask=inside, other=0.0).to(tl.float32)
            grad *= gates
            if FP8:
                scale = _scale(tl.max(tl.abs(grad)))
                tl.store(scales + number, scale)
                _put_fp8(grad, scale, dchange8 + place, inside)
            else:
                tl.store(dchange + place, grad, mask=inside)
    if NORM:
        tl.store(dgain + program * stride + d, sum_gain, mask=inside)
    if GATE:
        tl.store(dgate + program * stride + d, sum_gate, mask=inside)


@triton.jit
def gelu_forward_kernel(u, a, a8, scales, F, LEAST: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if FP8:  # the bound needs no GELU: it lies below its argument
        largest = tl.full((BLOCK,), LEAST, tl.float32)
        for start in range(0, F, BLOCK):
            f = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32))
        scale = _scale(tl.max(largest))
        tl.store(scales + row, scale)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        value = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        below, _ = _gelu_parts(value)
        if FP8:
            _put_fp8(value * below, scale, a8 + row * F + f, f < F)
        else:
            tl.store(a + row * F + f, value * below, mask=f < F)


@triton.jit
def gelu_backward_kernel(u, da, a, du, du8, scales, F, SLOPE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if FP8:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, F, BLOCK):
            f = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(da + row * F + f, mask=f < F, other=0.0).to(tl.float32)))
        scale = _scale(SLOPE * tl.max(largest))
        tl.store(scales + row, scale)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        value = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        grad = tl.load(da + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        below, density = _gelu_parts(value)
        grad *= below + value * density
        if FP8:
            _put_fp8(grad, scale, du8 + row * F + f, f < F)
        else:
            tl.store(a + row * F + f, value * below, mask=f < F)
            tl.store(du + row * F + f, grad, mask=f < F)


@triton.jit
def quantise_kernel(first, second, third, values8, scales, K, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [K] of one matrix, or of three side by side."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        source = first if part == 0 else (second if part == 1 else third)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            value = tl.load(source + row * K + k, mask=k < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
    scale = _scale(tl.max(largest))
    tl.store(scales + row, scale)
    for part in tl.static_range(PARTS):
        source = first if part == 0 else (second if part == 1 else third)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            value = tl.load(source + row * K + k, mask=k < K, other=0.0).to(tl.float32)
            _put_fp8(value, scale, values8 + (row * PARTS + part) * K + k, k < K)


@triton.jit
def columns_kernel(values, scales, scale, turned, N, K, stride, TILE: tl.constexpr):
    """A tile of rows with their own scales, turned round under one scale for all; powers of two lose nothing."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(values + n[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    tile *= (tl.load(scales + n, mask=n < N, other=0.0) / tl.load(scale))[:, None]
    into = turned + k[:, None].to(tl.int64) * stride + n[None, :]
    tl.store(into, tl.trans(tile.to(tl.float8e4nv)), mask=tl.trans(inside))


VOCAB_CHUNK = 2048  # of a row of logits at a time; with 4 warps the fastest of six on an H200
LOWEST = tl.constexpr(-1e30)  # where a lane has seen nothing yet; minus infinity would make differences NaN


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, V, NO_TARGET: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr
):
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
    cross_entropy_kernel[(rows,)](
        logits,
        targets,
        losses,
        0.0 if scale is None else scale,
        vocab,
        NO_TARGET=NO_LOSS,
        BLOCK=min(triton.next_power_of_2(vocab), VOCAB_CHUNK),
        GRAD=scale is not None,
        num_warps=4,
    )
    return losses


CHUNK = 1024  # of a long row at a time
TILE = 128  # of a matrix that is transposed


def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, precision: Precision
) -> tuple[Tensor, Tensor, Operand]:
    tokens, width = x.shape
    new_x = x if change is None else torch.empty_like(x)
    inverse = x.new_empty(tokens)
    h = x if precision.fp8 else torch.empty_like(x, dtype=precision.dtype)
    h8, scales = _fp8_operand(x, precision)
    norm_forward_kernel[(tokens,)](
        x,
        x if change is None else change,
        x if gate is None else gate,
        gain,
        new_x,
        inverse,
        h,
        h8,
        scales,
        width,
        EPSILON=EPSILON,
        BLOCK_D=triton.next_power_of_2(width),
        ADD=change is not None,
        FP8=precision.fp8,
        num_warps=4,
    )
    return new_x, inverse, Operand(None, h8, scales) if precision.fp8 else Operand(h)


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_change_kernel[(len(x),)](
        x, change, gate, out, x.shape[1], BLOCK_D=triton.next_power_of_2(x.shape[1]), num_warps=4
    )
    return out


def gelu_forward(u: Tensor, precision: Precision) -> Operand:
    a = u if precision.fp8 else torch.empty_like(u)
    a8, scales = _fp8_operand(u, precision)
    gelu_forward_kernel[(len(u),)](
        u, a, a8, scales, u.shape[1], LEAST=LEAST_GELU, BLOCK=CHUNK, FP8=precision.fp8, num_warps=4
    )
    return Operand(None, a8, scales) if precision.fp8 else Operand(a)


def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    a = u if precision.fp8 else torch.empty_like(u)
    du8, scales = _fp8_operand(u, precision)
    gelu_backward_kernel[(len(u),)](
        u, da, a, da, du8, scales, u.shape[1], SLOPE=MOST_SLOPE, BLOCK=CHUNK, FP8=precision.fp8, num_warps=4
    )
    return Operand(a), Operand(None, du8, scales) if precision.fp8 else Operand(da)


def residual_backward(
    dx: Tensor,
    norm: NormBackward | None,
    gated: GateBackward | None,
    sums: ModulationGradient,
    precision: Precision,
) -> tuple[Tensor, Operand, Operand]:
    tokens, width = dx.shape
    norm_of = norm or NormBackward(dx, dx, dx, dx, (0, 0))
    gated_of = gated or GateBackward(dx, dx, (0, 0))
    plain = not precision.fp8
    new_dx = torch.empty_like(dx) if norm else dx
    h = torch.empty_like(dx, dtype=precision.dtype) if norm and plain else dx
    dchange = torch.empty_like(dx, dtype=precision.dtype) if gated and plain else dx
    dchange8, scales = _fp8_operand(dchange, precision) if gated else (dx, dx)
    residual_backward_kernel[(len(sums.partial),)](
        norm_of.dh,
        norm_of.x,
        norm_of.inverse,
        norm_of.gain,
        dx,
        gated_of.change,
        gated_of.gate,
        new_dx,
        h,
        dchange,
        dchange8,
        scales,
        sums.partial[0, norm_of.at[0], norm_of.at[1]],
        sums.partial[0, gated_of.at[0], gated_of.at[1]],
        tokens,
        width,
        sums.partial.stride(0),
        BLOCK_D=triton.next_power_of_2(width),
        NORM=norm is not None,
        GATE=gated is not None,
        FP8=precision.fp8,
        num_warps=16,
    )
    return new_dx, Operand(h), Operand(dchange) if plain else Operand(None, dchange8, scales)


def quantise(*parts: Tensor) -> Operand:
    matrices = [part.contiguous() for part in parts]
    tokens, width = matrices[0].shape
    values8 = matrices[0].new_empty(tokens, len(matrices) * width, dtype=FP8)
    scales = matrices[0].new_empty(tokens, 1, dtype=torch.float32)
    quantise_kernel[(tokens,)](
        *(matrices * 3)[:3], values8, scales, width, PARTS=len(matrices), BLOCK=CHUNK, num_warps=4
    )
    return Operand(None, values8, scales)


def transposed(*operands: Operand) -> tuple[Tensor, Tensor]:
    parts = [rows.scaled for rows in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    total, width = sum(len(values) for values, _ in parts), parts[0][0].shape[1]
    turned = parts[0][0].new_empty(width, total)
    start = 0
    for values, scales in parts:
        rows = len(values)
        columns_kernel[(triton.cdiv(rows, TILE), triton.cdiv(width, TILE))](
            values, scales, scale, turned[:, start:], rows, width, total, TILE=TILE, num_warps=4
        )
        start += rows
    return turned, scale


def _fp8_operand(like: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Room for fp8 values and scales; without fp8 something that is not written."""
    if not precision.fp8:
        return like, like
    return torch.empty_like(like, dtype=FP8), like.new_empty(len(like), 1, dtype=torch.float32)
