"""Continuous batching: requests of any budget come and go at every token.

engine = Engine(model, tokenizer, rows=16, queue=64)
ticket = engine.submit(Request(prompt, Trajectory.uniform(2)))   # Busy when the queue is full
for event in engine.run(): ...                                   # event.row is the ticket; or engine.step()
engine.cancel(ticket)

At each step, waiting requests take free rows and run their prompts, and every other row gets one token more. What a
prompt shares with one that was run lately, along the same trajectory, is not run again. A request's text is what it
would be alone. `submit` and `cancel` may be called from any thread, `step` from one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from threading import Lock

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, require
from loopformer.inference.generate import Event, Request, RowState, take_all
from loopformer.inference.padding import ends, padded
from loopformer.inference.pool import Pool
from loopformer.inference.prefixes import WORTH_SHARING, Prefixes, common
from loopformer.model import LoopedLM
from loopformer.model.cache import RowKeys
from loopformer.trajectory import Trajectory

PROMPT_TOKENS = 2048  # of new requests in one step, so that those that run are not held up for long


class Busy(LoopformerError):
    """The queue is full: the caller may try again later."""


@dataclass
class Counts:
    """What an engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0  # that were run
    shared_tokens: int = 0  # that were not, as another prompt had them
    new_tokens: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request that has got a row, and what its prompt need not run again."""

    state: RowState
    keys: RowKeys
    shared: int

    @property
    def rest(self) -> tuple[int, ...]:
        return self.state.request.prompt[self.shared :]


class Engine:
    """Runs at most `rows` requests at once, and lets at most `queue` more wait."""

    def __init__(
        self, model: LoopedLM, tokenizer: Tokenizer, rows: int = 16, queue: int = 64, remember: int | None = None
    ) -> None:
        """`remember`: tokens of earlier prompts to keep for sharing; four contexts by default."""
        require(rows >= 1, f"An engine needs 1 row or more, got {rows}.")
        require(queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.model, self.counts = model, Counts()
        self._tokenizer, self._rows, self._most_waiting = tokenizer, rows, queue
        self._pool: Pool[RowState] = Pool(model, rows)
        self._prefixes = Prefixes(4 * model.config.context if remember is None else remember)
        self._tables: dict[Trajectory, Tensor | None] = {}
        self._numbers = count()
        self._waiting: deque[RowState] = deque()
        self._cancelled: set[int] = set()
        self._events: list[Event] = []  # of a step that failed halfway, for the next one to return
        self._door, self._work = Lock(), Lock()  # who waits; who runs

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._pool.tags)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._pool.tags

    @property
    def used_bytes(self) -> int:
        """Keys and values of the requests that run."""
        return self._pool.used_bytes

    def submit(self, request: Request) -> int:
        """Put a request in the queue; its ticket. What is wrong with it is said here, not while others run."""
        self.model.route(request.trajectory)
        state = RowState(next(self._numbers), request, self._tokenizer, self.model.config)
        with self._door:
            if len(self._waiting) >= self._most_waiting:
                raise Busy(f"The queue is full ({self._most_waiting} requests are waiting); try again later.")
            self._waiting.append(state)
        return state.number

    def cancel(self, ticket: int) -> None:
        """Drop a request, waiting or running; one that is done already is no matter.

        Its row is free at once, or after the token that is being computed in another thread.
        """
        with self._door:
            self._waiting = deque(state for state in self._waiting if state.number != ticket)
            self._cancelled.add(ticket)
        if self._work.acquire(blocking=False):
            try:
                self._drop_cancelled()
            finally:
                self._work.release()

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One token for every request that runs, and the first one for those that come in."""
        with self._work:
            self._drop_cancelled()
            running = list(self._pool.tags)
            if running:
                self._events += self._decode(running)
            self._admit()
            self.counts.steps += 1
            self.counts.new_tokens += len(self._events)
            events, self._events = self._events, []
            return events

    def _decode(self, running: list[RowState]) -> list[Event]:
        last = torch.tensor([[state.ids[-1]] for state in running], device=self.model.tokens.weight.device)
        lengths = list(self._pool.lengths)
        try:
            hidden = self.model.extend(last, self._pool, check=False)[:, 0]
            events = self._take(running, hidden)
        except BaseException:  # the next step does it again
            self._pool.lengths = lengths
            raise
        for place in reversed([place for place, event in enumerate(events) if event.result is not None]):
            self._pool.retire(place)
        return events

    def _admit(self) -> None:
        """Run the prompts of waiting requests, as many as there are rows for, and few enough at a time."""
        tokens = 0
        while self._waiting and len(self._pool.tags) < self._rows and tokens < PROMPT_TOKENS:
            arrivals = self._next_arrivals(self._rows - len(self._pool.tags), PROMPT_TOKENS - tokens)
            tokens += sum(len(arrival.rest) for arrival in arrivals)
            groups = _groups(arrivals, self.model.config.context)
            while groups:
                try:
                    self._events += self._prefill(groups[0])
                except BaseException:  # memory, or Ctrl-C: nobody is lost
                    with self._door:
                        self._waiting.extendleft(one.state for group in groups for one in group)
                    raise
                del groups[0]

    def _next_arrivals(self, most: int, tokens: int) -> list[Arrival]:
        """The next requests that can run together; one that shares its beginning with another waits for it."""
        arrivals: list[Arrival] = []
        with self._door:
            while self._waiting and len(arrivals) < most and tokens > 0:
                request = self._waiting[0].request
                keys, shared = self._prefixes.find(request.trajectory, request.prompt)
                beside = (
                    common(other.state.request.prompt, request.prompt)
                    for other in arrivals
                    if other.state.route == request.trajectory
                )
                if self._prefixes.most_tokens and max(beside, default=0) >= shared + WORTH_SHARING:
                    break
                arrivals.append(Arrival(self._waiting.popleft(), keys, shared))
                tokens -= len(arrivals[-1].rest)
        return arrivals

    def _prefill(self, group: list[Arrival]) -> list[Event]:
        """Run prompts together; those that go on after their first token get a row each."""
        routes = [arrival.state.route for arrival in group]
        ids, counts = padded(self.model, [arrival.rest for arrival in group])
        capacity = max(arrival.shared for arrival in group) + max(counts)
        cache = self.model.cache(routes, len(group), capacity)
        for row, arrival in enumerate(group):
            cache.write(row, arrival.keys, arrival.shared)
        hidden = ends(self.model.extend(ids, cache, counts, check=False), counts)
        events = self._take([arrival.state for arrival in group], hidden)
        for row, (arrival, event) in enumerate(zip(group, events, strict=True)):
            keys, prompt, route = cache.read(row), arrival.state.request.prompt, routes[row]
            self._prefixes.keep(prompt, keys)
            if event.result is None:
                self._pool.admit(arrival.state, self._table(route), keys, len(prompt))
        self.counts.prompt_tokens += sum(counts)
        self.counts.shared_tokens += sum(arrival.shared for arrival in group)
        return events

    def _take(self, states: list[RowState], hidden: Tensor) -> list[Event]:
        """The next token of each, from the hidden states of their last ones [B, D]."""
        return take_all(states, self.model.head(hidden)[:, : self.model.config.vocab])

    def _table(self, route: Trajectory) -> Tensor | None:
        """The modulations of a trajectory, computed once for as long as someone follows it."""
        if route not in self._tables:
            followed = {state.route for state in self._pool.tags}
            self._tables = {known: table for known, table in self._tables.items() if known in followed}
            self._tables[route] = self.model.table(route)
        return self._tables[route]

    def _drop_cancelled(self) -> None:
        with self._door:
            cancelled, self._cancelled = self._cancelled, set()
        for place in reversed(range(len(self._pool.tags))):
            if self._pool.tags[place].number in cancelled:
                self._pool.retire(place)


def _groups(arrivals: list[Arrival], context: int) -> list[list[Arrival]]:
    """Prompts of about the same length together, so that little is padded; each group fits the context."""
    groups: list[list[Arrival]] = []
    for arrival in sorted(arrivals, key=lambda one: -len(one.rest)):
        longest = len(groups[-1][0].rest) if groups else 0
        if 4 * len(arrival.rest) >= 3 * longest > 0 and arrival.shared + longest <= context:
            groups[-1].append(arrival)
        else:
            groups.append([arrival])
    return groups
