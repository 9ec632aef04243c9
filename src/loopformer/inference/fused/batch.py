"""Rows of unlike trajectories on a GPU, in passes that all of them share.

batch = SharedBatch(model, slots=64)                # with memory for all they may write, if there is so much
batch.fill(3, pages, keys, length, condition, draw) # slot 3 has a prompt that was run
batch.start({3: (token, length)})                   # its next token, at that place, goes through its first pass
batch.run([3, 5, 9])                                # one pass of each slot, whichever loop it stands at
logits = batch.logits([1])                          # of those whose last pass it was: the second, slot 5
batch.begin([5], tokens)                            # their next tokens
choices = batch.next_tokens([1], [5])               # or all three in one: tokens and their log-probabilities [B, 2]
logits = batch.token(3, budget=8)                   # or a whole token of a slot that runs alone
token, logprob = batch.follow(3, budget=8, place=20)  # and the most likely one after it, which comes next
choices = batch.draw(3, budget=8)                   # or the one that is drawn

The weights of all passes are the same, so a pass over rows at different loops reads them once: a mixture of budgets
costs what its passes cost, and rows come and go between passes. What differs from row to row lies on the device and
is looked up there by slot and loop: modulations, the place of the token, and pages of keys and values. Launches are
recorded as CUDA graphs, one for each power of two of rows; nothing here waits for the device. A row that runs alone
goes through kernels that read each weight once (graphs.py), all its passes in one graph.

Memory is given out in pages of PAGE tokens of one loop, so what a row needs follows from its budget and its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
from torch import Tensor

from loopformer.device import available_bytes, sent
from loopformer.errors import require
from loopformer.inference.fused import kernels
from loopformer.inference.fused.graphs import (
    LoneRow,
    PromptGraphs,
    allocate_scratch,
    fingerprint,
    launch_attention,
    record,
    wait_for,
    weights_by_rows,
)
from loopformer.inference.sampling import GREEDY, Draw, hashed_seed, rule
from loopformer.model import LoopedLM
from loopformer.model.block import EPSILON
from loopformer.model.cache import RowKeys
from loopformer.model.conditioning import Condition

PAGE = 64  # tokens
SHARE = 0.8  # of the memory that is free, for keys and values at most
PROMPTS = "prompts"  # the stream on which they run
COPIES = "copies of a lone row"  # the stream on which its tokens go to the host


def page_bytes(model: LoopedLM) -> int:
    """Keys and values of PAGE tokens in one loop."""
    config = model.config
    return config.blocks * 2 * PAGE * config.width * model.tokens.weight.element_size()


def pages_of(tokens: int, budget: int) -> int:
    """Pages that so many tokens take along a trajectory of so many loops."""
    return budget * -(-tokens // PAGE)


class SharedBatch:
    """The memory of some slots, and a pass of any of them; see the module's docstring."""

    def __init__(self, model: LoopedLM, slots: int, memory: int | None = None, pool: Tensor | None = None) -> None:
        """`memory`: bytes of keys and values, by default what all slots may need, if there is so much. `pool` is
        memory of another batch that nobody uses any more."""
        config, like = model.config, model.tokens.weight.detach()
        memory = int(SHARE * available_bytes(like.device)) if memory is None else memory
        pages = min(slots * pages_of(config.context, config.loops), memory // page_bytes(model))
        require(pages >= 1, f"{memory:,} bytes hold no page of keys, which takes {page_bytes(model):,}.")
        self.model, self.slots, self.page_count = model, slots, pages
        self.prompts = PromptGraphs(model)
        self._weights = weights_by_rows(model)
        self._made_for = fingerprint(model)
        self.device = like.device
        assert model.final_norm.weight is not None
        self._final = model.final_norm.weight.detach()

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # One slot and one page more: the last ones are nobody's, and fill up a launch.
        rows, loops = slots + 1, config.loops
        self._ids, self._lengths, self._loops = integers(rows), integers(rows), integers(rows)
        self._x = torch.zeros(rows, config.width, device=like.device)
        # In fp32, as a norm's weight less 1 is kept there, too.
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
        greedy = [rule(GREEDY.sampling, config.vocab)] * rows
        self._rules = torch.tensor(greedy, dtype=torch.float64, device=like.device)
        self._seeds = integers(rows)
        self._scratch = allocate_scratch(model, most)
        self._normed, self._change = like.new_zeros(most, config.width), like.new_zeros(most, config.width)
        self._logits = torch.zeros(most, config.vocab_rows, device=like.device)
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._lone_rows: dict[int, LoneRow] = {}  # by budget
        self._alone: tuple[int, LoneRow] | None = None  # the slot that runs alone, and where it does

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that the graphs were recorded with."""
        return fingerprint(self.model) == self._made_for

    def renewed(self) -> SharedBatch:
        """This batch, or an empty one in its memory if the model's weights have changed."""
        return self if self.is_current else SharedBatch(self.model, self.slots, self.nbytes, self._pool)

    def leave(self) -> None:
        """What comes after it waits for prompts that are under way: they write to memory that may be given away."""
        wait_for(PROMPTS, self.device)

    @property
    def nbytes(self) -> int:
        """Keys and values that it has room for."""
        return self.page_count * page_bytes(self.model)

    # What rows bring with them.

    def fill(
        self,
        slot: int,
        pages: Sequence[int],
        keys: RowKeys,
        length: int,
        condition: Condition,
        draw: Draw = GREEDY,
    ) -> None:
        """Give a slot the keys of `length` tokens, what its passes are told, how its tokens are drawn (what repeats
        is left to who asks for `logits`), and pages for all it may write: as many for each loop."""
        budget = len(keys.loops)
        if self._alone is not None and self._alone[0] == slot:
            self._alone = None
        taken = sent(pages, self.device, torch.int32).view(budget, -1)
        self._pages[slot].fill_(self.page_count)
        self._pages[slot, :budget, : taken.shape[1]] = taken
        self._table[slot, :budget] = self._modulation(condition, budget)
        if condition.injection is not None:
            self._injection[slot, :budget] = condition.injection
        self._rules[slot] = sent(rule(draw.sampling, self.model.config.vocab), self.device, torch.float64)
        self._seeds[slot] = sent([hashed_seed(draw.seed)], self.device)[0]
        used = -(-length // PAGE)
        every = torch.stack([loop[:, :, :, :length] for loop in keys.loops])
        every = torch.nn.functional.pad(every, (0, 0, 0, used * PAGE - length))  # [M, K, 2, H, tokens, W]
        cut = every.view(*every.shape[:4], used, PAGE, -1)
        self._pool[taken[:, :used].long()] = cut.permute(0, 4, 1, 2, 3, 5, 6).to(self._pool.dtype)

    def _modulation(self, condition: Condition, budget: int) -> Tensor:
        """[M, K, 4, D]; norms with weights of their own are scales less 1 of branches that are not gated."""
        if condition.modulation is not None:
            return condition.modulation.float()
        table = torch.zeros_like(self._table[0, :budget])
        table[:, :, :2] = 1
        for number, block in enumerate(self.model.stack.each()):
            for place, norm in ((2, block.norm_1), (3, block.norm_2)):
                assert norm.weight is not None
                table[:, number, place] = norm.weight.detach().float() - 1
        return table

    def start(self, tokens: Mapping[int, tuple[int, int]]) -> None:
        """Slots whose next pass is their first one: the token of each, and its place."""
        self._rejoin()
        slots = sent(list(tokens), self.device)
        state = sent(list(tokens.values()), self.device)  # [B, 2]
        self._ids[slots], self._lengths[slots], self._loops[slots] = state[:, 0], state[:, 1], 0

    # Launches.

    def run(self, slots: Sequence[int], passes: int = 1) -> None:
        """So many passes of each of these slots."""
        self._rejoin()
        count = self._put("order", slots, self.slots)

        def two_passes() -> None:
            self._pass(count)
            self._pass(count)

        for _ in range(passes // 2):  # two in one graph are half the work for the host
            self._replay("two passes", count, two_passes)
        if passes % 2:
            self._replay("pass", count, lambda: self._pass(count))

    def logits(self, rows: Sequence[int]) -> Tensor:
        """After the last pass of these rows of the launch, counted as they were given to `run`: logits [B, V]."""
        count = self._put("done", rows, 0)
        self._replay("head", count, lambda: self._head(count))
        return self._logits[: len(rows), : self.model.config.vocab]

    def begin(self, slots: Sequence[int], tokens: Tensor) -> None:
        """The next token of these slots [B]."""
        if self._alone is not None:
            self._alone[1].ids.copy_(tokens)
            return
        count = self._put("ended", slots, self.slots)
        self._choices[: len(slots), 0] = tokens
        self._begin(count)

    def next_tokens(self, rows: Sequence[int], slots: Sequence[int]) -> Tensor:
        """What follows the last pass of rows, in whose slots it comes next: tokens and their log-probabilities
        [B, 2], which the next launch writes over. All of it is one graph."""
        count = self._put("done", rows, 0)
        self._put("ended", slots, self.slots)
        self._replay("choice", count, lambda: self._next_tokens(count))
        return self._choices[: len(rows)]

    def token(self, slot: int, budget: int) -> Tensor:
        """All passes of the next token of a slot, if no other runs: logits [1, V]."""
        row = self._left_alone(slot, budget)
        row.replay(greedy=False)
        return row.logits[:, : self.model.config.vocab]

    def follow(self, slot: int, budget: int, place: int) -> tuple[Tensor, Tensor]:
        """The same of a token at this place; then the most likely one [1] comes next, with this log-probability
        [1]. The row does not write over them; another that comes to be alone waits for the stream COPIES."""
        row = self._left_alone(slot, budget)
        row.replay(greedy=True)
        return row.chosen[place], row.logprobs[place]

    def draw(self, slot: int, budget: int) -> Tensor:
        """The same where the next token is drawn: that and its log-probability [1, 2], as of `next_tokens`."""
        row = self._left_alone(slot, budget)
        row.replay(greedy=False)
        self._put("ended", [slot], self.slots)
        self._choose(row.logits, row.lengths, alone=True)
        row.ids.copy_(self._choices[:1, 0])
        return self._choices[:1]

    def _left_alone(self, slot: int, budget: int) -> LoneRow:
        if self._alone is None or self._alone[0] != slot:
            self._rejoin()
            if budget not in self._lone_rows:
                self._lone_rows[budget] = LoneRow(self.model, budget, self._weights, self._scratch, self._pool)
            row = self._lone_rows[budget]
            wait_for(COPIES, self.device)  # it writes its tokens where those of an earlier one were
            row.enter(
                self._ids[slot], self._lengths[slot], self._pages[slot], self._table[slot], self._injection[slot]
            )
            self._alone = slot, row
        return self._alone[1]

    def _rejoin(self) -> None:
        """A slot that ran alone goes on among others."""
        if self._alone is not None:
            slot, row = self._alone
            self._ids[slot], self._lengths[slot], self._loops[slot] = row.ids[0], row.lengths[0], 0
            self._alone = None

    def _put(self, name: str, numbers: Sequence[int], fill: int) -> int:
        """Write numbers to the device, unless they are there, and fill them up to a power of two: to how many."""
        count: int = triton.next_power_of_2(len(numbers))
        if self._written.get(name) != tuple(numbers):
            self._written.pop(name, None)  # not known while it is being written
            filled = [*numbers, *[fill] * (count - len(numbers))]
            self._numbers[name][:count] = sent(filled, self.device)
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


def paired(tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Tokens and their log-probabilities, each [B], as one tensor [B, 2]; fp32 holds every id exactly."""
    return torch.stack((tokens.float(), logprobs), 1)
