"""The one decode loop: requests of any budget come and go at every token, and no fault harms them.

engine = Engine(model, tokenizer, PlainRunner(model, 16), rows=16, queue=64)     # or lm.engine(16)
ticket = engine.submit(Request(prompt, Trajectory.uniform(2)))   # Busy when the queue is full
for event in engine.run(): ...                                   # event.ticket, event.piece; or engine.step()
engine.cancel(ticket)

At each step every running sequence gets its next token (decode). Then waiting ones, chosen by the scheduler, take
free slots and run their prompts (prefill). Tokens become text, and a sequence that has ended gives its slot back.
`lm.generate`, `lm.stream` and servers all run through here. What computes is a runner: runner.py or
fused/runner.py.

No fault loses or repeats text. A sequence takes its tokens in one assignment, and whatever a runner holds for
others than the sequences that the scheduler knows is released at the start of the next step. So after an error or
Ctrl-C the next step goes on from what the sequences say. An event is what a sequence has more than was delivered of
it. A sequence whose own work fails twice in a row ends with a result that says so. On the plain fp32 path a
request's text is what it would be alone. `submit` and `cancel` may be called from any thread, `step` and `run` from
one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle
from threading import Lock

import torch

from loopformer.device import device_context
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.detokenizer import Detokenizer
from loopformer.inference.request import Choice, Event, Request
from loopformer.inference.runner import Runner
from loopformer.inference.scheduler import Scheduler
from loopformer.inference.sequence import Progress, Status
from loopformer.inference.sequence import Sequence as Seq
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

PROMPT_TOKENS = 2048  # of new requests in a step while no row runs; otherwise `prefill_chunk`, to delay no row


@dataclass
class EngineCounts:
    """The work of an engine so far."""

    prompt_tokens: int = 0  # that were run
    shared_tokens: int = 0  # whose keys came from another prompt
    new_tokens: int = 0


class Engine:
    """Runs at most `rows` requests at once, and lets at most `queue` more wait."""

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: Detokenizer,
        runner: Runner,
        rows: int = 16,
        queue: int = 64,
    ) -> None:
        self.model, self.runner, self.rows = model, runner, rows
        self.scheduler = Scheduler(queue)
        self._tokenizer = tokenizer
        self._new_tokens = 0
        self._tickets = count()
        self._delivered: dict[int, Progress] = {}  # of each sequence by its ticket, as far as events told it
        self._work = Lock()  # held to run a step

    @property
    def waiting(self) -> int:
        return len(self.scheduler.with_status(Status.WAITING))

    @property
    def running(self) -> int:
        return len(self.scheduler.with_status(Status.RUNNING))

    @property
    def room(self) -> int:
        """How many more requests may wait before the queue is full."""
        return self.scheduler.queue - self.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do: every sequence has finished, and every event was delivered."""
        return all(map(self._is_done, self.scheduler.sequences))

    @property
    def used_bytes(self) -> int:
        """Keys and values of the requests that run."""
        return self.runner.used_bytes

    @property
    def memory_bytes(self) -> int:
        """Keys and values that there is room for."""
        return self.runner.memory_bytes

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(self.runner.prompt_tokens, self.runner.shared_tokens, self._new_tokens)

    def submit(self, request: Request) -> int:
        """Put a request in the queue and return its ticket. A wrong request is refused here, not in a step."""
        self.model.resolve(request.trajectory)
        self.runner.check(request)
        sequence = Seq(next(self._tickets), request, self._tokenizer, self.model.config)
        self.scheduler.add(sequence)
        return sequence.ticket

    def cancel(self, ticket: int) -> None:
        """Drop a request, waiting or running, if it has not ended.

        Its slot is free from the next step on. Its earlier events are still delivered.
        """
        self.scheduler.cancel(ticket)

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do. After an early exit the next `run` or `step` delivers the rest."""
        while True:
            for sequence in self.scheduler.sequences:
                progress = sequence.progress
                before = self._delivered.get(sequence.ticket, sequence.initial)
                if progress is not before:
                    event = sequence.event_since(before)
                    self._delivered[sequence.ticket] = (
                        progress  # and no call before the yield, where Ctrl-C might come
                    )
                    yield event
            if self.idle:
                return
            self._step()

    def step(self, is_due: Callable[[Seq], bool] = lambda sequence: True) -> list[Event]:
        """One token for every request that runs, and the first one for those that come in.

        Sequences that are not due get no event now. Their next event brings everything since their last one.
        """
        self._step()
        events: list[Event] = []
        delivered: dict[int, Progress] = {}
        for sequence in self.scheduler.sequences:
            progress = sequence.progress
            before = self._delivered.get(sequence.ticket, sequence.initial)
            if progress is not before and is_due(sequence):
                events.append(sequence.event_since(before))
                delivered[sequence.ticket] = progress
        self._delivered |= delivered  # and no call before the return, where Ctrl-C might come
        return events

    def _is_done(self, sequence: Seq) -> bool:
        before = self._delivered.get(sequence.ticket, sequence.initial)
        return sequence.status is Status.FINISHED and sequence.progress is before

    def _step(self) -> None:
        gradients = torch.is_grad_enabled()
        try:
            with self._work, device_context(self.model.device):
                self.scheduler.remove(self._is_done)
                self._delivered = {
                    sequence.ticket: self._delivered[sequence.ticket]
                    for sequence in self.scheduler.sequences
                    if sequence.ticket in self._delivered
                }
                self._release()
                if running := self.scheduler.with_status(Status.RUNNING):
                    self._append(running, self.runner.decode(running))
                self._prefill_waiting()
        finally:
            # Ctrl-C inside torch.no_grad's own code would leave it on for the whole process. This is one call of C.
            torch._C._set_grad_enabled(gradients)

    def _release(self) -> None:
        """Take back what the runner holds for sequences that have gone, or that an interrupted step left."""
        scheduler = self.scheduler
        self.runner.release_except(scheduler.with_status(Status.RUNNING), scheduler.with_status(Status.WAITING))

    def _prefill_waiting(self) -> None:
        """Run the prompts of waiting requests, as many as there are slots for, and few enough at a time."""
        runner = self.runner
        most = runner.prompt_tokens + (runner.prefill_chunk if self.running else PROMPT_TOKENS)
        while (tokens := most - runner.prompt_tokens) > 0:
            groups = self.scheduler.plan_prefills(runner, tokens)
            if not groups and not self.running:
                groups = runner.arrived(wait=True)
            if not groups:
                return
            for group in groups:
                self._prefill(group)

    def _prefill(self, group: Sequence[Seq]) -> None:
        """Run prompts, or take the first tokens of prompts that were under way."""
        failure: Exception | None = None
        for sequence in group:
            sequence.started_at = sequence.started_at or time.monotonic()
        try:
            outcomes = self.runner.prefill(group)
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the tensors of the failed run
        if failure is None:
            first_tokens: list[list[Choice]] = []
            for sequence, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, Choice):
                    first_tokens.append([outcome])
                else:
                    first_tokens.append([])
                    sequence.advance_prefill(outcome)
            self._append(group, first_tokens)
            return
        self._release()  # some of the group may have slots
        if len(group) == 1:
            self._handle_failure(group[0], failure)
            return
        for sequence in group:  # each alone, so that only the one at fault fails
            self._prefill([sequence])

    def _append(self, sequences: Sequence[Seq], choices: Sequence[Sequence[Choice]]) -> None:
        """Turn tokens into text."""
        for sequence, new in zip(sequences, choices, strict=True):
            if not new:
                continue
            before = len(sequence.ids)
            try:
                sequence.append(new)
            except Exception as error:
                self._handle_failure(sequence, error)
            self._new_tokens += len(sequence.ids) - before
        if any(sequence.status is Status.FINISHED for sequence in sequences):
            self._release()  # at once, so that waiting requests may come in within this step

    def _handle_failure(self, sequence: Seq, error: Exception) -> None:
        """Raise the error of a sequence the first time, so that the next step tries again. The second time in a row
        ends the sequence with it."""
        if not sequence.has_failed:
            sequence.has_failed = True
            raise error
        sequence.fail(str(error) or type(error).__name__)


def generate(
    model: LoopedLM, tokenizer: Detokenizer, requests: Sequence[Request], runner: Runner
) -> Iterator[Event]:
    """Run requests together to their ends. Their tickets count from 0. A request that fails raises `RunFailed`."""
    count = max(1, len(requests))
    engine = Engine(model, tokenizer, runner, count, count)
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
