"""Runners execute prefill and decode: the protocol that the engine and the scheduler know, and a runner for any
device.

runner = PlainRunner(model, rows=16)               # fused/runner.py has the runner for GPUs
runner.start_prefill(sequences)                    # run prompts, or one chunk of a long prompt
choices = runner.finish_prefill(sequences)         # the first token of each, which has a slot from now on
choices = runner.decode(sequences)                 # one more token each
runner.free_except(running, waiting)               # the slots and blocks of all other sequences are free again

The scheduler chooses the sequences. A failed step writes only past `cached_length` of a sequence, so the KV cache
stays valid for all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loopformer.device import to_device_async
from loopformer.errors import require
from loopformer.inference.kv_cache import BlockManager, KVBlock, SlotPool, fingerprint, page_bytes, slot_bytes
from loopformer.inference.request import Choice
from loopformer.inference.sampling import sample
from loopformer.inference.sequence import Sequence
from loopformer.model.cache import KVCache, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

PREFILL_CHUNK = 512  # tokens of a long prompt that are run at a time
PAGE = 16  # tokens of a page of the plain runner
CACHE_SLOTS = 4  # slots' worth of memory for cached prompts, by default
MAX_TABLES = 32  # condition tables of the trajectories that were used last
SLOT_MEMORY_TICKET = -1  # the ticket under which the slots of the plain runner hold their pages


class Runner(Protocol):
    """What the engine and the scheduler know of a runner."""

    rows: int  # sequences that can run at once
    prefill_chunk: int  # prompt tokens per step while sequences decode
    max_in_flight: int | None  # prompts whose prefill may be in flight at a time
    prompt_tokens: int  # run so far
    shared_tokens: int  # prompt tokens so far that came from cached blocks

    @property
    def free_rows(self) -> int:
        """How many more sequences could get a slot."""
        ...

    @property
    def share_tokens(self) -> int:
        """Prompts share prefixes of a multiple of so many tokens; 0: they share nothing."""
        ...

    @property
    def used_bytes(self) -> int:
        """The KV of sequences that run."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The KV that there is room for."""
        ...

    def check(self, sequence: Sequence) -> None:
        """Raise one sentence if this sequence can never run here."""
        ...

    @property
    def available_pages(self) -> int:
        """Pages of KV that more sequences could get."""
        ...

    def pages_needed(self, sequence: Sequence) -> int:
        """How many of these a waiting sequence would take."""
        ...

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens of its prompt need not be run: they are in cached blocks, or an earlier chunk has run
        them."""
        ...

    def start_prefill(self, sequences: list[Sequence]) -> None:
        """Run the prompts of these sequences together, or the next chunk of a single long prompt.

        The prefill of a prompt is in flight from its last chunk on. On a GPU it runs beside the host.
        """
        ...

    def in_flight(self) -> list[Sequence]:
        """The sequences whose prefill is in flight."""
        ...

    def finished_prefills(self, wait: bool) -> list[list[Sequence]]:
        """Groups of waiting sequences whose prefill has finished. With `wait`, the oldest group in flight, even if
        it has not finished: `finish_prefill` then waits for the device."""
        ...

    def finish_prefill(self, sequences: list[Sequence]) -> list[Choice]:
        """The first token of each sequence of such a group. They have slots from now on."""
        ...

    def decode(self, sequences: list[Sequence]) -> list[list[Choice]]:
        """The next tokens of sequences that have slots: one each. A GPU runs ahead of the host, so there it may be
        none now and several later."""
        ...

    def free_except(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Free the slots of all but the running sequences, and the prefills of all but the waiting ones."""
        ...


def pad_prompts(model: LoopedLM, prompts: list[list[int]]) -> tuple[Tensor, list[int]]:
    """ids [B, longest] on the model's device, padded at the end, and how many tokens of each row count."""
    counts = [len(prompt) for prompt in prompts]
    filled = [[*prompt, *[0] * (max(counts) - len(prompt))] for prompt in prompts]
    return to_device_async(filled, model.device), counts


def last_hidden(hidden: Tensor, counts: list[int]) -> Tensor:
    """The last state that counts of each padded row: [B, T, D] → [B, D]."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[rows, to_device_async([count - 1 for count in counts], hidden.device)]


def prefill(model: LoopedLM, prompts: list[list[int]], trajectories: list[Trajectory]) -> tuple[KVCache, Tensor]:
    """Run prompts of any lengths: their KV cache, and the hidden state [B, D] of each one's last token."""
    ids, counts = pad_prompts(model, prompts)
    cache = model.cache(trajectories, len(prompts))
    return cache, last_hidden(model.extend(ids, cache, counts), counts)


class PrefillOutput(NamedTuple):
    """Prompts that were run together: the KV that they leave, and the logits [B, V] of their next tokens."""

    sequences: list[Sequence]
    cache: KVCache
    logits: Tensor


class PromptRunner(ABC):
    """The half of a runner that runs prompts: prefixes that they share with others, and long prompts in chunks."""

    prefill_chunk = PREFILL_CHUNK

    def __init__(self, model: LoopedLM, blocks: BlockManager, share_prompts: bool) -> None:
        self.model, self.blocks, self._share_prompts = model, blocks, share_prompts
        self.prompt_tokens = self.shared_tokens = 0
        self._partial: dict[int, KVCache] = {}  # of prompts of which some chunks were run, by ticket
        self._tables: dict[Trajectory, Condition] = {}
        self._made_for = fingerprint(model)  # the weights that the above were computed with

    @abstractmethod
    def _read_blocks(self, sequence: Sequence, prefix: tuple[KVBlock, ...]) -> SequenceKV:
        """The KV in the cached blocks that the prompt of this sequence begins with."""

    @abstractmethod
    def _admit(self, sequence: Sequence, kv: SequenceKV) -> None:
        """Give a sequence, whose prompt was run, its slot, and cache its prompt."""

    @property
    def share_tokens(self) -> int:
        return self.blocks.page_tokens if self._share_prompts else 0

    def cached_tokens(self, sequence: Sequence) -> int:
        if sequence.ticket in self._partial:
            return self._partial[sequence.ticket].lengths[0]
        return len(self._match_prefix(sequence)) * self.blocks.page_tokens

    def _run_prompts(self, sequences: list[Sequence]) -> PrefillOutput | None:
        """Run prompts, or the next chunk of a long one; None if that was not its last chunk."""
        starts = [self.cached_tokens(sequence) for sequence in sequences]
        new = [[*sequence.request.prompt[start:]] for sequence, start in zip(sequences, starts, strict=True)]
        is_chunk = len(sequences) == 1 and len(new[0]) > self.prefill_chunk
        ids, counts = pad_prompts(self.model, [new[0][: self.prefill_chunk]] if is_chunk else new)
        # The last chunk has a cache of its own: if its logits fail, the earlier chunks stay as they are.
        cache = self._partial.get(sequences[0].ticket) if is_chunk else None
        if cache is None:
            trajectories = [sequence.trajectory for sequence in sequences]
            cache = self.model.cache(trajectories, len(new), max(starts) + max(map(len, new)), self._table)
            for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
                if start:
                    cache.write(row, self._read_start(sequence), start)
        hidden = self._extend(ids, cache, counts)  # [B, T, D]; the next prompt may overwrite it
        logits = None if is_chunk else self._logits(last_hidden(hidden, counts))
        self.prompt_tokens += sum(counts)
        begun = self._partial
        self.shared_tokens += sum(
            start for sequence, start in zip(sequences, starts, strict=True) if sequence.ticket not in begun
        )
        if logits is None:
            self._partial = {**begun, sequences[0].ticket: cache}
            sequences[0].advance_prefill(cache.lengths[0])
            return None
        tickets = {sequence.ticket for sequence in sequences}
        self._partial = {ticket: partial for ticket, partial in begun.items() if ticket not in tickets}
        return PrefillOutput(sequences, cache, logits)

    def _admit_all(self, output: PrefillOutput, choices: Iterable[Choice | None]) -> None:
        """Give slots to sequences whose prompts were run. The choice is None where one was cancelled meanwhile."""
        for row, (sequence, choice) in enumerate(zip(output.sequences, choices, strict=True)):
            # A NaN ends the sequence. Its KV is NaN as well, and must not reach the cache that others read.
            if choice is not None and not math.isnan(choice.logprob):
                self._admit(sequence, output.cache.read(row))

    def _match_prefix(self, sequence: Sequence) -> tuple[KVBlock, ...]:
        """The cached blocks that its prompt begins with."""
        if not self._share_prompts:
            return ()
        return self.blocks.match_prefix(self._prefix_root(sequence), sequence.request.prompt)

    def _prefix_root(self, sequence: Sequence) -> KVBlock:
        return self.blocks.prefix_root(self._made_for, sequence.trajectory, self.model.dtype_name)

    def _read_start(self, sequence: Sequence) -> SequenceKV:
        """The KV of the part of a prompt that need not be run, as many tokens as `cached_tokens`."""
        if sequence.ticket in self._partial:
            return self._partial[sequence.ticket].read(0)
        return self._read_blocks(sequence, self._match_prefix(sequence))

    def _extend(self, ids: Tensor, cache: KVCache, counts: list[int]) -> Tensor:
        """Run tokens of prompts on top of their cache, as `model.extend` does."""
        return self.model.extend(ids, cache, counts, check=False)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)[:, : self.model.config.vocab]

    def _table(self, trajectory: Trajectory) -> Condition:
        """The conditions of a trajectory's loops. Those used last are kept."""
        if trajectory not in self._tables:
            recent = list(self._tables.items())[1 - MAX_TABLES :]
            self._tables = {**dict(recent), trajectory: self.model.condition(trajectory)}
        return self._tables[trajectory]

    def _drop_partial_except(self, tickets: Collection[int]) -> None:
        self._partial = {ticket: cache for ticket, cache in self._partial.items() if ticket in tickets}


class PlainRunner(PromptRunner):
    """Continuous batching in PyTorch on any device.

    Rows that run have slots (`SlotPool`). Cached prompts have blocks: copies of their KV, from which later prompts
    are started. Slots and blocks share one limit of memory, so blocks are evicted when the slots grow."""

    max_in_flight: int | None = None

    def __init__(self, model: LoopedLM, rows: int, memory: int | None = None, share_prompts: bool = True) -> None:
        """`memory`: bytes of KV. There are fewer rows if it holds fewer whole contexts."""
        each = slot_bytes(model)
        if memory is None:
            memory = each * (rows + (CACHE_SLOTS if share_prompts else 0))
        self.rows, self.memory_bytes, self._page_bytes = min(rows, memory // each), memory, page_bytes(model, PAGE)
        require(self.rows >= 1, f"memory={memory:,} is below the {each:,} bytes of one row's keys.")
        super().__init__(model, BlockManager(memory // self._page_bytes, PAGE), share_prompts)
        self.slots = SlotPool(model, self.rows)
        self._finished: tuple[PrefillOutput, ...] = ()  # prefills whose sequences have no slots yet

    @property
    def free_rows(self) -> int:
        return self.slots.free - len(self.in_flight())

    @property
    def used_bytes(self) -> int:
        budgets = [slot.budget for slot in self.slots.layout if slot is not None]
        return sum(budgets) * self.slots.bytes_per_loop

    def check(self, sequence: Sequence) -> None:
        """Every slot may grow to the whole context, so nothing is refused."""

    @property
    def available_pages(self) -> int:
        return 0

    def pages_needed(self, sequence: Sequence) -> int:
        return 0  # the memory of a whole slot is reserved for every row

    @torch.no_grad()
    def start_prefill(self, sequences: list[Sequence]) -> None:
        if (weights := fingerprint(self.model)) != self._made_for:
            # The weights last: after an interruption before that this begins again.
            self._partial, self._tables, self._made_for = {}, {}, weights
        output = self._run_prompts(sequences)
        if output is not None:
            self._finished = (*self._finished, output)

    def in_flight(self) -> list[Sequence]:
        return [sequence for output in self._finished for sequence in output.sequences]

    def finished_prefills(self, wait: bool) -> list[list[Sequence]]:
        return [output.sequences for output in self._finished]

    @torch.no_grad()
    def finish_prefill(self, sequences: list[Sequence]) -> list[Choice]:
        output = next(output for output in self._finished if output.sequences is sequences)
        self._finished = tuple([other for other in self._finished if other is not output])
        choices = sample(output.logits, [sequence.draw() for sequence in sequences])
        self._admit_all(output, choices)
        return choices

    @torch.no_grad()
    def decode(self, sequences: list[Sequence]) -> list[list[Choice]]:
        by_ticket = {sequence.ticket: sequence for sequence in sequences}
        tickets = self.slots.arrange_rows({sequence.ticket: sequence.cached_length for sequence in sequences})
        rows = [by_ticket[ticket] for ticket in tickets]
        ids = torch.tensor([row.ids[-1:] for row in rows], device=self.model.device)  # [B, 1]
        hidden = self.model.extend(ids, self.slots, check=False)[:, 0]  # [B, D]
        chosen = dict(zip(tickets, sample(self._logits(hidden), [row.draw() for row in rows]), strict=True))
        return [[chosen[sequence.ticket]] for sequence in sequences]

    def free_except(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        tickets = {sequence.ticket for sequence in waiting}
        self.slots.free_except({sequence.ticket: sequence.cached_length for sequence in running})
        self.blocks.free_except({SLOT_MEMORY_TICKET})  # blocks that an interrupted `_cache_prompt` left
        self._drop_partial_except(tickets)
        self._finished = tuple(
            [output for output in self._finished if any(each.ticket in tickets for each in output.sequences)]
        )

    def _admit(self, sequence: Sequence, kv: SequenceKV) -> None:
        table = self._table(sequence.trajectory)
        loops, tokens = self.slots.size_for(sequence.trajectory.budget, sequence.kv_capacity)
        # The pages first: cached blocks are evicted for them before the slots take the memory. Rounded up, slots of
        # full size may come to one page more than there are.
        pages = -(-self.slots.bytes_for(loops, tokens) // self._page_bytes)
        self.blocks.reserve(SLOT_MEMORY_TICKET, min(pages, self.blocks.pages))
        self.slots.grow(loops, tokens, table)
        self.slots.admit(sequence.ticket, table, kv, len(sequence.request.prompt))
        if self._share_prompts:
            self._cache_prompt(sequence, kv)

    def _cache_prompt(self, sequence: Sequence, kv: SequenceKV) -> None:
        """Copy the KV of a prompt into blocks that later prompts may share, if there is room."""
        prompt, budget, size = sequence.request.prompt, sequence.trajectory.budget, self.blocks.page_tokens
        prefix, count = self._match_prefix(sequence), len(prompt) // size
        needed = self.blocks.pages_needed(budget, count * size, prefix)
        if count == len(prefix) or needed > self.blocks.available_pages:
            return
        blocks = self.blocks.allocate(sequence.ticket, budget, count, prefix)
        for number in range(len(prefix), count):
            part = slice(number * size, (number + 1) * size)
            blocks[number].kv = torch.stack([loop[:, :, :, part] for loop in kv.loops])  # [M, k, 2, H, PAGE, W]
        self.blocks.cache_prompt(sequence.ticket, self._prefix_root(sequence), prompt)
        self.blocks.free(sequence.ticket)  # the sequence reads its slot, so nobody holds these blocks

    def _read_blocks(self, sequence: Sequence, prefix: tuple[KVBlock, ...]) -> SequenceKV:
        stored = torch.cat([block.kv for block in prefix if block.kv is not None], dim=-2)
        return SequenceKV(sequence.trajectory, list(stored))
