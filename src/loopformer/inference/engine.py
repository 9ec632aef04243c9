"""The one decode loop: requests of any budget come and go at every token, and no fault harms them.

engine = Engine(model, tokenizer, PlainBackend(model, 16), rows=16, queue=64)     # or lm.engine(16)
ticket = engine.submit(Request(prompt, Trajectory.uniform(2)))   # Busy when the queue is full
for event in engine.run(): ...                                   # event.ticket, event.piece; or engine.step()
engine.cancel(ticket)

At each step every request that has a batch slot gets its next token (decode), and waiting ones take free slots and
run their prompts (prefill); tokens become text, and a request that has ended gives its slot back (retire).
`lm.generate`, `lm.stream` and servers all run through here. A backend computes: decode.py or fused/shared.py.

A step is a transaction. The state of all requests is one immutable value, which a step replaces in one assignment.
After an error before that, such as a full memory or Ctrl-C, nothing has happened, and the next step repeats the
work. Events are part of the state until they are delivered. A request whose own work fails twice in a row ends
with a result that says so. On the plain fp32 path a request's text is what it would be alone.
`submit` and `cancel` may be called from any thread, `step` and `run` from one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, cycle
from threading import Lock
from typing import Protocol

import torch

from loopformer.device import device_context
from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.inference.detokenizer import Detokenizer
from loopformer.inference.request import Event, Request, RowState
from loopformer.inference.sampling import Choice, is_whole
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

PROMPT_TOKENS = 2048  # of new requests in a step while no row runs; otherwise `prefill_chunk`, to delay no row


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
        """The waiting rows to prefill now, in order of arrival and in groups to run together; their prompts end
        with the one that exceeds `tokens`."""
        ...

    def prefill(self, rows: Sequence[RowState]) -> list[Choice | int]:
        """Run the prompts of one group: the first token of each row, which then has a slot. A number means that the
        row waits and is prefilled again: the tokens of a long prompt that were run, or 0 while the device runs."""
        ...

    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        """The next tokens of rows that have slots: one each, or none now and several later where the device runs
        ahead of the host."""
        ...

    def free_except(self, rows: Sequence[RowState]) -> None:
        """Clear and free the slots of all other rows."""
        ...

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        """Keys and values of these rows."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Room for keys and values."""
        ...


@dataclass
class EngineCounts:
    """The work of an engine so far."""

    prompt_tokens: int = 0  # that were run
    shared_tokens: int = 0  # whose keys came from another prompt
    new_tokens: int = 0


@dataclass(frozen=True)
class _State:
    """The state of all requests."""

    waiting: tuple[RowState, ...] = ()
    running: tuple[RowState, ...] = ()  # those that have slots
    faults: frozenset[int] = frozenset()  # tickets whose own work failed at the last try
    events: tuple[Event, ...] = ()
    first_event: int = 0  # its number among all events of the engine


class Engine:
    """Runs at most `rows` requests at once, and lets at most `queue` more wait."""

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: Detokenizer,
        backend: Backend,
        rows: int = 16,
        queue: int = 64,
    ) -> None:
        require(is_whole(queue) and queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.model, self.backend = model, backend
        self.rows, self._tokenizer, self._most_waiting = rows, tokenizer, queue
        self._new_tokens = 0
        self._tickets = count()
        self._state = _State()
        self._delivered = 0  # events
        self._state_lock, self._work = Lock(), Lock()  # held to replace the state, and to run a step

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
        """Whether nothing is left to do: no request waits or runs, and every event was delivered."""
        state = self._state
        return not (state.waiting or state.running) and state.first_event + len(state.events) == self._delivered

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
        return EngineCounts(self.backend.prompt_tokens, self.backend.shared_tokens, self._new_tokens)

    def submit(self, request: Request) -> int:
        """Put a request in the queue and return its ticket. A wrong request is refused here, not in a step."""
        self.model.resolve(request.trajectory)
        self.backend.check(request)
        row = RowState.start(next(self._tickets), request, self._tokenizer, self.model.config)
        with self._state_lock:
            if len(self._state.waiting) >= self._most_waiting:
                raise Busy(f"The queue is full ({self._most_waiting} requests are waiting); try again later.")
            self._state = replace(self._state, waiting=(*self._state.waiting, row))
        return row.ticket

    def cancel(self, ticket: int) -> None:
        """Drop a request, waiting or running, if it has not ended.

        Its slot is free from the next step on. Its earlier events are still delivered.
        """
        self._publish(lambda state: _without(state, ticket))

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do. After an early exit the next `run` or `step` delivers the rest."""
        while not self.idle:
            undelivered = self._undelivered()
            if not undelivered:
                self._step()
                continue
            event = undelivered[0]
            self._delivered += 1  # and no call before the yield: Ctrl-C cannot come between
            yield event

    def step(self) -> list[Event]:
        """One token for every request that runs, and the first one for those that come in."""
        self._step()
        events = list(self._undelivered())
        self._delivered += len(events)  # and no call before the return: Ctrl-C cannot come between
        return events

    def _undelivered(self) -> tuple[Event, ...]:
        state = self._state
        return state.events[self._delivered - state.first_event :]

    def _step(self) -> None:
        gradients = torch.is_grad_enabled()
        try:
            with self._work, device_context(self.model.device):
                delivered = self._delivered
                self._publish(
                    lambda state: replace(
                        state, events=state.events[delivered - state.first_event :], first_event=delivered
                    )
                )
                running = self._state.running
                self.backend.free_except(running)
                if running:
                    self._append_tokens(running, self.backend.decode(running))
                self._admit()
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
            failure = error.with_traceback(None)  # its frames hold the tensors of the failed run
        if failure is None:
            run: list[tuple[RowState, Choice]] = []
            further: set[int] = set()  # prompts of which one more piece was run
            for row, outcome in zip(group, choices, strict=True):
                if isinstance(outcome, Choice):
                    run.append((row, outcome))
                elif outcome:
                    further.add(row.ticket)
            if run:
                self._append_tokens([row for row, _ in run], [[choice] for _, choice in run])
            self._publish(lambda state: replace(state, faults=state.faults - further))
            return
        self.backend.free_except(self._state.running)  # some rows of the group may have slots
        if len(group) == 1:
            self._fault(group[0], failure)
            return
        for row in group:  # each alone, so that only the row at fault fails
            self._prefill([row])

    def _append_tokens(self, rows: Sequence[RowState], choices: Sequence[Sequence[Choice]]) -> None:
        """Turn tokens into text, and publish the new states of their rows."""
        after: dict[int, RowState] = {}
        events: list[Event] = []
        for row, chosen in zip(rows, choices, strict=True):
            if not chosen:
                continue
            try:
                after[row.ticket], event = row.append_tokens(chosen)
            except Exception as error:
                self._fault(row, error)
                continue
            events.append(event)
        ended = {event.ticket for event in events if event.result is not None}

        def appended(state: _State) -> _State:
            admitted = [row for row in state.waiting if row.ticket in after]
            running = [after.get(row.ticket, row) for row in (*state.running, *admitted)]
            present = {row.ticket for row in running}  # without rows that were cancelled meanwhile
            return replace(
                state,
                waiting=tuple(row for row in state.waiting if row.ticket not in after),
                running=tuple(row for row in running if row.ticket not in ended),
                faults=state.faults - after.keys(),
                events=(*state.events, *(event for event in events if event.ticket in present)),
            )

        self._publish(appended)
        if ended:
            self.backend.free_except(self._state.running)
        self._new_tokens += sum(len(after[row.ticket].ids) - len(row.ids) for row in rows if row.ticket in after)

    def _fault(self, row: RowState, error: Exception) -> None:
        """Raise the error of a request the first time, so that the next step tries again. The second time in a row
        ends the request with it."""
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
    )


def generate(
    model: LoopedLM, tokenizer: Detokenizer, requests: Sequence[Request], backend: Backend
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
    """Run prompts of every length at these budgets, and every number of rows, as one row after the other ends.

    A GPU compiles kernels and records graphs at first use; without this the first requests would wait for it.
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
