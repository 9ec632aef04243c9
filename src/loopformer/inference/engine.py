"""Prompts that were run lately, so that what a new one shares with them is not run again.

prefixes = Prefixes(most_tokens=4096)
prefixes.keep(prompt, cache.read(0))
kept, shared = prefixes.find(route, other_prompt)    # the longest common beginning

Keys of one trajectory mean nothing under another, so only prompts of the same trajectory share. What was used
longest ago goes first.

A cache whose rows come and go: the memory of continuous batching.

pool = Pool(model, rows=16)
place = pool.admit(state, table, cache.read(0), length)   # a prompt that was run elsewhere
hidden = model.extend(last_tokens, pool)                  # all rows, in the order of pool.tags
pool.retire(place)                                        # its memory is the next one's

Rows lie longest trajectory first, so that those still in the loop are always the first ones. One that comes or goes
moves at most one row of each shorter budget.

Continuous batching: requests of any budget come and go at every token.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counter
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, require
from loopformer.inference.decode import ends, padded, take_all
from loopformer.inference.request import Event, Request, RowState
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache, Passes, RowKeys
from loopformer.trajectory import Trajectory

WORTH_SHARING = 8  # tokens; fewer are run again


@dataclass(frozen=True)
class Prefix:
    """A prompt and its keys."""

    tokens: tuple[int, ...]
    keys: RowKeys


class Prefixes:
    """At most `most_tokens` tokens of prompts, the one used last at the end."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._kept: list[Prefix] = []

    @property
    def tokens(self) -> int:
        return sum(len(prefix.tokens) for prefix in self._kept)

    def find(self, trajectory: Trajectory, prompt: Sequence[int]) -> tuple[RowKeys, int]:
        """The keys of the prompt that shares the longest beginning, and its length; all but the last token at most,
        since that one's output is what is wanted."""
        best = max(self._along(trajectory), key=lambda prefix: common(prefix.tokens, prompt), default=None)
        shared = min(common(best.tokens, prompt), len(prompt) - 1) if best is not None else 0
        if best is None or shared == 0:
            return RowKeys(trajectory, []), 0
        self._kept = [prefix for prefix in self._kept if prefix is not best] + [best]
        return best.keys, shared

    def keep(self, prompt: Sequence[int], keys: RowKeys) -> None:
        """Remember a prompt, unless nearly all of it is remembered; one that it begins with is then forgotten."""
        same = self._along(keys.trajectory)
        known = max((common(one.tokens, prompt) for one in same), default=0)
        if len(prompt) > self.most_tokens or len(prompt) - known < WORTH_SHARING:
            return
        beginnings = [one for one in same if common(one.tokens, prompt) == len(one.tokens)]
        self._kept = [one for one in self._kept if not any(one is other for other in beginnings)]
        self._kept.append(Prefix(tuple(prompt), keys.copy()))
        while self.tokens > self.most_tokens:
            del self._kept[0]

    def _along(self, trajectory: Trajectory) -> list[Prefix]:
        return [prefix for prefix in self._kept if prefix.keys.trajectory == trajectory]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


class Tag(Protocol):
    """What a row belongs to."""

    @property
    def trajectory(self) -> Trajectory: ...


T = TypeVar("T", bound=Tag)


class Pool(Cache, Generic[T]):
    """At most `rows` sequences; `tags[place]` says whose row it is. A loop takes memory when it is first used."""

    def __init__(self, model: LoopedLM, rows: int) -> None:
        super().__init__(model.config, [], Passes([], [], []), model.config.context, model.tokens.weight)
        self.most = rows
        self.tags: list[T] = []
        self._order = torch.arange(rows, device=model.tokens.weight.device)
        self._told: list[Tensor | None] = []  # of each loop [rows, k, 4, D]
        self._blocks = model.config.blocks

    @property
    def used_bytes(self) -> int:
        """Memory that belongs to rows, of what was taken."""
        counts = self.passes.rows
        return sum(rows * k[0].nbytes * 2 for loop, rows in zip(self._kept, counts, strict=False) for k, _ in loop)

    def admit(self, tag: T, table: Tensor | None, kept: RowKeys, length: int) -> int:
        """Take in a row that has run `length` tokens, with its modulations [M, k, 4, D]; its place."""
        while len(self._kept) < tag.trajectory.budget:
            self._take_a_loop(table is not None)
        place = len(self.tags)
        self.tags.append(tag)
        self.lengths.append(0)
        for budget in sorted({one.trajectory.budget for one in self.tags[:-1]}):  # the shortest routes make room
            if budget < tag.trajectory.budget:
                first = next(number for number, one in enumerate(self.tags) if one.trajectory.budget == budget)
                self._move(first, place)
                place = first
        self.tags[place] = tag
        self._settle()
        self.write(place, kept, length)
        for loop, told in enumerate(self._told[: tag.trajectory.budget]):
            if told is not None and table is not None:
                told[place] = table[loop]
        return place

    def retire(self, place: int) -> None:
        """Let a row go."""
        mine = self.tags[place].trajectory.budget
        for budget in sorted(
            {one.trajectory.budget for one in self.tags if one.trajectory.budget <= mine}, reverse=True
        ):
            last = max(number for number, one in enumerate(self.tags) if one.trajectory.budget == budget)
            if last != place:
                self._move(last, place)
                place = last
        del self.tags[-1], self.lengths[-1]
        self._settle()

    def _place_of(self, row: int) -> int:
        return row  # rows lie in their own order

    def _move(self, source: int, target: int) -> None:
        """Put one row's keys, values, modulations and tag over another's."""
        length = self.lengths[source]
        for loop in range(self.tags[source].trajectory.budget):
            for pair in self._kept[loop]:
                for tensor in pair:
                    tensor[target, :, :length] = tensor[source, :, :length]
            told = self._told[loop]
            if told is not None:
                told[target] = told[source]
        self.tags[target], self.lengths[target] = self.tags[source], length

    def _settle(self) -> None:
        """The passes of the rows that are here now."""
        budgets = [tag.trajectory.budget for tag in self.tags]
        counts = [sum(budget > loop for budget in budgets) for loop in range(max(budgets, default=0))]
        told = [None if (all_ := self._told[loop]) is None else all_[:rows] for loop, rows in enumerate(counts)]
        self.passes = Passes(counts, told, list(range(len(budgets))))
        self.trajectories = tuple(tag.trajectory for tag in self.tags)

    def _take_a_loop(self, conditioned: bool) -> None:
        self._kept.append(self._empty_loop(self.most, self._blocks))
        told = self._weight.detach().new_zeros(self.most, self._blocks, 4, self._weight.shape[1])
        self._told.append(told if conditioned else None)


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
        self._numbers = counter()
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
        self.model.resolve(request.trajectory)
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
                    if other.state.trajectory == request.trajectory
                )
                if self._prefixes.most_tokens and max(beside, default=0) >= shared + WORTH_SHARING:
                    break
                arrivals.append(Arrival(self._waiting.popleft(), keys, shared))
                tokens -= len(arrivals[-1].rest)
        return arrivals

    def _prefill(self, group: list[Arrival]) -> list[Event]:
        """Run prompts together; those that go on after their first token get a row each."""
        trajectories = [arrival.state.trajectory for arrival in group]
        ids, counts = padded(self.model, [arrival.rest for arrival in group])
        capacity = max(arrival.shared for arrival in group) + max(counts)
        cache = self.model.cache(trajectories, len(group), capacity)
        for row, arrival in enumerate(group):
            cache.write(row, arrival.keys, arrival.shared)
        hidden = ends(self.model.extend(ids, cache, counts, check=False), counts)
        events = self._take([arrival.state for arrival in group], hidden)
        for row, (arrival, event) in enumerate(zip(group, events, strict=True)):
            keys, prompt, trajectory = cache.read(row), arrival.state.request.prompt, trajectories[row]
            self._prefixes.keep(prompt, keys)
            if event.result is None:
                self._pool.admit(arrival.state, self._table(trajectory), keys, len(prompt))
        self.counts.prompt_tokens += sum(counts)
        self.counts.shared_tokens += sum(arrival.shared for arrival in group)
        return events

    def _take(self, states: list[RowState], hidden: Tensor) -> list[Event]:
        """The next token of each, from the hidden states of their last ones [B, D]."""
        return take_all(states, self.model.head(hidden)[:, : self.model.config.vocab])

    def _table(self, trajectory: Trajectory) -> Tensor | None:
        """The modulations of a trajectory, computed once for as long as someone follows it."""
        if trajectory not in self._tables:
            followed = {state.trajectory for state in self._pool.tags}
            self._tables = {known: table for known, table in self._tables.items() if known in followed}
            self._tables[trajectory] = self.model.table(trajectory)
        return self._tables[trajectory]

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
