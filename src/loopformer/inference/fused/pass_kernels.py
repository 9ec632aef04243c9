"""Triton kernels of a pass that rows share which stand at different loops (batch.py).

Row i of a launch is in slot `order[i]`, and the slot says at which loop and place it stands; of each slot and loop
there are modulations in a table and a list of pages with keys and values. So a launch knows nothing of its rows,
and a CUDA graph of it serves whoever is there. TRITON_INTERPRET=1 runs them on the CPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from loopformer.inference.fused.kernels import wait, weighed, write_attention


@triton.jit
def enter_kernel(
    order,  # [B] slots
    loops,  # [S] the loop that each slot runs next
    ids,  # [S] tokens
    lengths,  # [S] their places
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
    idle,  # the slot that stands for nobody
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
    own = table + (slot * L + loop) * K * 4 * D
    k = tl.arange(0, BLOCK_D)
    inside = k < D
    more = tl.load(change + row * D + k, mask=inside, other=0).to(tl.float32)
    value = tl.load(x + slot * D + k, mask=inside, other=0)
    value += more * tl.load(own + GATE * D + k, mask=inside, other=0).to(tl.float32)
    tl.store(x + slot * D + k, value, mask=inside)
    if SCALE < K * 4:
        factor = 1.0 + tl.load(own + SCALE * D + k, mask=inside, other=0).to(tl.float32)
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
    """One new token's attention over the pages of its slot and loop; its own key and value are kept there."""
    head, split = tl.program_id(0), tl.program_id(1)
    row, h = head // H, head % H
    wait(PDL)
    slot = tl.load(order + row)
    length = tl.load(lengths + slot)
    mine = pages + (slot * L + tl.load(loops + slot)) * N
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
        page = tl.load(mine + length // PAGE).to(tl.int64)
        keys = pool + (((page * K + BLOCK) * 2 * H + h) * PAGE + length % PAGE) * W
        tl.store(keys + d, k, mask=inside)
        tl.store(keys + H * PAGE * W + d, v, mask=inside)
        largest = tl.sum(q * k.to(tl.float32))
        weight = 1.0
        mixed = v.to(tl.float32)
    each = tl.cdiv(tl.cdiv(length, PAGE), SPLITS)
    n = tl.arange(0, PAGE)
    page = tl.load(mine + tl.minimum(split * each, N - 1)).to(tl.int64)
    for number in range(split * each, tl.minimum(tl.cdiv(length, PAGE), (split + 1) * each)):
        keys = pool + ((page * K + BLOCK) * 2 * H + h) * PAGE * W + n[:, None] * W + d[None, :]
        valid = number * PAGE + n < length
        mask = valid[:, None] & inside[None, :]
        k = tl.load(keys, mask=mask, other=0).to(tl.float32)
        v = tl.load(keys + H * PAGE * W, mask=mask, other=0).to(tl.float32)
        page = tl.load(mine + tl.minimum(number + 1, N - 1)).to(tl.int64)  # early: the next keys wait for it
        score = tl.where(valid, tl.sum(k * q[None, :], axis=1), float("-inf"))
        mixed, largest, weight = weighed(score, v, mixed, largest, weight)
    write_attention(mixed, largest, weight, head, split, out, partial, arrived, W, BLOCK_W, SPLITS)


@triton.jit
def begin_kernel(
    slots,  # [B] that have their tokens
    choices,  # [B, 2] these, and their log-probabilities
    ids,  # [S]
    lengths,
    loops,
    idle,  # the slot that stands for nobody
):
    """The next token of each slot stands one place further, at the beginning of its trajectory."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    tl.store(ids + slot, tl.load(choices + row * 2).to(tl.int64))
    tl.store(lengths + slot, tl.where(slot == idle, 0, tl.load(lengths + slot) + 1))
    tl.store(loops + slot, 0)
