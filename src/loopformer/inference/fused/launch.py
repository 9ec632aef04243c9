"""The device's side of continuous batching: slots, pages of keys and values, and the launches of every loop.

batch = DecodeBatch(model, slots=64)                 # with memory for all that they may write, if there is so much
batch.fill(3, pages, kv, length, condition, draw)    # slot 3 gets the keys and values of a prompt
batch.set_tokens_from_host({3: (token, position)})   # its next token is at its first loop

Sequences share launches:
batch.run([3, 5, 9], loops=2)                        # two loops of each slot, whichever loop each is at
logits = batch.logits([1])                           # row 1 of that launch is slot 5, which has run its last loop
batch.set_tokens_from_device([5], tokens)            # its next token
choices = batch.next_tokens([1], [5])                # or both in one graph, with a token that the device chooses

A sequence that runs alone has all loops of a token in one graph (single_row.py):
logits = batch.single_row_logits(3, budget=8)        # then set_tokens_from_device
choices = batch.single_row_sampled(3, budget=8)      # or the device samples the next token, and sets it
copy = batch.single_row_greedy(3, 8, position=20)    # or the most likely one, which runs while it is copied

A slot is a sequence's index on the device. A row is its index within one launch. All loops have the same weights,
so a launch over rows at different loops reads the weights once, and the cost is the number of loops, whatever the
mix of budgets. Sequences come and go between loops. What differs between them lies on the device and is looked up
there by slot and loop: modulations, the position of the token, and its pages. So a launch is recorded as one CUDA
graph for each power of two of rows. Nothing here waits for the device. The streams are drawn in streams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
from torch import Tensor

from loopformer.cuda_graphs import record
from loopformer.device import available_bytes, to_device_async
from loopformer.errors import require
from loopformer.inference.fused import kernels
from loopformer.inference.fused.prefill import PromptGraphs
from loopformer.inference.fused.single_row import SingleRow, allocate_scratch, launch_attention
from loopformer.inference.fused.streams import HostCopy, SideStream
from loopformer.inference.fused.weights import weights_by_rows
from loopformer.inference.kv_cache import fingerprint, page_bytes
from loopformer.inference.request import Draw
from loopformer.inference.sampling import GREEDY, hashed_seed, kernel_settings
from loopformer.model.block import EPSILON
from loopformer.model.cache import SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM

GPU_PAGE_TOKENS = 64
MAX_MEMORY_SHARE = 0.8  # of the free memory, for keys and values
GATE_1, GATE_2, SCALE_1, SCALE_2 = range(4)  # the vectors of a block's modulation


class DecodeBatch:
    """The slots of a device, their pages, and the launches over any of them.

    All methods but `read` launch on the current stream, the decode stream, in the order of the calls. `read` and
    `prompts.extend` run on the prompt stream, inside `prompt_stream.after_decode()`, so they see every `fill`
    that was queued before.

    Pages are written only on the decode stream: by `fill`, and by the loops of the slot that they were given to.
    They may be freed while a prompt still reads them. Their next owner first writes them in its `fill`, after its
    own prompt, which was queued later on the same stream, has finished. A second prompt stream would break this. A
    sequence that is filled without a prompt of its own on that stream needs `wait_for_prompts` first.
    """

    def __init__(
        self, model: LoopedLM, slots: int, memory: int | None = None, kv_pages: Tensor | None = None
    ) -> None:
        """`memory`: bytes of keys and values, by default what all slots may need, if there is so much. `kv_pages`:
        the memory of a batch that is no longer used."""
        config, like = model.config, model.tokens.weight.detach()
        memory = int(MAX_MEMORY_SHARE * available_bytes(like.device)) if memory is None else memory
        self.page_tokens, self._page_bytes = GPU_PAGE_TOKENS, page_bytes(model, GPU_PAGE_TOKENS)
        max_pages = -(-config.context // GPU_PAGE_TOKENS)  # of one slot and loop
        pages = min(slots * config.loops * max_pages, memory // self._page_bytes)
        require(pages >= 1, f"{memory:,} bytes hold no page of keys, which takes {self._page_bytes:,}.")
        self.model, self.slots, self.page_count = model, slots, pages
        self.prompts = PromptGraphs(model)
        self.prompt_stream = SideStream("prompts", like.device)
        self._copy_stream = SideStream("copies to the host", like.device)  # of a row that runs alone
        self._weights = weights_by_rows(model)
        self.made_for = fingerprint(model)
        self.device = like.device
        assert model.final_norm.weight is not None
        self._final_norm = model.final_norm.weight.detach()

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # State of each slot. The last slot and the last page are spare: the padding rows of a launch use them.
        # No other row reads what they write.
        all_slots, loops = slots + 1, config.loops
        self._ids, self._positions, self._loops = integers(all_slots), integers(all_slots), integers(all_slots)
        self._x = torch.zeros(all_slots, config.width, device=like.device)
        # In fp32, as it also holds norm weights less 1, which bf16 would round.
        self._modulations = torch.zeros(all_slots, loops, config.blocks, 4, config.width, device=like.device)
        self._injection = like.new_zeros(all_slots, loops, config.width) if config.inject == "gated" else self._x
        self._page_tables = torch.full((all_slots, loops, max_pages), pages, dtype=torch.int32, device=like.device)
        shape = (pages + 1, config.blocks, 2, config.heads, GPU_PAGE_TOKENS, config.head_width)
        needed = (shape, like.dtype, like.device)
        if kv_pages is None or (kv_pages.shape, kv_pages.dtype, kv_pages.device) != needed:
            kv_pages = like.new_zeros(shape)
        self._kv_pages = kv_pages
        greedy = [kernel_settings(GREEDY.sampling, config.vocab)] * all_slots
        self._settings = torch.tensor(greedy, dtype=torch.float64, device=like.device)  # of sampling
        self._seeds = integers(all_slots)

        # Buffers of a launch, indexed by row.
        max_rows = triton.next_power_of_2(slots)
        self._indices = {name: integers(max_rows) for name in ("active_slots", "finished_rows", "finished_slots")}
        self._uploaded: dict[str, tuple[int, ...]] = {}  # what `_indices` holds, without its padding
        self._choices = torch.zeros(max_rows, 2, device=like.device)
        self._scratch = allocate_scratch(model, max_rows)
        self._normed, self._change = like.new_zeros(max_rows, config.width), like.new_zeros(max_rows, config.width)
        self._logits = torch.zeros(max_rows, config.vocab_rows, device=like.device)

        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._single_rows: dict[int, SingleRow] = {}  # by budget
        # The slot that runs alone. While it does, its token and position are in the SingleRow, not in the slot.
        self._single_row: tuple[int, SingleRow] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that the graphs were recorded with."""
        return fingerprint(self.model) == self.made_for

    def renewed(self) -> DecodeBatch:
        """This batch, or an empty one in its memory if the model's weights have changed.

        Call `wait_for_prompts` of the old batch before the new one is filled: prompts may still read its pages.
        """
        return self if self.is_current else DecodeBatch(self.model, self.slots, self.nbytes, self._kv_pages)

    def wait_for_prompts(self) -> None:
        """Let later work of the decode stream wait for prompts that still run.

        Call it before the batch is lent again or freed: prompts read its pages, and write buffers whose memory the
        decode stream would get. Copies to the host are not waited for. They only read, and nobody wants what is
        still on the way.
        """
        self.prompt_stream.decode_waits()

    @property
    def nbytes(self) -> int:
        """The size of all pages that may be given to slots."""
        return self.page_count * self._page_bytes

    # Slots, on the decode stream.

    def fill(
        self,
        slot: int,
        pages: Sequence[int],
        kv: SequenceKV,
        length: int,
        condition: Condition,
        draw: Draw = GREEDY,
        start: int = 0,
    ) -> None:
        """Give a slot to a sequence, with the keys and values of its first `length` tokens.

        `pages`: for all that the sequence may write, those of its first loop, then as many of the second, and so
        on. They hold the first `start` tokens already, a multiple of the page size. `draw`: how the device samples.
        A repetition penalty is not applied here: the host applies it to `logits`.

        `kv` and `condition` may come from the prompt stream, if the host or the decode stream has waited for them.
        They may be freed after `prompt_stream.wait_for_decode()`.
        """
        budget = len(kv.loops)
        if self._single_row is not None and self._single_row[0] == slot:
            self._single_row = None  # its former sequence's token must not be written back into the slot
        page_table = to_device_async(pages, self.device, torch.int32).view(budget, -1)  # [M, N]
        self._page_tables[slot].fill_(self.page_count)
        self._page_tables[slot, :budget, : page_table.shape[1]] = page_table
        self._modulations[slot, :budget] = self._modulation(condition, budget)
        if condition.injection is not None:
            self._injection[slot, :budget] = condition.injection
        self._settings[slot] = to_device_async(
            kernel_settings(draw.sampling, self.model.config.vocab), self.device, torch.float64
        )
        self._seeds[slot] = to_device_async([hashed_seed(draw.seed)], self.device)[0]
        size = self.page_tokens
        first, end = start // size, -(-length // size)  # the pages to write
        if first == end:
            return
        new = torch.stack([loop[:, :, :, start:length] for loop in kv.loops])
        new = torch.nn.functional.pad(new, (0, 0, 0, end * size - length))  # [M, K, 2, H, tokens, W]
        by_page = new.view(*new.shape[:4], end - first, size, -1).permute(0, 4, 1, 2, 3, 5, 6)
        self._kv_pages[page_table[:, first:end].long()] = by_page.to(self._kv_pages.dtype)

    def read(self, pages: Sequence[Sequence[int]]) -> list[Tensor]:
        """The keys and values [K, 2, H, tokens, W] in these pages, for each loop. Call it on the prompt stream."""
        page_table = to_device_async(pages, self.device)  # [M, N]
        by_page = self._kv_pages[page_table].permute(0, 2, 3, 4, 1, 5, 6)  # [M, K, 2, H, N, PAGE, W]
        return list(by_page.flatten(4, 5))

    def _modulation(self, condition: Condition, budget: int) -> Tensor:
        """Modulations [M, K, 4, D]; of a model without any, gates of 1 and its norm weights less 1 as scales."""
        if condition.modulation is not None:
            return condition.modulation.float()
        modulation = torch.zeros_like(self._modulations[0, :budget])
        modulation[:, :, :SCALE_1] = 1  # both gates
        for number, block in enumerate(self.model.stack.typed_blocks()):
            for scale, norm in ((SCALE_1, block.norm_1), (SCALE_2, block.norm_2)):
                assert norm.weight is not None
                modulation[:, number, scale] = norm.weight.detach().float() - 1
        return modulation

    def set_tokens_from_host(self, tokens: Mapping[int, tuple[int, int]]) -> None:
        """Set the next token of each slot, and its position. They are at their first loop."""
        self._unload_single_row()
        slots = to_device_async(list(tokens), self.device)
        state = to_device_async(list(tokens.values()), self.device)  # [B, 2]
        self._ids[slots], self._positions[slots], self._loops[slots] = state[:, 0], state[:, 1], 0

    # Launches that rows share, on the decode stream.

    def run(self, slots: Sequence[int], loops: int = 1) -> None:
        """Run so many loops of each of these slots. None of them may have fewer loops left."""
        self._unload_single_row()
        rows = self._upload_indices("active_slots", slots, self.slots)

        def two_loops() -> None:
            self._launch_loop(rows)
            self._launch_loop(rows)

        for _ in range(loops // 2):  # two loops in one graph: half as many replays from the host
            self._replay("two loops", rows, two_loops)
        if loops % 2:
            self._replay("loop", rows, lambda: self._launch_loop(rows))

    def logits(self, finished_rows: Sequence[int]) -> Tensor:
        """Logits [B, V] of rows that ran their last loop, counted as their slots were given to `run`.

        Call it right after that `run`, as the next launch overwrites the hidden states. The logits are valid until
        the next call. These slots must not run until `set_tokens_from_device`: they have no loop left.
        """
        rows = self._upload_indices("finished_rows", finished_rows, 0)
        self._replay("head", rows, lambda: self._launch_head(rows))
        return self._logits[: len(finished_rows), : self.model.config.vocab]

    def set_tokens_from_device(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Set the next tokens [B] of these slots, one position further and at their first loop. Call it after
        `logits` or `single_row_logits`."""
        if self._single_row is not None:  # `single_row_logits` has advanced the position, and counts no loops
            self._single_row[1].ids.copy_(tokens)
            return
        rows = self._upload_indices("finished_slots", slots, self.slots)
        self._choices[: len(slots), 0] = tokens
        self._launch_set_tokens(rows)

    def next_tokens(self, finished_rows: Sequence[int], finished_slots: Sequence[int]) -> Tensor:
        """Choose the next tokens of rows that ran their last loop, and set them in their slots, as one graph.

        As with `logits`, call it right after `run`. Returns tokens and log-probabilities [B, 2], valid until the
        next choice.
        """
        rows = self._upload_indices("finished_rows", finished_rows, 0)
        self._upload_indices("finished_slots", finished_slots, self.slots)
        self._replay("choice", rows, lambda: self._launch_next_tokens(rows))
        return self._choices[: len(finished_rows)]

    # Launches of a sequence that runs alone, on the decode stream. Each runs all loops of the slot's token.

    def single_row_logits(self, slot: int, budget: int) -> Tensor:
        """Logits [1, V] of the next token, valid until the next call. Then call `set_tokens_from_device`."""
        row = self._load_single_row(slot, budget)
        row.replay(greedy=False)
        return row.logits[:, : self.model.config.vocab]

    def single_row_greedy(self, slot: int, budget: int, position: int) -> HostCopy:
        """Run the token at this position and set the most likely next one: it and its log-probability [1, 2], on
        their way to the host. The next token does not wait for this copy."""
        row = self._load_single_row(slot, budget)
        row.replay(greedy=True)
        # `chosen` has an entry for each position, so later tokens of this sequence do not overwrite the one that is
        # copied. Another sequence does, so `_load_single_row` waits for the copies first.
        with self._copy_stream.after_decode():
            return HostCopy(torch.stack((row.chosen[position].float(), row.logprobs[position]), 1))

    def single_row_sampled(self, slot: int, budget: int) -> Tensor:
        """Sample and set the next token: it and its log-probability [1, 2], valid until the next choice."""
        row = self._load_single_row(slot, budget)
        row.replay(greedy=False)
        self._upload_indices("finished_slots", [slot], self.slots)
        self._launch_choice(row.logits, row.positions, single_row=True)
        row.ids.copy_(self._choices[:1, 0])
        return self._choices[:1]

    def last_logits(self, rows: int) -> Tensor:
        """The logits [B, V] from which so many tokens were chosen last. Another launch overwrites them."""
        logits = self._logits if self._single_row is None else self._single_row[1].logits
        return logits[:rows, : self.model.config.vocab]

    def _load_single_row(self, slot: int, budget: int) -> SingleRow:
        """The graphs of a slot that runs alone, after they have taken over the slot's state."""
        if self._single_row is None or self._single_row[0] != slot:
            self._unload_single_row()
            if budget not in self._single_rows:
                self._single_rows[budget] = SingleRow(
                    self.model, budget, self._weights, self._scratch, self._kv_pages
                )
            row = self._single_rows[budget]
            self._copy_stream.decode_waits()  # otherwise this row would overwrite tokens that are being copied
            row.load_slot(
                self._ids[slot],
                self._positions[slot],
                self._page_tables[slot],
                self._modulations[slot],
                self._injection[slot],
            )
            self._single_row = slot, row
        return self._single_row[1]

    def _unload_single_row(self) -> None:
        """Write the token and position of a slot that ran alone back, before the slot joins a launch of others."""
        if self._single_row is not None:
            slot, row = self._single_row
            self._ids[slot], self._positions[slot], self._loops[slot] = row.ids[0], row.positions[0], 0
            self._single_row = None

    # The kernels of each launch. Graphs record these, so what changes between replays is read on the device.

    def _upload_indices(self, name: str, indices: Sequence[int], padding: int) -> int:
        """Upload indices padded to a power of two, unless the device has them, and return the padded length."""
        length: int = triton.next_power_of_2(len(indices))
        if self._uploaded.get(name) != tuple(indices):
            # Forgotten first: after a fault in the upload the next call must not take the old indices for uploaded.
            self._uploaded.pop(name, None)
            padded = [*indices, *[padding] * (length - len(indices))]
            self._indices[name][:length] = to_device_async(padded, self.device)
            self._uploaded[name] = tuple(indices)
        return length

    def _launch_loop(self, rows: int) -> None:
        """Launch one loop of the first `rows` entries of `active_slots`."""
        config, blocks = self.model.config, self.model.config.blocks
        sizes = {"D": config.width, "L": config.loops, "K": blocks}
        widest = {"BLOCK_D": triton.next_power_of_2(config.width), "EPSILON": EPSILON}
        learned = self.model.places  # position embeddings; None with rotary positions
        kernels.begin_loop_kernel[(rows,)](
            self._indices["active_slots"],
            self._loops,
            self._ids,
            self._positions,
            self._weights.embedding,
            learned.weight if learned is not None else self._x,
            self._modulations,
            self._injection,
            self._x,
            self._normed,
            **sizes,
            **widest,
            LEARNED=learned is not None,
            INJECTED=config.inject == "gated",
        )
        scratch = self._scratch
        normed, qkv, mixed = self._normed[:rows], scratch.qkv[:rows], scratch.mixed[:rows]
        wide, change = scratch.wide[:rows], self._change[:rows]

        def add_and_norm(gate: int, scale: int) -> None:
            kernels.gated_norm_kernel[(rows,)](
                self._indices["active_slots"],
                self._loops,
                self._modulations,
                self._final_norm,
                self._x,
                change,
                normed,
                self.slots,
                **sizes,
                **widest,
                GATE=gate,
                SCALE=scale,
            )

        for block in range(blocks):
            to_qkv, out, up, down = (weight.t() for weight in self._weights.blocks[block])
            torch.mm(normed, to_qkv, out=qkv)
            launch_attention(
                config,
                scratch,
                self._kv_pages,
                rows,
                block,
                active_slots=self._indices["active_slots"],
                loops=self._loops,
                positions=self._positions,
                page_tables=self._page_tables,
                PDL=False,
            )
            torch.mm(mixed, out, out=change)
            add_and_norm(4 * block + GATE_1, 4 * block + SCALE_2)
            torch.mm(normed, up, out=wide)
            kernels.gelu_kernel[(triton.cdiv(wide.numel(), 1024),)](wide, wide.numel(), BLOCK_N=1024)
            torch.mm(wide, down, out=change)
            # The scale is that of the next block. After the last block there is none: the kernel then takes the
            # final norm's weight, and counts the loop. So this launch must be the last of a loop.
            add_and_norm(4 * block + GATE_2, 4 * (block + 1) + SCALE_1)

    def _launch_head(self, rows: int) -> None:
        """Logits of the first `rows` entries of `finished_rows`."""
        finished = self._normed[self._indices["finished_rows"][:rows]]
        self._logits[:rows].copy_(torch.mm(finished, self._weights.head.t()))

    def _launch_next_tokens(self, rows: int) -> None:
        # In this order: the choice needs the position of the token that was run. `_launch_set_tokens` advances it.
        self._launch_head(rows)
        self._launch_choice(self._logits[:rows], self._positions, single_row=False)
        self._launch_set_tokens(rows)

    def _launch_choice(self, logits: Tensor, positions: Tensor, single_row: bool) -> None:
        """Choose a token for each row of logits, by the settings of its entry in `finished_slots`."""
        vocab = self.model.config.vocab
        block = min(4096, triton.next_power_of_2(vocab))
        kernels.choice_kernel[(len(logits),)](
            logits,
            self._indices["finished_slots"],
            positions,
            self._settings,
            self._seeds,
            self._choices,
            logits.stride(0),
            vocab,
            SINGLE_ROW=single_row,
            BLOCK_N=block,
            num_warps=max(1, block // 256),
        )

    def _launch_set_tokens(self, rows: int) -> None:
        kernels.set_token_kernel[(rows,)](
            self._indices["finished_slots"], self._choices, self._ids, self._positions, self._loops, self.slots
        )

    def _replay(self, name: str, rows: int, launch: Callable[[], None]) -> None:
        """Replay the graph of a launch, which is recorded at its first use."""
        if self.device.type != "cuda":  # Triton's interpreter
            launch()
            return
        if (name, rows) not in self._graphs:
            # The recording's own run also writes buffers and the keys of the present tokens. The replay writes them
            # again before anything reads them.
            self._graphs[name, rows] = record(
                self.device, launch, [self._x, self._loops, self._ids, self._positions]
            )
        self._graphs[name, rows].replay()
