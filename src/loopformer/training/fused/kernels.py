"""Triton kernels of what lies between the products of a block in training, forward and backward.

A program takes whole rows (tokens). With `FP8` factors of products go out in fp8 with a scale for each row, and in
their plain dtype only where the weight's gradient needs them. elementwise.py says in PyTorch what each computes,
launch.py launches them. TRITON_INTERPRET=1 runs them on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

LARGEST_FP8 = tl.constexpr(448.0)  # of e4m3
SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def _scale(bound):
    """What the largest value of a row is divided by to become fp8's largest."""
    return tl.maximum(bound / LARGEST_FP8, SMALLEST_SCALE)


@triton.jit
def _put_fp8(values, scale, place, mask):
    """Rounding may lift the largest value over the edge, where fp8 has only NaN."""
    scaled = tl.minimum(tl.maximum(values / scale, -LARGEST_FP8), LARGEST_FP8)
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
            tl.store(h + place, normed * gains, mask=inside)
            above *= gains
            grad += inverse * (above - normed * (tl.sum(above * normed) / D))
            tl.store(new_dx + place, grad, mask=inside)
        if GATE:
            sum_gate += grad * tl.load(change + place, mask=inside, other=0.0).to(tl.float32)
            grad *= gates
            tl.store(dchange + place, grad, mask=inside)
            if FP8:
                scale = _scale(tl.max(tl.abs(grad)))
                tl.store(scales + number, scale)
                _put_fp8(grad, scale, dchange8 + place, inside)
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
        tl.store(a + row * F + f, value * below, mask=f < F)
        tl.store(du + row * F + f, grad, mask=f < F)
        if FP8:
            _put_fp8(grad, scale, du8 + row * F + f, f < F)


@triton.jit
def quantise_kernel(values, values8, scales, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(values + row * K + k, mask=k < K, other=0.0).to(tl.float32)))
    scale = _scale(tl.max(largest))
    tl.store(scales + row, scale)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(values + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        _put_fp8(value, scale, values8 + row * K + k, k < K)
