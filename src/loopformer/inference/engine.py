"""The one decode loop: requests of any budget come and go at every token, and no fault harms them.

engine = Engine(model, tokenizer, PlainRunner(model, rows=16), queue=64)         # or lm.engine(16)
ticket = engine.submit(Request(prompt, Trajectory.uniform(2)))   # Busy when the queue is full
for event in engine.run(): ...                                   # event.ticket, event.piece; or engine.step()
engine.cancel(ticket)

A step decodes first: every running sequence gets its next token. Then it prefills: the scheduler chooses waiting
sequences, the runner runs their prompts, and each gets a slot with its first token. Tokens become text, and a
sequence that has ended gives its slot back. `lm.generate`, `lm.stream` and servers all run through here. A runner
computes (runner.py, or fused/runner.py on a GPU). On the plain fp32 path a request's text is what it would be
alone.

No fault loses or repeats text. A sequence takes its tokens in one assignment. An event contains what was added to a
sequence since its last event. At the start of a step the runner frees whatever belongs to no sequence. So after an
error or Ctrl-C the next step goes on from what the sequences say. A sequence whose own work fails twice in a row
ends with a result that says so. `submit` and `cancel` may be called from any thread, `step` and `run` from one at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle
from threading import Lock
from typing import TYPE_CHECKING

import torch

from loopformer.device import device_context
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.detokenizer import Detokenizer
from loopformer.inference.request import Choice, Event, Request, Sampling
from loopformer.inference.scheduler import Scheduler
from loopformer.inference.sequence import Progress, Sequence, Status
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.runner import Runner


@dataclass
class EngineCounts:
    """The work of an engine so far."""

    prompt_tokens: int  # that were run
    shared_tokens: int  # whose KV came from cached blocks
    new_tokens: int


class Engine:
    """Runs as many requests at once as its runner has rows, and lets at most `queue` more wait."""

    def __init__(self, model: LoopedLM, tokenizer: Detokenizer, runner: Runner, queue: int = 64) -> None:
        self.model, self.runner = model, runner
        self.scheduler = Scheduler(queue)
        self._tokenizer = tokenizer
        self._new_tokens = 0
        self._tickets = count()
        self._at_last_event: dict[int, Progress] = {}  # the progress of each sequence then, by ticket
        self._placement = model.device, model.dtype_name
        self._work = Lock()  # held to run a step

    @property
    def rows(self) -> int:
        """How many requests can run at once."""
        return self.runner.rows

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

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
        """The KV of the requests that run."""
        return self.runner.used_bytes

    @property
    def memory_bytes(self) -> int:
        """The KV that there is room for."""
        return self.runner.memory_bytes

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(self.runner.prompt_tokens, self.runner.shared_tokens, self._new_tokens)

    def check(self, request: Request) -> None:
        """Raise one sentence if `submit` would refuse this request, whatever the queue."""
        self._make_sequence(request)

    def submit(self, request: Request) -> int:
        """Put a request in the queue and return its ticket. A wrong request is refused here, not in a step."""
        sequence = self._make_sequence(request)
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
                before = self._at_last_event.get(sequence.ticket, sequence.initial)
                if progress is not before:
                    event = sequence.event_since(before)
                    # Nothing between these two lines: Ctrl-C there would lose the event.
                    self._at_last_event[sequence.ticket] = progress
                    yield event
            if self.idle:
                return
            self._step()

    def step(self, is_due: Callable[[Sequence], bool] = lambda sequence: True) -> list[Event]:
        """Run one step and return its events: a token of every request that runs, or several on a GPU.

        Sequences that are not due get no event now. Their next event brings everything since their last one.
        """
        self._step()
        events: list[Event] = []
        delivered: dict[int, Progress] = {}
        for sequence in self.scheduler.sequences:
            progress = sequence.progress
            before = self._at_last_event.get(sequence.ticket, sequence.initial)
            if progress is not before and is_due(sequence):
                events.append(sequence.event_since(before))
                delivered[sequence.ticket] = progress
        # Nothing between these two lines: Ctrl-C there would lose the events. `|=` runs no Python code, so no
        # signal handler can run in between.
        self._at_last_event |= delivered
        return events

    def _make_sequence(self, request: Request) -> Sequence:
        self.model.resolve(request.trajectory)
        sequence = Sequence(next(self._tickets), request, self._tokenizer, self.model.config)
        self.runner.check(sequence)
        return sequence

    def _is_done(self, sequence: Sequence) -> bool:
        before = self._at_last_event.get(sequence.ticket, sequence.initial)
        return sequence.status is Status.FINISHED and sequence.progress is before

    def _step(self) -> None:
        gradients = torch.is_grad_enabled()
        try:
            with self._work, device_context(self.model.device):
                if (self.model.device, self.model.dtype_name) != self._placement:
                    raise LoopformerError("The model was moved while this engine has it; make a new engine.")
                running, waiting, finished = self.scheduler.split()
                self._remove([sequence.ticket for sequence in finished if self._is_done(sequence)])
                # First, as an interrupted step may have left slots that no sequence owns.
                self.runner.free_except(running, waiting)
                if running:
                    self._append(running, self.runner.decode(running))
                self._prefill()  # after decoding, which must not wait for prompts
        finally:
            # Ctrl-C inside torch.no_grad's own code would leave it on for the whole process. This is one call of C.
            torch._C._set_grad_enabled(gradients)

    def _remove(self, tickets: list[int]) -> None:
        if tickets:
            self.scheduler.remove(set(tickets))
            self._at_last_event = {
                ticket: progress for ticket, progress in self._at_last_event.items() if ticket not in tickets
            }

    def _free(self) -> None:
        """Free what the runner holds for sequences that do not run or wait any more."""
        running, waiting, _ = self.scheduler.split()
        self.runner.free_except(running, waiting)

    def _prefill(self) -> None:
        """Run the prompts of waiting sequences, as many as there are slots for and as a step may run."""
        runner, scheduler = self.runner, self.scheduler
        end = runner.prompt_tokens + scheduler.prefill_token_limit(runner)
        self._finish_prefills(block=False)
        while (tokens := end - runner.prompt_tokens) > 0:
            groups = scheduler.plan_prefills(runner, tokens)
            for group in groups:
                self._start_prefill(group)
            # Planned again after these have finished, as prompts may wait for their prefix.
            self._finish_prefills(block=not scheduler.running)
            if not groups:
                return

    def _start_prefill(self, group: list[Sequence]) -> None:
        for sequence in group:
            sequence.started_at = sequence.started_at or time.monotonic()
        try:
            self.runner.start_prefill(group)
            return
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the tensors of the failed run
        self._handle_prefill_failure(group, failure)

    def _finish_prefills(self, block: bool) -> None:
        """Give slots to the sequences whose prompts have been run. With `block`, wait for the oldest of these."""
        # One group at a time: what is done for one may end the others, or drop their prefills.
        while group := self.runner.next_prefill(block):
            block = False
            try:
                choices = self.runner.finish_prefill(group)
            except Exception as error:
                failure = error.with_traceback(None)
            else:
                self._append(group, [[choice] for choice in choices])
                continue
            self._handle_prefill_failure(group, failure)
            return  # a prefill that fails again and again must not keep the step from ending

    def _handle_prefill_failure(self, group: list[Sequence], failure: Exception) -> None:
        self._free()  # some of the group may have slots
        if len(group) == 1:
            self._handle_failure(group[0], failure)
            return
        # One at a time, so that only the one at fault fails. A runner may have started some of the group before the
        # failure. Started again, these would be given their first token twice.
        started = {sequence.ticket for sequence in self.runner.in_flight()}
        for sequence in group:
            if sequence.ticket not in started:
                self._start_prefill([sequence])

    def _append(self, sequences: list[Sequence], choices: list[list[Choice]]) -> None:
        """Turn tokens into text."""
        has_finished = False
        for sequence, new in zip(sequences, choices, strict=True):
            if not new:
                continue
            before = sequence.progress
            try:
                sequence.append(new)
            except Exception as error:
                self._handle_failure(sequence, error)
            after = sequence.progress
            self._new_tokens += len(after.ids) - len(before.ids)
            has_finished = has_finished or after.result is not None
        if has_finished:
            self._free()  # at once, so that waiting sequences get these slots within this step

    def _handle_failure(self, sequence: Sequence, error: Exception) -> None:
        """Raise the error of a sequence the first time, so that the next step tries again. The second time in a row
        ends the sequence with it."""
        if not sequence.has_failed:
            sequence.has_failed = True
            raise error
        sequence.fail(str(error) or type(error).__name__)


def generate(model: LoopedLM, tokenizer: Detokenizer, requests: list[Request], runner: Runner) -> Iterator[Event]:
    """Run requests together to their ends. Their tickets count from 0. A request that fails raises `RunFailed`."""
    count = max(1, len(requests))
    engine = Engine(model, tokenizer, runner, count)
    for request in requests:
        engine.submit(request)
    for event in engine.run():
        if event.result is not None and event.result.error is not None:
            raise RunFailed(event.result.error)
        yield event


def warm_up(engine: Engine, budgets: list[int]) -> None:
    """Run prompts of every length at these budgets, and every number of rows, as one row after the other ends.

    A GPU compiles kernels and records graphs at first use. Without this the first requests would wait for it, and
    so would all that run beside them.
    """
    config, page = engine.model.config, engine.runner.block_tokens
    longest = max(1, config.context - 1)  # in chunks where the context is longer than one
    sizes = sorted({longest, *(min(2**power, longest) for power in range(5, 10))})
    firsts = cycle(range(config.vocab))  # different first tokens, so that no prompt finds a cached prefix

    def make_prompt(size: int) -> tuple[int, ...]:
        return (next(firsts), *[0] * (size - 1))

    def submit(budget: int, prompt: tuple[int, ...], most: int, temperature: float = 0.0) -> None:
        with suppress(LoopformerError):  # one that can never fit into the memory that there is
            trajectory, sampling = Trajectory.uniform(budget), Sampling(temperature)
            most = min(most, config.context - len(prompt) + 1)
            engine.submit(Request(prompt, trajectory, sampling, max_tokens=most))

    for budget in (max(budgets), 1):
        for number in range(engine.rows):
            submit(budget, make_prompt(sizes[0]), 4 + number)
        list(engine.run())
    for budget in budgets:
        for size in sizes:
            submit(budget, make_prompt(size), 2)
            list(engine.run())
        # The same behind a cached prefix. A row that runs alone has another graph where its tokens are sampled.
        prefix = make_prompt(page)
        for size in [1, *sizes] if page else []:
            submit(budget, (*prefix, *make_prompt(min(size, longest - page))), 2, temperature=1.0)
            list(engine.run())
