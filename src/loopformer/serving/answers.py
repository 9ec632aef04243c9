"""Answers in the format of OpenAI's API with a few extra fields, complete or in chunks.

    writer = CompletionWriter(served, job, granted_trajectory)
    writer.complete(texts, usage).to_json()          # or writer.chunk(…), the content of a server-sent event

The pydantic models define the fields. A field that is not set is left out of the JSON. A field set to None is null.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator

from loopformer.inference.detokenizer import BROKEN
from loopformer.inference.request import Reason
from loopformer.model.cost import Cost
from loopformer.serving.messages import Alternatives, EngineOutput, TokenScore
from loopformer.serving.protocol import AnswerBody, Job, Served
from loopformer.trajectory import Trajectory

FINISH_REASONS: dict[Reason, str] = {"stop": "stop", "end": "stop", "length": "length", "context": "length"}
MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this, too
Logprob = Annotated[float, AfterValidator(lambda value: max(MIN_LOGPROB, value))]


class Usage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    loops: int  # passes through the stack
    flops: float  # counted as if no prompt shared a cached prefix


class GrantedDepth(AnswerBody):
    """The granted trajectory. `asked_budget` is set only if another trajectory was requested."""

    budget: int
    trajectory: str
    degraded: bool
    asked_budget: int | None = None


class CompletionLogprobs(AnswerBody):
    tokens: list[str]
    token_ids: list[int]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class AlternativeToken(AnswerBody):
    token: str
    logprob: Logprob
    bytes: list[int]


class ChosenToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(AnswerBody):
    content: list[ChosenToken]
    refusal: None


class ChatMessage(AnswerBody):
    """A message, or the text that a chunk adds to it."""

    role: str | None = None
    content: str | None = None
    refusal: None = None


class ChatChoice(AnswerBody):
    """A complete answer has a `message`, a chunk has a `delta`."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class GenerationAnswer(AnswerBody):
    """A complete answer, or a chunk. Only the first and the last chunk have a depth or usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice]
    usage: Usage | None = None
    loopformer: GrantedDepth | None = None


class LensToken(AnswerBody):
    id: int
    token: str
    logprob: Logprob


class LensLoop(AnswerBody):
    """The most likely next tokens after a loop, and the time from 0 to 1 that the trajectory has reached."""

    loop: int
    time: float
    top: list[LensToken]


class LensAnswer(AnswerBody):
    model: str
    trajectory: str
    loops: list[LensLoop]


def lens_answer(served: Served, trajectory: Trajectory, rows: Sequence[Alternatives]) -> LensAnswer:
    loops = []
    for number, (row, start, step) in enumerate(zip(rows, trajectory.times, trajectory.steps, strict=True), 1):
        top = [LensToken(id=token, token=served.token_text(token), logprob=logprob) for token, logprob in row]
        loops.append(LensLoop(loop=number, time=float(start + step), top=top))
    return LensAnswer(model=served.name, trajectory=str(trajectory), loops=loops)


@dataclass
class GeneratedText:
    """A text as generated so far, or the part that a chunk adds to it."""

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Reason | None = None
    token_scores: list[TokenScore] = field(default_factory=list)  # of prompt and new tokens, if they were scored

    def add(self, output: EngineOutput) -> None:
        self.text += output.text
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.reason = output.reason


def count_usage(cost: Cost, texts: Sequence[GeneratedText], n: int, budget: int) -> Usage:
    """Token counts, and the loops and FLOPs that the texts took. Each prompt has `n` texts."""
    prompt, new = sum(len(text.prompt) for text in texts) // n, sum(len(text.tokens) for text in texts)
    loops, flops = 0, 0.0
    for text in texts:
        prompted, decoded = len(text.prompt), max(0, len(text.tokens) - 1)  # the prefill yields the first token
        if text.tokens:
            loops += budget * (prompted + decoded)
            flops += cost.prefill_flops(prompted, budget)
            # FLOPs grow linearly with the context, so the first and the last decoded token give the exact mean.
            ends = (prompted + 1, prompted + decoded)
            flops += decoded * sum(cost.forward_flops(budget, end, causal=False) for end in ends) / 2
        if scored := max(0, len(text.token_scores) - 1):  # scoring runs all but the last token again
            loops += budget * scored
            flops += cost.prefill_flops(scored, budget)
    return Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new, loops=loops, flops=flops)


class AnswerWriter(ABC):
    """Writes the answer to a generation, complete or in chunks."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    choice_type: ClassVar[type[CompletionChoice] | type[ChatChoice]]
    empty_delta: ClassVar[dict[str, Any]]

    def __init__(self, served: Served, job: Job, granted: Trajectory) -> None:
        self._served, self._job = served, job
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        depth = {"budget": granted.budget, "trajectory": str(granted), "degraded": granted != job.trajectory}
        if granted != job.trajectory:
            depth["asked_budget"] = job.trajectory.budget
        self._depth = GrantedDepth.model_validate(depth)

    def complete(self, texts: Sequence[GeneratedText], usage: Usage) -> GenerationAnswer:
        choices = [self._choice(index, text, self._content(text)) for index, text in enumerate(texts)]
        return self._answer(self.kind, choices, usage=usage, loopformer=self._depth)

    def opening(self) -> GenerationAnswer:
        """The chunk before any text. It has all choices, as clients look at the first choice of every chunk."""
        choices = [self._choice(index, GeneratedText(()), self.empty_delta) for index in range(self._job.count)]
        return self._answer(self.chunk_kind, choices, loopformer=self._depth)

    def chunk(self, index: int, part: GeneratedText) -> GenerationAnswer:
        """The chunk that adds `part` to a text."""
        return self._answer(self.chunk_kind, [self._choice(index, part, self._delta(part))])

    def closing(self, usage: Usage) -> GenerationAnswer:
        """The chunk with the usage, for requests that include it."""
        return self._answer(self.chunk_kind, [], usage=usage, loopformer=self._depth)

    def _answer(self, kind: str, choices: list[Any], **fields: Any) -> GenerationAnswer:
        return GenerationAnswer(
            id=self._id, object=kind, created=self._created, model=self._served.name, choices=choices, **fields
        )

    def _choice(self, index: int, text: GeneratedText, content: dict[str, Any]) -> CompletionChoice | ChatChoice:
        reason = None if text.reason is None else FINISH_REASONS[text.reason]
        logprobs = None if self._job.alternatives is None else self._logprobs(index, text)
        return self.choice_type(index=index, **content, logprobs=logprobs, finish_reason=reason)

    @abstractmethod
    def _content(self, text: GeneratedText) -> dict[str, Any]:
        """The text in a complete answer."""

    @abstractmethod
    def _delta(self, part: GeneratedText) -> dict[str, Any]:
        """The text in a chunk."""

    @abstractmethod
    def _logprobs(self, index: int, text: GeneratedText) -> Any:
        """The tokens and their log-probabilities."""


class CompletionWriter(AnswerWriter):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    choice_type, empty_delta = CompletionChoice, {"text": ""}

    def __init__(self, served: Served, job: Job, granted: Trajectory) -> None:
        super().__init__(served, job, granted)
        # By choice, from chunk to chunk: the characters that are complete, and the tokens of one that is not.
        self._offset_states: dict[int, tuple[int, list[int]]] = {}

    def _content(self, text: GeneratedText) -> dict[str, Any]:
        prompt = self._served.tokenizer.decode(text.prompt) if self._job.echo else ""
        return {"text": prompt + text.text}

    def _delta(self, part: GeneratedText) -> dict[str, Any]:
        return {"text": part.text}

    def _logprobs(self, index: int, text: GeneratedText) -> CompletionLogprobs:
        ids: list[int] = [*text.tokens]
        values: list[float | None] = [*text.logprobs]
        rows = text.token_scores[len(text.prompt) :]
        if self._job.echo:
            ids = [*text.prompt, *ids]
            values = [*(row.logprob for row in text.token_scores[: len(text.prompt)]), *values]
            rows = text.token_scores
        return CompletionLogprobs(
            tokens=[self._served.token_text(token) for token in ids],
            token_ids=ids,
            token_logprobs=values,
            top_logprobs=[self._by_text(row.alternatives) for row in rows] if self._job.alternatives else None,
            text_offset=self._offsets(index, ids),
        )

    def _offsets(self, index: int, ids: Sequence[int]) -> list[int]:
        """Each token's character offset. A token in the middle of a character has the offset of that character."""
        end, incomplete = self._offset_states.get(index, (0, []))
        offsets = []
        for token in ids:
            incomplete.append(token)
            text, alone = (self._served.tokenizer.decode(tokens) for tokens in (incomplete, [token]))
            continues = alone.startswith(BROKEN) or not text.endswith(alone)
            offsets.append(end if continues else end + len(text) - len(alone))
            if not text.endswith(BROKEN):
                end += len(text)
                incomplete = []
        self._offset_states[index] = end, incomplete
        return offsets

    def _by_text(self, alternatives: Alternatives) -> dict[str, float] | None:
        # Tokens may share a text: in reverse order the most likely one overwrites the others. Then sort back.
        best = {self._served.token_text(token): value for token, value in reversed(alternatives)}
        return dict(reversed(best.items())) or None


class ChatWriter(AnswerWriter):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    choice_type, empty_delta = ChatChoice, {"delta": ChatMessage(role="assistant", content="")}

    def _content(self, text: GeneratedText) -> dict[str, Any]:
        return {"message": ChatMessage(role="assistant", content=text.text, refusal=None)}

    def _delta(self, part: GeneratedText) -> dict[str, Any]:
        return {"delta": ChatMessage(content=part.text) if part.text or part.reason is None else ChatMessage()}

    def _logprobs(self, index: int, text: GeneratedText) -> ChatLogprobs:
        scores = text.token_scores[len(text.prompt) :]
        alternatives = [score.alternatives for score in scores] or [()] * len(text.tokens)
        rows = zip(text.tokens, text.logprobs, alternatives, strict=True)
        content = [
            ChosenToken(
                **self._token(token, value),
                top_logprobs=[AlternativeToken(**self._token(*alternative)) for alternative in likely],
            )
            for token, value, likely in rows
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._served.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
