"""The bodies of requests, in the format of OpenAI's API with a few extra fields, and the errors.

    body = CompletionBody.model_validate({"prompt": "Once upon", "budget": 2})
    job = body.job(served)                       # prompts, sampling, trajectory: what the engine generates

The extra fields are `budget`, `trajectory`, `min_budget`, `priority`, and vLLM's `top_k`, `min_p` and
`repetition_penalty`. Fields of OpenAI's that do not change the text are ignored (`IGNORED`). Any other unsupported
field is an error that names it, unless its value changes nothing (null, `"frequency_penalty": 0`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, RunFailed, nearest, require
from loopformer.inference.request import MAX_PRIORITY, Request, Sampling, positions_to_reserve
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory, resolve

if TYPE_CHECKING:
    from loopformer.inference.chat import ChatTemplate, Message

NeutralValues = dict[str, tuple[Any, ...]]  # by field: the values that change nothing, besides null

# OpenAI's fields about accounts, bills, caches and tools, which no text depends on here. Any value is accepted.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_COMMON_UNSUPPORTED: NeutralValues = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
_COMPLETION_UNSUPPORTED = {**_COMMON_UNSUPPORTED, "best_of": (1,), "suffix": ("",)}
_CHAT_UNSUPPORTED: NeutralValues = {
    **_COMMON_UNSUPPORTED,
    "audio": (),
    "function_call": (),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_MESSAGE_UNSUPPORTED: NeutralValues = {
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_SCHEDULE_FAMILY = re.compile(r"\s*[a-z-]+\s*:\s*(\d+)\s*")
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
MAX_ALTERNATIVES = 20
MAX_PROMPTS = 128  # of a completion
DEFAULT_MAX_TOKENS = 16  # of a completion
CLIENT_GONE = 499  # nginx's status for a client that disconnected

# Without `fail_fast` pydantic collects an error for every wrong item, each of which takes a kilobyte.
Id = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[Id], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


# Errors.


class AnswerBody(BaseModel):
    """The body of an answer. A field that is not set is left out of its JSON."""

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def to_response(self, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        return Response(self.to_json(), status, headers, "application/json")


class ErrorDetail(AnswerBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerBody):
    error: ErrorDetail


class ApiError(LoopformerError):
    """An error that becomes an HTTP response. `param` names the wrong field of the request."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    @staticmethod
    def of(error: BaseException) -> ApiError:
        """The error that clients may see, without internals."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, LoopformerError):
            return ApiError(str(error), 500 if isinstance(error, RunFailed) else 400)
        if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
            return ApiError("The client disconnected.", CLIENT_GONE)
        return ApiError("The server failed to answer this request.", 500)

    def answer(self) -> ErrorAnswer:
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else encodable(self.param)
        detail = ErrorDetail(message=encodable(str(self)), type=kind, param=param, code=self.code)
        return ErrorAnswer(error=detail)

    def to_response(self) -> Response:
        return self.answer().to_response(self.status, self.headers)


def need(holds: bool, field: str, sentence: str) -> None:
    """Raise an ApiError about a field of the body unless the condition holds."""
    if not holds:
        raise ApiError(sentence, param=field)


def encodable(text: str) -> str:
    """The text with lone surrogates escaped. JSON can contain them, but UTF-8 cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


# Requests.


class Body(BaseModel):
    """The base of all bodies: values are not converted, and a field must be known or ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[NeutralValues] = {}  # OpenAI's fields that are refused with any other value

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {}
        for name, value in body.items():
            neutral = cls.unsupported.get(name)
            if value is None or name in cls.ignored or (neutral is not None and value in neutral):
                continue
            if neutral is not None:
                sentence = "'{field}' is a field of OpenAI's that is not supported here; leave it out."
                raise PydanticCustomError("unsupported_parameter", sentence, {"field": name})
            if name not in cls.model_fields:
                shown = encodable(str(name)[:64])
                hint = nearest(shown, list(cls.model_fields), "leave it out.")
                sentence = "'{field}' is not a field of this request; {hint}"
                context = {"field": shown, "hint": hint}
                raise PydanticCustomError("unknown_parameter", sentence, context)
            fields[name] = value
        return fields


class DepthBody(Body):
    """How many loops to run, and in which steps."""

    model: str | None = None
    budget: int | None = Field(None, ge=1, description="Loops per token; the model's default without it.")
    trajectory: str | None = Field(None, max_length=256, description="A schedule, such as 2-1-2-3.")

    def requested_trajectory(self, served: Served) -> Trajectory:
        """The requested trajectory of the served model; another model is an error."""
        served.check_name(self.model)
        require(self.budget is None or self.trajectory is None, "Give a budget or a trajectory, not both.")
        if self.trajectory is None:
            return served.default if self.budget is None else served.resolve("budget", self.budget)
        # Check the number of "cosine:99999999999" first: resolving it would compute that many steps.
        if family := _SCHEDULE_FAMILY.fullmatch(self.trajectory):
            served.resolve("trajectory", int(family[1]))
        return served.resolve("trajectory", self.trajectory)


class StreamOptionsBody(Body):
    unsupported: ClassVar[NeutralValues] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class GenerationBody(DepthBody):
    """What completions and chat completions share."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptionsBody = StreamOptionsBody()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1: any token.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_budget: int | None = Field(None, ge=1, description="The least that a busy server may grant.")
    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower comes first: a level is worth a second of waiting."
    )

    def _job(
        self, served: Served, prompts: list[list[int]], field: str, max_tokens: int, alternatives: int | None
    ) -> Job:
        """The job for these prompts, which come from `field`."""
        trajectory = self.requested_trajectory(served)
        min_budget = self.min_budget or (1 if self.trajectory is None else trajectory.budget)
        served.resolve("min_budget", min_budget)
        need(
            min_budget <= trajectory.budget,
            "min_budget",
            f"'min_budget' is {min_budget}, more than the {trajectory.budget} requested loops; lower it.",
        )
        for prompt in prompts:
            served.check_prompt(prompt, field)
        limit = served.max_output
        need(max_tokens <= limit, "max_tokens", f"'max_tokens' is at most {limit} here, got {max_tokens}.")
        top_k = self.top_k if self.top_k > 0 else None
        return Job(
            tuple(tuple(prompt) for prompt in prompts),
            self.n,
            Sampling(self.temperature, top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed),
            max_tokens,
            (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            trajectory,
            min_budget,
            self.priority,
            alternatives,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    unsupported: ClassVar[NeutralValues] = _COMPLETION_UNSUPPORTED

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, description=f"{DEFAULT_MAX_TOKENS} without it.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

    def job(self, served: Served) -> Job:
        need(
            not (self.echo and self.stream), "echo", "'echo' is not possible with 'stream'; leave out one of them."
        )
        default = min(DEFAULT_MAX_TOKENS, served.max_output)
        max_tokens = default if self.max_tokens is None else self.max_tokens
        need(max_tokens >= 1 or self.echo, "max_tokens", "'max_tokens' is 1 or more, or 0 with 'echo'.")
        prompts = self._prompts(served)
        need(len(prompts) > 0, "prompt", f"'prompt' is a text or a list of 1 to {MAX_PROMPTS} of them.")
        return replace(self._job(served, prompts, "prompt", max_tokens, self.logprobs), echo=self.echo)

    def _prompts(self, served: Served) -> list[list[int]]:
        if isinstance(self.prompt, str):
            return served.encode([self.prompt])
        if self.prompt and isinstance(self.prompt[0], int):
            return [[number for number in self.prompt if isinstance(number, int)]]
        texts = [text for text in self.prompt if isinstance(text, str)]
        return served.encode(texts) if texts else [ids for ids in self.prompt if isinstance(ids, list)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class MessageBody(Body):
    unsupported: ClassVar[NeutralValues] = _MESSAGE_UNSUPPORTED

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def to_message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    unsupported: ClassVar[NeutralValues] = _CHAT_UNSUPPORTED

    messages: list[MessageBody] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

    def job(self, served: Served) -> Job:
        has_logprobs = self.top_logprobs is None or self.logprobs
        need(has_logprobs, "top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        require(
            self.max_tokens is None or self.max_completion_tokens is None,
            "Give 'max_completion_tokens' or 'max_tokens', not both.",
        )
        messages = [message.to_message() for message in self.messages]
        served.check_length(served.chat.fewest_tokens(messages), "messages", "at least ")
        prompt = served.chat.encode(messages)
        # The last new token is never fed back, so it needs no position: hence context + 1.
        free_tokens = max(1, min(served.max_output, served.config.context + 1 - len(prompt)))
        max_tokens = self.max_completion_tokens or self.max_tokens or free_tokens
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        job = self._job(served, [prompt], "messages", max_tokens, alternatives)
        return replace(job, stops=(*job.stops, *served.chat.stops))


class TokenizeBody(Body):
    """POST /tokenize: a text, or a chat as the model reads it."""

    # Of vLLM. There are no special tokens to add, so both values change nothing.
    unsupported: ClassVar[NeutralValues] = {"add_special_tokens": (True, False), "return_token_strs": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = Field(None, min_length=1, max_length=4096, fail_fast=True)

    def ids(self, served: Served) -> list[int]:
        served.check_name(self.model)
        require((self.prompt is None) != (self.messages is None), "Give a 'prompt' or 'messages'.")
        if self.prompt is not None:
            return served.tokenizer.encode(self.prompt)
        return served.chat.encode([message.to_message() for message in self.messages or ()])


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds

    def text(self, served: Served) -> str:
        served.check_name(self.model)
        served.check_ids(self.tokens, "tokens")
        return served.tokenizer.decode(self.tokens)


class LensBody(DepthBody):
    """POST /lens: the most likely next tokens of a prompt after each loop."""

    prompt: str | TokenIds
    top: int = Field(5, ge=1, le=100)

    def ids(self, served: Served) -> list[int]:
        ids = served.encode([self.prompt])[0] if isinstance(self.prompt, str) else self.prompt
        served.check_prompt(ids, "prompt")
        return ids


# The served model, and the job that a request becomes.


@dataclass(frozen=True)
class Served:
    """What requests need to know about the served model."""

    name: str
    chat: ChatTemplate
    config: ModelConfig
    default: Trajectory
    value_bytes: int
    max_prompt: int
    max_output: int
    trained_budgets: frozenset[int] | None = None  # None: not known
    tuned_to_answer: bool | None = None  # None: not known
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def cost(self) -> Cost:
        return Cost(self.config)

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            sentence = f"The model '{name}' is not served here; '{self.name}' is."
            raise ApiError(sentence, 404, "model_not_found", "model")

    def resolve(self, field: str, value: int | str) -> Trajectory:
        """The trajectory that a field of a body names."""
        try:
            return resolve(value, self.config.loops)
        except LoopformerError as error:
            raise ApiError(str(error), param=field) from None

    def is_trained(self, trajectory: Trajectory, loop: int) -> bool | None:
        """Whether the model was trained to predict after a loop of a trajectory; None if that is not known.

        After an earlier loop than the last the state is that of a smaller budget only if loops know nothing of the
        trajectory. Otherwise it is an intermediate state.
        """
        if loop < trajectory.budget and self.config.conditioning not in ("none", "index"):
            return False
        return None if self.trained_budgets is None else loop in self.trained_budgets

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        last = min(self.config.vocab, self.tokenizer.vocab_size) - 1
        need(max(ids, default=0) <= last, field, f"Token ids must lie in 0…{last}.")

    def check_prompt(self, ids: Sequence[int], field: str) -> None:
        need(len(ids) > 0, field, "The prompt is empty; give at least one character.")
        self.check_ids(ids, field)
        self.check_length(len(ids), field)

    def check_length(self, tokens: int, field: str, at_least: str = "") -> None:
        if tokens > self.max_prompt:
            sentence = f"The prompt has {at_least}{tokens} tokens; this server accepts at most {self.max_prompt}."
            raise ApiError(sentence, 400, "context_length_exceeded", field)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of the texts of a prompt. One that is surely too long is refused before it is encoded, and one
        that is too long before the next one is."""
        prompts = []
        for text in texts:
            self.check_length(self.tokenizer.fewest_tokens(text), "prompt", "at least ")
            prompts.append(self.tokenizer.encode(text))
            self.check_length(len(prompts[-1]), "prompt")
        return prompts

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], special=True)


@dataclass(frozen=True)
class Job:
    """The texts to generate for a request, `n` for each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    trajectory: Trajectory
    min_budget: int  # the smallest budget that may be granted instead
    priority: int
    alternatives: int | None  # most likely tokens to list per position; None: no log-probabilities
    echo: bool = False
    client: str = ""  # who shares rows and queue with others: an API key's hash, or an address

    @property
    def count(self) -> int:
        """How many texts are requested."""
        return len(self.prompts) * self.n

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """The prompt of a text."""
        return self.prompts[index // self.n]

    def kv_bytes(self, served: Served, trajectory: Trajectory) -> int:
        """The bytes of keys and values that the texts may need along a trajectory."""
        if self.max_tokens:
            requests, context = self.requests(trajectory), served.config.context
            positions = sum(positions_to_reserve(request, context) for request in requests)
        else:  # only the prompts are scored
            positions = self.n * sum(map(len, self.prompts))
        return positions * served.cost.kv_bytes(trajectory.budget, served.value_bytes)

    def requests(self, trajectory: Trajectory) -> list[Request]:
        """The engine's requests. The i-th text of a prompt draws with `seed + i`."""
        seeds = [None if self.sampling.seed is None else self.sampling.seed + index for index in range(self.n)]
        return [
            Request(
                prompt,
                trajectory,
                replace(self.sampling, seed=seed),
                self.max_tokens,
                self.stops,
                self.alternatives or 0,
                self.priority,
                self.client,
            )
            for prompt in self.prompts
            for seed in seeds
        ]
