"""Who runs next: the one place that decides it, for every runner.

scheduler = Scheduler(queue=64)
scheduler.add(sequence)                          # Busy when the queue is full
scheduler.with_status(Status.RUNNING)            # in the order of arrival
scheduler.order_waiting()                        # in the order in which they are served
groups = scheduler.plan_prefills(runner, tokens=512)

Every running sequence gets a token at every step. Waiting ones are served by `_due`, the time at which a sequence
is due: when it arrived, later for a higher priority number, and later for each sequence that its client has running
or waiting before it. So clients get equal shares, and however many others come, everybody's turn comes.

A long prompt is run in pieces beside the rows that decode, so that none of them waits for all of it. A prompt whose
beginning another prompt is running waits for that one's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock

from loopformer.errors import LoopformerError, require
from loopformer.inference.request import is_whole
from loopformer.inference.runner import Runner
from loopformer.inference.sequence import Sequence as Seq
from loopformer.inference.sequence import Status
from loopformer.scoring import common_prefix

PRIORITY_SECONDS = 1.0  # of waiting that one level of priority counts for
SHARE_SECONDS = 5.0  # of waiting that a sequence before it of the same client counts for


class Busy(LoopformerError):
    """The queue is full: the caller may try again later."""


class Scheduler:
    """All sequences that are not done, and the order in which they are run."""

    def __init__(self, queue: int) -> None:
        require(is_whole(queue) and queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.queue = queue  # how many sequences may wait
        self.sequences: tuple[Seq, ...] = ()  # in the order of arrival; replaced, never changed in place
        self._lock = Lock()  # held while `sequences` is replaced, which other threads do as well

    def add(self, sequence: Seq) -> None:
        """Let a sequence wait."""
        with self._lock:
            if len(self.with_status(Status.WAITING)) >= self.queue:
                raise Busy(f"The queue is full ({self.queue} requests are waiting); try again later.")
            self.sequences = (*self.sequences, sequence)

    def cancel(self, ticket: int) -> None:
        """Finish a sequence without a result, if it has not finished."""
        for sequence in self.sequences:
            if sequence.ticket == ticket:
                sequence.cancel()

    def remove(self, is_done: Callable[[Seq], bool]) -> None:
        """Remove finished sequences of which nothing is left to do."""
        with self._lock:
            self.sequences = tuple([sequence for sequence in self.sequences if not is_done(sequence)])

    def with_status(self, status: Status) -> list[Seq]:
        """In the order of arrival."""
        return [sequence for sequence in self.sequences if sequence.status is status]

    def order_waiting(self) -> list[Seq]:
        """The waiting sequences in the order in which they are served."""
        before = Counter(sequence.request.client for sequence in self.with_status(Status.RUNNING))
        waiting = self.with_status(Status.WAITING)
        due: dict[int, float] = {}
        for sequence in sorted(waiting, key=lambda sequence: self._due(sequence, 0)):
            client = sequence.request.client
            due[sequence.ticket] = self._due(sequence, before[client])
            before[client] += 1
        # Those whose prompts were run in part come first: they may hold memory that the others wait for.
        return sorted(waiting, key=lambda sequence: (sequence.started_at is None, due[sequence.ticket]))

    def _due(self, sequence: Seq, before: int) -> float:
        """When a sequence is due, with so many of the same client before it."""
        return sequence.arrived_at + PRIORITY_SECONDS * sequence.request.priority + SHARE_SECONDS * before

    def plan_prefills(self, runner: Runner, tokens: int) -> list[list[Seq]]:
        """The groups of waiting sequences to prefill now; prompts end with the one that exceeds `tokens`.

        Prompts that were under way and are through come first. A group is run together, so its prompts have about
        the same length and little is padded.
        """
        if groups := runner.arrived(wait=False):
            return groups
        under_way, most = runner.in_flight(), runner.max_in_flight
        # Checked first, as it is cheap and true at most steps of a busy engine.
        if not runner.free_rows or (most is not None and len(under_way) >= most):
            return []
        chosen: list[tuple[int, int, Seq]] = []  # tokens to run, tokens that are cached
        in_flight = {sequence.ticket for sequence in under_way}
        for sequence in self.order_waiting():
            if sequence.ticket in in_flight:
                continue
            if not runner.fits([*(other for _, _, other in chosen), sequence]):
                break
            cached = runner.cached_tokens(sequence)
            others = (*under_way, *(other for _, _, other in chosen))
            if any(_shareable(sequence, other, runner.share_tokens) > cached for other in others):
                break
            rest = len(sequence.request.prompt) - cached
            chosen.append((rest, cached, sequence))
            is_long = rest > runner.prefill_chunk
            tokens -= min(rest, runner.prefill_chunk)
            if is_long or tokens <= 0:
                break
        groups = []
        longest = 0
        for rest, cached, sequence in sorted(chosen, key=lambda entry: -entry[0]):
            is_alike = 0 < longest <= runner.prefill_chunk and 4 * rest >= 3 * longest
            if is_alike and cached + longest <= sequence.context:
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
                longest = rest
        return groups


def _shareable(sequence: Seq, other: Seq, share_tokens: int) -> int:
    """How many tokens of a prompt could be shared once another one has run: whole pages, never the last token."""
    if other.trajectory != sequence.trajectory or not share_tokens:
        return 0
    prompt = sequence.request.prompt
    common = min(common_prefix(other.request.prompt, prompt), len(prompt) - 1)
    return common // share_tokens * share_tokens
