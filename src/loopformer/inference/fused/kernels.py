"""Triton kernels of one decoded token: few, fused, and each reads every weight once.

A token's pass through a block is five launches: norm and qkv, attention, out and residual, norm and up and GELU,
down and residual. Matmuls with few rows are limited by reading the weight, so each program reads its rows of the
weight whole, before it waits for the kernel ahead of it. All lengths are read on the device, so that a CUDA graph
can be replayed as the text grows.

TRITON_INTERPRET=1 runs them on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def wait(PDL: tl.constexpr):
    """With programmatic launch a kernel starts while the one before it runs; here it needs that one's output.

    The next one may start before, to fetch its weights; so what another kernel writes is read after this only.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _most_likely(values, where, start, programs):
    """The token of the largest of some values; with NaN among them it may be any, but it is one."""
    return tl.load(where + start + tl.minimum(tl.argmax(values, axis=0), programs - 1))


@triton.jit
def _gelu(x):
    """Exact, in fp32."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def embed_kernel(
    ids,  # [B]
    lengths,  # [B]
    embedding,  # [V, D] that passes start from
    places,  # [context, D]
    injection,  # [D]
    x,  # [B, D] fp32
    width,
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """x from the tokens, and the places they stand at; or some of that added to x, where it is injected."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < width
    wait(PDL)
    value = tl.load(embedding + tl.load(ids + row) * width + k, mask=inside).to(tl.float32)
    if LEARNED:
        value += tl.load(places + tl.load(lengths + row) * width + k, mask=inside).to(tl.float32)
    if INJECTED:
        value *= tl.load(injection + k, mask=inside).to(tl.float32)
        value += tl.load(x + row * width + k, mask=inside)
    tl.store(x + row * width + k, value, mask=inside)


@triton.jit
def norm_linear_kernel(
    x,  # [B, K] fp32
    weight,  # [N, K]
    scale,  # [K]: the modulation's, or the norm's weight
    y,  # [B, N]
    best,  # [B, programs] largest outputs,
    where,  # where they are, and
    mass,  # exp of all outputs less the largest, summed
    N,
    counted,  # outputs from here on are padding
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GELU: tl.constexpr,
    BEST: tl.constexpr,
    PDL: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """y = W · (x / rms(x) · scale), then GELU or the largest output, if asked."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    tile = rows[:, None] * K + k[None, :]
    w = tl.load(weight + tile, mask=(rows < N)[:, None] & inside[None, :], other=0)
    factor = tl.load(scale + k, mask=inside, other=0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    wait(PDL)
    for b in tl.static_range(B):
        value = tl.load(x + b * K + k, mask=inside, other=0)
        # Scaled afterwards, so that the two sums do not wait for each other.
        out = tl.sum(w.to(tl.float32) * (value * factor)[None, :], axis=1)
        out *= tl.rsqrt(tl.sum(value * value) / K + EPSILON)
        if GELU:
            out = _gelu(out)
        if BEST:
            out = tl.where(rows < counted, out, float("-inf"))
            top = tl.max(out)
            tl.store(best + b * tl.num_programs(0) + program, top)
            part = tl.sum(tl.where(rows < counted, tl.exp(out - top), 0.0))
            tl.store(mass + b * tl.num_programs(0) + program, part)
            tl.store(where + b * tl.num_programs(0) + program, program * ROWS + tl.argmax(out, axis=0))
        tl.store(y + b * N + rows, out, mask=rows < N)


@triton.jit
def linear_residual_kernel(
    a,  # [B, K]
    weight,  # [N, K]
    gate,  # [N]
    x,  # [B, N] fp32, added to
    N,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += gate · (W · a)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < N
    k = tl.arange(0, PIECE)
    first = tl.load(weight + rows[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if GATED:
        factor = tl.load(gate + rows, mask=valid, other=0).to(tl.float32)
    wait(PDL)
    for b in tl.static_range(B):
        value = tl.load(a + b * K + k, mask=k < K, other=0).to(tl.float32)
        out = tl.sum(first.to(tl.float32) * value[None, :], axis=1)
        for start in tl.static_range(PIECE, K, PIECE):
            inside = start + k < K
            tile = rows[:, None] * K + (start + k)[None, :]
            w = tl.load(weight + tile, mask=valid[:, None] & inside[None, :], other=0)
            more = tl.load(a + b * K + start + k, mask=inside, other=0).to(tl.float32)
            out += tl.sum(w.to(tl.float32) * more[None, :], axis=1)
        place = x + b * N + rows
        tl.store(place, tl.load(place, mask=valid, other=0) + factor * out, mask=valid)


@triton.jit
def weighed(score, v, mixed, largest, weight):
    """Attention's sum of values [W], its largest score and its weight, with some more keys: score [N], v [N, W]."""
    above = tl.maximum(largest, tl.max(score))
    shrink = tl.exp(largest - above)
    likely = tl.exp(score - above)
    return mixed * shrink + tl.sum(likely[:, None] * v, axis=0), above, weight * shrink + tl.sum(likely)


@triton.jit
def write_attention(
    mixed,  # [W], of one split of a head's keys
    largest,
    weight,
    head,
    split,
    out,  # [B, D]
    partial,  # [B · H, SPLITS, W + 2]
    arrived,  # [B · H] zeros; left as zeros
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A head's result; of several splits whoever comes last adds them up."""
    d = tl.arange(0, BLOCK_W)
    inside = d < W
    if SPLITS == 1:
        tl.store(out + head * W + d, mixed / weight, mask=inside)
    else:
        mine = partial + (head * SPLITS + split) * (W + 2)
        tl.store(mine + d, mixed, mask=inside)
        tl.store(mine + W, largest)
        tl.store(mine + W + 1, weight)
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            s = tl.arange(0, SPLITS)
            all_ = partial + (head * SPLITS + s) * (W + 2)
            tops = tl.load(all_ + W)
            share = tl.exp(tops - tl.max(tops))
            total = tl.sum(share * tl.load(all_ + W + 1))
            sums = tl.load(all_[:, None] + d[None, :], mask=inside[None, :], other=0)
            tl.store(out + head * W + d, tl.sum(share[:, None] * sums, axis=0) / total, mask=inside)
            tl.store(arrived + head, 0)


@triton.jit
def attention_kernel(
    qkv,  # [B, 3D]
    keys,  # [B, H, capacity, W]; with TOGETHER above 1 [1, H, capacity, W]
    values,
    lengths,  # [B], tokens before this one
    cosines,  # [capacity, W / 2]
    sines,
    out,  # [B, D]
    partial,  # [B · H, SPLITS, W + 2] fp32: sums, largest score, weight
    arrived,  # [B · H] zeros; left as zeros
    capacity,
    scale,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTARY: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One new token's attention over the valid length; its own key and value are kept.

    With TOGETHER above 1 the rows are that many tokens of one sequence, one after the other. Nobody then reads from
    the cache what another program may be writing: keys of these tokens are made from qkv, by whoever looks at them.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    row = head // H
    d = tl.arange(0, BLOCK_W)
    inside = d < W
    wait(PDL)
    length = tl.load(lengths + row)
    before = length if TOGETHER == 1 else tl.load(lengths)  # what the cache held before this launch
    start_q = qkv + row * 3 * H * W + (head % H) * W
    q = tl.load(start_q + d, mask=inside, other=0).to(tl.float32)
    if ROTARY:
        other = tl.where(d < W // 2, d + W // 2, d - W // 2)
        sign = tl.where(d < W // 2, -1.0, 1.0)
        cos = tl.load(cosines + length * (W // 2) + d % (W // 2), mask=inside, other=0)
        sin = tl.load(sines + length * (W // 2) + d % (W // 2), mask=inside, other=0) * sign
        q = q * cos + tl.load(start_q + other, mask=inside, other=0).to(tl.float32) * sin
    q *= scale
    base = (head if TOGETHER == 1 else head % H).to(tl.int64) * capacity * W
    largest = float("-inf")
    weight = 0.0
    mixed = tl.zeros([BLOCK_W], tl.float32)
    if TOGETHER > 1:
        if split == 0:  # the new tokens up to this one
            t = tl.arange(0, BLOCK_T)
            real = (t < TOGETHER)[:, None] & inside[None, :]
            start_k = qkv + t[:, None] * 3 * H * W + (head % H + H) * W
            k = tl.load(start_k + d[None, :], mask=real, other=0)
            v = tl.load(start_k + H * W + d[None, :], mask=real, other=0)
            if ROTARY:
                angle = (before + t)[:, None] * (W // 2) + (d % (W // 2))[None, :]
                turned = tl.load(start_k + other[None, :], mask=real, other=0).to(tl.float32) * sign[None, :]
                turned *= tl.load(sines + angle, mask=real, other=0)
                k = (k.to(tl.float32) * tl.load(cosines + angle, mask=real, other=0) + turned).to(k.dtype)
            if row == 0:
                place = base + (before + t)[:, None] * W + d[None, :]
                tl.store(keys + place, k, mask=real)
                tl.store(values + place, v, mask=real)
            score = tl.where(t <= row, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
            largest = tl.max(score)
            likely = tl.exp(score - largest)
            weight = tl.sum(likely)
            mixed = tl.sum(likely[:, None] * v.to(tl.float32), axis=0)
    elif split == 0:  # the new token
        k = tl.load(start_q + H * W + d, mask=inside, other=0)
        v = tl.load(start_q + 2 * H * W + d, mask=inside, other=0)
        if ROTARY:
            turned = tl.load(start_q + H * W + other, mask=inside, other=0).to(tl.float32) * sin
            k = (k.to(tl.float32) * cos + turned).to(k.dtype)
        tl.store(keys + base + length * W + d, k, mask=inside)
        tl.store(values + base + length * W + d, v, mask=inside)
        largest = tl.sum(q * k.to(tl.float32))
        weight = 1.0
        mixed = v.to(tl.float32)
    each = tl.cdiv(before, SPLITS * BLOCK_N) * BLOCK_N
    end = tl.minimum(before, (split + 1) * each)
    for start in range(split * each, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n < end)[:, None] & inside[None, :]
        k = tl.load(keys + base + n[:, None] * W + d[None, :], mask=mask, other=0).to(tl.float32)
        v = tl.load(values + base + n[:, None] * W + d[None, :], mask=mask, other=0).to(tl.float32)
        score = tl.where(n < end, tl.sum(k * q[None, :], axis=1), float("-inf"))
        mixed, largest, weight = weighed(score, v, mixed, largest, weight)
    write_attention(mixed, largest, weight, head, split, out, partial, arrived, W, BLOCK_W, SPLITS)


@triton.jit
def add_norm_kernel(
    x,  # [B, D] fp32, added to
    change,  # [B, D]
    gate,  # [D]
    scale,  # [D]
    y,  # [B, D]
    D,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """x += gate · change; y = x / rms(x) · scale."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_D)
    inside = k < D
    factor = tl.load(scale + k, mask=inside, other=0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    wait(PDL)
    value = tl.load(x + row * D + k, mask=inside, other=0)
    if ADD:
        more = tl.load(change + row * D + k, mask=inside, other=0).to(tl.float32)
        if GATED:
            more *= tl.load(gate + k, mask=inside, other=0).to(tl.float32)
        value += more
        tl.store(x + row * D + k, value, mask=inside)
    value = value * tl.rsqrt(tl.sum(value * value) / D + EPSILON) * factor
    tl.store(y + row * D + k, value, mask=inside)


@triton.jit
def gelu_kernel(x, count, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Exact GELU, in place."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait(PDL)
    value = tl.load(x + n, mask=n < count, other=0).to(tl.float32)
    tl.store(x + n, _gelu(value), mask=n < count)


@triton.jit
def advance_kernel(
    best,  # [B, programs]
    where,
    mass,
    logprobs,  # [capacity + 1, B], of the tokens that follow
    ids,  # [B]
    lengths,
    chosen,  # [capacity + 1, B]
    rows,
    programs,
    BLOCK_N: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token is in the cache now; greedily, the most likely next one is put in its place and noted."""
    row = tl.program_id(0)
    wait(PDL)
    length = tl.load(lengths + row)
    if GREEDY:
        n = tl.arange(0, BLOCK_N)
        values = tl.load(best + row * programs + n, mask=n < programs, other=float("-inf"))
        token = _most_likely(values, where, row * programs, programs)
        tl.store(ids + row, token)
        tl.store(chosen + length * rows + row, token)
        top = tl.max(values)
        parts = tl.load(mass + row * programs + n, mask=n < programs, other=0)
        # A part that is all padding has no largest output; its sum is 0.
        tl.store(
            logprobs + length * rows + row, -tl.log(tl.sum(tl.where(parts == 0, 0.0, parts * tl.exp(values - top))))
        )
    tl.store(lengths + row, length + 1)
