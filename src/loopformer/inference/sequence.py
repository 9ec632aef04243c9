"""A request on its way through the engine: its tokens, its text and its status.

sequence = Sequence(ticket, request, tokenizer, model.config)
sequence.append([Choice(token, logprob)])           # waiting → running → finished
event = sequence.event_since(sequence.initial)      # the text and tokens since an earlier moment

Tokens and text change by one assignment: `append`, `fail` and `cancel` compute the next state first and assign it
last. So after an error or Ctrl-C at any moment a sequence is as it was before the call or as it is after it.

A new rule for when a text ends belongs in `_find_end` (by tokens) or in `TextStream._cut_at_stop` (by text). A
limit on the memory of a sequence belongs in `positions_to_reserve` (request.py).
"""

from __future__ import annotations

import math
import secrets
import time
from array import array
from enum import Enum
from typing import NamedTuple

from loopformer.config.model import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.inference.detokenizer import Detokenizer, TextStream
from loopformer.inference.request import (
    Choice,
    Draw,
    Event,
    Reason,
    Request,
    Result,
    TopLogprobs,
    positions_to_reserve,
)
from loopformer.trajectory import Trajectory

NOT_A_NUMBER = "The model's output is not a number; are its weights damaged, or too large for bf16?"


class Status(Enum):
    """How far a sequence has come."""

    WAITING = "waiting"  # its prompt was not run, or only in part
    RUNNING = "running"  # it has new tokens, and gets more
    FINISHED = "finished"  # it ended, failed or was cancelled


class Progress(NamedTuple):
    """The tokens and the text of a sequence at one moment.

    The parts of each `Choice` are in tuples of numbers, because the garbage collector visits every `Choice` that is
    kept. With thousands of them it stops the engine for a fifth of a second now and then.
    """

    text: TextStream
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of each token, if the request wants any
    status: Status = Status.WAITING
    result: Result | None = None


class Sequence:
    """A request, its new tokens, and the text of these."""

    def __init__(self, ticket: int, request: Request, tokenizer: Detokenizer, config: ModelConfig) -> None:
        """Raises if the model cannot run this request."""
        if len(request.prompt) > config.context:
            raise LoopformerError(
                f"The prompt has {len(request.prompt)} tokens but the context is {config.context}; shorten it."
            )
        try:
            array("q", request.prompt)
        except (TypeError, OverflowError) as error:
            raise LoopformerError(f"A prompt is made of token ids, which are whole numbers: {error}.") from error
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= config.vocab:
            raise LoopformerError(
                f"Token ids must lie in 0…{config.vocab - 1}, got {low}…{high}; is this the model's own tokenizer?"
            )
        self.ticket, self.request, self.context = ticket, request, config.context
        self.arrived_at = time.monotonic()
        self.turn = 0  # among those of all clients; see scheduler.py
        self.started_at: float | None = None  # when its prompt was first run
        seed = request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        self.has_failed = False  # whether its work failed at the last try
        self.reserved_positions = positions_to_reserve(request, config.context)
        assert self.reserved_positions >= len(request.prompt), "a prompt is run whole"
        # The last token is never run, so it needs no position in the KV cache.
        self.max_new_tokens = min(request.max_tokens, self.reserved_positions - len(request.prompt) + 1)
        self._prefilled = 0  # the most tokens of its prompt that were run in chunks
        self._end_token = tokenizer.eot
        self.initial = Progress(TextStream(tokenizer, request.stops, after=request.prompt))
        self.progress = self.initial  # replaced, never changed in place
        self._is_cancelled = False

    @property
    def status(self) -> Status:
        return Status.FINISHED if self._is_cancelled else self.progress.status

    @property
    def trajectory(self) -> Trajectory:
        return self.request.trajectory

    @property
    def ids(self) -> tuple[int, ...]:
        """The new tokens."""
        return self.progress.ids

    @property
    def history(self) -> tuple[int, ...]:
        """Prompt and new tokens."""
        return (*self.request.prompt, *self.progress.ids)

    @property
    def num_tokens(self) -> int:
        """How many tokens prompt and text have."""
        return len(self.request.prompt) + len(self.progress.ids)

    @property
    def num_computed_tokens(self) -> int:
        """How many tokens have KV once the prompt was run: all but the last new one, the input of the next step."""
        return self.num_tokens - bool(self.progress.ids)

    def draw(self) -> Draw:
        """The settings and noise of the next token."""
        sampling = self.request.sampling
        history = self.history if sampling.repetition_penalty != 1 else ()
        return Draw(sampling, self.seed, self.num_tokens, history, self.request.top_logprobs)

    def advance_prefill(self, tokens: int) -> None:
        """Note how many tokens of its prompt were run in chunks. Only progress beyond the furthest chunk so far
        forgives a failure: otherwise a sequence that always fails at its last chunk would be tried forever."""
        if tokens > self._prefilled:
            self._prefilled, self.has_failed = tokens, False

    def append(self, choices: list[Choice]) -> None:
        """Append tokens up to the end of the text. The tokens after it are dropped."""
        if self._is_cancelled:
            return
        before = self.progress
        new, reason = self._find_end(choices)
        tokens = [choice.token for choice in new]
        text = before.text.copy()
        text.push(*(tokens[:-1] if reason == "end" else tokens))  # the end token has no text
        if text.stopped and len(new) > 1:
            # Push the tokens again, singly, to find the one that completed the stop string. Drop those after it.
            text = before.text.copy()
            for number, token in enumerate(tokens, start=1):
                text.push(token)
                if text.stopped:
                    new, tokens = new[:number], tokens[:number]
                    break
        if text.stopped:
            reason = "stop"
        if reason is not None:
            text.finish()
        top_logprobs = before.top_logprobs
        if count := self.request.top_logprobs:  # cut off what another row of the batch has requested
            top_logprobs += tuple([choice.top_logprobs[:count] for choice in new])
        logprobs = before.logprobs + tuple([choice.logprob for choice in new])
        after = Progress(text, before.ids + tuple(tokens), logprobs, top_logprobs, Status.RUNNING)
        if reason is not None:
            result = self._make_result(after, reason, NOT_A_NUMBER)
            after = after._replace(status=Status.FINISHED, result=result)
        self.has_failed = False
        self.progress = after

    def fail(self, sentence: str) -> None:
        """End with an error, if it has not ended. The text so far is kept, including what was held back."""
        if self.status is Status.FINISHED:
            return
        text = self.progress.text.copy()
        text.flush()
        after = self.progress._replace(text=text, status=Status.FINISHED)
        self.progress = after._replace(result=self._make_result(after, "error", sentence))

    def cancel(self) -> None:
        """Finish without a result, unless there is one. Tokens that come later are ignored."""
        self._is_cancelled = True

    def event_since(self, before: Progress) -> Event:
        """What was added since an earlier moment."""
        now, first = self.progress, len(before.ids)
        piece = now.text.text[before.text.shown : now.text.shown]
        ids, logprobs = now.ids[first:], now.logprobs[first:]
        choices = (
            map(Choice, ids, logprobs, now.top_logprobs[first:]) if now.top_logprobs else map(Choice, ids, logprobs)
        )
        return Event(self.ticket, piece, now.result, tuple(choices), self.started_at)

    def _find_end(self, choices: list[Choice]) -> tuple[list[Choice], Reason | None]:
        """The choices up to the end token, a NaN or a length limit, with the reason if there is one."""
        limit = self.max_new_tokens - len(self.progress.ids)
        for number, (token, logprob, _) in enumerate(choices[:limit]):
            if math.isnan(logprob):
                return choices[:number], "error"
            if token == self._end_token:
                return choices[: number + 1], "end"
        if len(choices) < limit:
            return choices, None
        return choices[:limit], "length" if self.max_new_tokens == self.request.max_tokens else "context"

    def _make_result(self, progress: Progress, reason: Reason, error: str) -> Result:
        return Result(
            progress.text.text,
            progress.ids,
            progress.logprobs,
            reason,
            len(self.request.prompt),
            self.trajectory,
            error if reason == "error" else None,
        )
