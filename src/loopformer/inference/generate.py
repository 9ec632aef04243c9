"""Generate text for a batch of requests, each with its own prompt, trajectory, sampling and limits.

for event in generate(model, tokenizer, [Request(ids, Trajectory.uniform(4))]): ...

Prefill all prompts, then one token at a time through the cache. A row that is done leaves the batch, and each row's
text is what it would be alone. The context limit ends a request with a stated reason; nothing slides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import RunFailed, require
from loopformer.inference.padding import ends, padded
from loopformer.inference.sampling import Sampling, choose, is_whole, pick
from loopformer.inference.text import TextStream
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache
from loopformer.trajectory import Trajectory

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
    def route(self) -> Trajectory:
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
        prompt, route = len(self.request.prompt), self.request.trajectory
        return Event(self.number, piece, Result(self.stream.text, ids, logprobs, reason, prompt, route))


@torch.no_grad()
def generate(model: LoopedLM, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Event]:
    """Run requests together; events come as tokens do."""
    config = model.config
    rows = [RowState(number, request, tokenizer, config) for number, request in enumerate(requests)]
    cache, hidden = prefill(model, [row.request.prompt for row in rows], [row.request.trajectory for row in rows])
    while rows:
        events = take_all(rows, model.head(hidden)[:, : config.vocab])
        yield from events
        going = [place for place, event in enumerate(events) if event.result is None]
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            if not rows:
                return
            cache = cache.select(going)
        last = torch.tensor([[row.ids[-1]] for row in rows], device=hidden.device)
        hidden = model.extend(last, cache, check=False)[:, 0]


def take_all(rows: Sequence[RowState], logits: Tensor) -> list[Event]:
    """The next token of each row from logits [B, V]; where all are greedy, at once."""
    if not all(row.request.sampling.most_likely for row in rows):
        return [row.take(one) for row, one in zip(rows, logits, strict=True)]
    tokens = logits.argmax(-1)
    chosen = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return [row.note(*one) for row, *one in zip(rows, tokens.tolist(), chosen.tolist(), strict=True)]


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], routes: Sequence[Trajectory]
) -> tuple[Cache, Tensor]:
    """Run prompts of any lengths: their cache, and the hidden state [B, D] of each one's last token."""
    ids, counts = padded(model, prompts)
    cache = model.cache(list(routes), len(prompts))
    return cache, ends(model.extend(ids, cache, counts), counts)
