"""A sequence that runs alone: all loops of a token in one CUDA graph, through kernels that read each weight once.

row = SingleRow(model, budget, weights, scratch, kv_pages)      # the memory of launch.py
row.load_slot(token, position, page_table, modulations, injection)    # take over a slot of the batch
row.replay(greedy=True)                                         # run its token, and choose the most likely next one

Rows that run together read each weight once for all of them (launch.py). A single row has nobody to share with, so
its matmuls are limited by how fast the weights are read, and get kernels of their own. All of it runs on the decode
stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopformer.config.model import ModelConfig
from loopformer.cuda_graphs import record
from loopformer.inference.fused import kernels
from loopformer.inference.fused.weights import Weights
from loopformer.model.block import EPSILON, rotary_angles
from loopformer.model.looped import LoopedLM

# Launch sizes, found on an H200 at width 2048.
OUTPUTS_PER_PROGRAM = {"qkv": 4, "out": 8, "up": 4, "down": 4, "head": 8}
WARPS = {"qkv": 4, "out": 4, "up": 4, "down": 8, "head": 4}
MAX_BLOCK_K = 2048  # inputs of a matmul that a program reads at a time
SPLITS = 32  # of the keys of one head, where there are few rows
ATTENTION_WARPS = 1


@dataclass(frozen=True)
class Scratch:
    """Buffers between the kernels of one loop, and rotary angles.

    Loops run one after the other on the decode stream, so all of them share these buffers, with one row or many.
    """

    qkv: Tensor  # [B, 3D]
    mixed: Tensor  # [B, D]
    wide: Tensor  # [B, FFN]
    partial: Tensor  # [B · H, SPLITS, W + 2] fp32
    arrived: Tensor  # [B · H] zeros. Each attention counts here and leaves zeros for the next
    cosines: Tensor  # [context, W / 2]
    sines: Tensor


def allocate_scratch(model: LoopedLM, rows: int) -> Scratch:
    """Buffers for loops of at most so many rows."""
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
    config: ModelConfig,
    scratch: Scratch,
    kv_pages: Tensor,
    rows: int,
    block: int,
    *,
    active_slots: Tensor,
    loops: Tensor,
    positions: Tensor,
    page_tables: Tensor,
    **options: Any,
) -> None:
    """Launch the attention of a block: `scratch.qkv` of new tokens → `scratch.mixed`, through their pages in
    `kv_pages` [pages, K, 2, H, PAGE, W]. The kernel describes the other tensors."""
    splits = scratch.partial.shape[1] if rows * config.heads < 512 else 1  # many rows fill the GPU unsplit
    kernels.paged_attention_kernel[(rows * config.heads, splits)](
        active_slots,
        loops,
        positions,
        page_tables,
        scratch.qkv,
        kv_pages,
        scratch.cosines,
        scratch.sines,
        scratch.mixed,
        scratch.partial,
        scratch.arrived,
        config.loops,
        page_tables.shape[-1],
        config.head_width**-0.5,
        BLOCK=block,
        K=config.blocks,
        H=config.heads,
        W=config.head_width,
        PAGE=kv_pages.shape[-2],
        BLOCK_W=triton.next_power_of_2(config.head_width),
        SPLITS=splits,
        ROTARY=config.positions == "rotary",
        num_warps=ATTENTION_WARPS,
        **options,
    )


class SingleRow:
    """The graphs of a slot that runs alone, along any trajectory of one budget.

    `chosen` and `logprobs` [context + 1, 1] have the most likely tokens, indexed by the input token's position. So
    a token can be copied to the host while the next ones run. The next slot overwrites them: wait for the copies of
    the last one before `load_slot`.
    """

    def __init__(self, model: LoopedLM, budget: int, weights: Weights, scratch: Scratch, kv_pages: Tensor) -> None:
        config, like = model.config, model.tokens.weight.detach()
        self._model, self._weights, self._scratch, self._kv_pages = model, weights, scratch, kv_pages
        nvidia = like.device.type == "cuda" and torch.version.hip is None
        # Programmatic dependent launch, from Hopper on: a kernel fetches its weights while the one before it ends.
        overlap = nvidia and torch.cuda.get_device_capability(like.device) >= (9, 0)
        self._launch: dict[str, Any] = {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=like.device)

        self.ids, self.positions, self.logits = integers(1), integers(1), floats(1, config.vocab_rows)
        self.chosen, self.logprobs = integers(config.context + 1, 1), floats(config.context + 1, 1)
        self._x = floats(config.width)
        programs = triton.cdiv(config.vocab_rows, OUTPUTS_PER_PROGRAM["head"])
        # Of each program of the head: its largest logit, that token, and the sum of exp(logit - largest).
        self._candidates = (floats(programs), integers(programs), floats(programs))
        # Every program of a matmul reads a whole scale, so modulations keep the narrow dtype that the conditioner
        # computed them in. Norm weights less 1 need fp32, as in the batch.
        dtype = torch.float32 if model.conditioner is None else like.dtype
        self._modulations = like.new_zeros(budget, config.blocks, 4, config.width, dtype=dtype)
        self._injection = like.new_zeros(budget, config.width) if config.inject == "gated" else None
        self._page_table = integers(config.loops, -(-config.context // kv_pages.shape[-2]), dtype=torch.int32)
        self._zero = integers(1)  # both the slot and the loop: each launch is given the page table of its loop
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def load_slot(
        self, token: Tensor, position: Tensor, page_table: Tensor, modulations: Tensor, injection: Tensor
    ) -> None:
        """Take over a slot: its token and that one's position [], its page table [L, N], and the modulations
        [L, K, 4, D] and injections [L, D] of its loops."""
        self.ids.copy_(token)
        self.positions.copy_(position)
        self._page_table.copy_(page_table)
        self._modulations.copy_(modulations[: len(self._modulations)])
        if self._injection is not None:
            self._injection.copy_(injection[: len(self._injection)])

    def replay(self, greedy: bool) -> None:
        """Run the token in `ids` through all its loops, to `logits` [1, V], and advance the position.

        With `greedy` the most likely next token is in `ids` afterwards. Otherwise the caller puts it there.
        """
        if self.ids.device.type != "cuda":  # Triton's interpreter
            self._run_token(greedy)
            return
        if greedy not in self._graphs:
            state = [self.ids, self.positions]
            # The recording's own run writes keys, logits and `chosen` at this position, as the replay does again.
            self._graphs[greedy] = record(self.ids.device, lambda: self._run_token(greedy), state)
        self._graphs[greedy].replay()

    def _run_token(self, greedy: bool) -> None:
        """Launch all kernels of one token, each of which waits for the one before it (`wait` in kernels.py).

        A kernel fetches weights and modulations before it waits. So none of these kernels may write them.
        """
        config, final = self._model.config, self._model.final_norm.weight
        assert final is not None
        scratch = self._scratch
        self._embed(None)
        for loop, blocks in enumerate(self._modulations):
            if loop > 0 and self._injection is not None:
                self._embed(self._injection[loop])
            for block, (gate_1, gate_2, scale_1, scale_2) in enumerate(blocks):
                qkv, out, up, down = self._weights.blocks[block]
                self._norm_linear("qkv", qkv, scale_1, scratch.qkv)
                launch_attention(
                    config,
                    scratch,
                    self._kv_pages,
                    1,
                    block,
                    active_slots=self._zero,
                    loops=self._zero,
                    positions=self.positions,
                    page_tables=self._page_table[loop:],
                    **self._launch,
                )
                self._linear_residual("out", out, scratch.mixed, gate_1)
                self._norm_linear("up", up, scale_2, scratch.wide)
                self._linear_residual("down", down, scratch.wide, gate_2)
        self._norm_linear("head", self._weights.head, final, self.logits)
        programs = len(self._candidates[0])
        kernels.advance_kernel[(1,)](
            *self._candidates,
            self.logprobs,
            self.ids,
            self.positions,
            self.chosen,
            programs,
            BLOCK_N=triton.next_power_of_2(programs),
            GREEDY=greedy,
            **self._launch,
        )

    def _embed(self, injection: Tensor | None) -> None:
        """Set `_x` to the token's embedding, or add the embedding times `injection` [D] to it."""
        width = self._model.config.width
        learned = self._model.places  # position embeddings; None with rotary positions
        kernels.embed_kernel[(1,)](
            self.ids,
            self.positions,
            self._weights.embedding,
            learned.weight if learned is not None else self._x,
            injection if injection is not None else self._x,
            self._x,
            width,
            LEARNED=learned is not None,
            INJECTED=injection is not None,
            BLOCK_K=triton.next_power_of_2(width),
            **self._launch,
        )

    def _norm_linear(self, name: str, weight: Tensor, scale: Tensor, y: Tensor) -> None:
        """y = W · norm(x) · scale, with what follows each matmul in the same kernel: GELU, or the head's argmax."""
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
        """x += gate · (W · a)."""
        outputs, inner = weight.shape
        rows = OUTPUTS_PER_PROGRAM[name]
        kernels.linear_residual_kernel[(triton.cdiv(outputs, rows),)](
            a,
            weight,
            gate,
            self._x,
            outputs,
            K=inner,
            BLOCK_K=min(triton.next_power_of_2(inner), MAX_BLOCK_K),
            ROWS=rows,
            num_warps=WARPS[name],
            **self._launch,
        )
