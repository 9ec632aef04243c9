"""A request on its way from prompt to result: what is asked, its text as it comes, what became of it.

request = Request(prompt_ids, Trajectory.uniform(4), Sampling(temperature=0.8, seed=3), max_tokens=64)
row = RowState.start(ticket, request, tokenizer, model.config)
row, event = row.take([Choice(token, logprob)])      # event.piece to show now; event.result when it has ended

A `RowState` never changes: taking tokens gives another one. So whoever holds the old one has lost nothing when a
step fails half-way. The context limit ends a request with a stated reason; nothing slides.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from loopformer.config import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.inference.sampling import Choice, Draw, Sampling, is_whole
from loopformer.trajectory import Trajectory

Reason = Literal["stop", "end", "length", "context", "error"]
REASONS = {
    "stop": "a stop string came",
    "end": "the model ended the text",
    "length": "the limit of new tokens was reached",
    "context": "the model's context is full",
    "error": "it failed",
}
NOT_A_NUMBER = "The model's output is not a number; are its weights damaged, or too large for bf16?"


@dataclass(frozen=True)
class Request:
    """One text to continue."""

    prompt: tuple[int, ...]
    trajectory: Trajectory
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise LoopformerError("The prompt is empty; give at least one character.")
        if not isinstance(self.trajectory, Trajectory):
            raise LoopformerError(f"{self.trajectory!r} is no Trajectory; make one of it.")
        if not (is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise LoopformerError(f"max_tokens must be 1 or more, a whole number; got {self.max_tokens!r}.")
        stops: object = self.stops
        if isinstance(stops, str):
            raise LoopformerError(f"stops takes a tuple of texts, not the one text {stops!r}; put it in brackets.")
        for stop in self.stops:
            if not isinstance(stop, str):
                raise LoopformerError(f"A stop string must be text, got {stop!r}.")


@dataclass(frozen=True)
class Result:
    """What became of a request. `logprobs[i]` is the model's log-probability of `ids[i]`, before any sampling."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason
    prompt_tokens: int
    trajectory: Trajectory
    error: str | None = None  # one sentence where the reason is "error"; text and ids are what came before


class Event(NamedTuple):
    """A piece of text of one request, and the tokens that came with it; the last one carries its result."""

    ticket: int
    piece: str
    result: Result | None = None
    choices: tuple[Choice, ...] = ()


class Detokenizer(Protocol):
    """What text needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


class EndingDetokenizer(Detokenizer, Protocol):
    """One that also knows the token that ends a text."""

    @property
    def eot(self) -> int: ...


class RowState(NamedTuple):
    """A request in a batch slot, or waiting for one: its tokens and its text so far."""

    ticket: int
    request: Request
    text: TextStream
    seed: int  # the request's, or one drawn for it
    context: int
    end: int  # the token that ends a text
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @classmethod
    def start(cls, ticket: int, request: Request, tokenizer: EndingDetokenizer, config: ModelConfig) -> RowState:
        """A request that nothing was run of yet; refused if this model cannot run it."""
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
        drawn = secrets.randbits(63) if seed is None else int(seed)
        return cls(ticket, request, text, drawn, config.context, tokenizer.eot)

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
        """Tokens whose keys and values are kept: all but the last new one, which the next step runs."""
        return self.length - bool(self.ids)

    @property
    def places_left(self) -> int:
        """How many tokens after the last one the context can hold."""
        return self.context - self.length

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens."""
        new = self.ids[max(0, len(self.ids) - count) :]
        older = count - len(new)
        return (*self.request.prompt[len(self.request.prompt) - older :], *new) if older > 0 else new

    def draw(self, drafted: Sequence[int] = ()) -> Draw:
        """What decides the next token, if the drafted ones come before it."""
        sampling = self.request.sampling
        history = (*self.history, *drafted) if sampling.repetition_penalty != 1 else ()
        return Draw(sampling, self.seed, self.length + len(drafted), history)

    def take(self, choices: Sequence[Choice]) -> tuple[RowState, Event]:
        """Append tokens, up to the one that ends the text: the state then, and what can be shown of it."""
        new, reason = self._until_end(choices)
        tokens = [choice.token for choice in new]
        text = self.text.copy()
        piece = text.push(*(tokens[:-1] if reason == "end" else tokens))
        if text.stopped and len(new) > 1:  # which of them made the stop string whole?
            text, piece = self.text.copy(), ""
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
        """Those that still belong to the text, whatever it says, and why none can follow them."""
        wanted, places = self.request.max_tokens - len(self.ids), self.places_left + 1  # the last one needs none
        for number, (token, logprob) in enumerate(choices[: min(wanted, places)]):
            if math.isnan(logprob):
                return choices[:number], "error"
            if token == self.end:
                return choices[: number + 1], "end"
        if len(choices) < min(wanted, places):
            return choices, None
        return choices[: min(wanted, places)], "length" if wanted <= places else "context"

    def failed(self, sentence: str) -> Event:
        """The end of a request that could not be run: what was held back is shown, and nothing more decoded."""
        return Event(self.ticket, self.text.copy().flush(), self._result("error", sentence))

    def _result(self, reason: Reason, error: str | None) -> Result:
        prompt = len(self.request.prompt)
        return Result(self.text.text, self.ids, self.logprobs, reason, prompt, self.trajectory, error)


BROKEN = "\ufffd"  # what decoding half a character gives


class TextStream:
    """Tokens to text as they come: whole characters only, and nothing beyond a stop string.

        stream = TextStream(tokenizer, stops=["\\n\\n"], after=prompt)
        piece = stream.push(token)     # what can be shown now; "" while a character may be half there
        piece = stream.finish()        # what was held back

    Many tokenizers write a space only between two words of what they decode at once, so a token is always decoded
    together with those before it. A copy goes its own way.
    """

    def __init__(self, tokenizer: Detokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after`: the tokens that the text follows."""
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._beginnings = tuple(stop[:size] for stop in self._stops for size in range(len(stop) - 1, 0, -1))
        self._longest = max(map(len, self._stops), default=1)
        self._ids = tuple(after)  # what is decoded: the last tokens with settled text, then those not yet settled
        self._done = len(after)  # how many of them are settled; a token may end in the middle of a character
        self._known = tokenizer.decode(self._ids) if after else ""  # what is settled of their text
        self._text = ""  # settled text
        self._shown = 0
        self.stopped = False

    def copy(self) -> TextStream:
        """What is pushed to one of both the other does not see."""
        other = object.__new__(TextStream)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def text(self) -> str:
        """All text so far that belongs to the result."""
        return self._text

    def push(self, *tokens: int) -> str:
        """Add tokens and return what can be shown. After a stop string they may be more than belong to the text."""
        if not tokens:
            return ""
        self._ids = (*self._ids, *tokens)
        self._settle(whole=False)
        return self._show(self._held())

    def finish(self) -> str:
        """Show what is left."""
        if not self.stopped:
            self._settle(whole=True)
        return self._show(0)

    def flush(self) -> str:
        """Show what was held back of the text so far."""
        return self._show(0)

    def _settle(self, whole: bool) -> None:
        """Take over the text of new tokens, up to a character that is not whole yet."""
        new = self._tokenizer.decode(self._ids)
        clear = new if whole else new.rstrip(BROKEN)
        before = max(0, len(self._text) - self._longest + 1)
        # What they follow may itself end in the middle of a character, which the new ones make whole.
        known = self._known if clear.startswith(self._known) else self._known.rstrip(BROKEN)
        self._text += clear[len(known) :]
        if clear != new:
            self._known = self._known if self._known.startswith(clear) else clear
        elif new != self._known:  # a token without text is nothing that the next one could follow
            self._ids = self._ids[self._done :]
            self._done, self._known = len(self._ids), self._tokenizer.decode(self._ids)
        stops_at = [place for stop in self._stops if (place := self._text.find(stop, before)) >= 0]
        if stops_at:
            self._text, self.stopped = self._text[: min(stops_at)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped or not self._text.endswith(self._beginnings):
            return 0
        return max((len(part) for part in self._beginnings if self._text.endswith(part)), default=0)

    def _show(self, held: int) -> str:
        end = max(self._shown, len(self._text) - held)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece
