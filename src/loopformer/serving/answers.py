"""What OpenAI's requests are answered with, and what ours says beside it: whole, in chunks, or an error.

CompletionAnswer(served, job, place).whole(texts, usage)     # or .chunk(…), one server-sent event
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from loopformer.inference.request import BROKEN, Reason
from loopformer.model.cost import Cost
from loopformer.serving.admission import Admitted
from loopformer.serving.protocol import Job, Served, encodable
from loopformer.serving.worker import Alternatives, Ranked
from loopformer.trajectory import Trajectory

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM says this
FINISH: dict[Reason, str] = {"stop": "stop", "end": "stop", "length": "length", "context": "length"}


@dataclass
class TextSoFar:
    """One text as it comes."""

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Reason | None = None
    ranked: list[Ranked] = field(default_factory=list)  # of prompt and new tokens, where they were looked at

    def add(self, text: str, tokens: Sequence[int], logprobs: Sequence[float], reason: Reason | None) -> None:
        self.text += text
        self.tokens += tokens
        self.logprobs += logprobs
        self.reason = reason


def usage(cost: Cost, texts: Sequence[TextSoFar], n: int, budget: int) -> dict[str, float]:
    """Tokens, and what they took: passes through the stack, and FLOPs as if no prompt had shared its beginning."""
    prompt, new = sum(len(text.prompt) for text in texts) // n, sum(len(text.tokens) for text in texts)
    loops, flops = 0, 0.0
    for text in texts:
        first, later = len(text.prompt), max(0, len(text.tokens) - 1)  # the prompt's own pass gives the first token
        if text.tokens:
            loops += budget * (first + later)
            flops += cost.prefill_flops(first, budget)
            ends = (cost.forward_flops(budget, context, causal=False) for context in (first + 1, first + later))
            flops += later * sum(ends) / 2  # which grow evenly
        if seen := max(0, len(text.ranked) - 1):  # and once more to be looked at, all but the last token
            loops += budget * seen
            flops += cost.prefill_flops(seen, budget)
    total = prompt + new
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": total}
    return {**counts, "loops": loops, "flops": flops}


class AnswerForm(ABC):
    """How an answer is written; one for completions and one for chats."""

    prefix: str
    kind: str
    chunk_kind: str
    _empty: ClassVar[dict[str, Any]]  # a choice of a chunk without text

    def __init__(self, served: Served, job: Job, place: Admitted) -> None:
        self._served, self._job, self._place = served, job, place
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @cached_property
    def followed(self) -> dict[str, Any]:
        """Which trajectory was followed, and whether less was granted than asked for."""
        granted, asked = self._place.trajectory, self._place.asked
        return {
            "budget": granted.budget,
            "trajectory": str(granted),
            "degraded": self._place.degraded,
            **({"asked_budget": asked.budget} if self._place.degraded else {}),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._served.name}

    def whole(self, texts: Sequence[TextSoFar], used: dict[str, float]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._content(text),
                "logprobs": self._logprobs(index, text),
                "finish_reason": FINISH[text.reason or "length"],
            }
            for index, text in enumerate(texts)
        ]
        return {**self._head(self.kind), "choices": choices, "usage": used, "loopformer": self.followed}

    def opening(self) -> dict[str, Any]:
        """The chunk that comes before any text; clients look at the first choice of every chunk."""
        choices = [
            {"index": index, **self._empty, "logprobs": self._logprobs(index, TextSoFar(())), "finish_reason": None}
            for index in range(self._job.count)
        ]
        return {**self._head(self.chunk_kind), "choices": choices, "loopformer": self.followed}

    def chunk(self, index: int, part: TextSoFar) -> dict[str, Any]:
        """What has come of one text since the last chunk."""
        finish = None if part.reason is None else FINISH[part.reason]
        logprobs = self._logprobs(index, part)
        choice = {"index": index, **self._delta(part), "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def closing(self, used: dict[str, float]) -> dict[str, Any]:
        """The chunk with the usage, where it was asked for."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": used, "loopformer": self.followed}

    @abstractmethod
    def _content(self, text: TextSoFar) -> dict[str, Any]:
        """The text in a whole answer."""

    @abstractmethod
    def _delta(self, part: TextSoFar) -> dict[str, Any]:
        """The text in a chunk."""

    @abstractmethod
    def _logprobs(self, index: int, text: TextSoFar) -> dict[str, Any] | None:
        """The tokens of a text, or of its next part, with their log-probabilities, where they were asked for."""


class CompletionAnswer(AnswerForm):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    _empty: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, served: Served, job: Job, place: Admitted) -> None:
        super().__init__(served, job, place)
        # Of each text its whole characters so far, and the tokens of the one that is not whole yet.
        self._read: dict[int, tuple[int, list[int]]] = {}

    def _content(self, text: TextSoFar) -> dict[str, Any]:
        prompt = self._served.tokenizer.decode(text.prompt) if self._job.echo else ""
        return {"text": prompt + text.text}

    def _delta(self, part: TextSoFar) -> dict[str, Any]:
        return {"text": part.text}

    def _logprobs(self, index: int, text: TextSoFar) -> dict[str, Any] | None:
        if self._job.alternatives is None:
            return None
        ids: list[int] = [*text.tokens]
        values: list[float | None] = [*text.logprobs]
        named = [row.alternatives for row in text.ranked[len(text.prompt) :]]
        if self._job.echo:
            ids = [*text.prompt, *ids]
            values = [*(row.logprob for row in text.ranked[: len(text.prompt)]), *values]
            named = [row.alternatives for row in text.ranked]
        return {
            "tokens": [self._served.token_text(token) for token in ids],
            "token_ids": ids,
            "token_logprobs": [None if value is None else _finite(value) for value in values],
            "top_logprobs": [self._named(row) for row in named] if self._job.alternatives else None,
            "text_offset": self._offsets(index, ids),
        }

    def _offsets(self, index: int, ids: Sequence[int]) -> list[int]:
        """Where each token begins in its text; one that goes on with a character begins where that does."""
        place, waiting = self._read.get(index, (0, []))
        offsets = []
        for token in ids:
            waiting.append(token)
            text, own = (self._served.tokenizer.decode(some) for some in (waiting, [token]))
            goes_on = own.startswith(BROKEN) or not text.endswith(own)
            offsets.append(place if goes_on else place + len(text) - len(own))
            if not text.endswith(BROKEN):
                place += len(text)
                waiting = []
        self._read[index] = place, waiting
        return offsets

    def _named(self, alternatives: Alternatives) -> dict[str, float] | None:
        best = {self._served.token_text(token): _finite(value) for token, value in reversed(alternatives)}
        return dict(reversed(best.items())) or None


class ChatAnswer(AnswerForm):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    _empty: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}

    def _content(self, text: TextSoFar) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text.text, "refusal": None}}

    def _delta(self, part: TextSoFar) -> dict[str, Any]:
        return {"delta": {"content": part.text} if part.text or part.reason is None else {}}

    def _logprobs(self, index: int, text: TextSoFar) -> dict[str, Any] | None:
        if self._job.alternatives is None:
            return None
        named = [row.alternatives for row in text.ranked[len(text.prompt) :]] or [()] * len(text.tokens)
        rows = zip(text.tokens, text.logprobs, named, strict=True)
        return {
            "content": [
                {**self._token(token, value), "top_logprobs": [self._token(*other) for other in others]}
                for token, value, others in rows
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._served.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def lens_answer(served: Served, trajectory: Trajectory, rows: Sequence[Alternatives]) -> dict[str, Any]:
    """After each loop its time on the way from 0 to 1, and the most likely next tokens."""
    times = [float(time + step) for time, step in zip(trajectory.times, trajectory.steps, strict=True)]
    loops = [
        {
            "loop": number,
            "time": time,
            "top": [
                {"id": token, "token": served.token_text(token), "logprob": _finite(logprob)}
                for token, logprob in row
            ],
        }
        for number, (time, row) in enumerate(zip(times, rows, strict=True), 1)
    ]
    return {"model": served.name, "trajectory": str(trajectory), "loops": loops}


def error_answer(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form."""
    texts = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {key: text and encodable(text) for key, text in texts.items()}}
