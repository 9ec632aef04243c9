"""What runs sequences on a device: the protocol that the engine knows, and the runner for any device.

runner = PlainRunner(model, slots=16)              # a `Runner`; fused/runner.py has the one for GPUs
choices = runner.prefill(sequences)                # run prompts: the first token of each
choices = runner.decode(sequences)                 # one more token each
runner.release_except(running, waiting)            # the slots and blocks of all other sequences are free again

A runner does as it is told: the scheduler decides which sequences it is given. A step that fails half-way leaves
the KV cache valid for every sequence. It writes only beyond the tokens that count, and a row is copied into its new
slot before the layout, one tuple, names it there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loopformer.device import to_device_async
from loopformer.errors import require
from loopformer.inference.kv_cache import KVBlock, PagePool, SlotPool, fingerprint, page_bytes, slot_bytes
from loopformer.inference.request import Request
from loopformer.inference.sampling import Choice, sample
from loopformer.inference.sequence import Sequence as Seq
from loopformer.model.cache import KVCache, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

PREFILL_CHUNK = 512  # tokens of a long prompt that are run at a time
PAGE = 16  # tokens of a page of the plain runner
CACHE_SLOTS = 4  # slots' worth of memory for shared prompts, by default
MAX_TABLES = 32  # condition tables of the trajectories that were used last
SLOTS = -1  # the ticket under which the slots of the plain runner hold their memory


class Runner(Protocol):
    """What the engine and the scheduler know of a runner."""

    prefill_chunk: int  # tokens of prompts that may be run at a time beside rows that run
    max_in_flight: int | None  # prompts that may be under way on the device at a time
    prompt_tokens: int  # that were run
    shared_tokens: int  # that were not, because another prompt had run them

    def check(self, request: Request) -> None:
        """Refuse what can never be run here, in one sentence."""
        ...

    def fits(self, sequences: Sequence[Seq]) -> bool:
        """Whether there is room for these, besides those that run."""
        ...

    def cached_tokens(self, sequence: Seq) -> int:
        """How many tokens of its prompt need not be run: another prompt has run them, or an earlier prefill."""
        ...

    def in_flight(self) -> Sequence[Seq]:
        """Sequences whose prompts are under way on the device."""
        ...

    def arrived(self, wait: bool) -> list[list[Seq]]:
        """Groups of prompts that are through: `prefill` returns their first tokens without delay. With `wait`,
        those that will be through first, even if they are not yet."""
        ...

    def prefill(self, sequences: Sequence[Seq]) -> list[Choice | int]:
        """Run the prompts of a group: the first token of each, which then has a slot. A number means that the
        sequence still waits and is prefilled again: how many tokens of a long prompt were run, or 0 while the
        device runs."""
        ...

    def decode(self, sequences: Sequence[Seq]) -> list[list[Choice]]:
        """The next tokens of sequences that have slots: one each, or none now and several later where the device
        runs ahead of the host."""
        ...

    def release_except(self, running: Sequence[Seq], waiting: Sequence[Seq]) -> None:
        """Free the slots of all but the running sequences, and what was prefilled of all but the waiting ones."""
        ...

    @property
    def used_bytes(self) -> int:
        """Keys and values of sequences that run."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Room for keys and values."""
        ...

    @property
    def share_tokens(self) -> int:
        """Prompts share beginnings that are a multiple of so many tokens; 0: they share nothing."""
        ...


def padded(model: LoopedLM, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """ids [B, longest] on the model's device, padded at the end, and how many tokens of each row count."""
    counts = [len(row) for row in rows]
    filled = [[*row, *[0] * (max(counts) - len(row))] for row in rows]
    return to_device_async(filled, model.device), counts


def ends(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """Of padded rows [B, T, …] the last one that counts, each [B, …]."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[rows, to_device_async([count - 1 for count in counts], hidden.device)]


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]
) -> tuple[KVCache, Tensor]:
    """Run prompts of any lengths: their KV cache, and the hidden state [B, D] of each one's last token."""
    ids, counts = padded(model, prompts)
    cache = model.cache(list(trajectories), len(prompts))
    return cache, ends(model.extend(ids, cache, counts), counts)


class PrefillOutput(NamedTuple):
    """Prompts that were run together: what their next tokens are chosen from, and the keys they leave."""

    sequences: tuple[Seq, ...]
    cache: KVCache
    logits: Tensor  # [B, V]


class PromptRunner(ABC):
    """The half of a runner that runs prompts: what they share with others, and long ones in pieces.

    A subclass has the memory of rows. It reads the keys of cached blocks (`_read_blocks`) and gives a prompt that
    was run its slot (`_admit`)."""

    prefill_chunk = PREFILL_CHUNK
    max_in_flight: int | None = None

    def __init__(self, model: LoopedLM, pool: PagePool, share_prompts: bool) -> None:
        self.model, self.pool, self._share_prompts = model, pool, share_prompts
        self.prompt_tokens = self.shared_tokens = 0
        self._partial: dict[int, KVCache] = {}  # of prompts of which some pieces were run, by ticket
        self._tables: dict[Trajectory, Condition] = {}
        self._made_for = fingerprint(model)  # the weights that the above were computed with

    @property
    def share_tokens(self) -> int:
        return self.pool.page_tokens if self._share_prompts else 0

    @abstractmethod
    def _read_blocks(self, sequence: Seq, blocks: Sequence[KVBlock]) -> SequenceKV:
        """The keys of cached blocks, which the prompt of this sequence begins with."""

    @abstractmethod
    def _admit(self, sequence: Seq, keys: SequenceKV) -> None:
        """Give a sequence, whose prompt was run, its slot, and let other prompts share its keys."""

    def in_flight(self) -> Sequence[Seq]:
        return ()

    def arrived(self, wait: bool) -> list[list[Seq]]:
        return []

    def cached_tokens(self, sequence: Seq) -> int:
        if sequence.ticket in self._partial:
            return self._partial[sequence.ticket].lengths[0]
        return len(self._match(sequence)) * self.pool.page_tokens

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Seq]) -> list[Choice | int]:
        if (weights := fingerprint(self.model)) != self._made_for:
            # The weights last: after an interruption before that this begins again.
            self._partial, self._tables, self._made_for = {}, {}, weights
        output = self._run_prompts(sequences)
        if isinstance(output, int):
            return [output]
        choices = sample(output.logits, [sequence.draw() for sequence in sequences])
        self._admit_all(output, choices)
        return [*choices]

    def _run_prompts(self, sequences: Sequence[Seq]) -> PrefillOutput | int:
        """Run prompts, or one more piece of a long one: then the number of its tokens that were run by now."""
        starts = [self.cached_tokens(sequence) for sequence in sequences]
        new = [sequence.request.prompt[start:] for sequence, start in zip(sequences, starts, strict=True)]
        is_piece = len(sequences) == 1 and len(new[0]) > self.prefill_chunk
        ids, counts = padded(self.model, [new[0][: self.prefill_chunk]] if is_piece else new)
        # The last piece has a cache of its own: when its logits fail, the earlier pieces stay as they are.
        cache = self._partial.get(sequences[0].ticket) if is_piece else None
        if cache is None:
            trajectories = [sequence.trajectory for sequence in sequences]
            cache = self.model.cache(trajectories, len(new), max(starts) + max(map(len, new)), self._table)
            for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
                if start:
                    cache.write(row, self._read_start(sequence), start)
        hidden = self._extend(ids, cache, counts)  # [B, T, D]
        logits = None if is_piece else self._logits(ends(hidden, counts))
        self.prompt_tokens += sum(counts)
        begun = self._partial
        self.shared_tokens += sum(
            start for sequence, start in zip(sequences, starts, strict=True) if sequence.ticket not in begun
        )
        if logits is None:
            self._partial = {**begun, sequences[0].ticket: cache}
            return cache.lengths[0]
        tickets = {sequence.ticket for sequence in sequences}
        self._partial = {ticket: partial for ticket, partial in begun.items() if ticket not in tickets}
        return PrefillOutput(tuple(sequences), cache, logits)

    def _admit_all(self, output: PrefillOutput, choices: Sequence[Choice | None]) -> None:
        """Give slots to sequences whose prompts were run. The choice is None where one was cancelled meanwhile."""
        for row, (sequence, choice) in enumerate(zip(output.sequences, choices, strict=True)):
            if choice is None or math.isnan(choice.logprob):
                continue  # it has ended; keys that are NaN must not reach the cache of others
            self._admit(sequence, output.cache.read(row))

    def _match(self, sequence: Seq) -> tuple[KVBlock, ...]:
        """The cached blocks that its prompt begins with."""
        return self.pool.match(self._origin(sequence), sequence.request.prompt) if self._share_prompts else ()

    def _origin(self, sequence: Seq) -> KVBlock:
        return self.pool.origin(fingerprint(self.model), sequence.trajectory, self.model.dtype_name)

    def _read_start(self, sequence: Seq) -> SequenceKV:
        """The keys of what need not be run of a prompt, as many as `cached_tokens`."""
        if sequence.ticket in self._partial:
            return self._partial[sequence.ticket].read(0)
        return self._read_blocks(sequence, self._match(sequence))

    def _extend(self, ids: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        """Run tokens of prompts on top of their cache, as `model.extend` does."""
        return self.model.extend(ids, cache, counts, check=False)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)[:, : self.model.config.vocab]

    def _table(self, trajectory: Trajectory) -> Condition:
        """The conditions of a trajectory's loops; those used last are cached."""
        if trajectory not in self._tables:
            recent = list(self._tables.items())[1 - MAX_TABLES :]
            self._tables = {**dict(recent), trajectory: self.model.condition(trajectory)}
        return self._tables[trajectory]

    def _forget_partial(self, tickets: Collection[int]) -> None:
        """Drop the pieces of all prompts but these."""
        self._partial = {ticket: cache for ticket, cache in self._partial.items() if ticket in tickets}


class PlainRunner(PromptRunner):
    """Continuous batching in PyTorch on any device."""

    def __init__(self, model: LoopedLM, slots: int, memory: int | None = None, share_prompts: bool = True) -> None:
        """`memory`: bytes of keys and values. A slot needs room for a whole context at most. What the slots do not
        need, prompts that are shared may take."""
        each = slot_bytes(model)
        if memory is None:
            memory = each * (slots + (CACHE_SLOTS if share_prompts else 0))
        self.rows = min(slots, memory // each)
        require(self.rows >= 1, f"memory={memory:,} is below the {each:,} bytes of one row's keys.")
        self._page_bytes = page_bytes(model, PAGE)
        super().__init__(model, PagePool(memory // self._page_bytes, PAGE), share_prompts)
        self.slots = SlotPool(model, self.rows)
        self._memory = memory

    def check(self, request: Request) -> None:
        """Nothing is refused."""

    def fits(self, sequences: Sequence[Seq]) -> bool:
        return len(sequences) <= self.slots.free

    @property
    def used_bytes(self) -> int:
        budgets = [slot.budget for slot in self.slots.layout if slot is not None]
        return sum(budgets) * self.slots.bytes_per_loop

    @property
    def memory_bytes(self) -> int:
        return self._memory

    @torch.no_grad()
    def decode(self, sequences: Sequence[Seq]) -> list[list[Choice]]:
        by_ticket = {sequence.ticket: sequence for sequence in sequences}
        tickets = self.slots.arrange_rows({sequence.ticket: sequence.cached_length for sequence in sequences})
        rows = [by_ticket[ticket] for ticket in tickets]
        ids = torch.tensor([row.ids[-1:] for row in rows], device=self.model.device)  # [B, 1]
        hidden = self.model.extend(ids, self.slots, check=False)[:, 0]  # [B, D]
        chosen = dict(zip(tickets, sample(self._logits(hidden), [row.draw() for row in rows]), strict=True))
        return [[chosen[sequence.ticket]] for sequence in sequences]

    def release_except(self, running: Sequence[Seq], waiting: Sequence[Seq]) -> None:
        self.slots.free_except({sequence.ticket: sequence.cached_length for sequence in running})
        self.pool.release_except({SLOTS})  # what an interrupted `_cache_blocks` left
        self._forget_partial({sequence.ticket for sequence in waiting})

    def _admit(self, sequence: Seq, keys: SequenceKV) -> None:
        prompt, table = sequence.request.prompt, self._table(sequence.trajectory)
        self._grow_slots(sequence, table)
        self.slots.admit(sequence.ticket, table, keys, len(prompt))
        if self._share_prompts:
            self._cache_blocks(sequence, keys)

    def _grow_slots(self, sequence: Seq, table: Condition) -> None:
        """Make the slots large enough. Their pages are counted first, so that cached blocks make room for them."""
        loops, tokens = self.slots.size_for(sequence.trajectory.budget, sequence.max_length)
        # The last page may be needed in part. Rounded up, slots of full size may come to one more than there are.
        pages = min(-(-self.slots.bytes_for(loops, tokens) // self._page_bytes), self.pool.pages)
        held = self.pool.holding(SLOTS)
        if missing := pages - sum(len(block.pages) for block in held):
            self.pool.allocate(SLOTS, missing, len(held) + 1)  # as one more block, of any number of pages
        self.slots.grow(loops, tokens, table)

    def _cache_blocks(self, sequence: Seq, keys: SequenceKV) -> None:
        """Copy the keys of a prompt into blocks that other prompts may share, if there is room."""
        prompt, budget, size = sequence.request.prompt, sequence.trajectory.budget, self.pool.page_tokens
        shared, count = self._match(sequence), len(prompt) // size
        if count == len(shared) or self.pool.pages_to_take(budget, count * size, shared) > self.pool.available:
            return
        blocks = self.pool.allocate(sequence.ticket, budget, count, shared)
        for number in range(len(shared), count):
            part = slice(number * size, (number + 1) * size)
            blocks[number].keys = torch.stack([loop[:, :, :, part] for loop in keys.loops])  # [M, k, 2, H, PAGE, W]
        self.pool.publish(sequence.ticket, self._origin(sequence), prompt)
        # The slot has keys of its own, so nobody reads these blocks but prompts that come later.
        self.pool.release(sequence.ticket)

    def _read_blocks(self, sequence: Seq, blocks: Sequence[KVBlock]) -> SequenceKV:
        stored = torch.cat([block.keys for block in blocks if block.keys is not None], dim=-2)
        return SequenceKV(sequence.trajectory, list(stored))
