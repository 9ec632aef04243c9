"""Answers in the format of OpenAI's API with a few extra fields, complete or in chunks.

    writer = CompletionWriter(served, job, granted_trajectory)
    writer.complete(texts, usage)                    # or writer.chunk(…).to_json(), a server-sent event

The pydantic models define the fields. A field that is not set is left out of the JSON. A field set to None is null.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator

from loopformer.inference.detokenizer import REPLACEMENT_CHARACTER
from loopformer.inference.request import Choice, Event, Reason, TopLogprobs
from loopformer.model.cost import Cost
from loopformer.serving.messages import TokenScore
from loopformer.serving.protocol import AnswerBody, Job, Served
from loopformer.trajectory import Trajectory

FINISH_REASONS: dict[Reason, str] = {"stop": "stop", "end": "stop", "length": "length", "context": "length"}
MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this, too
Logprob = Annotated[float, AfterValidator(lambda value: max(MIN_LOGPROB, value))]
EMPTY_TEXT = Event(0, "")  # answers know their texts by index and ignore the tickets of events


class Usage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    loops: int  # through the stack
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
    """The most likely next tokens after a loop, and the time from 0 to 1 that the trajectory has reached.

    `trained` says whether the model was trained to predict there. If not, they are only what can be read from an
    intermediate state. None: not known.
    """

    loop: int
    time: float
    trained: bool | None
    top: list[LensToken]


class LensAnswer(AnswerBody):
    model: str
    trajectory: str
    loops: list[LensLoop]


def lens_answer(served: Served, trajectory: Trajectory, rows: Sequence[TopLogprobs]) -> LensAnswer:
    loops = []
    for number, (row, start, step) in enumerate(zip(rows, trajectory.times, trajectory.steps, strict=True), 1):
        top = [LensToken(id=token, token=served.token_text(token), logprob=logprob) for token, logprob in row]
        trained = served.is_trained(trajectory, number)
        loops.append(LensLoop(loop=number, time=float(start + step), trained=trained, top=top))
    return LensAnswer(model=served.name, trajectory=str(trajectory), loops=loops)


def count_usage(cost: Cost, job: Job, new_tokens: Sequence[int], scored: bool, budget: int) -> Usage:
    """Token counts, and the loops and FLOPs that the texts took.

    `new_tokens` has the number of new tokens of each text. `scored` says whether the prompts were scored, too.
    """
    prompt, new = sum(map(len, job.prompts)), sum(new_tokens)
    loops, flops = 0, 0.0
    for index, count in enumerate(new_tokens):
        prompted, decoded = len(job.prompt_of(index)), max(0, count - 1)  # the prefill yields the first token
        if count:
            loops += budget * (prompted + decoded)
            flops += cost.prefill_flops(prompted, budget)
            # FLOPs grow linearly with the context, so the first and the last decoded token give the exact mean.
            ends = (prompted + 1, prompted + decoded)
            flops += decoded * sum(cost.forward_flops(budget, end, causal=False) for end in ends) / 2
        if scored and prompted > 1:  # scoring runs all but the last token of the prompt again
            loops += budget * (prompted - 1)
            flops += cost.prefill_flops(prompted - 1, budget)
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
        fields = {"budget": granted.budget, "trajectory": str(granted), "degraded": granted != job.trajectory}
        if granted != job.trajectory:
            fields["asked_budget"] = job.trajectory.budget
        self._depth = GrantedDepth.model_validate(fields)
        self._prompt_scores: Mapping[int, list[TokenScore]] = {}

    def complete(
        self, texts: Sequence[Event], usage: Usage, prompt_scores: Mapping[int, list[TokenScore]] | None = None
    ) -> str:
        """The JSON of the answer with these texts, each a single event.

        `prompt_scores` has the scores of the prompts that texts echo, by the index of the text.
        """
        self._prompt_scores = prompt_scores or {}
        # Choices are written one by one: a million objects for the log-probabilities of all of them would keep the
        # garbage collector busy for a second, during which nothing else runs.
        choices = [
            self._choice(index, text, self._content(index, text)).to_json() for index, text in enumerate(texts)
        ]
        answer = self._answer(self.kind, [], usage=usage, loopformer=self._depth).to_json()
        return answer.replace('"choices":[]', f'"choices":[{",".join(choices)}]', 1)

    def opening(self) -> GenerationAnswer:
        """The chunk before any text. It has all choices, as clients look at the first choice of every chunk."""
        choices = [self._choice(index, EMPTY_TEXT, self.empty_delta) for index in range(self._job.count)]
        return self._answer(self.chunk_kind, choices, loopformer=self._depth)

    def chunk(self, index: int, event: Event) -> GenerationAnswer:
        """The chunk that adds an event to the text with this index."""
        return self._answer(self.chunk_kind, [self._choice(index, event, self._delta(event))])

    def closing(self, usage: Usage) -> GenerationAnswer:
        """The chunk with the usage, for requests that include it."""
        return self._answer(self.chunk_kind, [], usage=usage, loopformer=self._depth)

    def _answer(self, kind: str, choices: list[Any], **fields: Any) -> GenerationAnswer:
        return GenerationAnswer(
            id=self._id, object=kind, created=self._created, model=self._served.name, choices=choices, **fields
        )

    def _choice(self, index: int, event: Event, content: dict[str, Any]) -> CompletionChoice | ChatChoice:
        reason = None if event.result is None else FINISH_REASONS[event.result.reason]
        logprobs = None if self._job.alternatives is None else self._logprobs(index, event)
        return self.choice_type(index=index, **content, logprobs=logprobs, finish_reason=reason)

    @abstractmethod
    def _content(self, index: int, text: Event) -> dict[str, Any]:
        """The text in a complete answer."""

    @abstractmethod
    def _delta(self, event: Event) -> dict[str, Any]:
        """The text in a chunk."""

    @abstractmethod
    def _logprobs(self, index: int, event: Event) -> Any:
        """The tokens and their log-probabilities."""


class CompletionWriter(AnswerWriter):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    choice_type, empty_delta = CompletionChoice, {"text": ""}

    def __init__(self, served: Served, job: Job, granted: Trajectory) -> None:
        super().__init__(served, job, granted)
        # By choice, from chunk to chunk: the characters that are complete, and the tokens of one that is not.
        self._offset_states: dict[int, tuple[int, list[int]]] = {}

    def _content(self, index: int, text: Event) -> dict[str, Any]:
        prompt = self._served.tokenizer.decode(self._job.prompt_of(index)) if self._job.echo else ""
        return {"text": prompt + text.piece}

    def _delta(self, event: Event) -> dict[str, Any]:
        return {"text": event.piece}

    def _logprobs(self, index: int, event: Event) -> CompletionLogprobs:
        ids = [choice.token for choice in event.choices]
        scores: list[TokenScore | Choice] = [*self._prompt_scores.get(index, ()), *event.choices]
        if self._job.echo:
            ids = [*self._job.prompt_of(index), *ids]
        return CompletionLogprobs(
            tokens=[self._served.token_text(token) for token in ids],
            token_ids=ids,
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[self._by_text(score.top_logprobs) for score in scores]
            if self._job.alternatives
            else None,
            text_offset=self._offsets(index, ids),
        )

    def _offsets(self, index: int, ids: Sequence[int]) -> list[int]:
        """Each token's character offset. A token in the middle of a character has the offset of that character."""
        end, incomplete = self._offset_states.get(index, (0, []))
        offsets = []
        for token in ids:
            incomplete.append(token)
            text, alone = (self._served.tokenizer.decode(tokens) for tokens in (incomplete, [token]))
            continues = alone.startswith(REPLACEMENT_CHARACTER) or not text.endswith(alone)
            offsets.append(end if continues else end + len(text) - len(alone))
            if not text.endswith(REPLACEMENT_CHARACTER):
                end += len(text)
                incomplete = []
        self._offset_states[index] = end, incomplete
        return offsets

    def _by_text(self, alternatives: TopLogprobs) -> dict[str, float] | None:
        # Tokens may share a text: in reverse order the most likely one overwrites the others. Then sort back.
        best = {self._served.token_text(token): value for token, value in reversed(alternatives)}
        return dict(reversed(best.items())) or None


class ChatWriter(AnswerWriter):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    choice_type, empty_delta = ChatChoice, {"delta": ChatMessage(role="assistant", content="")}

    def _content(self, index: int, text: Event) -> dict[str, Any]:
        return {"message": ChatMessage(role="assistant", content=text.piece, refusal=None)}

    def _delta(self, event: Event) -> dict[str, Any]:
        return {"delta": ChatMessage(content=event.piece) if event.piece or event.result is None else ChatMessage()}

    def _logprobs(self, index: int, event: Event) -> ChatLogprobs:
        content = [
            ChosenToken(
                **self._token(token, value),
                top_logprobs=[AlternativeToken(**self._token(*alternative)) for alternative in alternatives],
            )
            for token, value, alternatives in event.choices
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._served.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
