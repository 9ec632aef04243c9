"""The fused backend of the engine: requests of any budget come and go between passes that all of them share.

backend = SharedBackend(SharedBatch(model, slots=64))  # backend.obstacle(model) says what is in its way here
engine = Engine(model, tokenizer, backend)

Prompts run one after the other, each as one graph (graphs.py), many short ones together as on the plain path
(decode.py), on a stream of their own beside the passes of those that run: nobody waits for them, and a row comes in
when its first token is there. Tokens go through batch.py. A row needs pages for all it may come to, prompt and new
tokens, in each of its loops; whoever does not fit waits.

The device runs ahead of the host: while the engine makes text of one token, the passes of the next are under way.
What comes next is known without looking at a token, since it is chosen on the device and a budget says when it is
due; a row that turns out to have ended drops what was run for it. Only where a repetition penalty needs the text
itself does the device wait. All tokens that have come meanwhile are given out at once, so a host that is slower
than the device makes text of several at a time, which costs it less.

Under faults: what the device holds is taken out of the backend while it works, and put back when all of it was
noted. If it is not there, or does not stand where a row says it does, the row's tokens are run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopformer.errors import LoopformerError
from loopformer.inference.decode import PromptBackend, RunPrompts, prefill
from loopformer.inference.fused.batch import COPIES, PROMPTS, SharedBatch, page_bytes, pages_of, paired
from loopformer.inference.fused.graphs import side_stream, wait_for
from loopformer.inference.request import Request, RowState
from loopformer.inference.sampling import GREEDY, Choice, Draw, choose
from loopformer.model.cache import KVCache, SequenceKV

MOST_APART = 4  # prompts that came at once and are run one after the other
MOST_UNDER_WAY = 4  # prompts; more would only wait for each other
AHEAD, AHEAD_PASSES = 2, 8  # at least so many tokens of some row, and passes, are under way at a time
NOBODY = -1  # a ticket
NOTHING = -1  # new tokens of a row that the device has nothing of


class DeviceRow(NamedTuple):
    """A row in a slot: its pages, and how far the device will have come with it when all that is queued is done."""

    slot: int
    pages: tuple[int, ...]
    budget: int
    most: int  # new tokens that are wanted and have a place
    tokens: int  # new ones that are chosen by then
    loop: int = 0  # passes that the next one is through by then
    started: bool = False  # whether the device has the row's last token

    @property
    def goes_on(self) -> bool:
        return self.started and self.tokens < self.most

    def after(self, passes: int) -> DeviceRow:
        """So many passes later; they end with those of a token at the latest."""
        slot, pages, budget, most, tokens, loop, started = self
        loop += passes
        if loop == budget:
            return DeviceRow(slot, pages, budget, most, tokens + 1, 0, started)
        return DeviceRow(slot, pages, budget, most, tokens, loop, started)


class Pending(NamedTuple):
    """Tokens on their way to the host, after so many passes: whose, and when they are there."""

    passes: int
    tickets: tuple[int, ...]
    chosen: Tensor  # [B, 2] on the host: tokens, log-probabilities
    arrived: torch.cuda.Event | None

    def here(self) -> bool:
        arrived: Any = self.arrived
        return arrived is None or bool(arrived.query())

    def without(self, tickets: set[int]) -> Pending:
        """The same; what comes for some rows is nobody's."""
        return self._replace(tickets=tuple([NOBODY if one in tickets else one for one in self.tickets]))

    def choices(self) -> Iterator[tuple[int, Choice]]:
        """Ticket and choice of each, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        choices = [Choice(int(token), logprob) for token, logprob in self.chosen.tolist()]
        return zip(self.tickets, choices, strict=True)


class PromptsUnderWay(NamedTuple):
    """Prompts on the device, and their first tokens on their way to the host."""

    run: RunPrompts
    first: Pending


@dataclass(frozen=True)
class DeviceState:
    """What the device holds, and what has come from it that its rows have not taken yet."""

    free_slots: tuple[int, ...]
    free_pages: tuple[Sequence[int], ...]  # in bunches, as rows gave them back: there may be ten thousands
    rows: Mapping[int, DeviceRow] = field(default_factory=dict)  # by ticket
    pending: tuple[Pending, ...] = ()
    given: Mapping[int, list[Choice]] = field(
        default_factory=dict
    )  # by ticket; the last ones chosen and not pending

    def out_of_sync(self, rows: Sequence[RowState]) -> list[RowState]:
        """Rows whose next tokens neither are here or under way nor follow from what the device has."""

        def stands(row: RowState) -> bool:
            known = row.ticket in self.rows
            return known and 0 <= self.untaken(row) <= len(self.given.get(row.ticket, ()))

        return [row for row in rows if not stands(row)]

    def untaken(self, row: RowState) -> int:
        """How many of a row's tokens have come that it has not taken."""
        return self.rows[row.ticket].tokens - self._coming[row.ticket] - len(row.ids)

    @cached_property
    def _coming(self) -> Counter[int]:
        """Tokens that are under way, by ticket."""
        return Counter(ticket for one in self.pending for ticket in one.tickets)

    def without(self, tickets: set[int]) -> DeviceState:
        """The same without some rows; what is under way for them is dropped when it comes."""
        gone = [row for ticket, row in self.rows.items() if ticket in tickets]
        pending = [one.without(tickets) for one in self.pending]
        return DeviceState(
            (*self.free_slots, *(row.slot for row in gone)),
            (*self.free_pages, *(row.pages for row in gone)),
            {ticket: row for ticket, row in self.rows.items() if ticket not in tickets},
            tuple([one for one in pending if set(one.tickets) != {NOBODY}]),
            {ticket: given for ticket, given in self.given.items() if ticket not in tickets},
        )


class SharedBackend(PromptBackend):
    """Continuous batching of mixed budgets through shared passes; see the module's docstring."""

    def __init__(self, batch: SharedBatch, remember: int | None = None) -> None:
        """`remember`: tokens of earlier prompts to keep for sharing; four contexts by default."""
        super().__init__(batch.model, remember)
        self._batch = batch
        self._empty = DeviceState(tuple(range(batch.slots)), (range(batch.page_count),))
        self._device: DeviceState | None = self._empty
        self._under_way: tuple[PromptsUnderWay, ...] = ()

    def check(self, request: Request) -> None:
        """Refuse what this backend can never run."""
        if self._needed(request) > self._batch.page_count:
            raise LoopformerError(
                f"The request may come to {self._tokens(request)} tokens in {request.trajectory.budget} loops, "
                "more than the engine has memory for; lower max_tokens or the budget."
            )

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        return sum(self._needed(row.request) for row in rows) * page_bytes(self.model)

    @property
    def memory_bytes(self) -> int:
        return self._batch.nbytes

    def fits(self, rows: Sequence[RowState]) -> bool:
        device = self._device or self._empty
        rows = [*self._under_way_rows(), *rows]
        needed = sum(self._needed(row.request) for row in rows)
        return len(rows) <= len(device.free_slots) and needed <= sum(map(len, device.free_pages))

    def plan(self, waiting: Sequence[RowState], tokens: int) -> list[list[RowState]]:
        """Those whose first tokens are there, or are waited for as nobody runs; else prompts to run."""
        still = {row.ticket: row for row in waiting}
        # Of requests that have gone it is kept until it is done, so that no more is under way than MOST_UNDER_WAY.
        came = [(one, one.first.here()) for one in self._under_way]
        self._under_way = tuple(
            one for one, here in came if not here or not still.keys().isdisjoint(one.first.tickets)
        )
        first = [[still[ticket] for ticket in one.first.tickets if ticket in still] for one, here in came if here]
        if groups := [rows for rows in first if rows]:
            return groups
        under_way = {row.ticket for row in self._under_way_rows()}
        if len(under_way) < MOST_UNDER_WAY:
            groups = super().plan([row for row in waiting if row.ticket not in under_way], tokens)
            if groups:
                return [
                    part
                    for group in groups
                    for part in ([[row] for row in group] if len(group) <= MOST_APART else [group])
                ]
        if self._device is not None and self._device.rows:
            return []
        awaited = ([still[ticket] for ticket in one.first.tickets if ticket in still] for one in self._under_way)
        return [rows for rows in awaited if rows][:1]

    def _under_way_rows(self) -> list[RowState]:
        return [row for one in self._under_way for row in one.run.rows]

    def free_except(self, rows: Sequence[RowState]) -> None:
        device = self._device
        if device is not None and (gone := set(device.rows) - {row.ticket for row in rows}):
            self._device = device.without(gone)

    @torch.no_grad()
    def prefill(self, rows: Sequence[RowState]) -> list[Choice | int]:
        batch = self._batch.renewed()
        if batch is not self._batch:
            self._batch.leave()
            self._under_way = ()
            self.forget()
            if self._device is not None:  # rows that run keep their places, and are run again with the new weights
                lost = {ticket: row._replace(tokens=NOTHING) for ticket, row in self._device.rows.items()}
                self._device = replace(self._device, rows=lost, pending=(), given={})
            self._batch = batch  # last: Ctrl-C before it begins this again
        tickets = {row.ticket for row in rows}
        for one in self._under_way:
            if tickets <= set(one.first.tickets):
                return self._came(one, rows)
        with _beside(PROMPTS, self._batch.device):
            run = self._run(rows)
            if isinstance(run, int):
                return [run]
            chosen = paired(*choose(run.logits, [row.draw() for row in rows]))
            first = Pending(0, tuple([row.ticket for row in rows]), *_to_host(chosen))
        self._under_way = (*self._under_way, PromptsUnderWay(run, first))
        return [0] * len(rows)

    def _came(self, prompts: PromptsUnderWay, rows: Sequence[RowState]) -> list[Choice | int]:
        """The first tokens of prompts, which are waited for; those of the rows that have not gone come in."""
        choices = dict(prompts.first.choices())
        self._under_way = tuple(one for one in self._under_way if one is not prompts)
        still = {row.ticket for row in rows}
        self._admit_run(
            prompts.run, [choices[row.ticket] if row.ticket in still else None for row in prompts.run.rows]
        )
        _held_back(PROMPTS, self._batch.device)  # others may be given the memory that was just read
        return [choices[row.ticket] for row in rows]

    def _find_keys(self, row: RowState) -> tuple[SequenceKV, int]:
        keys, count = super()._find_keys(row)
        if keys.loops and keys.loops[0].is_cuda:
            # Forgotten while decoding, its memory would be given away there, though prompts are yet to read it.
            keys.loops[0].record_stream(torch.cuda.current_stream())
        return keys, count

    def _extend(self, ids: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        if len(counts) > 1:
            return super()._extend(ids, cache, counts)
        return self._batch.prompts.extend(ids, cache)

    @torch.no_grad()
    def admit(self, row: RowState, keys: SequenceKV) -> None:
        # Only a slot and pages that nobody has are written, so what is noted stays true if that fails.
        self._device = self._placed(self._device or self._empty, row, keys, len(row.request.prompt), 1)

    @torch.no_grad()
    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        device, self._device = self._device or self._empty, None
        out_of_sync = device.out_of_sync(rows)
        if out_of_sync:
            wait_for(PROMPTS, self._batch.device)  # what they compute may be used here, too
        for row in out_of_sync:  # by running all its tokens but the last again
            cache, _ = prefill(self.model, [row.history[:-1]], [row.trajectory])
            device = self._placed(device.without({row.ticket}), row, cache.read(0), row.length - 1, len(row.ids))
        given, pending = {row.ticket: _untaken(device, row) for row in rows}, list(device.pending)
        while pending and pending[0].here():
            _give(pending.pop(0), given)
        standing = {row.ticket: device.rows[row.ticket] for row in rows}
        waits = any(row.request.sampling.repetition_penalty != 1 for row in rows)
        while _more_under_way(pending, waits):
            launched = self._launched(rows, standing, given)
            if launched is None:
                break
            pending.append(launched)
        while pending and not any(given.values()):
            _give(pending.pop(0), given)
        self._device = replace(device, rows={**device.rows, **standing}, pending=tuple(pending), given=given)
        return list(given.values())

    def _start(self, rows: Sequence[RowState], standing: dict[int, DeviceRow]) -> None:
        """Let rows that have come in begin, each when others of its budget begin a token: rows that end theirs in
        the same pass choose the next ones together. A budget that nobody else has begins with any other."""
        new = [row for row in rows if not standing[row.ticket].started]
        if not new:
            return
        running = [row for row in standing.values() if row.goes_on]
        beginning = {row.budget for row in running if row.loop == 0}
        if running and not beginning:
            return
        waited_for = {row.budget for row in running} - beginning
        starting = [row for row in new if row.trajectory.budget not in waited_for]
        if starting:
            self._batch.start({standing[row.ticket].slot: (row.ids[-1], row.cached) for row in starting})
        for row in starting:
            standing[row.ticket] = standing[row.ticket]._replace(started=True)

    def _launched(
        self, rows: Sequence[RowState], standing: dict[int, DeviceRow], given: Mapping[int, list[Choice]]
    ) -> Pending | None:
        """Passes of all rows that go on until some have run their last one, and the next tokens of those. None: no
        row goes on."""
        self._start(rows, standing)
        going = [row for row in rows if standing[row.ticket].goes_on]
        if not going:
            return None
        before = [standing[row.ticket] for row in going]
        passes = min([row.budget - row.loop for row in before])
        slots = [row.slot for row in before]
        ended = [number for number, row in enumerate(before) if row.loop + passes == row.budget]
        alone = len(going) == 1 and passes == before[0].budget
        sampling = [going[number].request.sampling for number in ended]
        next_slots = [slots[number] for number in ended]
        if not alone:
            self._batch.run(slots, passes)
        if any(one.repetition_penalty != 1 for one in sampling):
            logits = self._batch.token(slots[0], passes) if alone else self._batch.logits(ended)
            draws = [_draw(going[number], before[number].tokens, given) for number in ended]
            tokens, logprobs = choose(logits, draws)
            self._batch.begin(next_slots, tokens)
            there = _to_host(paired(tokens, logprobs))
        elif not alone:
            there = _to_host(self._batch.next_tokens(ended, next_slots))
        elif not sampling[0].greedy:
            there = _to_host(self._batch.draw(slots[0], passes))
        else:
            place = len(going[0].request.prompt) + before[0].tokens - 1
            followed = self._batch.follow(slots[0], passes, place)
            with _beside(COPIES, self._batch.device):  # its next token does not wait for them
                there = _to_host(paired(*followed))
        for row, mine in zip(going, before, strict=True):
            standing[row.ticket] = mine.after(passes)
        return Pending(passes, tuple([going[number].ticket for number in ended]), *there)

    def _placed(
        self, device: DeviceState, row: RowState, keys: SequenceKV, length: int, tokens: int
    ) -> DeviceState:
        """A row takes a slot and pages, with the keys of `length` tokens and so many new tokens chosen."""
        count, request = self._needed(row.request), row.request
        most = min(request.max_tokens, row.context - len(request.prompt) + 1)  # the last one needs no place
        pages, left = _taken(device.free_pages, count)
        placed = DeviceRow(device.free_slots[0], pages, row.trajectory.budget, most, tokens)
        self._batch.fill(
            placed.slot, placed.pages, keys, length, self._table(row.trajectory), Draw(request.sampling, row.seed)
        )
        return replace(
            device,
            free_slots=device.free_slots[1:],
            free_pages=left,
            rows={**device.rows, row.ticket: placed},
        )

    def _tokens(self, request: Request) -> int:
        """What a request may come to."""
        return min(self.model.config.context, len(request.prompt) + request.max_tokens)

    def _needed(self, request: Request) -> int:
        return pages_of(self._tokens(request), request.trajectory.budget)


def _taken(free: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], tuple[Sequence[int], ...]]:
    """So many pages of the last bunches, and what is left."""
    pages: list[int] = []
    left = list(free)
    while len(pages) < count:
        assert left, "a row was admitted that does not fit"
        last, wanted = left.pop(), count - len(pages)
        pages += last[:wanted]
        if len(last) > wanted:
            left.append(last[wanted:])
    return tuple(pages), tuple(left)


def _more_under_way(pending: Sequence[Pending], waits: bool) -> bool:
    if waits:
        return not pending
    return len(pending) < AHEAD or sum(one.passes for one in pending) < AHEAD_PASSES


def _untaken(device: DeviceState, row: RowState) -> list[Choice]:
    """What was given out to a row before, and not taken."""
    count = device.untaken(row)
    return device.given[row.ticket][-count:] if count else []


def _give(arrived: Pending, given: Mapping[int, list[Choice]]) -> None:
    """Add what has come to what rows are given; nobody waits any more for what is dropped here."""
    for ticket, choice in arrived.choices():
        if ticket in given:
            given[ticket].append(choice)


def _draw(row: RowState, tokens: int, given: Mapping[int, list[Choice]]) -> Draw:
    """What decides a row's new token of this number; a repetition penalty knows all that has come."""
    sampling = row.request.sampling
    if sampling.is_argmax:
        return GREEDY
    history: tuple[int, ...] = ()
    if sampling.repetition_penalty != 1:
        history = (*row.history, *[one.token for one in given[row.ticket]])
    return Draw(sampling, row.seed, len(row.request.prompt) + tokens, history)


@contextmanager
def _beside(purpose: str, device: torch.device) -> Iterator[None]:
    """Run on the stream of some purpose: beside what decodes, after what it has begun, whose memory is read here or
    may be given to this."""
    with torch.cuda.stream(_held_back(purpose, device)):  # None: where we are
        yield


def _held_back(purpose: str, device: torch.device) -> torch.cuda.Stream | None:
    """The stream of some purpose, on which what comes next waits for what decodes; none without a GPU."""
    if device.type != "cuda":
        return None
    stream = side_stream(torch.cuda.current_device(), purpose)
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _to_host(chosen: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Tokens and log-probabilities [B, 2] on the host, once the event has come; nobody waits here."""
    if chosen.device.type != "cuda":
        return chosen.clone(), None
    there = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    there.copy_(chosen, non_blocking=True)
    make: Any = torch.cuda.Event
    arrived: torch.cuda.Event = make()
    arrived.record()
    return there, arrived
