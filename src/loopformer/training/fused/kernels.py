"""Triton kernels for the work between the matmuls of a block in training, their launchers, and cross-entropy.

The launchers have the names and parameters of ops.py, which defines in PyTorch what each computes. Tensors have one
token per row, and a program works on whole rows. Forward has one program per row. In backward a fixed number of
programs share the rows, because each sums gradients of gains and gates. Whatever the dtype of a tensor, arithmetic
and sums are fp32. With `FP8` an operand is written in fp8 with a scale per row, and what forward has kept is not
written again. TRITON_INTERPRET=1 runs all of it on the CPU.

    losses = cross_entropy_(logits, targets, scale, -100)   # [n] fp32; logits [n, V] become scale · their gradient

Cross-entropy reads a row of logits in chunks, twice; the second time the row is in the cache, and its gradient is
written over it. Each lane keeps a maximum and a sum of its own, so that lanes meet only at the end of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.model import block
from loopformer.training.fused import ops
from loopformer.training.fused.ops import FP8, GateBackward, NormBackward, Operand, Precision

# A jitted function may only use globals that are constexpr.
EPSILON = tl.constexpr(block.EPSILON)
MAX_FP8 = tl.constexpr(ops.MAX_FP8)
MIN_SCALE = tl.constexpr(ops.MIN_SCALE)
MAX_NEGATIVE_GELU = tl.constexpr(ops.MAX_NEGATIVE_GELU)
MAX_GELU_SLOPE = tl.constexpr(ops.MAX_GELU_SLOPE)
NEVER_SEEN = tl.constexpr(-1e30)  # the maximum of no logits; with minus infinity differences would be NaN
MAX_BLOCK = 1024  # elements of a long row at a time
TILE = 128  # rows and columns of a transposed tile
VOCAB_BLOCK = 2048  # logits of a row at a time; with 4 warps the fastest of six sizes on an H200


@triton.jit
def _scale(bound):
    """The power of two that brings a row with this bound into the range of fp8."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(bound / MAX_FP8, MIN_SCALE))))


@triton.jit
def _store_fp8(pointers, values, scale, mask):
    # The logarithm in _scale may round down, and beyond MAX_FP8 there is only NaN, so clamp.
    # NaN stays NaN, so that the trainer sees a step that went wrong.
    scaled = tl.clamp(values * (1.0 / scale), -MAX_FP8, MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, scaled.to(tl.float8e4nv), mask=mask)


@triton.jit
def _gelu_parts(u):
    """The normal distribution function at u, and its density; erf by Abramowitz and Stegun 7.1.26, to 1.5e-7."""
    z = tl.abs(u) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    bell = tl.exp(-z * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell
    return tl.where(u < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def norm_forward_kernel(
    x, change, gate, gain, new_x, inverse, h, scales, D, BLOCK_D: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr
):
    """Grid [N]. new_x = x + gate · change if ADD, the inverse rms [N], and h = new_x · inverse · gain."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    value = tl.load(x + row * D + d, mask=inside, other=0.0)
    if ADD:
        added = tl.load(change + row * D + d, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(gate + d, mask=inside, other=0.0) * added
        tl.store(new_x + row * D + d, value, mask=inside)
    inverse_rms = tl.rsqrt(tl.sum(value * value) / D + EPSILON)
    tl.store(inverse + row, inverse_rms)
    out = value * inverse_rms * tl.load(gain + d, mask=inside, other=0.0)
    if FP8:
        scale = _scale(tl.max(tl.abs(out)))
        tl.store(scales + row, scale)
        _store_fp8(h + row * D + d, out, scale, inside)
    else:
        tl.store(h + row * D + d, out, mask=inside)


@triton.jit
def add_change_kernel(x, change, gate, out, D, BLOCK_D: tl.constexpr):
    """Grid [N]. out = x + gate · change."""
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
    """Grid [programs]. Back through h = x / rms(x) · gain into the gradient dx, then through x = … + gate · change.

    Program p works on rows p, p + programs, … and writes its sums for dgain and dgate, `stride` elements apart.
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
    for row in range(program, N, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * D + d  # N · D may exceed 2^31
        grad = tl.load(dx + offsets, mask=inside, other=0.0)
        if NORM:
            above = tl.load(dh + offsets, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(inverse_rms + row)
            normed = tl.load(x + offsets, mask=inside, other=0.0) * inverse
            sum_gain += above * normed
            if not FP8:
                tl.store(h + offsets, normed * gains, mask=inside)
            above *= gains
            grad += inverse * (above - normed * (tl.sum(above * normed) / D))
            tl.store(new_dx + offsets, grad, mask=inside)
        if GATE:
            sum_gate += grad * tl.load(change + offsets, mask=inside, other=0.0).to(tl.float32)
            grad *= gates
            if FP8:
                scale = _scale(tl.max(tl.abs(grad)))
                tl.store(scales + row, scale)
                _store_fp8(dchange + offsets, grad, scale, inside)
            else:
                tl.store(dchange + offsets, grad, mask=inside)
    if NORM:
        tl.store(dgain + program * stride + d, sum_gain, mask=inside)
    if GATE:
        tl.store(dgate + program * stride + d, sum_gate, mask=inside)


@triton.jit
def gelu_forward_kernel(u, a, scales, F, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Grid [N]. a = gelu(u) of a row [F]. In fp8 a first sweep over u bounds |a|, which gives the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if FP8:
        largest = tl.full((BLOCK,), MAX_NEGATIVE_GELU, tl.float32)
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
            _store_fp8(a + row * F + f, value * below, scale, f < F)
        else:
            tl.store(a + row * F + f, value * below, mask=f < F)


@triton.jit
def gelu_backward_kernel(u, da, a, du, scales, F, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Grid [N]. du = da · gelu'(u) of a row [F], and without FP8 a = gelu(u) again. `du` may be `da`.

    In fp8 a first sweep over da bounds |du| by the largest slope of GELU, which gives the row's scale.
    """
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if FP8:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, F, BLOCK):
            f = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(da + row * F + f, mask=f < F, other=0.0).to(tl.float32)))
        scale = _scale(MAX_GELU_SLOPE * tl.max(largest))
        tl.store(scales + row, scale)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        value = tl.load(u + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        grad = tl.load(da + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        below, density = _gelu_parts(value)
        grad *= below + value * density
        if FP8:
            _store_fp8(du + row * F + f, grad, scale, f < F)
        else:
            tl.store(a + row * F + f, value * below, mask=f < F)
            tl.store(du + row * F + f, grad, mask=f < F)


@triton.jit
def quantise_kernel(first, second, third, quantised, scales, K, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid [N]. The fp8 row [PARTS · K] of one matrix, or of three side by side, under one scale."""
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
            _store_fp8(quantised + (row * PARTS + part) * K + k, value, scale, k < K)


@triton.jit
def transpose_kernel(values, scales, scale, transposed, N, K, stride, TILE: tl.constexpr):
    """Grid [N / TILE, K / TILE]. One tile of fp8 rows with a scale each, transposed under one scale for all.

    Scales are powers of two, so changing them only loses values that become too small for fp8.
    """
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(values + n[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    tile *= (tl.load(scales + n, mask=n < N, other=0.0) / tl.load(scale))[:, None]
    into = transposed + k[:, None].to(tl.int64) * stride + n[None, :]
    tl.store(into, tl.trans(tile.to(tl.float8e4nv)), mask=tl.trans(inside))


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr
):
    """Grid [n]. The loss of a row of logits [V], which GRAD replaces by its gradient times scale."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != IGNORED
    start_of_row = logits + row * V
    largest = tl.full((BLOCK,), NEVER_SEEN, tl.float32)
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
        tl.debug_barrier()  # every lane must have read the target's logit before one overwrites it
        factor = tl.where(counted, scale, 0.0)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(start_of_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
            grad = (tl.exp(x - normaliser) - tl.where(v == target, 1.0, 0.0)) * factor
            tl.store(start_of_row + v, grad, mask=v < V)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None, ignored: int) -> Tensor:
    """The losses [n] of logits [n, V], which become their own gradient times `scale` unless it is None.

    Rows with the target `ignored` have no loss and no gradient.
    """
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block_size, factor = min(triton.next_power_of_2(vocab), VOCAB_BLOCK), 0.0 if scale is None else scale
    cross_entropy_kernel[(rows,)](
        logits,
        targets,
        losses,
        factor,
        vocab,
        IGNORED=ignored,
        BLOCK=block_size,
        GRAD=scale is not None,
        num_warps=4,
    )
    return losses


def _empty_operand(like: Tensor, precision: Precision) -> Operand:
    """Memory for an operand of this shape."""
    if not precision.fp8:
        return Operand(torch.empty_like(like, dtype=precision.dtype))
    return Operand(torch.empty_like(like, dtype=FP8), like.new_empty(len(like), 1, dtype=torch.float32))


def _pointers(operand: Operand) -> tuple[Tensor, Tensor]:
    """Values and scales; a kernel that writes no scales gets the values twice."""
    return operand.values, operand.values if operand.scales is None else operand.scales


def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, precision: Precision
) -> tuple[Tensor, Tensor, Operand]:
    (tokens, width), has_change = x.shape, change is not None
    new_x = torch.empty_like(x) if has_change else x
    inverse, h = x.new_empty(tokens), _empty_operand(x, precision)
    added = (change, gate) if has_change else (x, x)  # the kernel reads neither without a change
    size = triton.next_power_of_2(width)
    norm_forward_kernel[(tokens,)](
        x, *added, gain, new_x, inverse, *_pointers(h), width, size, ADD=has_change, FP8=precision.fp8, num_warps=4
    )
    return new_x, inverse, h


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    (tokens, width), out = x.shape, torch.empty_like(x)
    add_change_kernel[(tokens,)](x, change, gate, out, width, BLOCK_D=triton.next_power_of_2(width), num_warps=4)
    return out


def gelu_forward(u: Tensor, precision: Precision) -> Operand:
    a = _empty_operand(u, precision)
    gelu_forward_kernel[(len(u),)](u, *_pointers(a), u.shape[1], BLOCK=MAX_BLOCK, FP8=precision.fp8, num_warps=4)
    return a


def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    a = u if precision.fp8 else torch.empty_like(u)
    du = _empty_operand(u, precision) if precision.fp8 else Operand(da)
    gelu_backward_kernel[(len(u),)](
        u, da, a, *_pointers(du), u.shape[1], BLOCK=MAX_BLOCK, FP8=precision.fp8, num_warps=4
    )
    return Operand(a), du


def residual_backward(
    dx: Tensor, norm: NormBackward | None, gated: GateBackward | None, sums: Tensor, precision: Precision
) -> tuple[Tensor, Operand, Operand]:
    tokens, width = dx.shape
    # The kernel reads and writes nothing of a norm or gate that is not there; dx stands for its tensors.
    norm_of, gated_of = norm or NormBackward(dx, dx, dx, dx, (0, 0)), gated or GateBackward(dx, dx, (0, 0))
    new_dx = torch.empty_like(dx) if norm else dx
    h = torch.empty_like(dx, dtype=precision.dtype) if norm and not precision.fp8 else dx
    dchange = _empty_operand(dx, precision) if gated else Operand(dx)
    residual_backward_kernel[(len(sums),)](
        norm_of.dh,
        norm_of.x,
        norm_of.inverse,
        norm_of.gain,
        dx,
        gated_of.change,
        gated_of.gate,
        new_dx,
        h,
        *_pointers(dchange),
        sums[0, norm_of.index[0], norm_of.index[1]],
        sums[0, gated_of.index[0], gated_of.index[1]],
        tokens,
        width,
        sums.stride(0),
        BLOCK_D=triton.next_power_of_2(width),
        NORM=norm is not None,
        GATE=gated is not None,
        FP8=precision.fp8,
        num_warps=16,
    )
    return new_dx, Operand(h), dchange


def quantise(*parts: Tensor) -> Operand:
    matrices = [part.contiguous() for part in parts]
    tokens, width = matrices[0].shape
    values = matrices[0].new_empty(tokens, len(matrices) * width, dtype=FP8)
    scales = matrices[0].new_empty(tokens, 1, dtype=torch.float32)
    quantise_kernel[(tokens,)](
        *(matrices * 3)[:3], values, scales, width, PARTS=len(matrices), BLOCK=MAX_BLOCK, num_warps=4
    )
    return Operand(values, scales)


def transpose_fp8(*operands: Operand) -> tuple[Tensor, Tensor]:
    parts = [rows.values_and_scales for rows in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    total, width = sum(len(values) for values, _ in parts), parts[0][0].shape[1]
    out, start = parts[0][0].new_empty(width, total), 0
    for values, scales in parts:
        grid = (triton.cdiv(len(values), TILE), triton.cdiv(width, TILE))
        # Passes lie side by side: a slice starts at its first column, and rows are `total` apart.
        transpose_kernel[grid](
            values, scales, scale, out[:, start:], len(values), width, total, TILE=TILE, num_warps=4
        )
        start += len(values)
    return out, scale
