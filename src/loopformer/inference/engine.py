"""The one decode loop: requests of any budget come and go at every token, and no fault harms them.

engine = Engine(model, tokenizer, PlainBackend(model, 16), rows=16, queue=64)     # or lm.engine(16)
ticket = engine.submit(Request(prompt, Trajectory.uniform(2)))   # Busy when the queue is full
for event in engine.run(): ...                                   # event.ticket, event.piece; or engine.step()
engine.cancel(ticket)

At each step every request that has a batch slot gets its next token (decode), and waiting ones take free slots and
run their prompts (prefill); tokens become text (take), and a request that has ended gives its slot back (retire).
`lm.generate`, `lm.stream` and servers all run through here. A backend computes: decode.py or fused/shared.py.

A step is a transaction. What all requests have come to is one immutable value, and what a step has found out
replaces it in one assignment: whatever is raised before that, a full memory or Ctrl-C, nothing has happened, and
the next step does it again. Events are part of that value until they are taken. A request whose own work fails
twice in a row ends with a result that says so. On the plain fp32 path a request's text is what it would be alone.
`submit` and `cancel` may be called from any thread, `step` and `run` from one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from threading import Lock
from typing import Protocol

import torch

from loopformer.device import device_context
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.request import EndingDetokenizer, Event, Request, RowState
from loopformer.inference.sampling import Choice, is_whole
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

PROMPT_TOKENS = 2048  # of new requests in a step where nobody runs; else a piece, to hold nobody up for long


class Busy(LoopformerError):
    """The queue is full: the caller may try again later."""


class Backend(Protocol):
    """What decodes: rows are known by their tickets, and given in their present states."""

    prefill_chunk: int  # tokens of prompts that may be run at a time beside rows that run
    prompt_tokens: int  # that were run
    shared_tokens: int  # that were not, as another prompt had them

    def check(self, request: Request) -> None:
        """Refuse what can never be run here, in one sentence."""
        ...

    def plan(self, waiting: Sequence[RowState], tokens: int) -> list[list[RowState]]:
        """Those of the waiting, first come first served, that can be prefilled now, in groups to run together;
        no more once their prompts exceed so many tokens."""
        ...

    def prefill(self, rows: Sequence[RowState]) -> list[Choice | int]:
        """Run the prompts of rows of one group, which then have slots: the first token of each. A number where the
        row waits and is prefilled again: tokens of a long prompt that were run, or 0 if all of it is under way."""
        ...

    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        """The next tokens of rows that have slots: one each, or none and later several where the
        device runs ahead of the host."""
        ...

    def free_except(self, rows: Sequence[RowState]) -> None:
        """These have slots; what others had is cleared and free."""
        ...

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        """Keys and values of these rows."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Keys and values that there is room for."""
        ...


@dataclass
class EngineCounts:
    """What an engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0  # that were run
    shared_tokens: int = 0  # that were not, as another prompt had them
    new_tokens: int = 0


@dataclass(frozen=True)
class _State:
    """What all requests have come to."""

    waiting: tuple[RowState, ...] = ()
    running: tuple[RowState, ...] = ()  # those that have slots
    faults: frozenset[int] = frozenset()  # requests whose own work failed the last time
    prefilled_tokens: Mapping[int, int] = field(default_factory=dict)  # most tokens of a prompt, by ticket
    events: tuple[Event, ...] = ()
    first_event: int = 0  # the number of the first of these, counted from the engine's beginning


class Engine:
    """Runs at most `rows` requests at once, and lets at most `queue` more wait."""

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: EndingDetokenizer,
        backend: Backend,
        rows: int = 16,
        queue: int = 64,
    ) -> None:
        if not is_whole(queue) or queue < 1:
            raise LoopformerError(f"The queue must hold 1 request or more, got {queue}.")
        self.model, self.backend = model, backend
        self.rows, self._tokenizer, self._most_waiting = rows, tokenizer, queue
        self._steps = self._new_tokens = 0
        self._tickets = count()
        self._state = _State()
        self._taken = 0  # events that were handed out
        self._state_lock, self._work = Lock(), Lock()  # who may replace the state; who runs

    @property
    def waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def room(self) -> int:
        """How many more requests may wait before the queue is full."""
        return self._most_waiting - self.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do: nobody waits or runs, and every event was taken."""
        state = self._state
        return not (state.waiting or state.running) and state.first_event + len(state.events) == self._taken

    @property
    def used_bytes(self) -> int:
        """Keys and values of the requests that run."""
        return self.backend.used_bytes(self._state.running)

    @property
    def memory_bytes(self) -> int:
        """Keys and values that there is room for."""
        return self.backend.memory_bytes

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(self._steps, self.backend.prompt_tokens, self.backend.shared_tokens, self._new_tokens)

    def submit(self, request: Request) -> int:
        """Put a request in the queue; its ticket. What is wrong with it is said here, not while others run."""
        self.model.resolve(request.trajectory)
        self.backend.check(request)
        row = RowState.start(next(self._tickets), request, self._tokenizer, self.model.config)
        with self._state_lock:
            if len(self._state.waiting) >= self._most_waiting:
                raise Busy(f"The queue is full ({self._most_waiting} requests are waiting); try again later.")
            self._state = replace(self._state, waiting=(*self._state.waiting, row))
        return row.ticket

    def cancel(self, ticket: int) -> None:
        """Drop a request, waiting or running; one that is done already is no matter.

        Its slot serves the next from the next step on. Events that were made before may still be taken.
        """
        self._publish(lambda state: _without(state, ticket))

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do. Whoever leaves early finds the rest at the next `run` or `step`."""
        while not self.idle:
            untaken = self._untaken()
            if not untaken:
                self._step()
                continue
            event = untaken[0]
            self._taken += 1  # and no call before the yield: Ctrl-C cannot come between
            yield event

    def step(self) -> list[Event]:
        """One token for every request that runs, and the first one for those that come in."""
        self._step()
        events = list(self._untaken())
        self._taken += len(events)  # and no call before the return: Ctrl-C cannot come between
        return events

    def _untaken(self) -> tuple[Event, ...]:
        state = self._state
        return state.events[self._taken - state.first_event :]

    def _step(self) -> None:
        gradients = torch.is_grad_enabled()
        try:
            with self._work, device_context(self.model.device):
                taken = self._taken
                self._publish(
                    lambda state: replace(
                        state, events=state.events[taken - state.first_event :], first_event=taken
                    )
                )
                running = self._state.running
                self.backend.free_except(running)
                if running:
                    self._take(running, self.backend.decode(running))
                self._admit()
                self._steps += 1
        finally:
            # Ctrl-C inside torch.no_grad's own code would leave it on for the whole process. This is one call of C.
            torch._C._set_grad_enabled(gradients)

    def _admit(self) -> None:
        """Run the prompts of waiting requests, as many as there are slots for, and few enough at a time."""
        most = self.backend.prompt_tokens + (self.backend.prefill_chunk if self._state.running else PROMPT_TOKENS)
        while (tokens := most - self.backend.prompt_tokens) > 0:
            groups = self.backend.plan(self._state.waiting, tokens)
            if not groups:
                return
            for group in groups:
                self._prefill(group)

    def _prefill(self, group: Sequence[RowState]) -> None:
        failure: Exception | None = None
        try:
            choices = self.backend.prefill(group)
        except Exception as error:
            failure = error.with_traceback(None)  # whose frames hold the memory of what failed
        if failure is None:
            run: list[tuple[RowState, Choice]] = []
            further: dict[int, int] = {}
            for row, outcome in zip(group, choices, strict=True):
                if isinstance(outcome, Choice):
                    run.append((row, outcome))
                elif outcome > self._state.prefilled_tokens.get(row.ticket, 0):
                    further[row.ticket] = outcome
            if run:
                self._take([row for row, _ in run], [[choice] for _, choice in run])
            if further:  # a piece that was never run before is work that did not fail
                self._publish(
                    lambda state: replace(
                        state,
                        faults=state.faults - further.keys(),
                        prefilled_tokens={**state.prefilled_tokens, **further},
                    )
                )
            return
        self.backend.free_except(self._state.running)  # some of the group may have got slots
        if len(group) == 1:
            self._fault(group[0], failure)
            return
        for row in group:  # so that only the one whose fault it is has to do with it
            self._prefill([row])

    def _take(self, rows: Sequence[RowState], choices: Sequence[Sequence[Choice]]) -> None:
        """Tokens become text, and what the rows have come to by it is published."""
        after: dict[int, RowState] = {}
        events: list[Event] = []
        for row, chosen in zip(rows, choices, strict=True):
            if not chosen:
                continue
            try:
                after[row.ticket], event = row.take(chosen)
            except Exception as error:
                self._fault(row, error)
                continue
            events.append(event)
        ended = {event.ticket for event in events if event.result is not None}

        def taken(state: _State) -> _State:
            admitted = [row for row in state.waiting if row.ticket in after]
            running = [after.get(row.ticket, row) for row in (*state.running, *admitted)]
            present = {row.ticket for row in running}  # but for those that were cancelled meanwhile
            return replace(
                state,
                waiting=tuple(row for row in state.waiting if row.ticket not in after),
                running=tuple(row for row in running if row.ticket not in ended),
                faults=state.faults - after.keys(),
                prefilled_tokens={
                    ticket: count for ticket, count in state.prefilled_tokens.items() if ticket not in after
                },
                events=(*state.events, *(event for event in events if event.ticket in present)),
            )

        self._publish(taken)
        if ended:
            self.backend.free_except(self._state.running)
        self._new_tokens += sum(len(after[row.ticket].ids) - len(row.ids) for row in rows if row.ticket in after)

    def _fault(self, row: RowState, error: Exception) -> None:
        """The first time it is raised, and the next step tries again; the second time the request ends with it."""
        sentence = str(error) or type(error).__name__
        again = row.ticket in self._state.faults

        def noted(state: _State) -> _State:
            if row.ticket not in {other.ticket for other in (*state.waiting, *state.running)}:
                return state  # it was cancelled meanwhile
            if not again:
                return replace(state, faults=state.faults | {row.ticket})
            return replace(_without(state, row.ticket), events=(*state.events, row.failed(sentence)))

        self._publish(noted)
        if not again:
            raise error

    def _publish(self, change: Callable[[_State], _State]) -> None:
        with self._state_lock:
            self._state = change(self._state)


def _without(state: _State, ticket: int) -> _State:
    return replace(
        state,
        waiting=tuple(row for row in state.waiting if row.ticket != ticket),
        running=tuple(row for row in state.running if row.ticket != ticket),
        faults=state.faults - {ticket},
        prefilled_tokens={other: count for other, count in state.prefilled_tokens.items() if other != ticket},
    )


def generate(
    model: LoopedLM, tokenizer: EndingDetokenizer, requests: Sequence[Request], backend: Backend
) -> Iterator[Event]:
    """Run requests together to their ends. Their tickets count from 0. A request that fails raises `RunFailed`."""
    count = max(1, len(requests))
    engine = Engine(model, tokenizer, backend, count, count)
    for request in requests:
        engine.submit(request)
    for event in engine.run():
        if event.result is not None and event.result.error is not None:
            raise RunFailed(event.result.error)
        yield event


def warm_up(engine: Engine, budgets: Sequence[int]) -> None:
    """Run prompts of every length at these budgets, and any number of rows as one after the other ends, by one pass
    and by as many as the most of them.

    On a GPU kernels are compiled and graphs recorded at first use, which the first requests would wait for.
    """
    config = engine.model.config
    longest = max(1, config.context - 1)  # where the context is longer than a piece, in pieces
    sizes = sorted({longest, *(min(2**power, longest) for power in range(5, 10))})
    firsts = cycle(range(config.vocab))  # no two prompts begin alike

    def submit(budget: int, size: int, most: int) -> None:
        prompt = (next(firsts), *[0] * (size - 1))
        with suppress(LoopformerError):  # one that can never fit into the memory that there is
            trajectory = Trajectory.uniform(budget)
            engine.submit(Request(prompt, trajectory, max_tokens=min(most, config.context - size + 1)))

    for budget in (max(budgets), 1):
        for number in range(engine.rows):
            submit(budget, sizes[0], 4 + number)
        list(engine.run())
    for budget in budgets:
        for size in sizes:
            submit(budget, size, 2)
            list(engine.run())
