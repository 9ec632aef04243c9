"""Triton kernels of decoding on a GPU.

Shared passes (batch.py): row i of a launch is in slot `order[i]`, and the slot says at which loop and position it
stands. For each slot and loop there are modulations in a table and a list of pages with keys and values. A launch
knows nothing else of its rows, so a CUDA graph of it serves any of them.

A row that runs alone (graphs.py): five launches for each block and pass: norm and qkv, attention, out and residual,
norm and up and GELU, down and residual. Matmuls of one row are limited by reading the weight, so each program loads
its rows of the weight before it waits for the kernel ahead of it.

All lengths are read on the device, so that a graph can be replayed as a text grows. TRITON_INTERPRET=1 runs the
kernels on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from loopformer.model import noise

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(number) for number in (noise.GOLDEN, noise.MIX_1, noise.MIX_2))
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def wait(PDL: tl.constexpr):
    """With programmatic launch a kernel starts while the one before it runs; here it waits for that one's output.

    The next kernel may start from here on, to fetch its weights. So a kernel may read what others write, and write,
    only after this.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _gelu(x):
    """Exact, in fp32."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_kernel(x, count, BLOCK_N: tl.constexpr):
    """Exact GELU, in place."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = tl.load(x + n, mask=n < count, other=0).to(tl.float32)
    tl.store(x + n, _gelu(value), mask=n < count)


@triton.jit
def enter_kernel(
    order,  # [B] slots
    loops,  # [S] the loop that each slot runs next
    ids,  # [S] tokens
    lengths,  # [S] their positions
    embedding,  # [V, D] that passes start from
    places,  # [context, D]
    table,  # [S, L, K, 4, D]
    injection,  # [S, L, D]
    x,  # [S, D] fp32, the state between passes
    y,  # [B, D]
    D,
    L,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """A token's state before its pass: its embedding, or what the pass before left, with some of it injected."""
    row = tl.program_id(0)
    slot = tl.load(order + row)
    loop = tl.load(loops + slot)
    k = tl.arange(0, BLOCK_D)
    inside = k < D
    value = tl.load(x + slot * D + k, mask=inside, other=0)
    if INJECTED or loop == 0:
        embedded = tl.load(embedding + tl.load(ids + slot) * D + k, mask=inside, other=0).to(tl.float32)
        if LEARNED:
            embedded += tl.load(places + tl.load(lengths + slot) * D + k, mask=inside, other=0).to(tl.float32)
        if loop == 0:
            value = embedded
        else:
            value += embedded * tl.load(injection + (slot * L + loop) * D + k, mask=inside, other=0).to(tl.float32)
        tl.store(x + slot * D + k, value, mask=inside)
    factor = 1.0 + tl.load(table + ((slot * L + loop) * K * 4 + 2) * D + k, mask=inside, other=0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / D + EPSILON) * factor
    tl.store(y + row * D + k, value, mask=inside)


@triton.jit
def gated_norm_kernel(
    order,  # [B]
    loops,  # [S]
    table,  # [S, L, K, 4, D]
    final,  # [D], the final norm's weight
    x,  # [S, D] fp32, added to
    change,  # [B, D]
    y,  # [B, D]
    idle,  # the slot of padding rows
    D,
    L,
    K: tl.constexpr,
    GATE: tl.constexpr,  # which of the table's K · 4 vectors
    SCALE: tl.constexpr,  # the same; from K · 4 on: the pass ends here
    BLOCK_D: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """x += gate · change; y = x / rms(x) · scale. At the end of a pass the scale is the final norm's."""
    row = tl.program_id(0)
    slot = tl.load(order + row)
    loop = tl.load(loops + slot)
    vectors = table + (slot * L + loop) * K * 4 * D
    k = tl.arange(0, BLOCK_D)
    inside = k < D
    more = tl.load(change + row * D + k, mask=inside, other=0).to(tl.float32)
    value = tl.load(x + slot * D + k, mask=inside, other=0)
    value += more * tl.load(vectors + GATE * D + k, mask=inside, other=0).to(tl.float32)
    tl.store(x + slot * D + k, value, mask=inside)
    if SCALE < K * 4:
        factor = 1.0 + tl.load(vectors + SCALE * D + k, mask=inside, other=0).to(tl.float32)
    else:
        factor = tl.load(final + k, mask=inside, other=0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / D + EPSILON) * factor
    tl.store(y + row * D + k, value, mask=inside)
    if SCALE >= K * 4:
        tl.debug_barrier()  # all warps have read the loop that is now written over
        tl.store(loops + slot, tl.where(slot == idle, 0, loop + 1))


@triton.jit
def paged_attention_kernel(
    order,  # [B]
    loops,  # [S]
    lengths,  # [S], tokens before this one
    pages,  # [S, L, N] of each slot and loop, in the order of the tokens
    qkv,  # [B, 3D]
    pool,  # [pages, K, 2, H, PAGE, W] keys and values
    cosines,  # [context, W / 2]
    sines,
    out,  # [B, D]
    partial,  # [B · H, SPLITS, W + 2] fp32: sums, largest score, weight
    arrived,  # [B · H] zeros; left as zeros
    L,
    N,
    scale,
    BLOCK: tl.constexpr,  # which of the stack
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One new token's attention over the pages of its slot and loop, where its own key and value are stored.

    Each program takes one split of the pages of one head. Sums are relative to the largest score so far, so that no
    exponential overflows.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    row, h = head // H, head % H
    wait(PDL)
    slot = tl.load(order + row)
    length = tl.load(lengths + slot)
    slot_pages = pages + (slot * L + tl.load(loops + slot)) * N
    d = tl.arange(0, BLOCK_W)
    inside = d < W
    start_q = qkv + row * 3 * H * W + h * W
    q = tl.load(start_q + d, mask=inside, other=0).to(tl.float32)
    if ROTARY:
        other = tl.where(d < W // 2, d + W // 2, d - W // 2)
        sign = tl.where(d < W // 2, -1.0, 1.0)
        cos = tl.load(cosines + length * (W // 2) + d % (W // 2), mask=inside, other=0)
        sin = tl.load(sines + length * (W // 2) + d % (W // 2), mask=inside, other=0) * sign
        q = q * cos + tl.load(start_q + other, mask=inside, other=0).to(tl.float32) * sin
    q *= scale
    largest = float("-inf")
    weight = 0.0
    mixed = tl.zeros([BLOCK_W], tl.float32)
    if split == 0:  # the new token
        k = tl.load(start_q + H * W + d, mask=inside, other=0)
        v = tl.load(start_q + 2 * H * W + d, mask=inside, other=0)
        if ROTARY:
            turned = tl.load(start_q + H * W + other, mask=inside, other=0).to(tl.float32) * sin
            k = (k.to(tl.float32) * cos + turned).to(k.dtype)
        page = tl.load(slot_pages + length // PAGE).to(tl.int64)
        keys = pool + (((page * K + BLOCK) * 2 * H + h) * PAGE + length % PAGE) * W
        tl.store(keys + d, k, mask=inside)
        tl.store(keys + H * PAGE * W + d, v, mask=inside)
        largest = tl.sum(q * k.to(tl.float32))
        weight = 1.0
        mixed = v.to(tl.float32)
    each = tl.cdiv(tl.cdiv(length, PAGE), SPLITS)
    n = tl.arange(0, PAGE)
    page = tl.load(slot_pages + tl.minimum(split * each, N - 1)).to(tl.int64)
    for number in range(split * each, tl.minimum(tl.cdiv(length, PAGE), (split + 1) * each)):
        keys = pool + ((page * K + BLOCK) * 2 * H + h) * PAGE * W + n[:, None] * W + d[None, :]
        valid = number * PAGE + n < length
        mask = valid[:, None] & inside[None, :]
        k = tl.load(keys, mask=mask, other=0).to(tl.float32)
        v = tl.load(keys + H * PAGE * W, mask=mask, other=0).to(tl.float32)
        page = tl.load(slot_pages + tl.minimum(number + 1, N - 1)).to(tl.int64)  # early: the next keys wait for it
        score = tl.where(valid, tl.sum(k * q[None, :], axis=1), float("-inf"))
        above = tl.maximum(largest, tl.max(score))
        shrink = tl.exp(largest - above)
        likely = tl.exp(score - above)
        mixed = mixed * shrink + tl.sum(likely[:, None] * v, axis=0)
        weight = weight * shrink + tl.sum(likely)
        largest = above
    if SPLITS == 1:
        tl.store(out + head * W + d, mixed / weight, mask=inside)
    else:
        split_sums = partial + (head * SPLITS + split) * (W + 2)
        tl.store(split_sums + d, mixed, mask=inside)
        tl.store(split_sums + W, largest)
        tl.store(split_sums + W + 1, weight)
        tl.debug_barrier()  # all warps have stored before the counter says so
        # The program that arrives last adds up all splits, and clears the counter for the next launch.
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            s = tl.arange(0, SPLITS)
            all_sums = partial + (head * SPLITS + s) * (W + 2)
            tops = tl.load(all_sums + W)
            share = tl.exp(tops - tl.max(tops))
            total = tl.sum(share * tl.load(all_sums + W + 1))
            sums = tl.load(all_sums[:, None] + d[None, :], mask=inside[None, :], other=0)
            tl.store(out + head * W + d, tl.sum(share[:, None] * sums, axis=0) / total, mask=inside)
            tl.store(arrived + head, 0)


@triton.jit
def begin_kernel(
    slots,  # [B] that have their tokens
    choices,  # [B, 2] these, and their log-probabilities
    ids,  # [S]
    lengths,
    loops,
    idle,  # the slot of padding rows
):
    """Put the next token of each slot one position further, at the beginning of its trajectory."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    tl.store(ids + slot, tl.load(choices + row * 2).to(tl.int64))
    tl.store(lengths + slot, tl.where(slot == idle, 0, tl.load(lengths + slot) + 1))
    tl.store(loops + slot, 0)


@triton.jit
def choice_kernel(
    logits,  # [B, …] fp32
    slots,  # [B]
    lengths,  # [S] tokens before the one that was run; ALONE: [1] before the one that is chosen
    rules,  # [S, 4] fp64: temperature, top-k, top-p, the logarithm of min-p (sampling.py)
    seeds,  # [S] int64
    choices,  # [B, 2] fp32: tokens, and their log-probabilities
    stride,  # of rows, at least `vocab`; what stands between is padding
    vocab,
    ALONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The next token of each row: the largest logit or, with a temperature, the largest with its noise among those
    that the rules keep. `choose` of sampling.py is its twin, and has the repetition penalty, too."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    row_logits = logits + row.to(tl.int64) * stride
    n = tl.arange(0, BLOCK_N)
    top = float("-inf")
    mass = 0.0
    token = 0
    for start in range(0, vocab, BLOCK_N):
        value = _logits(row_logits, start + n, stride, vocab)
        high = tl.max(value)
        token = tl.where(high > top, start + tl.argmax(value, axis=0), token)
        above = tl.maximum(top, high)
        shift = tl.where(above > float("-inf"), above, 0.0)  # where all so far is minus infinity, it weighs nothing
        mass = mass * tl.exp(top - shift) + tl.sum(tl.exp(value - shift))
        top = above
    temperature = tl.load(rules + slot * 4)
    if temperature > 0:
        top_k = tl.load(rules + slot * 4 + 1)
        top_p = tl.load(rules + slot * 4 + 2)
        least = tl.load(rules + slot * 4 + 3)
        cold = 1.0 / tl.maximum(temperature.to(tl.float32), 1e-30)
        # Kept are tokens above `bound`, and at it those that come while what stands before them is below `target`.
        bound = tl.full([], LOWEST, tl.int64)
        before = tl.full([], 0, tl.float64)
        target = tl.full([], float("inf"), tl.float64)
        if top_k < vocab:
            bound, _count = _smallest_below(row_logits, stride, vocab, top, cold, bound, top_k, True, BLOCK_N)
        if top_p < 1:
            total, _2, _3 = _weights_above(
                row_logits, stride, vocab, top, cold, bound - 1, bound, bound, False, BLOCK_N
            )
            target = top_p * total
            bound, before = _smallest_below(row_logits, stride, vocab, top, cold, bound, target, False, BLOCK_N)
        each = tl.exp((_number(bound) - top) * cold).to(tl.float64)
        key = _hashed(tl.load(seeds + slot).to(tl.uint64, bitcast=True) + _position(lengths, slot, ALONE) * GOLDEN)
        best = tl.full([], float("-inf"), tl.float64)
        ties = 0
        for start in range(0, vocab, BLOCK_N):
            inside = start + n < vocab
            value = _logits(row_logits, start + n, stride, vocab)
            rank = _ordered(value).to(tl.int64)
            tied = (rank == bound) & inside
            stands_before = before + (ties + tl.cumsum(tied.to(tl.int32), axis=0) - 1).to(tl.float64) * each
            score = (value - top).to(tl.float64) / temperature
            keep = ((rank > bound) | (tied & (stands_before < target))) & inside & (score >= least)
            if tl.max(keep.to(tl.int32)) > 0:  # noise costs most, and few of many tokens may be kept
                bits = _hashed(key + (start + n).to(tl.uint64) * GOLDEN)
                uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52: never 0 and never 1
                noisy = tl.where(keep, score - tl.log(-tl.log(uniform)), float("-inf"))
                high = tl.max(noisy)
                token = tl.where(high > best, start + tl.argmax(noisy, axis=0), token)
                best = tl.maximum(best, high)
            ties += tl.sum(tied.to(tl.int32))
    token = tl.minimum(token, vocab - 1)  # where logits are not numbers it may be any, but it is one
    tl.store(choices + row * 2, token.to(tl.float32))
    tl.store(choices + row * 2 + 1, tl.load(row_logits + token) - top - tl.log(mass))


@triton.jit
def _smallest_below(row_logits, stride, vocab, top, cold, kept, target, COUNT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The smallest kept rank that has less than `target` above it, and how much that is."""
    low = kept - 1
    high = _ordered(top).to(tl.int64)
    above = tl.full([], 0, tl.float64)
    while high - low > 1:
        one, two, three = low + (high - low) // 4, low + (high - low) // 2, low + (high - low) * 3 // 4
        first, second, third = _weights_above(row_logits, stride, vocab, top, cold, one, two, three, COUNT, BLOCK_N)
        low = tl.where(third >= target, three, tl.where(second >= target, two, tl.where(first >= target, one, low)))
        # Not `<`, so that it ends whatever is compared.
        if not (first >= target):
            high = one
            above = first
        elif not (second >= target):
            high = two
            above = second
        elif not (third >= target):
            high = three
            above = third
    return high, above


@triton.jit
def _weights_above(
    row_logits, stride, vocab, top, cold, one, two, three, COUNT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The weight of the logits of a rank above each of three ranks, or with COUNT their number.

    Minus infinity weighs nothing at any temperature.

    This loop runs over and over, so it is kept short: ranks are integers of 32 bits, and each lane adds the few
    weights that it sees in fp32, which is no coarser than the weights are.
    """
    n = tl.arange(0, BLOCK_N)
    first = tl.zeros([BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_N], tl.float32)
    third = tl.zeros([BLOCK_N], tl.float32)
    least = _ordered(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    from_one = (tl.maximum(one, least) + 1).to(tl.int32)
    from_two = (tl.maximum(two, least) + 1).to(tl.int32)
    from_three = (tl.maximum(three, least) + 1).to(tl.int32)
    for start in range(0, vocab, BLOCK_N):
        value = _logits(row_logits, start + n, stride, vocab)
        rank = _ordered(value)
        weight = 1.0 if COUNT else tl.exp(tl.maximum(value - top, -1e30) * cold)
        first += tl.where(rank >= from_one, weight, 0.0)
        second += tl.where(rank >= from_two, weight, 0.0)
        third += tl.where(rank >= from_three, weight, 0.0)
    return tl.sum(first.to(tl.float64)), tl.sum(second.to(tl.float64)), tl.sum(third.to(tl.float64))


@triton.jit
def _logits(row_logits, n, stride, vocab):
    """A row's logits of some tokens; minus infinity from `vocab` on."""
    # Read to the end of the row, which is aligned: a mask that ends anywhere would split up each lane's loads.
    value = tl.load(row_logits + n, mask=n < stride, other=float("-inf"))
    return tl.where(n < vocab, value, float("-inf"))


@triton.jit
def _ordered(value):
    """The ranks of fp32 numbers: integers in the same order."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(rank):
    """The fp32 number of a rank."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _position(lengths, slot, ALONE: tl.constexpr):
    """The number of tokens before the one that is chosen."""
    if ALONE:
        return tl.load(lengths).to(tl.uint64)
    return (tl.load(lengths + slot) + 1).to(tl.uint64)


@triton.jit
def _hashed(bits):
    """The hash of noise.py, of unsigned integers."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def embed_kernel(
    ids,  # [1]
    lengths,  # [1]
    embedding,  # [V, D] that passes start from
    places,  # [context, D]
    injection,  # [D]
    x,  # [D] fp32
    width,
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """x of one row: its token's embedding with that of its position; INJECTED: some of it is added to x."""
    k = tl.arange(0, BLOCK_K)
    inside = k < width
    wait(PDL)
    value = tl.load(embedding + tl.load(ids) * width + k, mask=inside).to(tl.float32)
    if LEARNED:
        value += tl.load(places + tl.load(lengths) * width + k, mask=inside).to(tl.float32)
    if INJECTED:
        value *= tl.load(injection + k, mask=inside).to(tl.float32)
        value += tl.load(x + k, mask=inside)
    tl.store(x + k, value, mask=inside)


@triton.jit
def norm_linear_kernel(
    x,  # [K] fp32
    weight,  # [N, K]
    scale,  # [K]: the modulation's, less 1, or the norm's weight
    y,  # [N]
    best,  # [programs] largest outputs,
    where,  # where they are, and
    mass,  # exp of all outputs less the largest, summed
    N,
    counted,  # outputs from here on are padding
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GELU: tl.constexpr,
    BEST: tl.constexpr,
    PDL: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """y = W · (x / rms(x) · scale) of one row, then GELU, or with BEST the largest output of each program."""
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
    value = tl.load(x + k, mask=inside, other=0)
    # Scaled afterwards, so that the two sums do not wait for each other.
    out = tl.sum(w.to(tl.float32) * (value * factor)[None, :], axis=1)
    out *= tl.rsqrt(tl.sum(value * value) / K + EPSILON)
    if GELU:
        out = _gelu(out)
    if BEST:
        out = tl.where(rows < counted, out, float("-inf"))
        top = tl.max(out)
        tl.store(best + program, top)
        tl.store(mass + program, tl.sum(tl.where(rows < counted, tl.exp(out - top), 0.0)))
        tl.store(where + program, program * ROWS + tl.argmax(out, axis=0))
    tl.store(y + rows, out, mask=rows < N)


@triton.jit
def linear_residual_kernel(
    a,  # [K]
    weight,  # [N, K]
    gate,  # [N]
    x,  # [N] fp32, added to
    N,
    K: tl.constexpr,
    PREFILL_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += gate · (W · a) of one row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < N
    k = tl.arange(0, PREFILL_CHUNK)
    first = tl.load(weight + rows[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0)
    factor = tl.load(gate + rows, mask=valid, other=0).to(tl.float32)
    wait(PDL)
    value = tl.load(a + k, mask=k < K, other=0).to(tl.float32)
    out = tl.sum(first.to(tl.float32) * value[None, :], axis=1)
    for start in tl.static_range(PREFILL_CHUNK, K, PREFILL_CHUNK):
        inside = start + k < K
        tile = rows[:, None] * K + (start + k)[None, :]
        w = tl.load(weight + tile, mask=valid[:, None] & inside[None, :], other=0)
        more = tl.load(a + start + k, mask=inside, other=0).to(tl.float32)
        out += tl.sum(w.to(tl.float32) * more[None, :], axis=1)
    tl.store(x + rows, tl.load(x + rows, mask=valid, other=0) + factor * out, mask=valid)


@triton.jit
def advance_kernel(
    best,  # [programs]
    where,
    mass,
    logprobs,  # [context + 1], of the tokens that follow
    ids,  # [1]
    lengths,
    chosen,  # [context + 1]
    programs,
    BLOCK_N: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row that runs alone is one token longer; with GREEDY the most likely next one comes in its place."""
    wait(PDL)
    length = tl.load(lengths)
    if GREEDY:
        n = tl.arange(0, BLOCK_N)
        values = tl.load(best + n, mask=n < programs, other=float("-inf"))
        # With NaN among them it may be any token, but it is one.
        token = tl.load(where + tl.minimum(tl.argmax(values, axis=0), programs - 1))
        tl.store(ids, token)
        tl.store(chosen + length, token)
        parts = tl.load(mass + n, mask=n < programs, other=0)
        # A part that is all padding has no largest output; its sum is 0.
        total = tl.sum(tl.where(parts == 0, 0.0, parts * tl.exp(values - tl.max(values))))
        tl.store(logprobs + length, -tl.log(total))
    tl.store(lengths, length + 1)
