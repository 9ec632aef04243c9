"""Triton kernels for up to 16 rows: the products of kernels.py on tensor cores.

A product with so few rows is still limited by reading the weight, but plain cores no longer keep up with it. A
program takes some outputs of all rows and reads its part of the weight piece by piece, the first one before it
waits for the kernel ahead of it. Rows are padded to 16, the least that tensor cores take. TRITON_INTERPRET=1 runs
them on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from loopformer.inference.kernels import _as_numbers, _wait

MOST_ROWS = 16
PADDED = tl.constexpr(MOST_ROWS)


@triton.jit
def _piece_of_weight(weight, n, k, N, K):
    """[PIECE, ROWS]."""
    tile = weight + n[None, :].to(tl.int64) * K + k[:, None]
    return tl.load(tile, mask=(n < N)[None, :] & (k < K)[:, None], other=0)


@triton.jit
def _piece_of_rows(x, told, b, k, B: tl.constexpr, K: tl.constexpr, PLUS_ONE: tl.constexpr):
    """[16, PIECE] times what it is told, and the sums of its squares [16]."""
    value = tl.load(x + b[:, None] * K + k[None, :], mask=(b < B)[:, None] & (k < K)[None, :], other=0)
    factor = tl.load(told + k, mask=k < K, other=0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    return (value * factor[None, :]).to(told.dtype.element_ty), tl.sum(value * value, axis=1)


@triton.jit
def _product(rows, w, out, BYTES: tl.constexpr):
    numbers = _as_numbers(w, True).to(rows.dtype) if BYTES else w
    return tl.dot(rows, numbers, out, input_precision="ieee")


@triton.jit
def norm_linear_rows_kernel(
    x,  # [B, K] fp32
    weight,  # [N, K]
    scales,  # [N], of weights in bytes
    told,  # [K]: the modulation's scale, or the norm's weight
    y,  # [B, N]
    best,  # [B, programs] largest outputs, and
    where,  # where they are
    N,
    counted,  # outputs from here on are padding
    K: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    SCALED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GELU: tl.constexpr,
    BEST: tl.constexpr,
    PDL: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """y = W · (x / rms(x) · told), then GELU or the largest output, if asked."""
    program = tl.program_id(0)
    n = program * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, PADDED)
    k = tl.arange(0, PIECE)
    w = _piece_of_weight(weight, n, k, N, K)
    _wait(PDL)
    rows, squares = _piece_of_rows(x, told, b, k, B, K, PLUS_ONE)
    out = _product(rows, w, tl.zeros([PADDED, ROWS], tl.float32), SCALED)
    for start in range(PIECE, K, PIECE):
        w = _piece_of_weight(weight, n, start + k, N, K)
        rows, more = _piece_of_rows(x, told, b, start + k, B, K, PLUS_ONE)
        squares += more
        out = _product(rows, w, out, SCALED)
    out *= tl.rsqrt(squares / K + EPSILON)[:, None]
    if SCALED:
        out *= tl.load(scales + n, mask=n < N, other=0).to(tl.float32)[None, :]
    if GELU:
        out = 0.5 * out * (1 + tl.erf(out * 0.7071067811865476))
    if BEST:
        out = tl.where((n < counted)[None, :], out, float("-inf"))
        place = b * tl.num_programs(0) + program
        tl.store(best + place, tl.max(out, axis=1), mask=b < B)
        tl.store(where + place, program * ROWS + tl.argmax(out, axis=1), mask=b < B)
    tl.store(y + b[:, None] * N + n[None, :], out, mask=(b < B)[:, None] & (n < N)[None, :])


@triton.jit
def linear_residual_rows_kernel(
    a,  # [B, K]
    weight,  # [N, K]
    scales,  # [N], of weights in bytes
    gate,  # [N]
    x,  # [B, N] fp32, added to
    N,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += gate · (W · a)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, PADDED)
    k = tl.arange(0, PIECE)
    w = _piece_of_weight(weight, n, k, N, K)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if GATED:
        factor = tl.load(gate + n, mask=n < N, other=0).to(tl.float32)
    if SCALED:
        factor *= tl.load(scales + n, mask=n < N, other=0).to(tl.float32)
    _wait(PDL)
    rows = tl.load(a + b[:, None] * K + k[None, :], mask=(b < B)[:, None] & (k < K)[None, :], other=0)
    out = _product(rows, w, tl.zeros([PADDED, ROWS], tl.float32), SCALED)
    for start in range(PIECE, K, PIECE):
        at = start + k
        w = _piece_of_weight(weight, n, at, N, K)
        rows = tl.load(a + b[:, None] * K + at[None, :], mask=(b < B)[:, None] & (at < K)[None, :], other=0)
        out = _product(rows, w, out, SCALED)
    place = x + b[:, None] * N + n[None, :]
    mask = (b < B)[:, None] & (n < N)[None, :]
    tl.store(place, tl.load(place, mask=mask, other=0) + factor[None, :] * out, mask=mask)
