"""A request and its states: settings, progress while it runs, and final result.

request = Request(prompt_ids, Trajectory.uniform(4), Sampling(temperature=0.8, seed=3), max_tokens=64)
row = RowState.start(ticket, request, tokenizer, model.config)
row, event = row.append_tokens([Choice(token, logprob)])   # event.piece to show; event.result at the end

A `RowState` is immutable: appending tokens returns a new one. When a step fails half-way, the engine still has the
old state and can repeat the step. A full context ends a request, because there is no sliding window.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from loopformer.config.model import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.inference.detokenizer import Detokenizer, TextStream
from loopformer.inference.sampling import Choice, Draw, Sampling, is_whole
from loopformer.trajectory import Trajectory

Reason = Literal["stop", "end", "length", "context", "error"]
REASONS = {
    "stop": "a stop string was generated",
    "end": "the model ended the text",
    "length": "the limit of new tokens was reached",
    "context": "the model's context is full",
    "error": "it failed",
}
MAX_STOPS, MAX_STOP_CHARS = 256, 4096  # of a request; its text is searched for each of them at every step
NOT_A_NUMBER = "The model's output is not a number; are its weights damaged, or too large for bf16?"


@dataclass(frozen=True)
class Request:
    """A prompt with the settings for its continuation."""

    prompt: tuple[int, ...]
    trajectory: Trajectory
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise LoopformerError("The prompt is empty; give at least one character.")
        if not isinstance(self.trajectory, Trajectory):
            raise LoopformerError(f"{self.trajectory!r} is no Trajectory; make one with Trajectory.parse(…).")
        if not (is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise LoopformerError(f"max_tokens must be 1 or more, a whole number; got {self.max_tokens!r}.")
        stops: object = self.stops
        if isinstance(stops, str):
            raise LoopformerError(f"stops must be a tuple of strings, not {stops!r}; write ({stops!r},).")
        for stop in self.stops:
            if not isinstance(stop, str):
                raise LoopformerError(f"A stop string must be text, got {stop!r}.")
            if len(stop) > MAX_STOP_CHARS:
                raise LoopformerError(f"A stop string may have {MAX_STOP_CHARS} characters, got {len(stop)}.")
        if len(self.stops) > MAX_STOPS:
            raise LoopformerError(f"A request may have {MAX_STOPS} stop strings, got {len(self.stops)}.")


@dataclass(frozen=True)
class Result:
    """The outcome of a request. `logprobs[i]` is the model's log-probability of `ids[i]`, before sampling."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason
    prompt_tokens: int
    trajectory: Trajectory
    error: str | None = None  # one sentence if the reason is "error"; text and ids are then what came before it


class Event(NamedTuple):
    """A new piece of a request's text, with its tokens. Only the last event of a request has a result."""

    ticket: int
    piece: str
    result: Result | None = None
    choices: tuple[Choice, ...] = ()


class RowState(NamedTuple):
    """The state of a request, waiting or running: its tokens and its text so far."""

    ticket: int
    request: Request
    text: TextStream
    seed: int  # from the request, or random
    context: int
    end: int  # the end token
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @classmethod
    def start(cls, ticket: int, request: Request, tokenizer: Detokenizer, config: ModelConfig) -> RowState:
        """The state before prefill. Raises if the model cannot run this request."""
        if len(request.prompt) > config.context:
            raise LoopformerError(
                f"The prompt has {len(request.prompt)} tokens but the context is {config.context}; shorten it."
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= config.vocab:
            raise LoopformerError(
                f"Token ids must lie in 0…{config.vocab - 1}, got {low}…{high}; is this the model's own tokenizer?"
            )
        seed = request.sampling.seed
        text = TextStream(tokenizer, request.stops, after=request.prompt)
        seed = secrets.randbits(63) if seed is None else int(seed)
        return cls(ticket, request, text, seed, config.context, tokenizer.eot)

    @property
    def trajectory(self) -> Trajectory:
        return self.request.trajectory

    @property
    def history(self) -> tuple[int, ...]:
        """Prompt and new tokens."""
        return (*self.request.prompt, *self.ids)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.ids)

    @property
    def cached(self) -> int:
        """How many tokens are in the KV cache: all but the last new one, which is the input of the next step."""
        return self.length - bool(self.ids)

    @property
    def free_positions(self) -> int:
        """How many tokens after the last one the context can hold."""
        return self.context - self.length

    def draw(self) -> Draw:
        """The settings and noise of the next token."""
        sampling = self.request.sampling
        history = self.history if sampling.repetition_penalty != 1 else ()
        return Draw(sampling, self.seed, self.length, history)

    def append_tokens(self, choices: Sequence[Choice]) -> tuple[RowState, Event]:
        """Append tokens up to the end of the text. Returns the new state, and an event with the text to show."""
        new, reason = self._until_end(choices)
        tokens = [choice.token for choice in new]
        text = copy(self.text)  # push changes it, and this state must stay valid if the step is repeated
        piece = text.push(*(tokens[:-1] if reason == "end" else tokens))
        if text.stopped and len(new) > 1:
            # Push the tokens again, singly, to find the one that completed the stop string. Drop those after it.
            text, piece = copy(self.text), ""
            for count, token in enumerate(tokens, start=1):
                piece += text.push(token)
                if text.stopped:
                    new, tokens = new[:count], tokens[:count]
                    break
        if text.stopped:
            reason = "stop"
        ids, logprobs = (*self.ids, *tokens), (*self.logprobs, *[choice.logprob for choice in new])
        after = self._replace(text=text, ids=ids, logprobs=logprobs)
        if reason is None:
            return after, Event(self.ticket, piece, None, tuple(new))
        piece += text.finish()
        result = after._result(reason, NOT_A_NUMBER if reason == "error" else None)
        return after, Event(self.ticket, piece, result, tuple(new))

    def _until_end(self, choices: Sequence[Choice]) -> tuple[Sequence[Choice], Reason | None]:
        """The choices up to the end token, a NaN or a length limit, with the reason if there is one."""
        # The last token is never run, so it needs no position in the context.
        limit = min(self.request.max_tokens - len(self.ids), self.free_positions + 1)
        for number, (token, logprob) in enumerate(choices[:limit]):
            if math.isnan(logprob):
                return choices[:number], "error"
            if token == self.end:
                return choices[: number + 1], "end"
        if len(choices) < limit:
            return choices, None
        return choices[:limit], "length" if len(self.ids) + limit == self.request.max_tokens else "context"

    def failed(self, sentence: str) -> Event:
        """The last event of a failed request, with the text that was held back. Nothing more is decoded."""
        return Event(self.ticket, copy(self.text).flush(), self._result("error", sentence))

    def _result(self, reason: Reason, error: str | None) -> Result:
        prompt = len(self.request.prompt)
        return Result(self.text.text, self.ids, self.logprobs, reason, prompt, self.trajectory, error)
