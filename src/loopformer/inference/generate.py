"""Generate text for a batch of requests, each with its own prompt, trajectory, sampling and limits.

for event in generate(model, tokenizer, [Request(ids, Trajectory.uniform(4))]): ...

Prefill all prompts, then one token at a time through the cache. A row that is done leaves the batch, and each row's
text is what it would be alone. The context limit ends a request with a stated reason; nothing slides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from loopformer.config import require
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.sampling import Sampling, choose
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
        require(self.max_tokens >= 1, f"max_tokens must be 1 or more, got {self.max_tokens}.")


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


class _Row:
    """A request on its way."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer, context: int) -> None:
        self.number, self.request = number, request
        self.stream = TextStream(tokenizer, request.stops)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.room = context - len(request.prompt)
        self._end = tokenizer.eot
        self._draws = random.Random(request.sampling.seed)

    def take(self, logits: Tensor) -> Event:
        """Choose a token from logits [V]."""
        history = (*self.request.prompt, *self.ids)
        token = choose(logits, self.request.sampling, self._draws.random(), history)
        self.ids.append(token)
        self.logprobs.append(float(logits.float().log_softmax(-1)[token]))
        if token == self._end:
            return self._finish("", "end")
        piece = self.stream.push(token)
        if self.stream.stopped:
            return self._finish(piece, "stop")
        if len(self.ids) == self.request.max_tokens:
            return self._finish(piece, "length")
        if len(self.ids) > self.room:  # the token before was the last that has a place
            return self._finish(piece, "context")
        return Event(self.number, piece)

    def _finish(self, piece: str, reason: Reason) -> Event:
        piece += self.stream.finish()
        result = Result(
            self.stream.text,
            tuple(self.ids),
            tuple(self.logprobs),
            reason,
            len(self.request.prompt),
            self.request.trajectory,
        )
        return Event(self.number, piece, result)


@torch.no_grad()
def generate(model: LoopedLM, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Event]:
    """Run requests together; events come as tokens do."""
    config = model.config
    for request in requests:
        require(
            len(request.prompt) <= config.context,
            f"The prompt has {len(request.prompt)} tokens but the context is {config.context}; shorten it.",
        )
        model.route(request.trajectory)
    rows = [_Row(number, request, tokenizer, config.context) for number, request in enumerate(requests)]
    cache, hidden = prefill(model, [row.request.prompt for row in rows], [row.request.trajectory for row in rows])
    while rows:
        events = [row.take(logits) for row, logits in zip(rows, model.head(hidden)[:, : config.vocab], strict=True)]
        yield from events
        going = [place for place, event in enumerate(events) if event.result is None]
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            if not rows:
                return
            cache = cache.select(going)
        last = torch.tensor([[row.ids[-1]] for row in rows], device=hidden.device)
        hidden = model.extend(last, cache)[:, 0]


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], routes: Sequence[Trajectory]
) -> tuple[Cache, Tensor]:
    """Run prompts of any lengths: their cache, and the hidden state [B, D] of each one's last token."""
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    device = model.tokens.weight.device
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    cache = model.cache(list(routes), len(prompts))
    hidden = model.extend(padded, cache, counts)
    last = torch.tensor(counts, device=device) - 1
    return cache, hidden[torch.arange(len(counts), device=device), last]
