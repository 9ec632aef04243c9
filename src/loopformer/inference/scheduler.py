"""Which waiting sequences to prefill, and in which order: decided here alone, for every runner.

scheduler = Scheduler(queue=64)
scheduler.add(sequence)                          # Busy when the queue is full
scheduler.running, scheduler.waiting             # in the order of arrival
groups = scheduler.plan_prefills(runner, scheduler.prefill_token_limit(runner))

Clients take turns. Each client's requests take consecutive turns, starting at the current turn. So a client that
sends many requests delays only its own, and a new client is served next. In the same turn clients are served in the
order of arrival. A client's turns go to its own requests by priority and arrival: a level of priority is worth a
second of waiting. So nobody starves.

Every running sequence is decoded at every step; there is no preemption. On a GPU, FusedRunner decides at which loop
a prefilled sequence joins those that decode (`_join` in fused/runner.py). While sequences decode, a step runs only
one chunk of prompts, so that none of them waits long for its next token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from loopformer.errors import LoopformerError, require
from loopformer.inference.request import is_whole
from loopformer.inference.sequence import Sequence, Status

if TYPE_CHECKING:
    from loopformer.inference.runner import Runner

IDLE_PREFILL_TOKENS = 2048  # prompt tokens per step when nothing decodes; otherwise one chunk
PRIORITY_SECONDS = 1.0  # of waiting that a level of priority is worth


class Busy(LoopformerError):
    """The queue is full: the caller may try again later."""


class Candidate(NamedTuple):
    """A sequence to prefill, and how many tokens of its prompt are to be run and cached."""

    new_tokens: int
    cached_tokens: int
    sequence: Sequence


class PendingPrefixes:
    """The beginnings of prompts that are being run, in blocks of tokens, as the cache will have them.

    A block is found by the block before it and its own tokens, so a prompt costs the same however many there are.
    """

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: 0 where prompts share nothing."""
        self._size = block_tokens
        self._numbers: dict[tuple[Hashable, tuple[int, ...]], int] = {}  # of each block

    def add(self, sequence: Sequence) -> None:
        """Add a prompt."""
        before: Hashable = sequence.trajectory
        for tokens in self._blocks(sequence, len(sequence.request.prompt)):
            before = self._numbers.setdefault((before, tokens), len(self._numbers))

    def shared_tokens(self, sequence: Sequence) -> int:
        """How many tokens a prompt could share once the others have run: whole blocks, never its last token."""
        before: Hashable = sequence.trajectory
        shared = 0
        for tokens in self._blocks(sequence, len(sequence.request.prompt) - 1):
            number = self._numbers.get((before, tokens))
            if number is None:
                break
            before, shared = number, shared + self._size
        return shared

    def _blocks(self, sequence: Sequence, end: int) -> Iterator[tuple[int, ...]]:
        """The full blocks of the first `end` tokens of a prompt."""
        size, prompt = self._size, sequence.request.prompt
        starts = range(0, end - size + 1, size) if size else ()
        return (prompt[start : start + size] for start in starts)


class Scheduler:
    """All sequences that are not done, and the order in which they are run."""

    def __init__(self, queue: int) -> None:
        require(is_whole(queue) and queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.queue = queue  # how many sequences may wait
        self.sequences: tuple[Sequence, ...] = ()  # in the order of arrival; replaced, never changed in place
        self._turn = 0  # the latest that was served
        self._next_turns: dict[str, int] = {}  # of each client that has sequences, or has used the current turn
        self._lock = Lock()  # held while these are replaced, which other threads do as well

    @property
    def running(self) -> list[Sequence]:
        return self.split()[0]

    @property
    def waiting(self) -> list[Sequence]:
        return self.split()[1]

    def split(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """The running, waiting and finished sequences. In one pass, because another thread may cancel a sequence
        meanwhile, and it must not be in two of the lists."""
        running, waiting, finished = list[Sequence](), list[Sequence](), list[Sequence]()
        for sequence in self.sequences:
            status = sequence.status  # compared, as the hash of an enum's member is a slow call
            if status is Status.RUNNING:
                running.append(sequence)
            elif status is Status.WAITING:
                waiting.append(sequence)
            else:
                finished.append(sequence)
        return running, waiting, finished

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        with self._lock:
            if len(self.sequences) >= self.queue and len(self.waiting) >= self.queue:
                raise Busy(f"The queue is full ({self.queue} requests are waiting); try again later.")
            client = sequence.request.client
            sequence.turn = max(self._turn, self._next_turns.get(client, 0))
            self._next_turns[client] = sequence.turn + 1
            self.sequences = (*self.sequences, sequence)

    def cancel(self, ticket: int) -> None:
        """Finish a sequence without a result, if it has not finished."""
        for sequence in self.sequences:
            if sequence.ticket == ticket:
                sequence.cancel()

    def remove(self, tickets: set[int]) -> None:
        """Remove sequences of which nothing is left to do."""
        with self._lock:
            self.sequences = tuple([sequence for sequence in self.sequences if sequence.ticket not in tickets])
            clients = {sequence.request.client for sequence in self.sequences}
            # A client that has used the current turn and comes back must not get it again: clients that submit one
            # text after another would keep it from ending.
            self._next_turns = {
                client: turn
                for client, turn in self._next_turns.items()
                if client in clients or (clients and turn > self._turn)
            }

    def prefill_token_limit(self, runner: Runner) -> int:
        """How many prompt tokens the next step may run: one chunk while sequences decode."""
        is_decoding = any(sequence.status is Status.RUNNING for sequence in self.sequences)
        return runner.chunk_tokens if is_decoding else IDLE_PREFILL_TOKENS

    def plan_prefills(self, runner: Runner, tokens: int) -> list[list[Sequence]]:
        """The groups of waiting sequences to prefill now. Stops after the prompt that reaches the limit of tokens.

        The prompts of a group are run together, so they have about the same length. Start all groups before blocks
        are freed or evicted for anything else. A prompt whose cached prefix has gone runs more tokens than planned.
        Its group may then need more positions than the context has, or more pages than there are, and fail.
        """
        in_flight, limit, free_rows = runner.in_flight(), runner.max_in_flight, runner.free_rows
        # Checked first: at most steps of a busy engine no row is free.
        if not free_rows or (limit is not None and len(in_flight) >= limit):
            return []
        free_pages = runner.available_pages
        tickets = {sequence.ticket for sequence in in_flight}
        pending = PendingPrefixes(runner.block_tokens)
        for sequence in in_flight:
            pending.add(sequence)
        chosen: list[Candidate] = []
        for sequence in self.order_waiting():
            if sequence.ticket in tickets:
                continue
            free_rows, free_pages = free_rows - 1, free_pages - runner.pages_needed(sequence)
            if free_rows < 0 or free_pages < 0:
                break  # no overtaking: otherwise a large request would starve
            cached = runner.cached_tokens(sequence)
            if pending.shared_tokens(sequence) > cached:
                break  # wait for the prefix rather than compute it twice
            pending.add(sequence)
            candidate = Candidate(len(sequence.request.prompt) - cached, cached, sequence)
            chosen.append(candidate)
            self._turn = max(self._turn, sequence.turn)
            tokens -= min(candidate.new_tokens, runner.chunk_tokens)
            if candidate.new_tokens > runner.chunk_tokens or tokens <= 0:
                break
        return _group_by_length(chosen, runner.chunk_tokens)

    def order_waiting(self) -> list[Sequence]:
        """The waiting sequences in the order in which they are served. Another policy belongs here."""
        waiting = self.waiting
        by_client = defaultdict[str, list[Sequence]](list)
        for sequence in sorted(waiting, key=_own_deadline):
            by_client[sequence.request.client].append(sequence)
        for sequences in by_client.values():
            turns = sorted([sequence.turn for sequence in sequences])
            for sequence, turn in zip(sequences, turns, strict=True):
                sequence.turn = turn
        # Started prompts come first: their chunks may hold pages that the others wait for.
        return sorted(waiting, key=lambda each: (each.started_at is None, each.turn, each.arrived_at))


def _own_deadline(sequence: Sequence) -> float:
    """The order of a sequence among those of its client."""
    return sequence.arrived_at + PRIORITY_SECONDS * sequence.request.priority


def _group_by_length(chosen: list[Candidate], chunk_tokens: int) -> list[list[Sequence]]:
    """Groups in which the shortest has three quarters of the longest, so that at most a quarter is padding. They
    are in the order of their first members."""
    groups: list[list[Sequence]] = []
    longest = 0
    for new_tokens, cached_tokens, sequence in sorted(chosen, key=lambda candidate: -candidate.new_tokens):
        is_alike = 0 < longest <= chunk_tokens and 4 * new_tokens >= 3 * longest
        if is_alike and cached_tokens + longest <= sequence.context:  # padding needs positions, too
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
            longest = new_tokens
    rank = {candidate.sequence.ticket: number for number, candidate in enumerate(chosen)}
    return sorted(groups, key=lambda group: min(rank[sequence.ticket] for sequence in group))
