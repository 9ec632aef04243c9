"""The device's side of continuous batching: slots, pages of keys and values, and the kernels that every loop
launches.

batch = DecodeBatch(model, slots=64)                # with memory for all that they may write, if there is so much
batch.fill(3, pages, keys, length, condition, draw) # slot 3 gets a prompt that was run
batch.start({3: (token, length)})                   # its next token, at that position, begins with its first loop
batch.run([3, 5, 9])                                # one loop of each of these slots, whichever each is at
logits = batch.logits([1])                          # of rows of that launch that ended their last loop: slot 5's
batch.begin([5], tokens)                            # their next tokens
choices = batch.next_tokens([1], [5])               # or all three in one graph: tokens and log-probabilities [B, 2]
logits = batch.token(3, budget=8)                   # or all loops of a token of a slot that runs alone
copy = batch.follow(3, budget=8, position=20)       # and the most likely next token, which runs next
choices = batch.draw(3, budget=8)                   # or one that is drawn

All loops have the same weights, so a launch over rows at different loops reads them once. A mixture of budgets
costs what its loops cost, and rows come and go between loops. What differs from row to row lies on the device and
is looked up there by slot and loop: modulations, the position of the token, and its pages. Launches are recorded as
CUDA graphs, one for each power of two of rows. Nothing here waits for the device. A row that runs alone goes
through kernels that read each weight once (single_row.py), all loops of a token in one graph.

Everything here runs on the stream that decodes, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
from torch import Tensor

from loopformer.device import available_bytes, to_device_async
from loopformer.errors import require
from loopformer.inference.fused import kernels
from loopformer.inference.fused.batch_pool import weights_by_rows
from loopformer.inference.fused.graphs import HostCopy, SideStream, record
from loopformer.inference.fused.prefill import PromptGraphs
from loopformer.inference.fused.single_row import SingleRow, allocate_scratch, launch_attention
from loopformer.inference.kv_cache import fingerprint, page_bytes
from loopformer.inference.sampling import GREEDY, Draw, hashed_seed, kernel_settings
from loopformer.model.block import EPSILON
from loopformer.model.cache import SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM

PAGE = 64  # tokens
MEMORY_SHARE = 0.8  # of the free memory, for keys and values at most


class DecodeBatch:
    """The memory of some slots, and the launches over any of them."""

    def __init__(self, model: LoopedLM, slots: int, memory: int | None = None, pool: Tensor | None = None) -> None:
        """`memory`: bytes of keys and values, by default what all slots may need, if there is so much. `pool`: the
        memory of a batch that is no longer used."""
        config, like = model.config, model.tokens.weight.detach()
        memory = int(MEMORY_SHARE * available_bytes(like.device)) if memory is None else memory
        self.page_tokens, self._page_bytes = PAGE, page_bytes(model, PAGE)
        pages = min(slots * config.loops * -(-config.context // PAGE), memory // self._page_bytes)
        require(pages >= 1, f"{memory:,} bytes hold no page of keys, which takes {self._page_bytes:,}.")
        self.model, self.slots, self.page_count = model, slots, pages
        self.prompts = PromptGraphs(model)
        self.prompt_stream = SideStream("prompts", like.device)
        self._copy_stream = SideStream("copies to the host", like.device)  # of the tokens of a row that runs alone
        self._weights = weights_by_rows(model)
        self.made_for = fingerprint(model)
        self.device = like.device
        assert model.final_norm.weight is not None
        self._final = model.final_norm.weight.detach()

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # One slot and one page more than are given out: rows that fill up a launch use them.
        rows, loops = slots + 1, config.loops
        self._ids, self._lengths, self._loops = integers(rows), integers(rows), integers(rows)
        self._x = torch.zeros(rows, config.width, device=like.device)
        # In fp32, as it also holds norm weights less 1, which bf16 would round.
        self._table = torch.zeros(rows, loops, config.blocks, 4, config.width, device=like.device)
        self._injection = like.new_zeros(rows, loops, config.width) if config.inject == "gated" else self._x
        self._pages = torch.full(
            (rows, loops, -(-config.context // PAGE)), pages, dtype=torch.int32, device=like.device
        )
        shape = (pages + 1, config.blocks, 2, config.heads, PAGE, config.head_width)
        if pool is None or (pool.shape, pool.dtype, pool.device) != (shape, like.dtype, like.device):
            pool = like.new_zeros(shape)
        self._pool = pool
        most = triton.next_power_of_2(slots)
        self._numbers = {name: integers(most) for name in ("order", "done", "ended")}
        self._written: dict[str, tuple[int, ...]] = {}
        self._choices = torch.zeros(most, 2, device=like.device)
        # How each slot chooses its tokens.
        greedy = [kernel_settings(GREEDY.sampling, config.vocab)] * rows
        self._rules = torch.tensor(greedy, dtype=torch.float64, device=like.device)
        self._seeds = integers(rows)
        self._scratch = allocate_scratch(model, most)
        self._normed, self._change = like.new_zeros(most, config.width), like.new_zeros(most, config.width)
        self._logits = torch.zeros(most, config.vocab_rows, device=like.device)
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._single_rows: dict[int, SingleRow] = {}  # by budget
        self._alone: tuple[int, SingleRow] | None = None  # the slot that runs alone, and where it does

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that the graphs were recorded with."""
        return fingerprint(self.model) == self.made_for

    def renewed(self) -> DecodeBatch:
        """This batch, or an empty one in its memory if the model's weights have changed."""
        return self if self.is_current else DecodeBatch(self.model, self.slots, self.nbytes, self._pool)

    def leave(self) -> None:
        """Let later work wait for prompts that still run: they write to memory that may be given away."""
        self.prompt_stream.join()

    @property
    def nbytes(self) -> int:
        """Keys and values that it has room for."""
        return self.page_count * self._page_bytes

    # Slots.

    def fill(
        self,
        slot: int,
        pages: Sequence[int],
        keys: SequenceKV,
        length: int,
        condition: Condition,
        draw: Draw = GREEDY,
        start: int = 0,
    ) -> None:
        """Give a slot the keys of `length` tokens, the conditions of its loops, and pages for all it may write, as
        many for each loop. The pages hold the first `start` tokens already. `draw`: how its tokens are drawn, but
        for a repetition penalty, which needs `logits`."""
        budget = len(keys.loops)
        if self._alone is not None and self._alone[0] == slot:
            self._alone = None
        table = to_device_async(pages, self.device, torch.int32).view(budget, -1)  # [M, N]
        self._pages[slot].fill_(self.page_count)
        self._pages[slot, :budget, : table.shape[1]] = table
        self._table[slot, :budget] = self._modulation(condition, budget)
        if condition.injection is not None:
            self._injection[slot, :budget] = condition.injection
        self._rules[slot] = to_device_async(
            kernel_settings(draw.sampling, self.model.config.vocab), self.device, torch.float64
        )
        self._seeds[slot] = to_device_async([hashed_seed(draw.seed)], self.device)[0]
        size = self.page_tokens
        first, end = start // size, -(-length // size)  # the pages to write
        if first == end:
            return
        new = torch.stack([loop[:, :, :, start:length] for loop in keys.loops])
        new = torch.nn.functional.pad(new, (0, 0, 0, end * size - length))  # [M, K, 2, H, tokens, W]
        by_page = new.view(*new.shape[:4], end - first, size, -1).permute(0, 4, 1, 2, 3, 5, 6)
        self._pool[table[:, first:end].long()] = by_page.to(self._pool.dtype)

    def read(self, pages: Sequence[Sequence[int]]) -> list[Tensor]:
        """The keys and values [K, 2, H, tokens, W] in these pages, for each loop."""
        table = to_device_async(pages, self.device)  # [M, N]
        by_page = self._pool[table].permute(0, 2, 3, 4, 1, 5, 6)  # [M, K, 2, H, N, PAGE, W]
        return list(by_page.flatten(4, 5))

    def _modulation(self, condition: Condition, budget: int) -> Tensor:
        """Modulations [M, K, 4, D]; of a model without any, gates of 1 and its norm weights less 1 as scales."""
        if condition.modulation is not None:
            return condition.modulation.float()
        table = torch.zeros_like(self._table[0, :budget])
        table[:, :, :2] = 1
        for number, block in enumerate(self.model.stack.typed_blocks()):
            for scale, norm in ((2, block.norm_1), (3, block.norm_2)):
                assert norm.weight is not None
                table[:, number, scale] = norm.weight.detach().float() - 1
        return table

    def start(self, tokens: Mapping[int, tuple[int, int]]) -> None:
        """Begin the trajectories of tokens: the token of each slot, and its position."""
        self._rejoin()
        slots = to_device_async(list(tokens), self.device)
        state = to_device_async(list(tokens.values()), self.device)  # [B, 2]
        self._ids[slots], self._lengths[slots], self._loops[slots] = state[:, 0], state[:, 1], 0

    # Launches.

    def run(self, slots: Sequence[int], passes: int = 1) -> None:
        """So many passes of each of these slots."""
        self._rejoin()
        count = self._write_numbers("order", slots, self.slots)

        def two_passes() -> None:
            self._pass(count)
            self._pass(count)

        for _ in range(passes // 2):  # two in one graph are half the work for the host
            self._replay("two passes", count, two_passes)
        if passes % 2:
            self._replay("pass", count, lambda: self._pass(count))

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits [B, V] of rows of the launch, counted as their slots were given to `run`."""
        count = self._write_numbers("done", rows, 0)
        self._replay("head", count, lambda: self._head(count))
        return self._logits[: len(rows), : self.model.config.vocab]

    def begin(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Begin the next tokens [B] of these slots, one position further."""
        if self._alone is not None:
            self._alone[1].ids.copy_(tokens)
            return
        count = self._write_numbers("ended", slots, self.slots)
        self._choices[: len(slots), 0] = tokens
        self._begin(count)

    def next_tokens(self, rows: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Choose and begin the next tokens of rows of the launch, in their slots, as one graph: tokens and their
        log-probabilities [B, 2], valid until the next launch."""
        count = self._write_numbers("done", rows, 0)
        self._write_numbers("ended", slots, self.slots)
        self._replay("choice", count, lambda: self._next_tokens(count))
        return self._choices[: len(rows)]

    def token(self, slot: int, budget: int) -> Tensor:
        """Logits [1, V] of the next token of a slot, if no other runs, after all its passes."""
        row = self._enter_alone(slot, budget)
        row.replay(greedy=False)
        return row.logits[:, : self.model.config.vocab]

    def follow(self, slot: int, budget: int, position: int) -> HostCopy:
        """Run a token at this position as `token` does, and begin the most likely next one: it and its
        log-probability [1, 2], on their way to the host. The next token does not wait for this copy."""
        row = self._enter_alone(slot, budget)
        row.replay(greedy=True)
        # Later tokens of this row do not overwrite these. Another row that runs alone does, and waits
        # (_enter_alone).
        with self._copy_stream.after_decoding():
            return HostCopy(torch.stack((row.chosen[position].float(), row.logprobs[position]), 1))

    def draw(self, slot: int, budget: int) -> Tensor:
        """Run a token as `token` does, and begin the next one, drawn: it and its log-probability [1, 2]."""
        row = self._enter_alone(slot, budget)
        row.replay(greedy=False)
        self._write_numbers("ended", [slot], self.slots)
        self._choose(row.logits, row.lengths, alone=True)
        row.ids.copy_(self._choices[:1, 0])
        return self._choices[:1]

    def last_logits(self, rows: int) -> Tensor:
        """The logits [B, V] from which so many tokens were chosen last. Another launch overwrites them."""
        logits = self._logits if self._alone is None else self._alone[1].logits
        return logits[:rows, : self.model.config.vocab]

    def _enter_alone(self, slot: int, budget: int) -> SingleRow:
        """The graph of a slot that runs alone, after it has taken over the slot's state."""
        if self._alone is None or self._alone[0] != slot:
            self._rejoin()
            if budget not in self._single_rows:
                self._single_rows[budget] = SingleRow(self.model, budget, self._weights, self._scratch, self._pool)
            row = self._single_rows[budget]
            self._copy_stream.join()  # an earlier row's tokens, which this one overwrites, may still be copied
            row.enter(
                self._ids[slot], self._lengths[slot], self._pages[slot], self._table[slot], self._injection[slot]
            )
            self._alone = slot, row
        return self._alone[1]

    def _rejoin(self) -> None:
        """Put the state of a slot that ran alone back among the others."""
        if self._alone is not None:
            slot, row = self._alone
            self._ids[slot], self._lengths[slot], self._loops[slot] = row.ids[0], row.lengths[0], 0
            self._alone = None

    def _write_numbers(self, name: str, numbers: Sequence[int], fill: int) -> int:
        """Write numbers to the device, unless they are there, filled up to a power of two; that power."""
        count: int = triton.next_power_of_2(len(numbers))
        if self._written.get(name) != tuple(numbers):
            self._written.pop(name, None)  # a fault while they are written must not leave them noted
            filled = [*numbers, *[fill] * (count - len(numbers))]
            self._numbers[name][:count] = to_device_async(filled, self.device)
            self._written[name] = tuple(numbers)
        return count

    def _pass(self, rows: int) -> None:
        """Launch one pass of as many rows as `order` has slots."""
        config, blocks = self.model.config, self.model.config.blocks
        sizes = {"D": config.width, "L": config.loops, "K": blocks}
        widest = {"BLOCK_D": triton.next_power_of_2(config.width), "EPSILON": EPSILON}
        places = self.model.places
        kernels.enter_kernel[(rows,)](
            self._numbers["order"],
            self._loops,
            self._ids,
            self._lengths,
            self._weights.embedding,
            places.weight if places is not None else self._x,
            self._table,
            self._injection,
            self._x,
            self._normed,
            **sizes,
            **widest,
            LEARNED=places is not None,
            INJECTED=config.inject == "gated",
        )
        scratch = self._scratch
        normed, qkv, mixed = self._normed[:rows], scratch.qkv[:rows], scratch.mixed[:rows]
        wide, change = scratch.wide[:rows], self._change[:rows]

        def add(gate: int, scale: int) -> None:
            kernels.gated_norm_kernel[(rows,)](
                self._numbers["order"],
                self._loops,
                self._table,
                self._final,
                self._x,
                change,
                normed,
                self.slots,
                **sizes,
                **widest,
                GATE=gate,
                SCALE=scale,
            )

        slots = (self._numbers["order"], self._loops, self._lengths, self._pages)
        for block in range(blocks):
            to_qkv, out, up, down = (weight.t() for weight in self._weights.blocks[block])
            torch.mm(normed, to_qkv, out=qkv)
            launch_attention(config, scratch, self._pool, rows, block, *slots, PDL=False)
            torch.mm(mixed, out, out=change)
            add(4 * block, 4 * block + 3)
            torch.mm(normed, up, out=wide)
            kernels.gelu_kernel[(triton.cdiv(wide.numel(), 1024),)](wide, wide.numel(), BLOCK_N=1024)
            torch.mm(wide, down, out=change)
            add(4 * block + 1, 4 * block + 6)  # the next block's first scale

    def _head(self, rows: int) -> None:
        ended = self._normed[self._numbers["done"][:rows]]
        self._logits[:rows].copy_(torch.mm(ended, self._weights.head.t()))

    def _next_tokens(self, rows: int) -> None:
        self._head(rows)
        self._choose(self._logits[:rows], self._lengths, alone=False)
        self._begin(rows)

    def _choose(self, logits: Tensor, lengths: Tensor, alone: bool) -> None:
        vocab = self.model.config.vocab
        block = min(4096, triton.next_power_of_2(vocab))
        kernels.choice_kernel[(len(logits),)](
            logits,
            self._numbers["ended"],
            lengths,
            self._rules,
            self._seeds,
            self._choices,
            logits.stride(0),
            vocab,
            ALONE=alone,
            BLOCK_N=block,
            num_warps=max(1, block // 256),
        )

    def _begin(self, rows: int) -> None:
        kernels.begin_kernel[(rows,)](
            self._numbers["ended"], self._choices, self._ids, self._lengths, self._loops, self.slots
        )

    def _replay(self, name: str, rows: int, launch: Callable[[], None]) -> None:
        if self.device.type != "cuda":  # Triton's interpreter
            launch()
            return
        if (name, rows) not in self._graphs:
            self._graphs[name, rows] = record(self.device, launch, [self._x, self._loops, self._ids, self._lengths])
        self._graphs[name, rows].replay()
