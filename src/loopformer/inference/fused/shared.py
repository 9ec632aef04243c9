"""The fused backend of the engine: requests of any budget come and go between passes that all of them share.

backend = SharedBackend(model, slots=64)             # DecoderPool.obstacle(model) says what is in its way here
engine = Engine(model, tokenizer, backend=backend)

Prompts are run as on the plain path (decode.py); tokens go through batch.py. A row needs pages for all it may come
to, prompt and new tokens, in each of its loops; whoever does not fit waits.

The device runs ahead of the host: while the engine makes text of one token, the passes of the next are under way.
What comes next is known without looking at a token, since it is chosen on the device and a budget says when it is
due; a row that turns out to have ended drops what was run for it. Only where a repetition penalty needs the text
itself does the device wait.

Under faults: what the device holds is taken out of the backend while it works, and put back when all of it was
noted. If it is not there, or does not stand where a row says it does, the row's tokens are run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from loopformer.device import available_bytes
from loopformer.errors import LoopformerError
from loopformer.inference.decode import PromptBackend, prefill
from loopformer.inference.fused.batch import SharedBatch, page_bytes, pages_of
from loopformer.inference.request import Request, RowState
from loopformer.inference.sampling import Choice, Draw, choose
from loopformer.model import LoopedLM
from loopformer.model.cache import RowKeys

AHEAD = 2  # groups of passes that are under way at a time
SHARE = 0.8  # of the memory that is free, for keys and values at most


@dataclass(frozen=True)
class Seat:
    """A row in a slot: its pages, and how far the device will have come with it when all that is queued is done."""

    slot: int
    pages: tuple[int, ...]
    budget: int
    tokens: int  # new ones that are chosen by then
    loop: int = 0  # passes that the next one is through by then
    started: bool = False  # whether the device has the row's last token

    def goes_on(self, row: RowState) -> bool:
        """Whether one more token is wanted, and there is a place for the one before it."""
        return self.tokens < row.request.max_tokens and len(row.request.prompt) + self.tokens <= row.context


@dataclass(frozen=True)
class Flight:
    """Tokens that are under way from the device: whose, which of their new ones, and when they are there."""

    tickets: tuple[int, ...]
    numbers: tuple[int, ...]
    tokens: Tensor
    logprobs: Tensor
    landed: torch.cuda.Event | None

    def choices(self) -> list[tuple[int, int, Choice]]:
        """Ticket, number and choice of each, once they are there."""
        if self.landed is not None:
            self.landed.synchronize()
        pairs = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        each = zip(self.tickets, self.numbers, pairs, strict=True)
        return [(ticket, number, Choice(*pair)) for ticket, number, pair in each]


@dataclass(frozen=True)
class Held:
    """What the device holds, and what has come from it that its rows have not taken yet."""

    slots: tuple[int, ...]  # that nobody has
    pages: tuple[int, ...]
    seats: Mapping[int, Seat] = field(default_factory=dict)  # by ticket
    flights: tuple[Flight, ...] = ()
    found: Mapping[int, Mapping[int, Choice]] = field(default_factory=dict)  # by ticket and number

    def astray(self, rows: Sequence[RowState]) -> list[RowState]:
        """Rows whose next tokens neither are here or under way nor follow from what the device has."""
        known = {(ticket, number) for ticket, found in self.found.items() for number in found}
        known |= {pair for one in self.flights for pair in zip(one.tickets, one.numbers, strict=True)}

        def stands(row: RowState) -> bool:
            seat = self.seats.get(row.ticket)
            return seat is not None and all((row.ticket, n) in known for n in range(len(row.ids), seat.tokens))

        return [row for row in rows if not stands(row)]

    def moved(self, changes: Mapping[int, Mapping[str, Any]]) -> Held:
        """The same with some seats changed."""
        seats = {ticket: replace(self.seats[ticket], **change) for ticket, change in changes.items()}
        return replace(self, seats={**self.seats, **seats})

    def without(self, tickets: set[int]) -> Held:
        """The same without some rows; what is under way for them is dropped when it comes."""
        gone = [seat for ticket, seat in self.seats.items() if ticket in tickets]
        return Held(
            (*self.slots, *(seat.slot for seat in gone)),
            (*self.pages, *(page for seat in gone for page in seat.pages)),
            {ticket: seat for ticket, seat in self.seats.items() if ticket not in tickets},
            tuple(one for one in self.flights if not (set(one.tickets) & set(self.seats)) <= tickets),
            {ticket: found for ticket, found in self.found.items() if ticket not in tickets},
        )


class SharedBackend(PromptBackend):
    """Continuous batching of mixed budgets through shared passes; see the module's docstring."""

    def __init__(self, model: LoopedLM, slots: int, remember: int | None = None, memory: int | None = None) -> None:
        """`memory`: bytes of keys and values; by default what all slots may need, if there is so much."""
        super().__init__(model, remember)
        if memory is None:
            memory = int(SHARE * available_bytes(model.tokens.weight.device))
        wanted = slots * pages_of(model.config.context, model.config.loops)
        pages = min(wanted, memory // page_bytes(model))
        if pages < 1:
            raise LoopformerError(f"{memory:,} bytes hold no page of keys, which takes {page_bytes(model):,}.")
        self._batch = SharedBatch(model, slots, pages)
        self._nothing = Held(tuple(range(slots)), tuple(range(pages)))
        self._held: Held | None = self._nothing

    def check(self, request: Request) -> None:
        """Refuse what this backend can never run."""
        if request.certainty is not None:
            raise LoopformerError("The fused engine has no kernels for certainty; use the plain one.")
        if self._needed(request) > self._batch.page_count:
            raise LoopformerError(
                f"The request may come to {self._tokens(request)} tokens in {request.trajectory.budget} loops, "
                "more than the engine has memory for; lower max_tokens or the budget."
            )

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        return sum(self._needed(row.request) for row in rows) * page_bytes(self.model)

    def fits(self, rows: Sequence[RowState]) -> bool:
        held = self._held or self._nothing
        needed = sum(self._needed(row.request) for row in rows)
        return len(rows) <= len(held.slots) and needed <= len(held.pages)

    def keep(self, rows: Sequence[RowState]) -> None:
        held = self._held
        if held is not None and (gone := set(held.seats) - {row.ticket for row in rows}):
            self._held = held.without(gone)

    @torch.no_grad()
    def admit(self, row: RowState, keys: RowKeys) -> None:
        # Only a slot and pages that nobody has are written, so what is held stays true if that fails.
        self._held = self._seated(self._held or self._nothing, row, keys, len(row.request.prompt), 1)

    @torch.no_grad()
    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        held, self._held = self._held or self._nothing, None
        held = self._ready(held, rows)
        waits = any(row.request.sampling.repetition_penalty != 1 for row in rows)
        while len(held.flights) < (1 if waits else AHEAD):
            going = [row for row in rows if held.seats[row.ticket].goes_on(row)]
            if not going:
                break
            held = self._launched(held, going)
        found: dict[int, dict[int, Choice]] = {row.ticket: {} for row in rows}
        for row in rows:  # what was given out before, and not taken
            known = held.found.get(row.ticket, {})
            found[row.ticket] |= {number: choice for number, choice in known.items() if number >= len(row.ids)}
        while held.flights and not any(found.values()):
            for ticket, number, choice in held.flights[0].choices():
                if ticket in found:
                    found[ticket][number] = choice
            held = replace(held, flights=held.flights[1:])
        self._held = replace(held, found=found)
        return [[found[row.ticket][number] for number in sorted(found[row.ticket])] for row in rows]

    def _ready(self, held: Held, rows: Sequence[RowState]) -> Held:
        """Every row has its slot, and the device has its last token."""
        for row in held.astray(rows):  # by running all its tokens but the last again
            cache, _ = prefill(self.model, [row.history[:-1]], [row.trajectory])
            held = self._seated(held.without({row.ticket}), row, cache.read(0), row.length - 1, len(row.ids))
        new = {row.ticket: row for row in rows if not held.seats[row.ticket].started}
        if new:
            self._batch.start({held.seats[t].slot: (row.ids[-1], row.cached) for t, row in new.items()})
        return held.moved({ticket: {"started": True} for ticket in new})

    def _launched(self, held: Held, rows: Sequence[RowState]) -> Held:
        """Passes of these rows until some have run their last one, and the next tokens of those."""
        seats = [held.seats[row.ticket] for row in rows]
        passes = min(seat.budget - seat.loop for seat in seats)
        for _ in range(passes):
            self._batch.run([seat.slot for seat in seats])
        ended = [number for number, seat in enumerate(seats) if seat.loop + passes == seat.budget]
        draws = [self._draw(held, rows[number], seats[number]) for number in ended]
        tokens, logprobs = choose(self._batch.logits(ended), draws)
        self._batch.begin([seats[number].slot for number in ended], tokens)
        moved = {row.ticket: {"loop": seat.loop + passes} for row, seat in zip(rows, seats, strict=True)}
        moved |= {rows[number].ticket: {"loop": 0, "tokens": seats[number].tokens + 1} for number in ended}
        flight = Flight(
            tuple(rows[number].ticket for number in ended),
            tuple(seats[number].tokens for number in ended),
            *_on_the_way(tokens, logprobs),
        )
        return replace(held.moved(moved), flights=(*held.flights, flight))

    def _draw(self, held: Held, row: RowState, seat: Seat) -> Draw:
        """What decides a row's next token; a repetition penalty knows all that has come."""
        known = held.found.get(row.ticket, {})
        drafted = [known[number].token for number in range(len(row.ids), seat.tokens) if number in known]
        return row.draw(drafted)._replace(position=len(row.request.prompt) + seat.tokens)

    def _seated(self, held: Held, row: RowState, keys: RowKeys, length: int, tokens: int) -> Held:
        count = self._needed(row.request)
        seat = Seat(held.slots[0], held.pages[:count], row.trajectory.budget, tokens)
        assert len(seat.pages) == count, "a row was admitted that does not fit"
        self._batch.fill(seat.slot, seat.pages, keys, length, self._table(row.trajectory))
        seats = {**held.seats, row.ticket: seat}
        return replace(held, slots=held.slots[1:], pages=held.pages[count:], seats=seats)

    def _tokens(self, request: Request) -> int:
        """What a request may come to."""
        return min(self.model.config.context, len(request.prompt) + request.max_tokens)

    def _needed(self, request: Request) -> int:
        return pages_of(self._tokens(request), request.trajectory.budget)


def _on_the_way(tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
    """Both on the host, once the event has come."""
    if tokens.device.type != "cuda":
        return tokens, logprobs, None
    there = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in (tokens, logprobs)]
    for host, device in zip(there, (tokens, logprobs), strict=True):
        host.copy_(device, non_blocking=True)
    make: Any = torch.cuda.Event
    landed: torch.cuda.Event = make()
    landed.record()
    return there[0], there[1], landed
