"""Triton kernels of decoding on a GPU.

Rows that share launches (launch.py): row i of a launch is slot `active_slots[i]`, and `loops` and `positions` say
at which loop and position the slot is. Each slot and loop has its modulations and its page table. A launch knows
nothing else of its rows, so a CUDA graph of it serves any of them. A loop is begin_loop_kernel and, for each block,
the qkv matmul, attention, the out matmul, gated_norm_kernel, the up matmul, GELU, the down matmul and
gated_norm_kernel again.

A single row (single_row.py): five launches for each block and loop: norm and qkv, attention, out and residual, norm
and up and GELU, down and residual. Matmuls of one row are limited by reading the weight, so each program loads its
rows of the weight before it waits for the kernel ahead of it.

Shapes: B rows of a launch, S slots, L loops, K blocks, D width, H heads of width W, V vocabulary. Positions are
read on the device, so that a graph can be replayed as a sequence grows. TRITON_INTERPRET=1 runs the kernels on the
CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from loopformer.model import noise

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(number) for number in (noise.GOLDEN, noise.MIX_1, noise.MIX_2))
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the output of the kernel before, with programmatic dependent launch (PDL).

    A kernel starts while the one before it runs, fetches its weights, and waits here until that one has finished.
    Before this it may neither write nor read what other kernels of the graph write. Every kernel of the graph must
    call it: if one did not, the next could read what the one before it still writes.
    """
    if PDL:
        # In this order: the next kernel may start to fetch its weights while this one waits.
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
def begin_loop_kernel(
    active_slots,  # [B] the slot of each row
    loops,  # [S] the loop that each slot runs next
    ids,  # [S] tokens
    positions,  # [S] their positions
    embedding,  # [V, D] that the first loop starts from
    position_embedding,  # [context, D]
    modulations,  # [S, L, K, 4, D]: two gates and two scales, these less 1
    injection,  # [S, L, D]
    x,  # [S, D] fp32, the state between loops
    y,  # [B, D] the input of the first matmul
    D,
    L,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Begin a loop: x = embedding at the first, x += injection · embedding at later ones. y = norm(x) · scale."""
    row = tl.program_id(0)
    slot = tl.load(active_slots + row)
    loop = tl.load(loops + slot)
    k = tl.arange(0, BLOCK_D)
    inside = k < D
    value = tl.load(x + slot * D + k, mask=inside, other=0)
    if INJECTED or loop == 0:
        embedded = tl.load(embedding + tl.load(ids + slot) * D + k, mask=inside, other=0).to(tl.float32)
        if LEARNED:
            embedded += tl.load(position_embedding + tl.load(positions + slot) * D + k, mask=inside, other=0).to(
                tl.float32
            )
        if loop == 0:
            value = embedded
        else:
            value += embedded * tl.load(injection + (slot * L + loop) * D + k, mask=inside, other=0).to(tl.float32)
        tl.store(x + slot * D + k, value, mask=inside)
    # The norm of the first block, whose first scale is vector 2 of its four.
    factor = 1.0 + tl.load(modulations + ((slot * L + loop) * K * 4 + 2) * D + k, mask=inside, other=0).to(
        tl.float32
    )
    value = value * tl.rsqrt(tl.sum(value * value) / D + EPSILON) * factor
    tl.store(y + row * D + k, value, mask=inside)


@triton.jit
def gated_norm_kernel(
    active_slots,  # [B]
    loops,  # [S]
    modulations,  # [S, L, K, 4, D]: two gates and two scales, these less 1
    final,  # [D], the final norm's weight
    x,  # [S, D] fp32, added to
    change,  # [B, D]
    y,  # [B, D]
    spare_slot,  # of padding rows; it stays at loop 0
    D,
    L,
    K: tl.constexpr,
    GATE: tl.constexpr,  # which of the loop's K · 4 modulation vectors
    SCALE: tl.constexpr,  # the same; from K · 4 on: the loop ends here
    BLOCK_D: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """x += gate · change; y = x / rms(x) · scale. At the end of a loop the scale is the final norm's weight.

    There it also counts the loop of each slot. So it must be the last kernel of a loop, as all of them read
    `loops`.
    """
    row = tl.program_id(0)
    slot = tl.load(active_slots + row)
    loop = tl.load(loops + slot)
    vectors = modulations + (slot * L + loop) * K * 4 * D
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
        tl.debug_barrier()  # otherwise a warp could read the loop that comes next
        tl.store(loops + slot, tl.where(slot == spare_slot, 0, loop + 1))


@triton.jit
def paged_attention_kernel(
    active_slots,  # [B]
    loops,  # [S]
    positions,  # [S] of the new tokens, each also the number of tokens before it
    page_tables,  # [S, L, N] pages of each slot and loop, in the order of the tokens
    qkv,  # [B, 3D]
    kv_pages,  # [pages, K, 2, H, PAGE, W] keys and values
    cosines,  # [context, W / 2]
    sines,
    out,  # [B, D]
    partial,  # [B · H, SPLITS, W + 2] fp32: sums, largest score, weight
    arrived,  # [B · H] how many splits have finished: zeros, and left as zeros
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
    """Attention of one new token over the pages of its slot and loop, where its own key and value are stored.

    Each program takes one split of the pages of one head, and the first also the new token. Sums are relative to
    the largest score so far, so that no exponential overflows.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    row, h = head // H, head % H
    wait(PDL)
    slot = tl.load(active_slots + row)
    position = tl.load(positions + slot)
    page_table = page_tables + (slot * L + tl.load(loops + slot)) * N
    d = tl.arange(0, BLOCK_W)
    inside = d < W
    start_q = qkv + row * 3 * H * W + h * W
    q = tl.load(start_q + d, mask=inside, other=0).to(tl.float32)
    if ROTARY:
        other = tl.where(d < W // 2, d + W // 2, d - W // 2)
        sign = tl.where(d < W // 2, -1.0, 1.0)
        cos = tl.load(cosines + position * (W // 2) + d % (W // 2), mask=inside, other=0)
        sin = tl.load(sines + position * (W // 2) + d % (W // 2), mask=inside, other=0) * sign
        q = q * cos + tl.load(start_q + other, mask=inside, other=0).to(tl.float32) * sin
    q *= scale
    largest = float("-inf")
    weight = 0.0
    out_sum = tl.zeros([BLOCK_W], tl.float32)
    if split == 0:  # the new token, which no program reads from its page in this launch
        k = tl.load(start_q + H * W + d, mask=inside, other=0)
        v = tl.load(start_q + 2 * H * W + d, mask=inside, other=0)
        if ROTARY:
            turned = tl.load(start_q + H * W + other, mask=inside, other=0).to(tl.float32) * sin
            k = (k.to(tl.float32) * cos + turned).to(k.dtype)
        page = tl.load(page_table + position // PAGE).to(tl.int64)
        keys = kv_pages + (((page * K + BLOCK) * 2 * H + h) * PAGE + position % PAGE) * W
        tl.store(keys + d, k, mask=inside)
        tl.store(keys + H * PAGE * W + d, v, mask=inside)
        largest = tl.sum(q * k.to(tl.float32))
        weight = 1.0
        out_sum = v.to(tl.float32)
    pages_per_split = tl.cdiv(tl.cdiv(position, PAGE), SPLITS)
    n = tl.arange(0, PAGE)
    # Clamped, because an empty split may begin behind the end of the table.
    page = tl.load(page_table + tl.minimum(split * pages_per_split, N - 1)).to(tl.int64)
    for index in range(split * pages_per_split, tl.minimum(tl.cdiv(position, PAGE), (split + 1) * pages_per_split)):
        keys = kv_pages + ((page * K + BLOCK) * 2 * H + h) * PAGE * W + n[:, None] * W + d[None, :]
        valid = index * PAGE + n < position
        mask = valid[:, None] & inside[None, :]
        k = tl.load(keys, mask=mask, other=0).to(tl.float32)
        v = tl.load(keys + H * PAGE * W, mask=mask, other=0).to(tl.float32)
        page = tl.load(page_table + tl.minimum(index + 1, N - 1)).to(tl.int64)  # early: the next keys wait for it
        score = tl.where(valid, tl.sum(k * q[None, :], axis=1), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(score - new_largest)
        out_sum = out_sum * shrink + tl.sum(weights[:, None] * v, axis=0)
        weight = weight * shrink + tl.sum(weights)
        largest = new_largest
    if SPLITS == 1:
        tl.store(out + head * W + d, out_sum / weight, mask=inside)
    else:
        split_sums = partial + (head * SPLITS + split) * (W + 2)
        tl.store(split_sums + d, out_sum, mask=inside)
        tl.store(split_sums + W, largest)
        tl.store(split_sums + W + 1, weight)
        tl.debug_barrier()  # all warps must have stored before the counter says so
        # The program that arrives last adds up all splits, and clears the counter for the next launch.
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            s = tl.arange(0, SPLITS)
            all_sums = partial + (head * SPLITS + s) * (W + 2)
            largest_of_splits = tl.load(all_sums + W)
            shrinks = tl.exp(largest_of_splits - tl.max(largest_of_splits))
            total = tl.sum(shrinks * tl.load(all_sums + W + 1))
            sums = tl.load(all_sums[:, None] + d[None, :], mask=inside[None, :], other=0)
            tl.store(out + head * W + d, tl.sum(shrinks[:, None] * sums, axis=0) / total, mask=inside)
            tl.store(arrived + head, 0)


@triton.jit
def set_token_kernel(
    finished_slots,  # [B] whose tokens have been chosen
    choices,  # [B, 2] the tokens, and their log-probabilities
    ids,  # [S]
    positions,
    loops,
    spare_slot,  # of padding rows; it stays at position 0
):
    """Set the next token of each slot, one position further and at its first loop."""
    row = tl.program_id(0)
    slot = tl.load(finished_slots + row)
    tl.store(ids + slot, tl.load(choices + row * 2).to(tl.int64))
    tl.store(positions + slot, tl.where(slot == spare_slot, 0, tl.load(positions + slot) + 1))
    tl.store(loops + slot, 0)


@triton.jit
def choice_kernel(
    logits,  # [B, …] fp32
    finished_slots,  # [B]
    positions,  # [S] of the tokens that were run; SINGLE_ROW: [1] of the token that is chosen
    settings,  # [S, 4] fp64: temperature, top-k, top-p, the logarithm of min-p (sampling.py)
    seeds,  # [S] int64
    choices,  # [B, 2] fp32: tokens, and their log-probabilities
    stride,  # of rows, at least `vocab`; the rest of a row is padding
    vocab,
    SINGLE_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The next token of each row: the largest logit or, with a temperature, the largest with its noise among those
    that the settings keep. `sample_async` (sampling.py) is its twin, and also applies the repetition penalty."""
    row = tl.program_id(0)
    slot = tl.load(finished_slots + row)
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
        shift = tl.where(above > float("-inf"), above, 0.0)  # minus infinity alone weighs nothing
        mass = mass * tl.exp(top - shift) + tl.sum(tl.exp(value - shift))
        top = above
    temperature = tl.load(settings + slot * 4)
    if temperature > 0:
        top_k = tl.load(settings + slot * 4 + 1)
        top_p = tl.load(settings + slot * 4 + 2)
        log_min_p = tl.load(settings + slot * 4 + 3)
        inverse_temperature = 1.0 / tl.maximum(temperature.to(tl.float32), 1e-30)
        # Top-k and top-p keep the tokens above the rank `bound`. Of those at `bound`, in the order of their ids,
        # they keep each whose predecessors weigh less than `target` together.
        bound = tl.full([], LOWEST, tl.int64)
        mass_above = tl.full([], 0, tl.float64)
        target = tl.full([], float("inf"), tl.float64)
        if top_k < vocab:
            bound, _number_above = _smallest_below(
                row_logits, stride, vocab, top, inverse_temperature, bound, top_k, True, BLOCK_N
            )
        if top_p < 1:
            total, _above_2, _above_3 = _weights_above(
                row_logits, stride, vocab, top, inverse_temperature, bound - 1, bound, bound, False, BLOCK_N
            )
            target = top_p * total
            bound, mass_above = _smallest_below(
                row_logits, stride, vocab, top, inverse_temperature, bound, target, False, BLOCK_N
            )
        weight_at_bound = tl.exp((_number(bound) - top) * inverse_temperature).to(tl.float64)
        key = _hashed(
            tl.load(seeds + slot).to(tl.uint64, bitcast=True) + _position(positions, slot, SINGLE_ROW) * GOLDEN
        )
        best = tl.full([], float("-inf"), tl.float64)
        ties = 0
        for start in range(0, vocab, BLOCK_N):
            inside = start + n < vocab
            value = _logits(row_logits, start + n, stride, vocab)
            rank = _ordered(value).to(tl.int64)
            tied = (rank == bound) & inside
            ties_before = (ties + tl.cumsum(tied.to(tl.int32), axis=0) - 1).to(tl.float64)
            mass_before = mass_above + ties_before * weight_at_bound
            score = (value - top).to(tl.float64) / temperature
            keep = ((rank > bound) | (tied & (mass_before < target))) & inside & (score >= log_min_p)
            if tl.max(keep.to(tl.int32)) > 0:  # noise costs most, and a block often keeps no token
                bits = _hashed(key + (start + n).to(tl.uint64) * GOLDEN)
                uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52: never 0 and never 1
                noisy = tl.where(keep, score - tl.log(-tl.log(uniform)), float("-inf"))
                high = tl.max(noisy)
                token = tl.where(high > best, start + tl.argmax(noisy, axis=0), token)
                best = tl.maximum(best, high)
            ties += tl.sum(tied.to(tl.int32))
    token = tl.minimum(token, vocab - 1)  # if logits are NaN it may be any token, but must be one
    tl.store(choices + row * 2, token.to(tl.float32))
    tl.store(choices + row * 2 + 1, tl.load(row_logits + token) - top - tl.log(mass))


@triton.jit
def _smallest_below(
    row_logits, stride, vocab, top, inverse_temperature, kept, target, COUNT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The smallest kept rank that has less than `target` above it, and how much that is: a search in quarters."""
    low = kept - 1
    high = _ordered(top).to(tl.int64)
    above = tl.full([], 0, tl.float64)
    while high - low > 1:
        rank_1, rank_2, rank_3 = low + (high - low) // 4, low + (high - low) // 2, low + (high - low) * 3 // 4
        above_1, above_2, above_3 = _weights_above(
            row_logits, stride, vocab, top, inverse_temperature, rank_1, rank_2, rank_3, COUNT, BLOCK_N
        )
        low = tl.where(above_1 >= target, rank_1, low)
        low = tl.where(above_2 >= target, rank_2, low)
        low = tl.where(above_3 >= target, rank_3, low)
        # Not `<`, so that the search also ends where weights are NaN.
        if not (above_1 >= target):
            high = rank_1
            above = above_1
        elif not (above_2 >= target):
            high = rank_2
            above = above_2
        elif not (above_3 >= target):
            high = rank_3
            above = above_3
    return high, above


@triton.jit
def _weights_above(
    row_logits,
    stride,
    vocab,
    top,
    inverse_temperature,
    rank_1,
    rank_2,
    rank_3,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weight of the logits of a rank above each of three ranks, or with COUNT their number.

    Minus infinity weighs nothing at any temperature.

    The search calls this about 16 times, so the loop is short: ranks are integers of 32 bits, and each lane adds
    the few weights that it sees in fp32, which is no coarser than the weights are.
    """
    n = tl.arange(0, BLOCK_N)
    above_1 = tl.zeros([BLOCK_N], tl.float32)
    above_2 = tl.zeros([BLOCK_N], tl.float32)
    above_3 = tl.zeros([BLOCK_N], tl.float32)
    lowest = _ordered(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    from_1 = (tl.maximum(rank_1, lowest) + 1).to(tl.int32)
    from_2 = (tl.maximum(rank_2, lowest) + 1).to(tl.int32)
    from_3 = (tl.maximum(rank_3, lowest) + 1).to(tl.int32)
    for start in range(0, vocab, BLOCK_N):
        value = _logits(row_logits, start + n, stride, vocab)
        rank = _ordered(value)
        weight = 1.0 if COUNT else tl.exp(tl.maximum(value - top, -1e30) * inverse_temperature)
        above_1 += tl.where(rank >= from_1, weight, 0.0)
        above_2 += tl.where(rank >= from_2, weight, 0.0)
        above_3 += tl.where(rank >= from_3, weight, 0.0)
    return tl.sum(above_1.to(tl.float64)), tl.sum(above_2.to(tl.float64)), tl.sum(above_3.to(tl.float64))


@triton.jit
def _logits(row_logits, n, stride, vocab):
    """A row's logits of some tokens; minus infinity from `vocab` on."""
    # Read to the end of the row, which is aligned: a mask up to `vocab` would split up each lane's loads.
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
def _position(positions, slot, SINGLE_ROW: tl.constexpr):
    """The position of the token that is chosen."""
    if SINGLE_ROW:
        return tl.load(positions).to(tl.uint64)
    return (tl.load(positions + slot) + 1).to(tl.uint64)


@triton.jit
def _hashed(bits):
    """The hash of noise.py, of unsigned integers."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def embed_kernel(
    ids,  # [1]
    positions,  # [1]
    embedding,  # [V, D] that the first loop starts from
    position_embedding,  # [context, D]
    injection,  # [D]
    x,  # [D] fp32
    width,
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """x = the token's embedding with that of its position; INJECTED: x += injection · embedding."""
    k = tl.arange(0, BLOCK_K)
    inside = k < width
    wait(PDL)
    value = tl.load(embedding + tl.load(ids) * width + k, mask=inside).to(tl.float32)
    if LEARNED:
        value += tl.load(position_embedding + tl.load(positions) * width + k, mask=inside).to(tl.float32)
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
    best,  # [programs] largest output of each,
    best_index,  # which output that is,
    mass,  # sums of exp(output - largest)
    N,
    vocab,  # BEST: outputs from here on are padding
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
    wait(PDL)  # the weight and the scale are loaded by now; x is written by the kernel before
    value = tl.load(x + k, mask=inside, other=0)
    # Divided by the rms afterwards, so that the two sums do not wait for each other.
    out = tl.sum(w.to(tl.float32) * (value * factor)[None, :], axis=1)
    out *= tl.rsqrt(tl.sum(value * value) / K + EPSILON)
    if GELU:
        out = _gelu(out)
    if BEST:
        out = tl.where(rows < vocab, out, float("-inf"))
        top = tl.max(out)
        tl.store(best + program, top)
        tl.store(mass + program, tl.sum(tl.where(rows < vocab, tl.exp(out - top), 0.0)))
        tl.store(best_index + program, program * ROWS + tl.argmax(out, axis=0))
    tl.store(y + rows, out, mask=rows < N)


@triton.jit
def linear_residual_kernel(
    a,  # [K]
    weight,  # [N, K]
    gate,  # [N]
    x,  # [N] fp32, added to
    N,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += gate · (W · a) of one row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < N
    k = tl.arange(0, BLOCK_K)
    first = tl.load(weight + rows[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0)
    factor = tl.load(gate + rows, mask=valid, other=0).to(tl.float32)
    wait(PDL)
    value = tl.load(a + k, mask=k < K, other=0).to(tl.float32)
    out = tl.sum(first.to(tl.float32) * value[None, :], axis=1)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        inside = start + k < K
        tile = rows[:, None] * K + (start + k)[None, :]
        w = tl.load(weight + tile, mask=valid[:, None] & inside[None, :], other=0)
        more = tl.load(a + start + k, mask=inside, other=0).to(tl.float32)
        out += tl.sum(w.to(tl.float32) * more[None, :], axis=1)
    tl.store(x + rows, tl.load(x + rows, mask=valid, other=0) + factor * out, mask=valid)


@triton.jit
def advance_kernel(
    best,  # [programs]
    best_index,
    mass,
    logprobs,  # [context + 1] of `chosen`
    ids,  # [1]
    positions,
    chosen,  # [context + 1] tokens, indexed by the position of the token before
    programs,
    BLOCK_N: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Advance the position of a single row. With GREEDY, also choose the most likely token as its next input."""
    wait(PDL)
    position = tl.load(positions)
    if GREEDY:
        n = tl.arange(0, BLOCK_N)
        values = tl.load(best + n, mask=n < programs, other=float("-inf"))
        # If one is NaN it may be any token, but must be one.
        token = tl.load(best_index + tl.minimum(tl.argmax(values, axis=0), programs - 1))
        tl.store(ids, token)
        tl.store(chosen + position, token)
        parts = tl.load(mass + n, mask=n < programs, other=0)
        # Of a program that has only padding, the largest output is minus infinity, and the sum is 0.
        total = tl.sum(tl.where(parts == 0, 0.0, parts * tl.exp(values - tl.max(values))))
        tl.store(logprobs + position, -tl.log(total))
    tl.store(positions, position + 1)
