"""The runner for GPUs: sequences of any budget come and go between loops that all of them share.

runner = FusedRunner(DecodeBatch(model, slots=64))  # batch_pool.unsupported_reason(model) says what is in its way
engine = Engine(model, tokenizer, runner)

Prompts run one after the other, each as one graph (prefill.py), or many short ones together as in the plain runner.
They run on a stream of their own beside the rows that decode, so no row waits for them. A sequence gets its slot
when its first token has arrived on the host. Tokens are decoded by launch.py. From its prefill on a sequence holds
pages for all tokens that it may come to, in each of its loops. What does not fit waits.

The device runs ahead of the host: while the engine makes text of a token, the loops of the next one are under way.
What comes next is known without looking at a token, because tokens are chosen on the device and a budget says when
one is due. If a row turns out to have ended, what was run for it is dropped. Only where a repetition penalty needs
the text does the device wait. All tokens that have arrived are given out at once, so a host that is slower than the
device makes text of several at a time, which costs it less.

Under faults: `_device` is None while it changes. If a change was interrupted, or a row is not where its sequence
says, its tokens are run again. What a row holds of the pages is known to the pool alone (kv_cache.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.errors import LoopformerError
from loopformer.inference.fused.graphs import HostCopy
from loopformer.inference.fused.launch import DecodeBatch
from loopformer.inference.kv_cache import KVBlock, PagePool, page_bytes
from loopformer.inference.request import Choice, Request
from loopformer.inference.runner import PrefillOutput, PromptRunner, prefill
from loopformer.inference.sampling import Draw, sample_async, to_choices
from loopformer.inference.sequence import Sequence as Seq
from loopformer.inference.sequence import Status
from loopformer.model.cache import KVCache, SequenceKV

MAX_APART = 4  # prompts of a group that are run one after the other, each as one graph
MAX_IN_FLIGHT = 4  # prompts under way; more would only wait for each other
TOKENS_AHEAD, LOOPS_AHEAD = 2, 8  # at least so many tokens of some row, and loops, are under way at a time
NOBODY = -1  # a ticket
LOST = -1  # new tokens of a row that the device has nothing of


class DeviceRow(NamedTuple):
    """A row in a slot, and how far the device will have come with it when all that is queued is done."""

    slot: int
    budget: int
    most: int  # new tokens that are wanted and have room
    tokens: int  # new ones that are chosen by then
    loop: int = 0  # loops that the next one is through by then
    started: bool = False  # whether the device has the row's last token

    @property
    def continues(self) -> bool:
        return self.started and self.tokens < self.most

    def after(self, loops: int) -> DeviceRow:
        """So many loops later; they end with those of a token at the latest."""
        slot, budget, most, tokens, loop, started = self  # this runs for every row of every launch
        if loop + loops == budget:
            return DeviceRow(slot, budget, most, tokens + 1, 0, started)
        return DeviceRow(slot, budget, most, tokens, loop + loops, started)


class PendingTokens(NamedTuple):
    """Tokens on their way to the host, after so many loops, and whose they are."""

    loops: int
    tickets: tuple[int, ...]
    copy: HostCopy  # [B, 2 + 2N], as `sample_async` returns them

    def without(self, tickets: set[int]) -> PendingTokens:
        """The same; what arrives for these rows is nobody's."""
        return self._replace(tickets=tuple([NOBODY if ticket in tickets else ticket for ticket in self.tickets]))

    def choices(self) -> Iterator[tuple[int, Choice]]:
        """Ticket and choice of each, once they have arrived."""
        return zip(self.tickets, to_choices(self.copy.wait()), strict=True)


class PrefillInFlight(NamedTuple):
    """Prompts on the device, and their first tokens on their way to the host."""

    output: PrefillOutput
    first: PendingTokens


@dataclass(frozen=True)
class DeviceState:
    """What the device holds, and what has arrived from it that its sequences have not taken yet."""

    rows: Mapping[int, DeviceRow] = field(default_factory=dict)  # by ticket
    pending: tuple[PendingTokens, ...] = ()
    given: Mapping[int, list[Choice]] = field(default_factory=dict)  # by ticket: the last tokens that have arrived

    def out_of_sync(self, sequences: Sequence[Seq]) -> list[Seq]:
        """Sequences whose next tokens neither are here or under way nor follow from what the device has."""

        def is_in_sync(sequence: Seq) -> bool:
            known = sequence.ticket in self.rows
            return known and 0 <= self.untaken(sequence) <= len(self.given.get(sequence.ticket, ()))

        return [sequence for sequence in sequences if not is_in_sync(sequence)]

    def untaken(self, sequence: Seq) -> int:
        """How many of a sequence's tokens have arrived that it has not taken."""
        return self.rows[sequence.ticket].tokens - self._pending_counts[sequence.ticket] - len(sequence.ids)

    @cached_property
    def _pending_counts(self) -> Counter[int]:
        """Tokens that are under way, by ticket."""
        return Counter(ticket for pending in self.pending for ticket in pending.tickets)

    def without(self, tickets: set[int]) -> DeviceState:
        """The same without some rows; what is under way for them is dropped when it arrives."""
        pending = [pending.without(tickets) for pending in self.pending]
        return DeviceState(
            {ticket: row for ticket, row in self.rows.items() if ticket not in tickets},
            tuple([tokens for tokens in pending if set(tokens.tickets) != {NOBODY}]),
            {ticket: given for ticket, given in self.given.items() if ticket not in tickets},
        )


class FusedRunner(PromptRunner):
    """Continuous batching of mixed budgets through shared loops; see the module's docstring."""

    max_in_flight: int | None = MAX_IN_FLIGHT

    def __init__(self, batch: DecodeBatch, share_prompts: bool = True) -> None:
        super().__init__(batch.model, PagePool(batch.page_count, batch.page_tokens), share_prompts)
        self._batch = batch
        self._device: DeviceState | None = DeviceState()
        self._in_flight: tuple[PrefillInFlight, ...] = ()

    def check(self, request: Request) -> None:
        """Refuse what this runner can never run."""
        tokens = min(self.model.config.context, len(request.prompt) + request.max_tokens)
        if self.pool.pages_to_take(request.trajectory.budget, tokens, ()) > self.pool.pages:
            raise LoopformerError(
                f"The request may come to {tokens} tokens in {request.trajectory.budget} loops, "
                "more than the engine has memory for; lower max_tokens or the budget."
            )

    @property
    def used_bytes(self) -> int:
        return (self.pool.pages - self.pool.available) * page_bytes(self.model, self.pool.page_tokens)

    @property
    def memory_bytes(self) -> int:
        return self._batch.nbytes

    @property
    def free_rows(self) -> int:
        rows = len(self._device.rows) if self._device is not None else 0
        return self._batch.slots - rows - len(self.in_flight())

    def fits(self, sequences: Sequence[Seq]) -> bool:
        return len(sequences) <= self.free_rows and sum(map(self._pages_to_take, sequences)) <= self.pool.available

    def _pages_to_take(self, sequence: Seq) -> int:
        if self.pool.holding(sequence.ticket):  # since its first pieces were run
            return 0
        shared = self._match(sequence)
        return self.pool.pages_to_take(sequence.trajectory.budget, sequence.max_length, shared)

    def release_except(self, running: Sequence[Seq], waiting: Sequence[Seq]) -> None:
        tickets, still_waiting = ({sequence.ticket for sequence in group} for group in (running, waiting))
        if self._device is not None and (gone := self._device.rows.keys() - tickets):
            self._device = self._device.without(gone)
        # A prompt whose requests were all cancelled counts as in flight, and keeps its pages, until it is through.
        self._in_flight = tuple(
            [
                flight
                for flight in self._in_flight
                if not (still_waiting.isdisjoint(flight.first.tickets) and flight.first.copy.has_arrived())
            ]
        )
        self._forget_partial(still_waiting)
        tickets |= {sequence.ticket for sequence in self.in_flight()} | self._partial.keys()
        self.pool.release_except(tickets)

    # Prompts.

    def in_flight(self) -> list[Seq]:
        return [sequence for flight in self._in_flight for sequence in flight.output.sequences]

    def arrived(self, wait: bool) -> list[list[Seq]]:
        flights = [flight for flight in self._in_flight if wait or flight.first.copy.has_arrived()]
        groups = [
            [sequence for sequence in flight.output.sequences if sequence.status is Status.WAITING]
            for flight in flights
        ]
        return [group for group in groups if group][: 1 if wait else None]

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Seq]) -> list[Choice | int]:
        self._renew_batch()
        tickets = {sequence.ticket for sequence in sequences}
        for flight in self._in_flight:
            if tickets <= set(flight.first.tickets):
                return self._land(flight, sequences)
        outcomes: list[Choice | int] = []
        groups = [[sequence] for sequence in sequences] if len(sequences) <= MAX_APART else [sequences]
        for group in groups:
            outcomes += self._take_off(group)
        return outcomes

    def _take_off(self, sequences: Sequence[Seq]) -> list[int]:
        """Let prompts, or a piece of a long one, run on the device."""
        for sequence in sequences:
            blocks = -(-sequence.max_length // self.pool.page_tokens)
            self.pool.allocate(sequence.ticket, sequence.trajectory.budget, blocks, self._match(sequence))
        with self._batch.prompt_stream.after_decode():
            output = self._run_prompts(sequences)
            if isinstance(output, int):
                return [output]
            chosen = sample_async(output.logits, [sequence.draw() for sequence in sequences])
            first = PendingTokens(0, tuple([sequence.ticket for sequence in sequences]), HostCopy(chosen))
        self._in_flight = (*self._in_flight, PrefillInFlight(output, first))
        return [0] * len(sequences)

    def _land(self, flight: PrefillInFlight, sequences: Sequence[Seq]) -> list[Choice | int]:
        """The first tokens of prompts, which are waited for. The sequences that still wait get their slots."""
        choices = dict(flight.first.choices())
        self._in_flight = tuple([other for other in self._in_flight if other is not flight])
        waiting = {sequence.ticket for sequence in sequences}
        self._admit_all(
            flight.output, [choice if ticket in waiting else None for ticket, choice in choices.items()]
        )
        # The cache of the prompts is freed now, after decoding has been told to copy it. The next prompts must not
        # write to its memory before that is done.
        self._batch.prompt_stream.wait_for_decode()
        return [choices[sequence.ticket] for sequence in sequences]

    def _renew_batch(self) -> None:
        """Drop what was computed if the model's weights have changed. Rows that run keep their slots, and their
        tokens are run again with the new weights."""
        batch = self._batch.renewed()
        if batch is self._batch:
            return
        self._batch.wait_for_prompts()
        self._in_flight, self._partial, self._tables = (), {}, {}
        if batch.page_count == self.pool.pages:
            self.pool.forget_prompts()
        else:  # the dtype is another one
            self.pool = PagePool(batch.page_count, batch.page_tokens)
        if self._device is not None:
            lost = {ticket: row._replace(tokens=LOST) for ticket, row in self._device.rows.items()}
            self._device = replace(self._device, rows=lost, pending=(), given={})
        self._batch = batch  # last: after an interruption before it this method begins again

    def _match(self, sequence: Seq) -> tuple[KVBlock, ...]:
        held = self.pool.holding(sequence.ticket)
        if not held:
            return super()._match(sequence)
        # The blocks that it shares, or that it has published itself. They are its own from now on.
        count = next((number for number, block in enumerate(held) if block.key is None), len(held))
        return held[: min(count, (len(sequence.request.prompt) - 1) // self.pool.page_tokens)]

    def _read_blocks(self, sequence: Seq, blocks: Sequence[KVBlock]) -> SequenceKV:
        pages = [[block.pages[loop] for block in blocks] for loop in range(sequence.trajectory.budget)]
        return SequenceKV(sequence.trajectory, self._batch.read(pages))

    def _extend(self, ids: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        if len(counts) > 1:
            return super()._extend(ids, cache, counts)
        return self._batch.prompts.extend(ids, cache)

    @torch.no_grad()
    def _admit(self, sequence: Seq, keys: SequenceKV) -> None:
        # Only a slot and pages that nobody else has are written, so what is noted stays true if that fails.
        prompt = len(sequence.request.prompt)
        self._device = self._place(self._device or DeviceState(), sequence, keys, prompt, 1)

    # Rows that decode.

    @torch.no_grad()
    def decode(self, sequences: Sequence[Seq]) -> list[list[Choice]]:
        device, self._device = self._device or DeviceState(), None
        out_of_sync = device.out_of_sync(sequences)
        if out_of_sync:
            self._batch.prompt_stream.decode_waits()  # what prompts compute may be used here, too
        for sequence in out_of_sync:  # run all its tokens but the last again
            cache, _ = prefill(self.model, [sequence.history[:-1]], [sequence.trajectory])
            cached, tokens = sequence.length - 1, len(sequence.ids)
            device = self._place(device.without({sequence.ticket}), sequence, cache.read(0), cached, tokens)
        given = {sequence.ticket: _untaken(device, sequence) for sequence in sequences}
        rows = {sequence.ticket: device.rows[sequence.ticket] for sequence in sequences}
        pending = list(device.pending)
        while pending and pending[0].copy.has_arrived():
            _give(pending.pop(0), given)
        waits = any(sequence.request.sampling.repetition_penalty != 1 for sequence in sequences)
        while not _is_far_ahead(pending, waits):
            launched = self._launch(sequences, rows, given)
            if launched is None:
                break
            pending.append(launched)
        while pending and not any(given.values()):
            _give(pending.pop(0), given)
        self._device = replace(device, rows={**device.rows, **rows}, pending=tuple(pending), given=given)
        return list(given.values())

    def _launch(
        self, sequences: Sequence[Seq], rows: dict[int, DeviceRow], given: Mapping[int, list[Choice]]
    ) -> PendingTokens | None:
        """Run all rows that continue until some have run their last loop, and choose the next tokens of those.
        None: no row continues."""
        self._start(sequences, rows)
        active = [sequence for sequence in sequences if rows[sequence.ticket].continues]
        if not active:
            return None
        before = [rows[sequence.ticket] for sequence in active]
        loops = min([row.budget - row.loop for row in before])
        slots = [row.slot for row in before]
        ended = [number for number, row in enumerate(before) if row.loop + loops == row.budget]
        alone = len(active) == 1 and loops == before[0].budget
        requests = [active[number].request for number in ended]
        next_slots = [slots[number] for number in ended]
        if not alone:
            self._batch.run(slots, loops)
        if any(request.sampling.repetition_penalty != 1 or request.alternatives for request in requests):
            logits = self._batch.single_row_logits(slots[0], loops) if alone else self._batch.logits(ended)
            chosen = sample_async(logits, [_draw(active[number], before[number].tokens, given) for number in ended])
            self._batch.begin_tokens(next_slots, chosen[:, 0])
            copy = HostCopy(chosen)
        elif not alone:
            copy = HostCopy(self._batch.next_tokens(ended, next_slots))
        elif not requests[0].sampling.greedy:
            copy = HostCopy(self._batch.single_row_sampled(slots[0], loops))
        else:
            position = len(requests[0].prompt) + before[0].tokens - 1
            copy = self._batch.single_row_greedy(slots[0], loops, position)
        for sequence, row in zip(active, before, strict=True):
            rows[sequence.ticket] = row.after(loops)
        return PendingTokens(loops, tuple([active[number].ticket for number in ended]), copy)

    def _start(self, sequences: Sequence[Seq], rows: dict[int, DeviceRow]) -> None:
        """Let rows that have come in begin, each when others of its budget begin a token: rows that end theirs in
        the same loop choose the next ones together. A budget that nobody else has begins with any other."""
        new = [sequence for sequence in sequences if not rows[sequence.ticket].started]
        if not new:
            return
        active = [row for row in rows.values() if row.continues]
        beginning = {row.budget for row in active if row.loop == 0}
        if active and not beginning:
            return
        awaited = {row.budget for row in active} - beginning
        starting = [sequence for sequence in new if sequence.trajectory.budget not in awaited]
        if starting:
            last_tokens = [(sequence.ids[-1], sequence.cached_length) for sequence in starting]
            slots = [rows[sequence.ticket].slot for sequence in starting]
            self._batch.start_tokens(dict(zip(slots, last_tokens, strict=True)))
        for sequence in starting:
            rows[sequence.ticket] = rows[sequence.ticket]._replace(started=True)

    def _place(self, device: DeviceState, sequence: Seq, keys: SequenceKV, length: int, tokens: int) -> DeviceState:
        """Give a sequence a slot, with the keys of `length` tokens and so many new tokens chosen."""
        budget, prompt = sequence.trajectory.budget, sequence.request.prompt
        blocks = -(-sequence.max_length // self.pool.page_tokens)
        self.pool.allocate(sequence.ticket, budget, blocks, self._match(sequence))  # unless it has them
        written = len(self._match(sequence)) * self.pool.page_tokens
        taken = {row.slot for row in device.rows.values()}
        slot = next(slot for slot in range(self._batch.slots) if slot not in taken)
        draw = Draw(sequence.request.sampling, sequence.seed)
        table = self._table(sequence.trajectory)
        self._batch.fill(slot, self._page_table(sequence), keys, length, table, draw, written)
        if self._share_prompts:  # the keys are queued, and whoever shares them reads them after that
            self.pool.publish(sequence.ticket, self._origin(sequence), prompt)
        row = DeviceRow(slot, budget, sequence.max_new_tokens, tokens)
        return replace(device, rows={**device.rows, sequence.ticket: row})

    def _page_table(self, sequence: Seq) -> list[int]:
        """The pages of a sequence: those of the first loop in the order of its tokens, then those of the second."""
        blocks = self.pool.holding(sequence.ticket)
        return [block.pages[loop] for loop in range(sequence.trajectory.budget) for block in blocks]


def _is_far_ahead(pending: Sequence[PendingTokens], waits: bool) -> bool:
    """Whether enough is under way. With `waits` the next launch needs the last tokens."""
    if waits:
        return bool(pending)
    return len(pending) >= TOKENS_AHEAD and sum(tokens.loops for tokens in pending) >= LOOPS_AHEAD


def _untaken(device: DeviceState, sequence: Seq) -> list[Choice]:
    """What was given out to a sequence before, and not taken."""
    count = device.untaken(sequence)
    return device.given[sequence.ticket][-count:] if count else []


def _give(arrived: PendingTokens, given: Mapping[int, list[Choice]]) -> None:
    """Add what has arrived to what sequences are given; the rest is nobody's."""
    for ticket, choice in arrived.choices():
        if ticket in given:
            given[ticket].append(choice)


def _draw(sequence: Seq, tokens: int, given: Mapping[int, list[Choice]]) -> Draw:
    """What decides a sequence's new token of this number; a repetition penalty knows all that have arrived."""
    request = sequence.request
    history: tuple[int, ...] = ()
    if request.sampling.repetition_penalty != 1:
        history = (*sequence.history, *[choice.token for choice in given[sequence.ticket]])
    position = len(request.prompt) + tokens
    return Draw(request.sampling, sequence.seed, position, history, request.alternatives)
