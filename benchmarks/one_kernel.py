"""One kernel for a whole token of a row that runs alone: does it beat five for each block of each pass?

    python benchmarks/one_kernel.py [--model paper/loopformer-3x8] [--budgets 8,4,2] [--int8] [--out FILE]

On trial, for GPUs. decoder.py launches five kernels per block, and each waits for the one before it: 120 times for
a token at M = 8 of the paper's size, in which memory is busy two thirds of the time. Here one program per
multiprocessor stays for the whole token. Its work is one list of tiles of weights, which the compiler's pipeline
fetches into shared memory some turns ahead of their use, so memory goes on while programs wait for each other
between two products. A token then is this kernel, the head, and the choice.

Tokens are compared with those of `LoneRow` before either is timed, and the logits of one token with themselves:
roundings differ from those of `LoneRow`, so a program that did not wait for others would show there only. With one
program it also runs in Triton's interpreter (TRITON_INTERPRET=1, --device cpu --dtype float32 --model demo
--budgets 2 --context 20 --tokens 1).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopformer.benchmark.machine import best_of, describe, publish
from loopformer.cli.bench import named_model
from loopformer.config import preset_names, whole_numbers
from loopformer.inference.decode import prefill
from loopformer.inference.fused.batch import PAGE, LoneRow, SharedBatch, pages_of
from loopformer.inference.fused.kernels import as_numbers, gelu, weighed
from loopformer.inference.fused.quantise import Weights, plain, quantised
from loopformer.model import LoopedLM
from loopformer.model.block import EPSILON


@triton.jit
def arrive(counter, P: tl.constexpr):
    """All that this program has written may be read by those who have waited for it."""
    if P > 1:  # not tl.debug_barrier: loops that have it are not pipelined
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_until(counter, arrivals):
    while tl.atomic_add(counter, 0, sem="acquire") < arrivals:
        pass


@triton.jit
def attend(
    head,
    split,
    qkv,  # [3D] fp32
    mine,  # [N] pages of this loop
    pool,  # [pages, K, 2, H, PAGE, W]
    cosines,
    sines,
    length,
    sums,  # [SPLITS, D] fp32
    tops,  # [SPLITS, H]
    masses,  # [SPLITS, H]
    block,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """One split of a head's keys: values summed by their weight, the largest score and the weights' sum."""
    d = tl.arange(0, BLOCK_W)
    inside = d < W
    start_q = qkv + head * W
    q = tl.load(start_q + d, mask=inside, other=0)
    other = tl.where(d < W // 2, d + W // 2, d - W // 2)
    sign = tl.where(d < W // 2, -1.0, 1.0)
    if ROTARY:
        cos = tl.load(cosines + length * (W // 2) + d % (W // 2), mask=inside, other=0)
        sin = tl.load(sines + length * (W // 2) + d % (W // 2), mask=inside, other=0) * sign
        q = q * cos + tl.load(start_q + other, mask=inside, other=0) * sin
    q *= scale
    largest = float("-inf")
    mass = 0.0
    mixed = tl.zeros([BLOCK_W], tl.float32)
    if split == 0:  # the new token
        k = tl.load(start_q + D + d, mask=inside, other=0)
        v = tl.load(start_q + 2 * D + d, mask=inside, other=0)
        if ROTARY:
            k = k * cos + tl.load(start_q + D + other, mask=inside, other=0) * sin
        page = tl.load(mine + length // PAGE).to(tl.int64)
        keys = pool + (((page * K + block) * 2 * H + head) * PAGE + length % PAGE) * W
        tl.store(keys + d, k.to(pool.dtype.element_ty), mask=inside)
        tl.store(keys + H * PAGE * W + d, v.to(pool.dtype.element_ty), mask=inside)
        largest = tl.sum(q * k.to(pool.dtype.element_ty).to(tl.float32))
        mass = 1.0
        mixed = v.to(pool.dtype.element_ty).to(tl.float32)
    n = tl.arange(0, PAGE)
    filled = tl.cdiv(length, PAGE)
    each = tl.cdiv(filled, SPLITS)
    for number in range(split * each, tl.minimum(filled, (split + 1) * each)):
        page = tl.load(mine + number).to(tl.int64)
        keys = pool + ((page * K + block) * 2 * H + head) * PAGE * W + n[:, None] * W + d[None, :]
        valid = number * PAGE + n < length
        mask = valid[:, None] & inside[None, :]
        k = tl.load(keys, mask=mask, other=0).to(tl.float32)
        v = tl.load(keys + H * PAGE * W, mask=mask, other=0).to(tl.float32)
        score = tl.where(valid, tl.sum(k * q[None, :], axis=1), float("-inf"))
        mixed, largest, mass = weighed(score, v, mixed, largest, mass)
    tl.store(sums + split * D + head * W + d, mixed, mask=inside)
    tl.store(tops + split * H + head, largest)
    tl.store(masses + split * H + head, mass)


@triton.jit
def tile_of(
    i,
    program,
    TO_OUT: tl.constexpr,
    TO_UP: tl.constexpr,
    TO_DOWN: tl.constexpr,
    TILES: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program's i-th tile: where its matrix begins, rows, columns, how many there are, the product's tiles."""
    tile = i % TILES
    block = (i // TILES) % K
    is_qkv = tile < TO_OUT
    is_out = (tile >= TO_OUT) & (tile < TO_UP)
    is_up = (tile >= TO_UP) & (tile < TO_DOWN)
    is_down = tile >= TO_DOWN
    first = tl.where(is_qkv, 0, tl.where(is_out, TO_OUT, tl.where(is_up, TO_UP, TO_DOWN)))
    last = tl.where(is_qkv, TO_OUT, tl.where(is_out, TO_UP, tl.where(is_up, TO_DOWN, TILES))) - 1
    outputs = tl.where(is_qkv, 3 * D, tl.where(is_up, F, D))
    inner = tl.where(is_down, F, D)
    pieces = tl.where(is_down, (F + COLS - 1) // COLS, (D + COLS - 1) // COLS)
    before = tl.where(is_qkv, 0, tl.where(is_out, 3 * D * D, tl.where(is_up, 4 * D * D, 4 * D * D + F * D)))
    group = (tile - first) // pieces
    piece = (tile - first) % pieces
    rows = (group * P + program) * ROWS + tl.arange(0, ROWS)
    cols = piece * COLS + tl.arange(0, COLS)
    matrix = block.to(tl.int64) * (4 * D * D + 2 * D * F) + before
    return matrix, rows, cols, outputs, inner, first, last


@triton.jit
def token_kernel(
    ids,  # [1]
    lengths,  # [1], tokens before this one
    embedding,  # [V, D] that passes start from
    places,  # [context, D]
    table,  # [M, K, 4, D] modulations
    injection,  # [M, D]
    weights,  # [K, 4D² + 2DF]: qkv, out, up and down of each block, one after the other
    scales,  # [K, 5D + F], of weights in bytes
    pool,  # [pages, K, 2, H, PAGE, W] keys and values
    pages,  # [L, N] of each loop
    cosines,  # [context, W / 2]
    sines,
    x,  # [D] fp32, and so are the others
    qkv,  # [3D]
    sums,  # [SPLITS, D]
    tops,  # [SPLITS, H]
    masses,  # [SPLITS, H]
    wide,  # [F]
    counter,  # [1] 0; left as 0
    N,
    scale,
    STEPS: tl.constexpr,  # M · K
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    P: tl.constexpr,  # programs
    ROWS: tl.constexpr,  # of a tile
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles
    LEARNED: tl.constexpr,
    INJECTED: tl.constexpr,
    ROTARY: tl.constexpr,
    SCALED: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """x after all passes of one token; its keys and values are kept."""
    program = tl.program_id(0)
    PIECES_D: tl.constexpr = (D + COLS - 1) // COLS
    PIECES_F: tl.constexpr = (F + COLS - 1) // COLS
    SHARE: tl.constexpr = ROWS * P
    # Tiles of each product for every program; from where on they are of the next one.
    TO_OUT: tl.constexpr = (3 * D + SHARE - 1) // SHARE * PIECES_D
    TO_UP: tl.constexpr = TO_OUT + (D + SHARE - 1) // SHARE * PIECES_D
    TO_DOWN: tl.constexpr = TO_UP + (F + SHARE - 1) // SHARE * PIECES_D
    TILES: tl.constexpr = TO_DOWN + (D + SHARE - 1) // SHARE * PIECES_F
    token = tl.load(ids)
    length = tl.load(lengths)

    for start in range(program * ROWS, D, SHARE):
        rows = start + tl.arange(0, ROWS)
        value = tl.load(embedding + token * D + rows, mask=rows < D, other=0).to(tl.float32)
        if LEARNED:
            value += tl.load(places + length * D + rows, mask=rows < D, other=0).to(tl.float32)
        tl.store(x + rows, value, mask=rows < D)
    arrive(counter, P)

    turn = 0
    acc = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([COLS], tl.float32)
    for i in tl.range(0, STEPS * TILES, num_stages=AHEAD):
        # The tile that is fetched now, and used some turns later, when `turn` has come as far.
        matrix, ahead_rows, ahead_cols, ahead_outputs, ahead_inner, _first, _last = tile_of(
            i, program, TO_OUT, TO_UP, TO_DOWN, TILES, K, D, F, P, ROWS, COLS
        )
        w = tl.load(
            weights + matrix + ahead_rows[:, None] * ahead_inner + ahead_cols[None, :],
            mask=(ahead_rows < ahead_outputs)[:, None] & (ahead_cols < ahead_inner)[None, :],
            other=0,
        )
        # Always so, but the compiler does not know: its pipeline moves what it finds outside of an `if`, and would
        # read what other programs write before it has waited for them.
        if length >= 0:
            step = turn // TILES
            tile = turn % TILES
            block = step % K
            is_qkv = tile < TO_OUT
            is_out = (tile >= TO_OUT) & (tile < TO_UP)
            is_up = (tile >= TO_UP) & (tile < TO_DOWN)
            is_down = tile >= TO_DOWN
            _matrix, rows, cols, outputs, inner, first, last = tile_of(
                turn, program, TO_OUT, TO_UP, TO_DOWN, TILES, K, D, F, P, ROWS, COLS
            )
            column = (tile - first) % tl.where(is_down, (F + COLS - 1) // COLS, (D + COLS - 1) // COLS) * COLS
            if tile == first:
                wait_until(
                    counter, (1 + 5 * step + tl.where(is_qkv, 0, tl.where(is_out, 1, tl.where(is_up, 3, 4)))) * P
                )
                if is_out:
                    for item in range(program, H * SPLITS, P):
                        attend(
                            item % H,
                            item // H,
                            qkv,
                            pages + (step // K) * N,
                            pool,
                            cosines,
                            sines,
                            length,
                            sums,
                            tops,
                            masses,
                            block,
                            scale,
                            K,
                            D,
                            H,
                            W,
                            BLOCK_W,
                            PAGE,
                            SPLITS,
                            ROTARY,
                        )
                    arrive(counter, P)
                    wait_until(counter, (3 + 5 * step) * P)
            inside = cols < inner
            a = tl.zeros([COLS], tl.float32)
            squared = tl.zeros([COLS], tl.float32)
            if is_out:
                head = cols // W
                top = tl.load(tops + head, mask=inside, other=0)
                for s in tl.static_range(1, SPLITS):
                    top = tl.maximum(top, tl.load(tops + s * H + head, mask=inside, other=0))
                total = tl.zeros([COLS], tl.float32)
                for s in tl.static_range(SPLITS):
                    likely = tl.exp(tl.load(tops + s * H + head, mask=inside, other=0) - top)
                    total += likely * tl.load(masses + s * H + head, mask=inside, other=1)
                    a += likely * tl.load(sums + s * D + cols, mask=inside, other=0)
                a = a / total
            else:
                if is_down:
                    a = tl.load(wide + cols, mask=inside, other=0)
                else:
                    value = tl.load(x + cols, mask=inside, other=0)
                    squared = value * value
                    place = (step * 4 + tl.where(is_qkv, 2, 3)) * D
                    a = value * (1.0 + tl.load(table + place + cols, mask=inside, other=0).to(tl.float32))
            fresh = column == 0
            acc = tl.where(fresh, 0.0, acc) + as_numbers(w, SCALED) * a[None, :]
            squares = tl.where(fresh, 0.0, squares) + squared
            if column + COLS >= inner:
                out = tl.sum(acc, axis=1)
                valid = rows < outputs
                if SCALED:
                    above = tl.where(is_qkv, 0, tl.where(is_out, 3 * D, tl.where(is_up, 4 * D, 4 * D + F)))
                    out *= tl.load(scales + block * (5 * D + F) + above + rows, mask=valid, other=0)
                if is_qkv | is_up:
                    out *= tl.rsqrt(tl.sum(squares) / D + EPSILON)
                    if is_qkv:
                        tl.store(qkv + rows, out, mask=valid)
                    else:
                        tl.store(wide + rows, gelu(out), mask=valid)
                else:
                    gate = table + (step * 4 + tl.where(is_out, 0, 1)) * D
                    out *= tl.load(gate + rows, mask=valid, other=0).to(tl.float32)
                    out += tl.load(x + rows, mask=valid, other=0)
                    if INJECTED & is_down & (block == K - 1) & (step + 1 < STEPS):
                        embedded = tl.load(embedding + token * D + rows, mask=valid, other=0).to(tl.float32)
                        if LEARNED:
                            embedded += tl.load(places + length * D + rows, mask=valid, other=0).to(tl.float32)
                        injected = injection + (step // K + 1) * D
                        out += embedded * tl.load(injected + rows, mask=valid, other=0).to(tl.float32)
                    tl.store(x + rows, out, mask=valid)
                if tile == last:
                    arrive(counter, P)
        turn += 1  # noqa: SIM113 (the pipeline must not know that it is `i`)
    # Whoever comes last leaves the counter as it was.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == (2 + 5 * STEPS) * P - 1:
        tl.store(counter, 0)


@dataclass(frozen=True)
class Shape:
    """How the work is cut: programs on a multiprocessor, a tile, and how many of them are fetched ahead."""

    programs: int = 1
    rows: int = 8
    cols: int = 1024
    ahead: int = 8
    warps: int = 8
    splits: int = 4  # of the keys of one head


SHAPES = [
    Shape(),
    Shape(ahead=12),
    Shape(ahead=4),
    Shape(warps=16),
    Shape(warps=16, ahead=12),
    Shape(rows=4, cols=2048),
    Shape(rows=16, cols=512),
    Shape(programs=2, rows=4, warps=4, ahead=12),
]
REPEATS = 50  # of one token


class OneKernelRow(LoneRow):
    """A row that runs alone, through `token_kernel`."""

    def __init__(self, shape: Shape, model: LoopedLM, budget: int, weights: Weights, pool: Tensor) -> None:
        super().__init__(model, budget, weights, None, pool)
        assert self._table is not None, "passes must be told something"
        config, device = model.config, pool.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if pool.is_cuda else 1
        self._shape, self._programs = shape, processors * shape.programs
        self._packed = torch.stack([torch.cat([one.values.flatten() for one in block]) for block in weights.blocks])
        self._scales = self._x
        if weights.int8:
            scales = [torch.cat([one.scales for one in b if one.scales is not None]) for b in weights.blocks]
            self._scales = torch.stack(scales)

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, device=device)

        self._qkv32, self._wide32 = floats(3 * config.width), floats(config.ffn)
        self._sums = floats(shape.splits, config.width)
        self._tops, self._masses = floats(shape.splits, config.heads), floats(shape.splits, config.heads)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    def run(self) -> None:
        model, config, shape = self.model, self.model.config, self._shape
        # All programs must run at once, as they wait for each other.
        at_once = {"launch_cooperative_grid": True} if self.ids.is_cuda else {}
        token_kernel[(self._programs,)](
            self.ids,
            self.lengths,
            self._weights.embedding,
            model.places.weight if model.places is not None else self._x,
            self._table,
            self._injection if self._injection is not None else self._x,
            self._packed,
            self._scales,
            self._pool,
            self._pages,
            self._cos,
            self._sin,
            self._x,
            self._qkv32,
            self._sums,
            self._tops,
            self._masses,
            self._wide32,
            self._counter,
            self._pages.shape[-1],
            config.head_width**-0.5,
            STEPS=self.trajectory.budget * config.blocks,
            K=config.blocks,
            D=config.width,
            F=config.ffn,
            H=config.heads,
            W=config.head_width,
            BLOCK_W=triton.next_power_of_2(config.head_width),
            PAGE=PAGE,
            SPLITS=shape.splits,
            P=self._programs,
            ROWS=shape.rows,
            COLS=min(shape.cols, triton.next_power_of_2(config.width)),
            AHEAD=shape.ahead,
            LEARNED=model.places is not None,
            INJECTED=self._injection is not None,
            ROTARY=config.positions == "rotary",
            SCALED=self._weights.int8,
            EPSILON=EPSILON,
            num_warps=shape.warps,
            **at_once,
        )
        norm = model.final_norm.weight
        assert norm is not None
        self._norm_linear("head", self._weights.head, norm, self.logits, counted=config.vocab)


@torch.no_grad()
def measured(model: LoopedLM, budget: int, context: int, tokens: int, int8: bool) -> list[dict[str, Any]]:
    """Many kernels and one, in all shapes: how far logits are apart, tokens that are the same, and their rate."""
    prompt, trajectory = [(7 * place) % model.config.vocab for place in range(context)], model.resolve(budget)
    weights = quantised(model) if int8 else plain(model)
    batch = SharedBatch(model, 1, weights=weights)
    cache, _ = prefill(model, [prompt], [trajectory])
    pages = range(pages_of(context + tokens + 1, budget))
    batch.fill(0, pages, cache.read(0), context, model.condition(trajectory))
    batch.start({0: (prompt[0], context)})
    state = batch._ids[0], batch._lengths[0], batch._pages[0], batch._table[0], batch._injection[0]
    shapes = [shape for shape in SHAPES if batch._pool.is_cuda or shape.programs == 1]
    ways: list[Shape | None] = [None, *shapes, None]  # many kernels first and last, as the machine drifts
    found: list[dict[str, Any]] = []
    expected: tuple[Tensor, list[int]] | None = None
    for shape in ways:
        line: dict[str, Any] = {"budget": budget, "shape": shape and asdict(shape)}
        try:
            if shape is None:
                row = LoneRow(model, budget, weights, None, batch._pool)
            else:
                row = OneKernelRow(shape, model, budget, weights, batch._pool)
            row.enter(*state)
            row.replay("stay")
            logits = row.logits[0, : model.config.vocab].clone()
            if row.ids.is_cuda:
                line["unsteady"] = sum(_differs(row, logits) for _ in range(REPEATS))
            _follow(row, state, tokens)
            said = row.chosen[context : context + tokens, 0].tolist()
            expected = expected or (logits, said)
            line["logits_off"] = float((logits - expected[0]).norm() / expected[0].norm())
            parts = [place for place, pair in enumerate(zip(said, expected[1], strict=True)) if pair[0] != pair[1]]
            line["same_tokens"] = min(parts, default=tokens)
            if row.ids.is_cuda:
                seconds = best_of(5, model.device, partial(_follow, row, state, tokens))
                line["tokens_per_second"] = tokens / seconds
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:  # a shape that does not fit
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        print(line, flush=True)
        found.append(line)
    return found


def _differs(row: LoneRow, logits: Tensor) -> bool:
    """Whether the same token once more has other logits, by a single bit: sums have an order, so it is a race."""
    row.replay("stay")
    return not torch.equal(row.logits[0, : len(logits)], logits)


def _follow(row: LoneRow, state: tuple[Tensor, ...], tokens: int) -> None:
    """So many tokens, one after the other, from the same place each time."""
    row.enter(*state)
    for _ in range(tokens):
        row.replay("follow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paper/loopformer-3x8", help="a preset, a run, a model folder or box")
    parser.add_argument("--budgets", default="8,4,2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = named_model(asked.model, asked.device, asked.dtype)
    if asked.model in preset_names():
        with torch.no_grad():
            for parameter in model.parameters():  # gates that start at zero would hide what blocks do
                parameter.add_(0.02 * torch.randn_like(parameter))
    report: dict[str, Any] = {"model": asked.model, "int8": asked.int8, **describe(model.device)}
    report["runs"] = [
        line
        for budget in whole_numbers(asked.budgets, "--budgets")
        for line in measured(model, budget, asked.context, asked.tokens, asked.int8)
    ]
    publish(report, asked.out)


if __name__ == "__main__":
    main()
