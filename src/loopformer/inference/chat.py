"""A chat as a prompt: its turns as tokens, by the model's own template or the plain one, as many as have room.

    template = ChatTemplate.find(tokenizer, Path("models/mine"))
    fitted = template.fit([{"role": "user", "content": "2 + 2?"}], most=200)
    request = Request(fitted.ids, trajectory, stops=template.stops)

The plain one is that of supervised examples (data/tokenizer.py): `User: 2 + 2?`, an empty line, `Assistant:`. A
template of the model's own is Jinja, as Transformers writes it, and runs in Jinja's sandbox. Its special tokens are
tokens; what a message spells like one stays text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loopformer.data.tokenizer import ROLES, Tokenizer, encode_prompt
from loopformer.errors import LoopformerError
from loopformer.files import read_json
from loopformer.loading.folder import TEMPLATE, TOKENIZER_CONFIG, find_chat_template

Message = dict[str, str]  # role and content
_MARK = "\ufdd0"  # which Unicode keeps for uses like this: no text has it


class FittedChat(NamedTuple):
    """The turns that are left of a chat, and their tokens up to where the answer begins."""

    messages: list[Message]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """How turns become tokens; the tokenizer's end token is the one that ends an answer."""

    tokenizer: Tokenizer
    source: str | None = None  # Jinja; None is the plain template

    @classmethod
    def find(cls, tokenizer: Tokenizer, *folders: Path | None) -> ChatTemplate:
        """The template of the first folder that has one, with the end token that is named beside it; else the plain
        one."""
        source = find_chat_template(*folders)
        if source is None:
            return cls(tokenizer)
        settings = [folder / TOKENIZER_CONFIG for folder in folders if folder is not None]
        end = next((read_json(path).get("eos_token") for path in settings if path.is_file()), None)
        end = end.get("content") if isinstance(end, dict) else end
        return cls(tokenizer.ending_with(end) if isinstance(end, str) else tokenizer, source)

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends an answer besides the end token: a model that never learned this one goes on as the user."""
        return () if self.source is not None else (f"\n\n{ROLES['user']}", f"\n{ROLES['user']}")

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat so far, ready for the model to answer."""
        if self.source is None:
            return encode_prompt(self.tokenizer, messages)
        marked = [{**message, "content": self._marked(message["content"])} for message in messages]
        rendered = self._rendered(marked)
        return [number for part in rendered.split(_MARK) for number in self.tokenizer.encode_template(part)]

    def _marked(self, content: str) -> str:
        """What somebody said, with a mark inside of whatever would read as a special token: it is cut there."""
        for special in self.tokenizer.special_tokens:
            content = content.replace(special, f"{special[:1]}{_MARK}{special[1:]}")
        return content

    def fit(self, messages: Sequence[Message], most: int) -> FittedChat:
        """A chat without so many of its oldest turns, each a question and its answer, that it has at most so many
        tokens. What a system says and the last question stay."""
        kept = list(messages)
        first = sum(message["role"] == "system" for message in kept[:1])
        while len(ids := self.encode(kept)) > most and len(kept) > first + 1:
            del kept[first : first + 2]
        return FittedChat(kept, tuple(ids))

    def _rendered(self, messages: Sequence[Message]) -> str:
        end = self.tokenizer.decode([self.tokenizer.eot], special=True)
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, bos_token=end, eos_token=end, pad_token=end
            )
        except Exception as error:  # a template is a program, and fails as one
            reason = " ".join(str(error).split())
            raise LoopformerError(f"The model's chat template fails ({reason}); correct its {TEMPLATE}.") from error

    @cached_property
    def _template(self) -> Template:
        """The template with what templates expect to find, as Transformers gives it."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        return environment.from_string(self.source or "")


def _refuse(sentence: str) -> Any:
    raise TemplateError(sentence)
