"""The public types of generation: requests and their settings, events and results.

request = Request(prompt_ids, Trajectory.uniform(4), Sampling(temperature=0.8, seed=3), max_tokens=64)
ticket = engine.submit(request)
for event in engine.run(): ...       # event.piece is new text; the last event of a request has its result
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, NamedTuple

from loopformer.errors import LoopformerError, require
from loopformer.trajectory import Trajectory

TopLogprobs = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the most likely first
Reason = Literal["stop", "end", "length", "context", "error"]
REASONS = {
    "stop": "a stop string was generated",
    "end": "the model ended the text",
    "length": "the limit of new tokens was reached",
    "context": "the model's context is full",
    "error": "it failed",
}
MAX_STOPS, MAX_STOP_CHARS = 256, 4096  # of a request; its text is searched for each of them at every step
MAX_PRIORITY = 10  # priorities lie in ±10; a level is worth a second of waiting


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of a request."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # only the k most likely tokens
    top_p: float = 1.0  # only the most likely tokens that make up this probability
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one
    repetition_penalty: float = 1.0  # above 1: tokens that already occur in the text become less likely
    seed: int | None = None  # None: a different text each time

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not _is_finite(value):
                raise LoopformerError(f"{name} must be a finite number, got {value!r}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not (value is None or is_whole(value)):
                raise LoopformerError(f"{name} must be a whole number, got {value!r}.")
        for name, is_valid, bounds in (
            ("temperature", self.temperature >= 0, "be 0 (greedy) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "be 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "lie in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "lie in [0.01, 100]"),
        ):
            require(is_valid, f"{name} must {bounds}, got {getattr(self, name)}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the logits, so that nothing else needs to be computed."""
        return self.greedy and self.repetition_penalty == 1


@dataclass(frozen=True)
class Request:
    """A prompt with the settings for its continuation."""

    prompt: tuple[int, ...]
    trajectory: Trajectory
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stops: tuple[str, ...] = ()
    top_logprobs: int = 0  # how many of the most likely tokens to report at each position
    priority: int = 0  # lower is served earlier, among the requests of the same client
    client: str = ""  # clients take turns

    def __post_init__(self) -> None:
        if not self.prompt:
            raise LoopformerError("The prompt is empty; give at least one character.")
        if not isinstance(self.trajectory, Trajectory):
            raise LoopformerError(f"{self.trajectory!r} is no Trajectory; make one with Trajectory.parse(…).")
        if not (is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise LoopformerError(f"max_tokens must be 1 or more, a whole number; got {self.max_tokens!r}.")
        if not (is_whole(self.top_logprobs) and self.top_logprobs >= 0):
            raise LoopformerError(f"top_logprobs must be 0 or more, a whole number; got {self.top_logprobs!r}.")
        if not (is_whole(self.priority) and abs(self.priority) <= MAX_PRIORITY):
            raise LoopformerError(
                f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority!r}."
            )
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


class Draw(NamedTuple):
    """All that a row's next token depends on besides its logits."""

    sampling: Sampling
    seed: int = 0
    position: int = 0  # number of tokens before the next token
    history: tuple[int, ...] = ()  # these tokens; needed only with a repetition penalty
    top_logprobs: int = 0  # how many of the most likely tokens to report


class Choice(NamedTuple):
    """A token and its log-probability under the model, before sampling, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top_logprobs: TopLogprobs = ()


def positions_to_reserve(request: Request, context: int) -> int:
    """How many positions of the KV cache a request reserves: those of its prompt at least.

    A limit on the memory of each request belongs here. A smaller reservation ends the text earlier. Runners and the
    server's admission take the number from here alone.
    """
    return min(context, len(request.prompt) + request.max_tokens)


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
    started_at: float | None = None  # when the prompt was first run, by `time.monotonic`, which all processes share

    def merge(self, later: Event) -> Event:
        """This event and a later one of the same request, as one."""
        started_at = later.started_at if self.started_at is None else self.started_at
        return Event(
            self.ticket, self.piece + later.piece, later.result, (*self.choices, *later.choices), started_at
        )


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python or NumPy."""
    return isinstance(value, Integral)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False
