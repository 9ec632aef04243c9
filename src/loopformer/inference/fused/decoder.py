"""Decoding on the GPU near what its memory allows: fused kernels, replayed as one CUDA graph per token.

decoder = Decoder(model, Trajectory.uniform(4), rows=1)
hidden = decoder.prefill([prompt])                 # [B, D] of each prompt's last token
logits = decoder.step(tokens)                      # [B, V] after one more token each
tokens = decoder.greedy(64)                        # [64, B] after `decoder.ids`, without a word with the host

A decoder is bound to a trajectory and a number of rows, as its cache is; it can be filled with new prompts as often
as wanted. Few rows go through matmuls of our own, which read each weight once (kernels.py), more through the
library's. Kernels are compiled at first use, which takes seconds. With `together` its rows are tokens of one
sequence, one after the other (speculate.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from loopformer.device import current
from loopformer.errors import require
from loopformer.inference.decode import ends, padded
from loopformer.inference.fused import kernels
from loopformer.inference.fused.quantise import Weights, weights_by_rows
from loopformer.model import LoopedLM
from loopformer.model.block import EPSILON, rotary_angles
from loopformer.model.cache import Cache
from loopformer.trajectory import Trajectory

Then = Literal["stay", "advance", "follow"]
FEW_ROWS = 2  # up to here our own matmuls are faster than the library's
RECORDING = Lock()  # the streams that graphs are recorded on are those of all threads


@dataclass(frozen=True)
class Tuning:
    """Sizes of the launches. The defaults were found on an H200 at width 2048."""

    rows: dict[str, int] = field(default_factory=lambda: {"qkv": 4, "out": 8, "up": 4, "down": 4, "head": 8})
    warps: dict[str, int] = field(default_factory=lambda: {"qkv": 4, "out": 4, "up": 4, "down": 8, "head": 4})
    piece: int = 2048  # of the inner dimension
    splits: int = 32  # of the keys of one head, where there are few rows
    block_n: int = 32  # keys at a time
    block_n_many: int = 64
    attention_warps: int = 2
    overlap: bool = True  # on Hopper: start a kernel while the one before it ends


class Modulation(NamedTuple):
    """The modulation of a block in a pass: gates, if there are any, and scales, each [D]."""

    gate_1: Tensor | None
    gate_2: Tensor | None
    scale_1: Tensor
    scale_2: Tensor


class Launches(ABC):
    """The launches of one token of some rows along a trajectory, and their graph; where keys and values lie is
    known to those who derive from it."""

    _together = 1  # rows that are tokens of one sequence

    def __init__(
        self,
        model: LoopedLM,
        trajectory: Trajectory,
        rows: int,
        weights: Weights | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        config, like = model.config, model.tokens.weight.detach()
        require(
            config.plain_only is None, f"There are no kernels for model.{config.plain_only}; decode without fast."
        )
        self.model, self.trajectory, self.rows = model, model.resolve(trajectory), rows
        self._weights, self._tuning = weights or weights_by_rows(model), tuning or Tuning()
        self._few = rows <= FEW_ROWS
        nvidia = like.device.type == "cuda" and torch.version.hip is None
        hopper = nvidia and torch.cuda.get_device_capability(like.device) >= (9, 0)
        overlap = self._tuning.overlap and hopper
        self.launch: dict[str, Any] = {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=like.device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=like.device)

        width, heads = config.width, config.heads
        self.ids, self.lengths = integers(rows), integers(rows)
        self.chosen = integers(config.context + 1, rows)
        self.logits = floats(rows, config.vocab_rows)
        self._x = floats(rows, width)
        self._qkv, self._mixed = like.new_zeros(rows, 3 * width), like.new_zeros(rows, width)
        self._wide = like.new_zeros(rows, config.ffn)
        self._normed, self._change = like.new_zeros(rows, width), like.new_zeros(rows, width)
        self._splits = self._tuning.splits if rows * heads < 512 else 1
        self._partial = floats(rows * heads, self._splits, config.head_width + 2)
        self._arrived = torch.zeros(rows * heads, dtype=torch.int32, device=like.device)
        programs = triton.cdiv(config.vocab_rows, self._tuning.rows["head"]) if self._few else 1
        self.best, self.where = floats(rows, programs), integers(rows, programs)
        self.mass, self.logprobs = torch.ones_like(self.best), torch.zeros_like(self.chosen, dtype=torch.float32)
        positions = torch.arange(config.context, device=like.device)[None]
        self._cos, self._sin = (
            angle[0, 0].contiguous() for angle in rotary_angles(positions, config.head_width, torch.float32)
        )
        with torch.no_grad():
            told = model.condition(self.trajectory)
        self._table = None if told.modulation is None else told.modulation.to(like.dtype).contiguous()
        self._injection = None if told.injection is None else told.injection.to(like.dtype).contiguous()
        self._graphs: dict[Then, torch.cuda.CUDAGraph] = {}

    @abstractmethod
    def _attention(self, step: int) -> None:
        """Launch the attention of a block in a pass, counted through."""

    def replay(self, then: Then) -> None:
        """One token each, through a graph; then stay, or advance its place, or greedily go on to the next."""
        if self.ids.device.type != "cuda":  # Triton's interpreter
            self._token(then)
            return
        if then not in self._graphs:
            self._graphs[then] = record(self.ids.device, lambda: self._token(then), [self.ids, self.lengths])
        self._graphs[then].replay()

    def _token(self, then: Then) -> None:
        """Launch every kernel of one token."""
        self.run()
        if then == "stay":
            return
        programs = self.best.shape[1]
        kernels.advance_kernel[(self.rows,)](
            self.best,
            self.where,
            self.mass,
            self.logprobs,
            self.ids,
            self.lengths,
            self.chosen,
            self.rows,
            programs,
            BLOCK_N=triton.next_power_of_2(programs),
            GREEDY=then == "follow",
            **self.launch,
        )

    def run(self) -> None:
        """Launch a pass of `ids` [B] at `lengths`: logits, and candidates `best` for the largest at `where`."""
        config = self.model.config
        self._embed(None)
        modulations = self._modulations()
        norm = self.model.final_norm.weight
        assert norm is not None
        if self._few:
            for step in range(len(modulations)):
                self._inject(step)
                self._few_rows_block(step, modulations[step])
            self._norm_linear("head", self._weights.head, norm, self.logits, counted=config.vocab)
        else:
            self._add_norm(None, None, modulations[0].scale_1)
            for step in range(len(modulations)):
                following = modulations[step + 1].scale_1 if step + 1 < len(modulations) else norm
                if self._inject(step):
                    self._add_norm(None, None, modulations[step].scale_1)
                self._many_rows_block(step, modulations[step], following)
            self._many_logits()
            best, where = self.logits[:, : config.vocab].max(-1, keepdim=True)
            self.best.copy_(best)
            self.where.copy_(where)

    def _inject(self, step: int) -> bool:
        """Add some of the embedding at the beginning of a pass but the first; whether that was done."""
        loop, block = divmod(step, self.model.config.blocks)
        if self._injection is None or loop == 0 or block > 0:
            return False
        self._embed(self._injection[loop])
        return True

    def _embed(self, injection: Tensor | None) -> None:
        model, width = self.model, self.model.config.width
        kernels.embed_kernel[(self.rows,)](
            self.ids,
            self.lengths,
            self._weights.embedding,
            model.places.weight if model.places is not None else self._x,
            injection if injection is not None else self._x,
            self._x,
            width,
            LEARNED=model.places is not None,
            INJECTED=injection is not None,
            BLOCK_K=triton.next_power_of_2(width),
            **self.launch,
        )

    def _modulations(self) -> list[Modulation]:
        """Of each block in each pass, in the order they run."""
        if self._table is not None:
            return [Modulation(*block.unbind()) for loop in self._table for block in loop]
        norms = [(block.norm_1.weight, block.norm_2.weight) for block in self.model.stack.each()]
        weights = [Modulation(None, None, one, two) for one, two in norms if one is not None and two is not None]
        return weights * self.trajectory.budget

    def _few_rows_block(self, step: int, modulation: Modulation) -> None:
        """Five kernels."""
        qkv, out, up, down = self._weights.blocks[step % len(self._weights.blocks)]
        plus_one = self._table is not None
        self._norm_linear("qkv", qkv, modulation.scale_1, self._qkv, plus_one=plus_one)
        self._attention(step)
        self._linear_residual("out", out, self._mixed, modulation.gate_1)
        self._norm_linear("up", up, modulation.scale_2, self._wide, plus_one=plus_one, gelu=True)
        self._linear_residual("down", down, self._wide, modulation.gate_2)

    def _many_rows_block(self, step: int, modulation: Modulation, following: Tensor) -> None:
        """The library's matmuls, and what lies between them fused; `following` is the next norm's scale."""
        qkv, out, up, down = (one.t() for one in self._weights.blocks[step % len(self._weights.blocks)])
        torch.mm(self._normed, qkv, out=self._qkv)
        self._attention(step)
        torch.mm(self._mixed, out, out=self._change)
        self._add_norm(self._change, modulation.gate_1, modulation.scale_2)
        torch.mm(self._normed, up, out=self._wide)
        count = self._wide.numel()
        kernels.gelu_kernel[(triton.cdiv(count, 1024),)](self._wide, count, BLOCK_N=1024, **self.launch)
        torch.mm(self._wide, down, out=self._change)
        self._add_norm(self._change, modulation.gate_2, following)

    def _many_logits(self) -> None:
        head = self._weights.head.t()
        if self._together > 1 and head.dtype != torch.float32:
            # Not rounded to bf16, in which the two most likely tokens are often equal.
            torch.mm(self._normed, head, torch.float32, out=self.logits)
        else:
            self.logits.copy_(torch.mm(self._normed, head))

    def _norm_linear(
        self,
        name: str,
        weight: Tensor,
        scale: Tensor,
        y: Tensor,
        counted: int = 0,
        plus_one: bool = False,
        gelu: bool = False,
    ) -> None:
        outputs, inner = weight.shape
        rows = self._tuning.rows[name]
        kernels.norm_linear_kernel[(triton.cdiv(outputs, rows),)](
            self._x,
            weight,
            scale,
            y,
            self.best,
            self.where,
            self.mass,
            outputs,
            counted,
            K=inner,
            BLOCK_K=triton.next_power_of_2(inner),
            ROWS=rows,
            B=self.rows,
            PLUS_ONE=plus_one,
            GELU=gelu,
            BEST=counted > 0,
            EPSILON=EPSILON,
            num_warps=self._tuning.warps[name],
            **self.launch,
        )

    def _linear_residual(self, name: str, weight: Tensor, a: Tensor, gate: Tensor | None) -> None:
        outputs, inner = weight.shape
        rows = self._tuning.rows[name]
        kernels.linear_residual_kernel[(triton.cdiv(outputs, rows),)](
            a,
            weight,
            gate if gate is not None else self._x,
            self._x,
            outputs,
            K=inner,
            PIECE=min(triton.next_power_of_2(inner), self._tuning.piece),
            ROWS=rows,
            B=self.rows,
            GATED=gate is not None,
            num_warps=self._tuning.warps[name],
            **self.launch,
        )

    def _add_norm(self, change: Tensor | None, gate: Tensor | None, scale: Tensor) -> None:
        width = self.model.config.width
        kernels.add_norm_kernel[(self.rows,)](
            self._x,
            change if change is not None else self._x,
            gate if gate is not None else self._x,
            scale,
            self._normed,
            width,
            BLOCK_D=triton.next_power_of_2(width),
            ADD=change is not None,
            GATED=gate is not None,
            PLUS_ONE=self._table is not None and scale is not self.model.final_norm.weight,
            EPSILON=EPSILON,
            **self.launch,
        )


class Decoder(Launches):
    """Rows that follow one trajectory together, each with a cache of the whole context."""

    def __init__(
        self,
        model: LoopedLM,
        trajectory: Trajectory,
        rows: int,
        weights: Weights | None = None,
        tuning: Tuning | None = None,
        together: Cache | None = None,
    ) -> None:
        """`together` is the cache of the one sequence that all rows belong to; without it each is its own."""
        super().__init__(model, trajectory, rows, weights, tuning)
        self.cache = model.cache(self.trajectory, rows) if together is None else together
        self._together = rows if together is not None else 1

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run new prompts, which take the place of what was there: hidden [B, D] of each one's last token."""
        require(len(prompts) == self.rows, f"{len(prompts)} prompts were given to a decoder of {self.rows} rows.")
        ids, counts = padded(self.model, prompts)
        self.cache.lengths = [0] * self.rows
        hidden = self.model.extend(ids, self.cache, counts)
        self.lengths.copy_(torch.tensor(counts))
        return ends(hidden, counts)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One more token each [B]: logits [B, V], which the next step writes over."""
        self.cache.need_room(1)
        self.ids.copy_(tokens)
        self.replay("advance")
        self.cache.advance([1] * self.rows)
        return self.logits[:, : self.model.config.vocab]

    @torch.no_grad()
    def greedy(self, count: int) -> Tensor:
        """Follow the most likely tokens after `ids`: [count, B]."""
        self.cache.need_room(count)
        start = self.lengths.clone()
        for _ in range(count):
            self.replay("follow")
        self.cache.advance([count] * self.rows)
        return self.chosen.gather(0, start + torch.arange(count, device=start.device)[:, None])

    def _attention(self, step: int) -> None:
        config, tuning = self.model.config, self._tuning
        keys, values = self.cache.tensors(*divmod(step, config.blocks))
        kernels.attention_kernel[(self.rows * config.heads, self._splits)](
            self._qkv,
            keys,
            values,
            self.lengths,
            self._cos,
            self._sin,
            self._mixed,
            self._partial,
            self._arrived,
            self.cache.capacity,
            config.head_width**-0.5,
            H=config.heads,
            W=config.head_width,
            BLOCK_W=triton.next_power_of_2(config.head_width),
            BLOCK_N=tuning.block_n if self._splits > 1 else tuning.block_n_many,
            SPLITS=self._splits,
            ROTARY=config.positions == "rotary",
            TOGETHER=self._together,
            BLOCK_T=triton.next_power_of_2(self._together),
            num_warps=tuning.attention_warps,
            **self.launch,
        )


@lru_cache
def side_stream(device: int, purpose: str) -> torch.cuda.Stream:
    """A stream beside the one that decodes; one for each purpose is enough, as libraries keep memory for each."""
    make: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make(device)
    return stream


def wait_for(purpose: str, device: torch.device) -> None:
    """Let what decodes wait for what is under way on the stream of some purpose."""
    if device.type == "cuda":
        torch.cuda.current_stream().wait_stream(side_stream(torch.cuda.current_device(), purpose))


def record(
    device: torch.device,
    launch: Callable[[], None],
    state: Sequence[Tensor],
    of: str = "passes",
    pool: Any = None,
) -> torch.cuda.CUDAGraph:
    """A graph of launches on a GPU, which are compiled by running them once.

    `state` is put back afterwards; keys that were written lie beyond the valid length. What runs beside other
    graphs is recorded `of` something else: libraries have memory of their own for each stream, and graphs use that
    of the stream they were recorded from. Graphs that never run at once may share a `pool` of memory.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING, current(device):
        before = [tensor.clone() for tensor in state]
        index = torch.cuda.current_device()
        warm_up = side_stream(index, "warm-up")
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
