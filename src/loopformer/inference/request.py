"""Tokens to text as they come: whole characters only, and nothing beyond a stop string.

stream = TextStream(tokenizer, stops=["\n\n"], after=prompt)
piece = stream.push(token)     # what can be shown now; "" while a character or a stop string may be half there
piece = stream.finish()        # what was held back

Many tokenizers write a space only between two words of what they decode at once, so a token is always decoded
together with those before it.

Generate text for a batch of requests, each with its own prompt, trajectory, sampling and limits.

for event in generate(model, tokenizer, [Request(ids, Trajectory.uniform(4))]): ...

Prefill all prompts, then one token at a time through the cache. A row that is done leaves the batch, and each row's
text is what it would be alone. The context limit ends a request with a stated reason; nothing slides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import RunFailed, require
from loopformer.inference.sampling import Sampling, choose, is_whole, pick
from loopformer.trajectory import Trajectory

BROKEN = "\ufffd"  # what decoding half a character gives


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of one request, piece by piece."""

    def __init__(self, tokenizer: Decoder, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after`: the tokens that the text follows."""
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._ids = list(after)  # what is decoded: the last tokens with settled text, then those not yet settled
        self._done = len(after)  # how many of them are settled; a token may end in the middle of a character
        self._known = tokenizer.decode(self._ids) if after else ""  # what is settled of their text
        self._text = ""  # settled text
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far that belongs to the result."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token and return what can be shown."""
        self._ids.append(token)
        self._settle(whole=False)
        return self._show(self._held())

    def finish(self) -> str:
        """Show what is left."""
        if not self.stopped:
            self._settle(whole=True)
        return self._show(0)

    def _settle(self, whole: bool) -> None:
        """Take over the text of new tokens, up to a character that is not whole yet."""
        new = self._tokenizer.decode(self._ids)
        clear = new if whole else new.rstrip(BROKEN)
        before = max(0, len(self._text) - max((len(stop) for stop in self._stops), default=1) + 1)
        # What they follow may itself end in the middle of a character, which the new ones make whole.
        known = self._known if clear.startswith(self._known) else self._known.rstrip(BROKEN)
        self._text += clear[len(known) :]
        if clear != new:
            self._known = self._known if self._known.startswith(clear) else clear
        elif new != self._known:  # a token without text is nothing that the next one could follow
            self._ids = self._ids[self._done :]
            self._done, self._known = len(self._ids), self._tokenizer.decode(self._ids)
        found = [place for stop in self._stops if (place := self._text.find(stop, before)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(1, min(len(stop), len(self._text) + 1)):
                if self._text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def _show(self, held: int) -> str:
        end = max(self._shown, len(self._text) - held)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece


Reason = Literal["stop", "end", "length", "context"]


REASONS = {
    "stop": "a stop string came",
    "end": "the model ended the text",
    "length": "the limit of new tokens was reached",
    "context": "the model's context is full",
}


@dataclass(frozen=True)
class Request:
    """One text to continue."""

    prompt: tuple[int, ...]
    trajectory: Trajectory
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.prompt) > 0, "The prompt is empty; give at least one character.")
        require(isinstance(self.trajectory, Trajectory), f"{self.trajectory!r} is no Trajectory; make one of it.")
        whole = is_whole(self.max_tokens) and self.max_tokens >= 1
        require(whole, f"max_tokens must be 1 or more, a whole number; got {self.max_tokens!r}.")
        for stop in self.stops:
            require(isinstance(stop, str), f"A stop string must be text, got {stop!r}.")


@dataclass(frozen=True)
class Result:
    """What became of a request. `logprobs[i]` is the model's log-probability of `ids[i]`, before any sampling."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason
    prompt_tokens: int
    trajectory: Trajectory


@dataclass(frozen=True)
class Event:
    """A piece of text of one request; the last one carries its result."""

    row: int
    piece: str
    result: Result | None = None


class RowState:
    """A request on its way: its tokens, its text, its own random numbers."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer, config: ModelConfig) -> None:
        require(
            len(request.prompt) <= config.context,
            f"The prompt has {len(request.prompt)} tokens but the context is {config.context}; shorten it.",
        )
        low, high = min(request.prompt), max(request.prompt)
        require(
            low >= 0 and high < config.vocab,
            f"Token ids must lie in 0…{config.vocab - 1}, got {low}…{high}; is this the model's own tokenizer?",
        )
        self.number, self.request = number, request
        self.stream = TextStream(tokenizer, request.stops, after=request.prompt)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self._context, self._end = config.context, tokenizer.eot
        seed = request.sampling.seed
        self._draws = random.Random(None if seed is None else int(seed))
        self.random = self._draws.random

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
    def places_left(self) -> int:
        """How many tokens after the last one the context can hold."""
        return self._context - self.length

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens."""
        return self.history[self.length - count :]

    def draw(self, likely: Tensor) -> int:
        """A token from probabilities [V]."""
        return pick(likely, self.random())

    def take(self, logits: Tensor) -> Event:
        """Choose the next token from logits [V]."""
        return self.add(choose(logits, self.request.sampling, self.random(), self.history), logits)

    def add(self, token: int, logits: Tensor) -> Event:
        """Append a token that was chosen with these logits [V]."""
        return self.note(token, float(logits.float().log_softmax(-1)[token]))

    def note(self, token: int, logprob: float) -> Event:
        """Append a token and its log-probability."""
        if math.isnan(logprob):
            raise RunFailed("The model's output is not a number; are its weights damaged, or too large for bf16?")
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token == self._end:
            return self._finish("", "end")
        piece = self.stream.push(token)
        if self.stream.stopped:
            return self._finish(piece, "stop")
        if len(self.ids) == self.request.max_tokens:
            return self._finish(piece, "length")
        if self.places_left < 0:  # this token has no place, so none can follow
            return self._finish(piece, "context")
        return Event(self.number, piece)

    def _finish(self, piece: str, reason: Reason) -> Event:
        piece += self.stream.finish()
        ids, logprobs = tuple(self.ids), tuple(self.logprobs)
        prompt, trajectory = len(self.request.prompt), self.request.trajectory
        return Event(self.number, piece, Result(self.stream.text, ids, logprobs, reason, prompt, trajectory))
