"""Triton kernels of what lies between the products of a block in training, forward and backward.

A program takes whole rows (tokens). With `FP8` factors of products go out in fp8 with a scale for each row instead
of their plain dtype, and what backward could make again is not made, since it is kept. elementwise.py says in
PyTorch what each computes, launch.py launches them. TRITON_INTERPRET=1 runs them on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from loopformer.training.fused import products

LARGEST_FP8 = tl.constexpr(products.LARGEST_FP8)
SMALLEST_SCALE = tl.constexpr(products.SMALLEST_SCALE)


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
