"""Triton kernels for the work between the matmuls of a block in training, their launchers, and cross-entropy.

The launchers have the names and parameters of ops.py, which defines in PyTorch what each computes. Tensors have one
token per row, and most kernels run one program per row. In `residual_backward_kernel` a fixed number of programs
share the rows of a sequence, because each sums the gradients of gains and gates over its rows. Gains and gates have
a vector for each sequence of `length` tokens, and these vectors are `table_stride` elements apart. Arithmetic and
sums are fp32, whatever the dtype of a tensor. With `FP8`, operands are written in fp8 with a scale per row, and
backward does not write operands again that forward has saved. TRITON_INTERPRET=1 runs all kernels on the CPU.

    losses = cross_entropy_(logits, targets, scale, -100)   # [n] fp32; logits [n, V] become scale · their gradient

Cross-entropy reads a row of logits twice, in chunks. The second time the row comes from the cache, and its gradient
overwrites it. Each lane keeps its own maximum and sum, so lanes synchronise only at the end of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.model import block
from loopformer.model.block import Rotary
from loopformer.training.fused import ops
from loopformer.training.fused.ops import FP8, GateBackward, NormBackward, Operand, Precision

# A jitted function may only use globals that are constexpr.
EPSILON = tl.constexpr(block.EPSILON)
MAX_FP8 = tl.constexpr(ops.MAX_FP8)
MIN_SCALE = tl.constexpr(ops.MIN_SCALE)
MAX_NEGATIVE_GELU = tl.constexpr(ops.MAX_NEGATIVE_GELU)
MAX_GELU_SLOPE = tl.constexpr(ops.MAX_GELU_SLOPE)
INITIAL_MAX = tl.constexpr(-1e30)  # a running maximum before any logit; -inf would give NaN as -inf - -inf
MAX_BLOCK = 1024  # elements of a long row that a program handles at a time
TILE = 128  # rows and columns of a tile that is transposed
VOCAB_BLOCK = 2048  # logits of a row at a time; the fastest of six sizes on an H200 with 4 warps


@triton.jit
def _scale(bound):
    """The power of two that brings a row with this bound into the range of fp8."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(bound / MAX_FP8, MIN_SCALE))))


@triton.jit
def _store_fp8(pointers, values, scale, mask):
    # The logarithm in _scale may round down. Clamp, because fp8 turns values beyond MAX_FP8 into NaN.
    # Keep a NaN that was there before, so that the trainer sees a step that went wrong.
    scaled = tl.clamp(values * (1.0 / scale), -MAX_FP8, MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, scaled.to(tl.float8e4nv), mask=mask)


@triton.jit
def _gelu_parts(u):
    """The standard normal CDF and density at u. The error function is Abramowitz and Stegun 7.1.26, to 1.5e-7."""
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
    inverse,
    h,
    scales,
    D,
    length,
    table_stride,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
):
    """Grid [N]. new_x = x + gate · change if ADD, else x; inverse = 1 / rms(new_x); h = new_x · inverse · gain."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    vector = row // length * table_stride + d
    value = tl.load(x + row * D + d, mask=inside, other=0.0)
    if ADD:
        added = tl.load(change + row * D + d, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(gate + vector, mask=inside, other=0.0) * added
        tl.store(new_x + row * D + d, value, mask=inside)
    inverse_rms = tl.rsqrt(tl.sum(value * value) / D + EPSILON)
    tl.store(inverse + row, inverse_rms)
    out = value * inverse_rms * tl.load(gain + vector, mask=inside, other=0.0)
    if FP8:
        scale = _scale(tl.max(tl.abs(out)))
        tl.store(scales + row, scale)
        _store_fp8(h + row * D + d, out, scale, inside)
    else:
        tl.store(h + row * D + d, out, mask=inside)


@triton.jit
def rotate_kernel(
    heads,
    cos,
    sin,
    length,
    H,
    half,
    row_stride,
    token_stride,
    head_stride,
    angle_stride,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Grid [B · T]. Rotate the pairs (i, i + half) of all heads of a token by its angles, in place."""
    row = (tl.program_id(0) // length).to(tl.int64)
    token = tl.program_id(0) % length
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (h < H) & (d < half)
    angles = row * angle_stride + token * half + d
    c = tl.load(cos + angles, mask=d < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=d < half, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    pointers = heads + row * row_stride + token * token_stride + h * head_stride + d
    first = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointers + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, first * c - second * s, mask=inside)
    tl.store(pointers + half, first * s + second * c, mask=inside)


@triton.jit
def add_change_kernel(x, change, gate, out, D, length, table_stride, BLOCK_D: tl.constexpr):
    """Grid [N]. out = x + gate · change."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    added = tl.load(change + row * D + d, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row // length * table_stride + d, mask=inside, other=0.0)
    value = tl.load(x + row * D + d, mask=inside, other=0.0) + gates * added
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
    D,
    length,
    table_stride,
    programs,
    sums_stride,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Grid [S · programs]. Back through h = x / rms(x) · gain into dx, then through x = … + gate · change.

    Program p of a sequence works on its rows p, p + programs, … Each program writes its sums to a row of its own in
    dgain and dgate, whose rows are `sums_stride` elements apart. So no atomics are needed, and the sums do not
    depend on the order of programs.
    """
    program = tl.program_id(0)
    sequence = (program // programs).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    vector = sequence * table_stride + d
    if NORM:
        gains = tl.load(gain + vector, mask=inside, other=0.0)
        sum_gain = tl.zeros((BLOCK_D,), tl.float32)
    if GATE:
        gates = tl.load(gate + vector, mask=inside, other=0.0)
        sum_gate = tl.zeros((BLOCK_D,), tl.float32)
    for token in range(program % programs, length, programs):
        row = sequence * length + token
        offsets = row * D + d  # in 64 bits: N · D may exceed 2^31
        grad = tl.load(dx + offsets, mask=inside, other=0.0)
        if NORM:
            grad_h = tl.load(dh + offsets, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(inverse_rms + row)
            normed = tl.load(x + offsets, mask=inside, other=0.0) * inverse
            sum_gain += grad_h * normed
            if not FP8:
                tl.store(h + offsets, normed * gains, mask=inside)
            grad_h *= gains
            grad += inverse * (grad_h - normed * (tl.sum(grad_h * normed) / D))
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
        tl.store(dgain + program * sums_stride + d, sum_gain, mask=inside)
    if GATE:
        tl.store(dgate + program * sums_stride + d, sum_gate, mask=inside)


@triton.jit
def gelu_forward_kernel(u, a, scales, F, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Grid [N]. a = gelu(u) of a row [F].

    In fp8 a first sweep over u gives the row's scale: |gelu(u)| is at most max(u, MAX_NEGATIVE_GELU).
    """
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
        cdf, _ = _gelu_parts(value)
        if FP8:
            _store_fp8(a + row * F + f, value * cdf, scale, f < F)
        else:
            tl.store(a + row * F + f, value * cdf, mask=f < F)


@triton.jit
def gelu_backward_kernel(u, da, a, du, scales, F, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Grid [N]. du = da · gelu'(u) of a row [F]. Without FP8 also a = gelu(u), which forward did not save.

    In fp8 a first sweep over da gives the row's scale: |du| is at most MAX_GELU_SLOPE · |da|. `du` may be
    the memory of `da`, because each element is read before it is written.
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
        cdf, density = _gelu_parts(value)
        grad *= cdf + value * density
        if FP8:
            _store_fp8(du + row * F + f, grad, scale, f < F)
        else:
            tl.store(a + row * F + f, value * cdf, mask=f < F)
            tl.store(du + row * F + f, grad, mask=f < F)


@triton.jit
def quantise_kernel(first, second, third, quantised, scales, K, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid [N]. A row of one matrix, or of three side by side, as an fp8 row [PARTS · K] with one scale."""
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
    """Grid [N / TILE, K / TILE]. Transpose one tile of fp8 rows with a scale each, under one scale for all.

    Scales are powers of two, so a change of scale is exact, except for values that become too small for fp8.
    """
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(values + n[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    tile *= (tl.load(scales + n, mask=n < N, other=0.0) / tl.load(scale))[:, None]
    pointers = transposed + k[:, None].to(tl.int64) * stride + n[None, :]
    tl.store(pointers, tl.trans(tile.to(tl.float8e4nv)), mask=tl.trans(inside))


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr
):
    """Grid [n]. The loss of a row of logits [V]. With GRAD the row becomes its own gradient times scale."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    is_counted = target != IGNORED
    row_start = logits + row * V
    largest = tl.full((BLOCK,), INITIAL_MAX, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row_start + v, mask=v < V, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        # The sum so far is relative to the old maximum: rescale it to the new one.
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest
    top = tl.max(largest)
    normaliser = top + tl.log(tl.sum(total * tl.exp(largest - top)))
    target_logit = tl.load(row_start + target, mask=is_counted, other=0).to(tl.float32)
    tl.store(losses + row, tl.where(is_counted, normaliser - target_logit, 0.0))
    if GRAD:
        tl.debug_barrier()  # every lane must read the target's logit before any lane overwrites it
        factor = tl.where(is_counted, scale, 0.0)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row_start + v, mask=v < V, other=float("-inf")).to(tl.float32)
            grad = (tl.exp(x - normaliser) - tl.where(v == target, 1.0, 0.0)) * factor
            tl.store(row_start + v, grad, mask=v < V)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None, ignored: int) -> Tensor:
    """The losses [n] of logits [n, V]. Unless `scale` is None, the logits become their own gradient times `scale`.

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
    """An uninitialised operand of this shape."""
    if not precision.fp8:
        return Operand(torch.empty_like(like, dtype=precision.dtype))
    return Operand(torch.empty_like(like, dtype=FP8), like.new_empty(len(like), 1, dtype=torch.float32))


def _pointers(operand: Operand) -> tuple[Tensor, Tensor]:
    """Values and scales for a kernel. Without fp8 the values stand in for scales, which it does not write."""
    return operand.values, operand.values if operand.scales is None else operand.scales


def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, precision: Precision
) -> tuple[Tensor, Tensor, Operand]:
    (tokens, width), has_change = x.shape, change is not None
    new_x = torch.empty_like(x) if has_change else x
    inverse, h = x.new_empty(tokens), _empty_operand(x, precision)
    added = (change, gate) if has_change else (x, x)  # placeholders, which the kernel does not read
    norm_forward_kernel[(tokens,)](
        x,
        *added,
        gain,
        new_x,
        inverse,
        *_pointers(h),
        width,
        tokens // len(gain),
        gain.stride(0),
        BLOCK_D=triton.next_power_of_2(width),
        ADD=has_change,
        FP8=precision.fp8,
        num_warps=4,
    )
    return new_x, inverse, h


def rotate_(x: Tensor, rotary: Rotary, inverse: bool = False) -> None:
    cos, sin = rotary
    half = cos.shape[-1]
    heads = x.view(*x.shape[:2], -1, 2 * half)  # [B, T, H, D/H]
    rows, length, count, _ = heads.shape
    rotate_kernel[(rows * length,)](
        heads,
        cos,
        sin,
        length,
        count,
        half,
        *heads.stride()[:3],
        cos.stride(0) if len(cos) > 1 else 0,
        BLOCK_H=triton.next_power_of_2(count),
        BLOCK_HALF=triton.next_power_of_2(half),
        INVERSE=inverse,
        num_warps=4,
    )


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    (tokens, width), out, size = x.shape, torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    add_change_kernel[(tokens,)](
        x, change, gate, out, width, tokens // len(gate), gate.stride(0), BLOCK_D=size, num_warps=4
    )
    return out


def gelu_forward(u: Tensor, precision: Precision) -> Operand:
    a = _empty_operand(u, precision)
    gelu_forward_kernel[(len(u),)](u, *_pointers(a), u.shape[1], BLOCK=MAX_BLOCK, FP8=precision.fp8, num_warps=4)
    return a


def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    # In fp8 the kernel writes no a, and u stands in for it. Otherwise du overwrites da, which has no later reader.
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
    # Without a norm or a gate, dx stands in for tensors that the kernel neither reads nor writes.
    norm_inputs, gate_inputs = norm or NormBackward(dx, dx, dx, dx, (0, 0)), gated or GateBackward(dx, dx, (0, 0))
    new_dx = torch.empty_like(dx) if norm else dx
    h = torch.empty_like(dx, dtype=precision.dtype) if norm and not precision.fp8 else dx
    dchange = _empty_operand(dx, precision) if gated else Operand(dx)
    sequences, programs = sums.shape[:2]
    vectors = norm_inputs.gain if norm else gate_inputs.gate
    residual_backward_kernel[(sequences * programs,)](
        norm_inputs.dh,
        norm_inputs.x,
        norm_inputs.inverse,
        norm_inputs.gain,
        dx,
        gate_inputs.change,
        gate_inputs.gate,
        new_dx,
        h,
        *_pointers(dchange),
        sums[0, 0, norm_inputs.index[0], norm_inputs.index[1]],
        sums[0, 0, gate_inputs.index[0], gate_inputs.index[1]],
        width,
        tokens // sequences,
        vectors.stride(0),
        programs,
        sums.stride(1),
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
    parts = [operand.values_and_scales for operand in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    total, width = sum(len(values) for values, _ in parts), parts[0][0].shape[1]
    out, start = parts[0][0].new_empty(width, total), 0
    for values, scales in parts:
        grid = (triton.cdiv(len(values), TILE), triton.cdiv(width, TILE))
        # Operands lie side by side in `out` [K, total], so rows are `total` apart. Each starts at column `start`.
        transpose_kernel[grid](
            values, scales, scale, out[:, start:], len(values), width, total, TILE=TILE, num_warps=4
        )
        start += len(values)
    return out, scale
