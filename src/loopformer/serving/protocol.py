"""OpenAI's requests, and ours beside them; answers.py has what they are answered with.

    body = CompletionBody.model_validate({"prompt": "Once upon", "budget": 2})
    job = body.job(served)                       # prompts, sampling, trajectory: what the engine runs

Ours: `budget`, `trajectory`, `min_budget`, `priority`, and `top_k`, `min_p` and `repetition_penalty` as vLLM has
them. A field of OpenAI's that is not supported here is refused by its name, unless it says what would be so without
it (null, `"frequency_penalty": 0`); nothing is ignored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, nearest, require
from loopformer.inference.chat import ChatTemplate, Message
from loopformer.inference.request import Request
from loopformer.inference.sampling import Sampling
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory, resolve

NeutralValues = dict[str, tuple[Any, ...]]  # by field: the values that change nothing; nor does null

_COMMON_UNSUPPORTED: NeutralValues = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "user": (),
}
_COMPLETION_UNSUPPORTED = {**_COMMON_UNSUPPORTED, "best_of": (1,), "suffix": ("",)}
_CHAT_UNSUPPORTED: NeutralValues = {
    **_COMMON_UNSUPPORTED,
    "audio": (),
    "function_call": (),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
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
_FAMILY = re.compile(r"\s*[a-z-]+\s*:\s*(\d+)\s*")
MOST_ALTERNATIVES = 20
NEW_TOKENS = 16  # of a completion that does not say how many it wants

Id = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """What every body has in common: types are as written, and every field is known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[NeutralValues] = {}  # OpenAI's fields that are refused, unless they change nothing

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            neutral = cls.unsupported.get(name)
            if value is None or (neutral is not None and value in neutral):
                continue
            if neutral is not None:
                sentence = "'{field}' is a field of OpenAI's that is not supported here; leave it out."
                raise PydanticCustomError("unsupported_parameter", sentence, {"field": name})
            if name not in cls.model_fields:
                hint = nearest(str(name), list(cls.model_fields), "leave it out.")
                sentence = "'{field}' is no field of this request; {hint}"
                context = {"field": encodable(str(name)[:64]), "hint": encodable(hint)}
                raise PydanticCustomError("unknown_parameter", sentence, context)
            kept[name] = value
        return kept


class DepthBody(Body):
    """How deep to go."""

    model: str | None = None
    budget: int | None = Field(None, ge=1, description="Loops per token; the model's default without it.")
    trajectory: str | None = Field(None, max_length=256, description="A schedule, such as 4-2-1-1.")

    def followed(self, served: Served) -> Trajectory:
        """The trajectory that is asked for; the model must be the one that is served."""
        served.check_name(self.model)
        require(self.budget is None or self.trajectory is None, "Give a budget or a trajectory, not both.")
        if self.trajectory is None:
            return served.default if self.budget is None else served.resolved("budget", self.budget)
        if family := _FAMILY.fullmatch(self.trajectory):  # before so many steps are made
            served.resolved("trajectory", int(family[1]))
        return served.resolved("trajectory", self.trajectory)


class StreamOptionsBody(Body):
    unsupported: ClassVar[NeutralValues] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class GenerationBody(DepthBody):
    """What completions and chat completions share."""

    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptionsBody = StreamOptionsBody()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1: any token.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    min_budget: int | None = Field(None, ge=1, description="The least that a busy server may grant.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower comes first.")

    def _job(
        self, served: Served, prompts: list[list[int]], field: str, max_tokens: int, alternatives: int | None
    ) -> Job:
        """What is asked for, where the prompts are of this field."""
        trajectory = self.followed(served)
        least = self.min_budget or (1 if self.trajectory is None else trajectory.budget)
        served.resolved("min_budget", least)
        need(
            least <= trajectory.budget,
            "min_budget",
            f"'min_budget' is {least}, more than the {trajectory.budget} loops that are asked for; lower it.",
        )
        for prompt in prompts:
            served.check_prompt(prompt, field)
        served.check_output(max_tokens)
        top_k = self.top_k if self.top_k > 0 else None
        sampling = Sampling(self.temperature, top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        prompt_ids = tuple(tuple(prompt) for prompt in prompts)
        return Job(prompt_ids, self.n, sampling, max_tokens, stops, trajectory, least, self.priority, alternatives)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    unsupported: ClassVar[NeutralValues] = _COMPLETION_UNSUPPORTED

    prompt: str | list[str] | list[Id] | list[list[Id]]
    max_tokens: int | None = Field(None, ge=0, description=f"{NEW_TOKENS} without it.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)

    def job(self, served: Served) -> Job:
        need(
            not self.stream or not self.logprobs,
            "logprobs",
            "'logprobs' of more than the chosen token go without 'stream'; ask for 0, or do not stream.",
        )
        need(not (self.echo and self.stream), "echo", "'echo' goes without 'stream'.")
        most = min(NEW_TOKENS, served.max_output) if self.max_tokens is None else self.max_tokens
        need(most >= 1 or self.echo, "max_tokens", "'max_tokens' is 1 or more, or 0 with 'echo'.")
        prompts = self._prompts(served.tokenizer)
        need(0 < len(prompts) <= 128, "prompt", "'prompt' is a text or a list of 1 to 128 of them.")
        job = self._job(served, prompts, "prompt", most, self.logprobs)
        return replace(job, echo=self.echo)

    def _prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if isinstance(self.prompt, str):
            return [tokenizer.encode(self.prompt)]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[number for number in self.prompt if isinstance(number, int)]]
        texts = [text for text in self.prompt if isinstance(text, str)]
        return tokenizer.encode_batch(texts) if texts else [ids for ids in self.prompt if isinstance(ids, list)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class MessageBody(Body):
    unsupported: ClassVar[NeutralValues] = _MESSAGE_UNSUPPORTED

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    unsupported: ClassVar[NeutralValues] = _CHAT_UNSUPPORTED

    messages: list[MessageBody] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)

    def job(self, served: Served) -> Job:
        alone = self.top_logprobs is not None and not self.logprobs
        need(not alone, "top_logprobs", "'top_logprobs' goes with 'logprobs', which is to be true.")
        streamed = self.stream and bool(self.top_logprobs)
        need(not streamed, "top_logprobs", "'top_logprobs' goes without 'stream'.")
        require(
            self.max_tokens is None or self.max_completion_tokens is None,
            "Give 'max_completion_tokens' or 'max_tokens', not both.",
        )
        prompt = served.chat.encode([message.plain() for message in self.messages])
        most = self.max_completion_tokens or self.max_tokens or served.most_output(len(prompt))
        job = self._job(served, [prompt], "messages", most, (self.top_logprobs or 0) if self.logprobs else None)
        return replace(job, stops=(*job.stops, *served.chat.stops))


class TokenizeBody(Body):
    """POST /tokenize: a text, or a chat as the model is given it."""

    # vLLM's; there are no special tokens to add
    unsupported: ClassVar[NeutralValues] = {"add_special_tokens": (True, False), "return_token_strs": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = Field(None, min_length=1, max_length=4096)

    def ids(self, served: Served) -> list[int]:
        served.check_name(self.model)
        require((self.prompt is None) != (self.messages is None), "Give a 'prompt' or 'messages'.")
        if self.prompt is not None:
            return served.tokenizer.encode(self.prompt)
        return served.chat.encode([message.plain() for message in self.messages or ()])


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Id]

    def text(self, served: Served) -> str:
        served.check_name(self.model)
        served.check_ids(self.tokens, "tokens")
        return served.tokenizer.decode(self.tokens)


class LensBody(DepthBody):
    """POST /lens: the most likely next tokens of a prompt after each loop."""

    prompt: str | list[Id]
    top: int = Field(5, ge=1, le=100)

    def ids(self, served: Served) -> list[int]:
        ids = served.tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        served.check_prompt(ids, "prompt")
        return ids


# What is served, and what it is asked to do.


class WrongField(LoopformerError):
    """What is wrong with one field of a body."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def need(holds: bool, field: str, sentence: str) -> None:
    """Refuse a body for a field of it."""
    if not holds:
        raise WrongField(field, sentence)


class UnknownModel(WrongField):
    """Another model than the one that is served."""


class TooLong(WrongField):
    """A prompt that does not fit."""


@dataclass(frozen=True)
class Served:
    """The model behind the server, as far as requests need to know it."""

    name: str
    chat: ChatTemplate
    config: ModelConfig
    default: Trajectory
    value_bytes: int
    max_prompt: int
    max_output: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def cost(self) -> Cost:
        return Cost(self.config)

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise UnknownModel("model", f"The model '{name[:64]}' is not served here; '{self.name}' is.")

    def resolved(self, field: str, asked: int | str) -> Trajectory:
        """The trajectory that a field of a body asks for."""
        try:
            return resolve(asked, self.config.loops)
        except LoopformerError as error:
            raise WrongField(field, str(error)) from None

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        last = min(self.config.vocab, self.tokenizer.vocab_size) - 1
        need(max(ids, default=0) <= last, field, f"Token ids lie in 0…{last}.")

    def check_prompt(self, ids: Sequence[int], field: str) -> None:
        need(len(ids) > 0, field, "The prompt is empty; give at least one character.")
        self.check_ids(ids, field)
        if len(ids) > self.max_prompt:
            raise TooLong(field, f"The prompt has {len(ids)} tokens; at most {self.max_prompt} are taken here.")

    def check_output(self, tokens: int) -> None:
        need(
            tokens <= self.max_output,
            "max_tokens",
            f"'max_tokens' is at most {self.max_output} here, got {tokens}.",
        )

    def most_output(self, prompt: int) -> int:
        """As many tokens as there is room for after a prompt."""
        return max(1, min(self.max_output, self.config.context + 1 - prompt))

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], special=True)


@dataclass(frozen=True)
class Job:
    """What a client asks for, in the engine's words: `n` texts for each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    trajectory: Trajectory
    least: int  # the smallest budget that may be granted instead
    priority: int
    alternatives: int | None  # likely tokens to name beside each; None: no log-probabilities at all
    echo: bool = False

    @property
    def count(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, place: int) -> tuple[int, ...]:
        return self.prompts[place // self.n]

    def kv_bytes(self, served: Served, trajectory: Trajectory) -> int:
        """Keys and values that the texts may come to."""
        tokens = sum(min(served.config.context, len(prompt) + self.max_tokens) for prompt in self.prompts)
        return self.n * tokens * served.cost.kv_bytes(trajectory.budget, served.value_bytes)

    def requests(self, trajectory: Trajectory) -> list[Request]:
        """For the engine; texts of one prompt draw with seeds that follow each other."""
        seeds = [None if self.sampling.seed is None else self.sampling.seed + place for place in range(self.n)]
        return [
            Request(prompt, trajectory, replace(self.sampling, seed=seed), self.max_tokens, self.stops)
            for prompt in self.prompts
            for seed in seeds
        ]


def encodable(text: str) -> str:
    """The text with an escape for half a surrogate pair, which a client may send and nobody can write."""
    return text.encode(errors="backslashreplace").decode()
