"""Which waiting sequences to prefill, and in which order: decided here for every runner.

scheduler = Scheduler(queue=64)
scheduler.add(sequence)                          # Busy when the queue is full
scheduler.running, scheduler.waiting             # in the order of arrival
groups = scheduler.plan_prefills(runner, scheduler.prefill_budget(runner))

Every running sequence gets a token at every step; there is no preemption. Waiting sequences are ordered by a
virtual deadline (`_deadline`): their arrival, a second later per level of priority, and five seconds later per
sequence that the same client has running or waiting before. So clients get equal shares. Arrival wins in the end,
so nobody starves.

While sequences decode, a step runs only one chunk of prompts, so that none of them waits long for its next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from loopformer.errors import LoopformerError, require
from loopformer.inference.request import is_whole
from loopformer.inference.runner import Runner
from loopformer.inference.sequence import Sequence, Status
from loopformer.scoring import common_prefix

IDLE_PREFILL_TOKENS = 2048  # prompt tokens per step when nothing decodes; otherwise the runner's `prefill_chunk`
PRIORITY_SECONDS = 1.0  # delay per level of priority
FAIRNESS_SECONDS = 5.0  # delay per earlier sequence of the same client


class Busy(LoopformerError):
    """The queue is full: the caller may try again later."""


class Candidate(NamedTuple):
    """A sequence to prefill, and how many tokens of its prompt are to be run and cached."""

    new_tokens: int
    cached_tokens: int
    sequence: Sequence


class Scheduler:
    """All sequences that are not done, and the order in which they are run."""

    def __init__(self, queue: int) -> None:
        require(is_whole(queue) and queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.queue = queue  # how many sequences may wait
        self.sequences: tuple[Sequence, ...] = ()  # in the order of arrival; replaced, never changed in place
        self._lock = Lock()  # held while `sequences` is replaced, which other threads do as well

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is Status.RUNNING]

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is Status.WAITING]

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        with self._lock:
            if len(self.waiting) >= self.queue:
                raise Busy(f"The queue is full ({self.queue} requests are waiting); try again later.")
            self.sequences = (*self.sequences, sequence)

    def cancel(self, ticket: int) -> None:
        """Finish a sequence without a result, if it has not finished."""
        for sequence in self.sequences:
            if sequence.ticket == ticket:
                sequence.cancel()

    def remove(self, is_done: Callable[[Sequence], bool]) -> None:
        """Remove sequences of which nothing is left to do."""
        with self._lock:
            self.sequences = tuple([sequence for sequence in self.sequences if not is_done(sequence)])

    def prefill_budget(self, runner: Runner) -> int:
        """How many prompt tokens the next step may run."""
        return runner.prefill_chunk if self.running else IDLE_PREFILL_TOKENS

    def plan_prefills(self, runner: Runner, tokens: int) -> list[list[Sequence]]:
        """The groups of waiting sequences to prefill now. Stops after the prompt that uses up the budget of tokens.

        The prompts of a group are run together, so they have about the same length.
        """
        in_flight, limit = runner.in_flight(), runner.max_in_flight
        # Checked first: at most steps of a busy engine no row is free.
        if not runner.free_rows or (limit is not None and len(in_flight) >= limit):
            return []
        tickets = {sequence.ticket for sequence in in_flight}
        chosen: list[Candidate] = []
        for sequence in self.order_waiting():
            if sequence.ticket in tickets:
                continue
            others = [candidate.sequence for candidate in chosen]
            if not runner.fits([*others, sequence]):
                break  # no overtaking: otherwise a large request would starve
            cached = runner.cached_tokens(sequence)
            if any(_shareable_tokens(sequence, other, runner) > cached for other in (*in_flight, *others)):
                break  # wait for the prefix rather than compute it twice
            candidate = Candidate(len(sequence.request.prompt) - cached, cached, sequence)
            chosen.append(candidate)
            tokens -= min(candidate.new_tokens, runner.prefill_chunk)
            if candidate.new_tokens > runner.prefill_chunk or tokens <= 0:
                break
        return _group_by_length(chosen, runner.prefill_chunk)

    def order_waiting(self) -> list[Sequence]:
        """The waiting sequences in the order in which they are served."""
        before = Counter(sequence.request.client for sequence in self.running)
        waiting, deadlines = self.waiting, dict[int, float]()
        for sequence in sorted(waiting, key=lambda sequence: self._deadline(sequence, 0)):
            client = sequence.request.client
            deadlines[sequence.ticket] = self._deadline(sequence, before[client])
            before[client] += 1
        # Prompts that were begun come first: they may hold pages that the others wait for.
        return sorted(waiting, key=lambda one: (one.started_at is None, deadlines[one.ticket]))

    def _deadline(self, sequence: Sequence, before: int) -> float:
        """The virtual deadline of a sequence with so many earlier ones of its client. Another policy belongs
        here."""
        delay = PRIORITY_SECONDS * sequence.request.priority + FAIRNESS_SECONDS * before
        return sequence.arrived_at + delay


def _shareable_tokens(sequence: Sequence, other: Sequence, runner: Runner) -> int:
    """How many tokens of a prompt could be shared once another one has run: whole pages, never the last token."""
    size = runner.share_tokens
    if other.trajectory != sequence.trajectory or not size:
        return 0
    prompt = sequence.request.prompt
    common = min(common_prefix(other.request.prompt, prompt), len(prompt) - 1)
    return common // size * size


def _group_by_length(chosen: list[Candidate], prefill_chunk: int) -> list[list[Sequence]]:
    """Groups in which the shortest has three quarters of the longest, so that at most a quarter is padding. They
    are in the order of their first members."""
    groups: list[list[Sequence]] = []
    longest = 0
    for new_tokens, cached_tokens, sequence in sorted(chosen, key=lambda candidate: -candidate.new_tokens):
        is_alike = 0 < longest <= prefill_chunk and 4 * new_tokens >= 3 * longest
        if is_alike and cached_tokens + longest <= sequence.context:  # padding needs positions, too
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
            longest = new_tokens
    rank = {candidate.sequence.ticket: number for number, candidate in enumerate(chosen)}
    return sorted(groups, key=lambda group: min(rank[sequence.ticket] for sequence in group))
