"""What runs on a GPU as one CUDA graph: all passes of a prompt, and all passes of a token of a row that runs alone.

prompts = PromptGraphs(model)
hidden = prompts.extend(ids, cache)                   # as model.extend does, for a cache of one row
row = SingleRowRunner(model, budget, weights, scratch, pool)  # the memory of batch.py
row.enter(token, length, pages, table, injection)     # a slot's
row.replay(greedy=True)                               # its next token, and the most likely one after it

A graph launches hundreds of kernels at once, since launching them one by one takes longer than they run. What
differs from replay to replay lies on the device: modulations, positions, and where keys and values are.

A prompt's graph is recorded for each budget and each power of two of tokens, once for prompts that begin a text and
once for those that continue one. Padding comes last, or writes its keys where none are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
import triton
from torch import Tensor

from loopformer.config.model import ModelConfig
from loopformer.device import device_context
from loopformer.inference.fused import kernels
from loopformer.inference.fused.backend import Weights
from loopformer.model.block import EPSILON, rotary_angles
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

FEWEST = 32  # tokens of the smallest graph of a prompt
SPARE = 16  # slots beyond the context, so that a row of keys stays aligned; the first takes the keys of padding
RECORDING = Lock()  # capture streams belong to the process: one graph is recorded at a time

# Launch sizes of a row that runs alone, found on an H200 at width 2048.
OUTPUTS_PER_PROGRAM = {"qkv": 4, "out": 8, "up": 4, "down": 4, "head": 8}
WARPS = {"qkv": 4, "out": 4, "up": 4, "down": 8, "head": 4}
INNER_PIECE = 2048  # inputs of a matmul that a program reads at a time
SPLITS = 32  # of the keys of one head, where there are few rows
ATTENTION_WARPS = 1


@dataclass(frozen=True)
class Scratch:
    """What the kernels of a pass hand to each other, and rotary angles. Passes run one after the other, so that all
    of them share it."""

    qkv: Tensor  # [B, 3D]
    mixed: Tensor  # [B, D]
    wide: Tensor  # [B, FFN]
    partial: Tensor  # [B · H, SPLITS, W + 2] fp32
    arrived: Tensor  # [B · H] zeros, which every attention leaves as zeros
    cosines: Tensor  # [context, W / 2]
    sines: Tensor


def allocate_scratch(model: LoopedLM, rows: int) -> Scratch:
    """Memory for passes of at most so many rows."""
    config, like = model.config, model.tokens.weight.detach()
    positions = torch.arange(config.context, device=like.device)[None]
    cosines, sines = rotary_angles(positions, config.head_width, torch.float32)
    return Scratch(
        like.new_zeros(rows, 3 * config.width),
        like.new_zeros(rows, config.width),
        like.new_zeros(rows, config.ffn),
        torch.zeros(rows * config.heads, SPLITS, config.head_width + 2, device=like.device),
        torch.zeros(rows * config.heads, dtype=torch.int32, device=like.device),
        cosines[0, 0].contiguous(),
        sines[0, 0].contiguous(),
    )


def launch_attention(
    config: ModelConfig, scratch: Scratch, pool: Tensor, rows: int, block: int, *slots: Tensor, **launch: Any
) -> None:
    """Launch the attention of a block over a pool [pages, K, 2, H, PAGE, W] of keys and values. `slots` are order,
    loops, lengths and pages, as the kernel takes them."""
    splits = scratch.partial.shape[1] if rows * config.heads < 512 else 1  # many rows fill the GPU unsplit
    kernels.paged_attention_kernel[(rows * config.heads, splits)](
        *slots,
        scratch.qkv,
        pool,
        scratch.cosines,
        scratch.sines,
        scratch.mixed,
        scratch.partial,
        scratch.arrived,
        config.loops,
        slots[-1].shape[-1],
        config.head_width**-0.5,
        BLOCK=block,
        K=config.blocks,
        H=config.heads,
        W=config.head_width,
        PAGE=pool.shape[-2],
        BLOCK_W=triton.next_power_of_2(config.head_width),
        SPLITS=splits,
        ROTARY=config.positions == "rotary",
        num_warps=ATTENTION_WARPS,
        **launch,
    )


class SingleRowRunner:
    """A row that runs alone, along any trajectory of one budget, with its keys and values in pages.

    Its kernels read each weight once. `chosen` and `logprobs` [context + 1, 1] have the tokens that were chosen, by
    the position of the token before each.
    """

    def __init__(self, model: LoopedLM, budget: int, weights: Weights, scratch: Scratch, pool: Tensor) -> None:
        config, like = model.config, model.tokens.weight.detach()
        self._model, self._weights, self._scratch, self._pool = model, weights, scratch, pool
        nvidia = like.device.type == "cuda" and torch.version.hip is None
        # On Hopper a kernel starts, and fetches its weights, while the one before it ends.
        overlap = nvidia and torch.cuda.get_device_capability(like.device) >= (9, 0)
        self._launch: dict[str, Any] = {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=like.device)

        self.ids, self.lengths, self.logits = integers(1), integers(1), floats(1, config.vocab_rows)
        self.chosen, self.logprobs = integers(config.context + 1, 1), floats(config.context + 1, 1)
        self._x = floats(config.width)
        programs = triton.cdiv(config.vocab_rows, OUTPUTS_PER_PROGRAM["head"])
        # Of each program of the head: its largest logit, the token of that, and the exp of all less it, summed.
        self._candidates = (floats(programs), integers(programs), floats(programs))
        self._table = floats(budget, config.blocks, 4, config.width)
        self._injection = like.new_zeros(budget, config.width) if config.inject == "gated" else None
        self._pages = integers(config.loops, -(-config.context // pool.shape[-2]), dtype=torch.int32)
        self._first = integers(1)  # the only slot, and the loop whose pages a launch is given
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def enter(self, token: Tensor, length: Tensor, pages: Tensor, table: Tensor, injection: Tensor) -> None:
        """Take over a slot: its next token and that one's position [], its pages [L, N], and the modulations
        [L, K, 4, D] and injection [L, D] of its passes."""
        self.ids.copy_(token)
        self.lengths.copy_(length)
        self._pages.copy_(pages)
        self._table.copy_(table[: len(self._table)])
        if self._injection is not None:
            self._injection.copy_(injection[: len(self._injection)])

    def replay(self, greedy: bool) -> None:
        """Run the token in `ids` through all its passes, for `logits` [1, V]; greedily, put the most likely next
        token in its place."""
        if self.ids.device.type != "cuda":  # Triton's interpreter
            self._run_token(greedy)
            return
        if greedy not in self._graphs:
            state = [self.ids, self.lengths]
            self._graphs[greedy] = record(self.ids.device, lambda: self._run_token(greedy), state)
        self._graphs[greedy].replay()

    def _run_token(self, greedy: bool) -> None:
        """Launch every kernel of one token."""
        config, final = self._model.config, self._model.final_norm.weight
        assert final is not None
        scratch = self._scratch
        self._embed(None)
        for loop, blocks in enumerate(self._table):
            if loop > 0 and self._injection is not None:
                self._embed(self._injection[loop])
            for block, (gate_1, gate_2, scale_1, scale_2) in enumerate(blocks):
                qkv, out, up, down = self._weights.blocks[block]
                self._norm_linear("qkv", qkv, scale_1, scratch.qkv)
                slot = (self._first, self._first, self.lengths, self._pages[loop:])
                launch_attention(config, scratch, self._pool, 1, block, *slot, **self._launch)
                self._linear_residual("out", out, scratch.mixed, gate_1)
                self._norm_linear("up", up, scale_2, scratch.wide)
                self._linear_residual("down", down, scratch.wide, gate_2)
        self._norm_linear("head", self._weights.head, final, self.logits)
        programs = len(self._candidates[0])
        kernels.advance_kernel[(1,)](
            *self._candidates,
            self.logprobs,
            self.ids,
            self.lengths,
            self.chosen,
            programs,
            BLOCK_N=triton.next_power_of_2(programs),
            GREEDY=greedy,
            **self._launch,
        )

    def _embed(self, injection: Tensor | None) -> None:
        """Put the token's embedding into `_x`, or add some of it, as injected."""
        places, width = self._model.places, self._model.config.width
        kernels.embed_kernel[(1,)](
            self.ids,
            self.lengths,
            self._weights.embedding,
            places.weight if places is not None else self._x,
            injection if injection is not None else self._x,
            self._x,
            width,
            LEARNED=places is not None,
            INJECTED=injection is not None,
            BLOCK_K=triton.next_power_of_2(width),
            **self._launch,
        )

    def _norm_linear(self, name: str, weight: Tensor, scale: Tensor, y: Tensor) -> None:
        outputs, inner = weight.shape
        rows = OUTPUTS_PER_PROGRAM[name]
        kernels.norm_linear_kernel[(triton.cdiv(outputs, rows),)](
            self._x,
            weight,
            scale,
            y,
            *self._candidates,
            outputs,
            self._model.config.vocab,
            K=inner,
            BLOCK_K=triton.next_power_of_2(inner),
            ROWS=rows,
            PLUS_ONE=name != "head",
            GELU=name == "up",
            BEST=name == "head",
            EPSILON=EPSILON,
            num_warps=WARPS[name],
            **self._launch,
        )

    def _linear_residual(self, name: str, weight: Tensor, a: Tensor, gate: Tensor) -> None:
        outputs, inner = weight.shape
        rows = OUTPUTS_PER_PROGRAM[name]
        kernels.linear_residual_kernel[(triton.cdiv(outputs, rows),)](
            a,
            weight,
            gate,
            self._x,
            outputs,
            K=inner,
            PREFILL_CHUNK=min(triton.next_power_of_2(inner), INNER_PIECE),
            ROWS=rows,
            num_warps=WARPS[name],
            **self._launch,
        )


class PlacedOnDevice(KVCache):
    """A cache of one row that writes new tokens at positions given on the device."""

    def __init__(
        self, model: LoopedLM, trajectory: Trajectory, keys: Tensor, start: Tensor | None, count: Tensor
    ) -> None:
        """`keys` [L, K, 2, 1, H, context and spare, D/H]; tokens from `start` [] on, of which `count` [] count.
        Without `start` they begin a text: attention that is only causal is much faster than with a mask."""
        super().__init__(
            model.config, [trajectory], LoopPlan([], [], None), model.config.context, model.tokens.weight
        )
        passes = model.plan_loops(trajectory, 1)
        self.passes = LoopPlan(passes.rows, [one.map(torch.clone) for one in passes.conditions], None)
        self._kept = list(keys[: trajectory.budget])
        self._from, self._count = start, count

    def positions_and_mask(self, count: int) -> tuple[Tensor, Tensor | None]:
        if self._from is None:
            return super().positions_and_mask(count)
        new = torch.arange(count, device=self._from.device)
        positions = torch.where(new < self._count, self._from + new, self.capacity)[None]
        self._start, self._end, self._positions = None, self.capacity + SPARE, positions
        looked_at = torch.arange(self._end, device=new.device)
        # Padding, too, must have a position that the table of positions has.
        return positions.clamp(max=self.capacity - 1), looked_at <= positions[:, None, :, None]

    def advance(self, counts: Sequence[int]) -> None:
        """Do nothing: the length is on the device."""


@dataclass(frozen=True)
class PromptGraph:
    """A graph and what it reads and writes."""

    ids: Tensor  # [1, T]
    conditions: list[Condition]
    hidden: Tensor  # [1, T, D]
    replay: Callable[[], None]


class PromptGraphs:
    """The graphs of a model's prompts, and the memory in which they run."""

    def __init__(self, model: LoopedLM) -> None:
        config, like = model.config, model.tokens.weight.detach()
        self.model = model
        places = config.context + SPARE
        self._keys = like.new_zeros(config.loops, config.blocks, 2, 1, config.heads, places, config.head_width)
        self._start, self._count = (torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2))
        self._recorded: dict[tuple[int, int, bool], PromptGraph] = {}
        self._pool: Any = None  # the memory that all of them compute in, one at a time

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run tokens [1, T] on top of a cache of one row, which keeps them: hidden [1, T, D] after the final norm,
        valid until the next call."""
        (trajectory,), (start,), count = cache.trajectories, cache.lengths, ids.shape[1]
        cache.check_room(count)
        budget = trajectory.budget
        tokens = min(self.model.config.context, max(FEWEST, triton.next_power_of_2(count)))
        graph = self._graph(budget, tokens, begins=start == 0)
        graph.ids[:, :count] = ids
        graph.ids[:, count:] = ids[:, :1]
        recorded, wanted = (
            [tensor for condition in conditions for tensor in condition.tensors]
            for conditions in (graph.conditions, cache.passes.conditions)
        )
        if recorded:
            torch._foreach_copy_(recorded, wanted)
        keys = self._keys[:budget, :, :, 0]  # [M, k, 2, H, context and spare, D/H]
        if start:
            self._start.fill_(start)
            self._count.fill_(count)
            keys.zero_()  # what lies beyond the prompt is multiplied by 0, and must be finite
            torch._foreach_copy_(list(keys[..., :start, :]), cache.read(0).loops)
        graph.replay()
        cache.write(0, SequenceKV(trajectory, list(keys)), start + count)
        return graph.hidden[:, :count]

    def _graph(self, budget: int, tokens: int, begins: bool) -> PromptGraph:
        if (budget, tokens, begins) not in self._recorded:
            start = None if begins else self._start
            cache = PlacedOnDevice(self.model, Trajectory.uniform(budget), self._keys, start, self._count)
            ids = self._start.new_zeros(1, tokens)
            hidden = self._keys.new_zeros(1, tokens, self.model.config.width)

            def launch() -> None:
                hidden.copy_(self.model.extend(ids, cache, check=False))

            replay = launch
            if ids.device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                replay = record(ids.device, launch, [], "prompts", self._pool).replay
            self._recorded[budget, tokens, begins] = PromptGraph(ids, cache.passes.conditions, hidden, replay)
        return self._recorded[budget, tokens, begins]


@lru_cache
def side_stream(device: int, purpose: str) -> torch.cuda.Stream:
    """A stream beside the one that decodes. There is one for each purpose, as libraries keep memory for each."""
    make: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make(device)
    return stream


def wait_for(purpose: str, device: torch.device) -> None:
    """Let the decoding stream wait for what is queued on the stream of some purpose."""
    if device.type == "cuda":
        torch.cuda.current_stream().wait_stream(side_stream(torch.cuda.current_device(), purpose))


def record(
    device: torch.device,
    launch: Callable[[], None],
    state: Sequence[Tensor],
    of: str = "passes",
    pool: Any = None,
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of launches, whose kernels are compiled by running them once.

    `state` is restored afterwards; keys that the run wrote lie beyond the valid length. Graphs that run beside
    others are recorded `of` something else: libraries have memory of their own for each stream, and a graph uses
    that of the stream it was recorded from. Graphs that never run at once may share a `pool` of memory.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING, device_context(device):
        before = [tensor.clone() for tensor in state]
        index = torch.cuda.current_device()
        warm_up = side_stream(index, "warm-up")
        # The warm-up reads what is queued here, and must be done before the capture begins.
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            launch()
        torch.cuda.current_stream().wait_stream(warm_up)
        stream = side_stream(index, f"recording of {of}")
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):  # other threads go on
            launch()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
    return graph
