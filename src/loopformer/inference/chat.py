"""A chat as a prompt: as many of its turns as fit, as tokens by the model's chat template or the plain one.

    template = ChatTemplate.find(tokenizer, Path("models/mine"))
    fitted = template.fit([{"role": "user", "content": "2 + 2?"}], most=200)
    request = Request(fitted.ids, trajectory, stops=template.stops)

The plain template is that of supervised examples (data/tokenizer.py): `User: 2 + 2?`, an empty line, `Assistant:`.
The template of a model is Jinja, as in Transformers, and runs in Jinja's sandbox. Special tokens of the template
are encoded as tokens. A message that spells one out stays text.
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
_MARK = "\ufdd0"  # a Unicode noncharacter: no text contains it


class FittedChat(NamedTuple):
    """The turns of a chat that fit, and their tokens up to the beginning of the answer."""

    messages: list[Message]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """Turns a chat into tokens. The tokenizer's end token is the one that ends an answer."""

    tokenizer: Tokenizer
    source: str | None = None  # Jinja; None is the plain template

    @classmethod
    def find(cls, tokenizer: Tokenizer, *folders: Path | None) -> ChatTemplate:
        """The template of the first folder that has one, with the end token of its tokenizer settings.

        Without any, the plain template.
        """
        source = find_chat_template(*folders)
        if source is None:
            return cls(tokenizer)
        settings = [folder / TOKENIZER_CONFIG for folder in folders if folder is not None]
        end = next((read_json(path).get("eos_token") for path in settings if path.is_file()), None)
        end = end.get("content") if isinstance(end, dict) else end
        return cls(tokenizer.with_end_token(end) if isinstance(end, str) else tokenizer, source)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer. A model that never learned the end token goes on with the user's next turn."""
        return () if self.source is not None else (f"\n\n{ROLES['user']}", f"\n{ROLES['user']}")

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a chat, up to the beginning of the answer."""
        if self.source is None:
            return encode_prompt(self.tokenizer, messages)
        marked = [{**message, "content": self._marked(message["content"])} for message in messages]
        rendered = self._rendered(marked)
        return [number for part in rendered.split(_MARK) for number in self.tokenizer.encode_template(part)]

    def _marked(self, content: str) -> str:
        """A message with a mark inside everything that reads like a special token.

        The rendered chat is cut at the marks before it is encoded, so the tokenizer never sees such a token.
        """
        for special in self.tokenizer.special_tokens:
            content = content.replace(special, f"{special[:1]}{_MARK}{special[1:]}")
        return content

    def fit(self, messages: Sequence[Message], most: int) -> FittedChat:
        """The chat without its oldest questions and answers, so that it has at most `most` tokens.

        The system message and the last question always stay.
        """
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
        except Exception as error:  # a template is a program, so it can raise anything
            reason = " ".join(str(error).split())
            raise LoopformerError(f"The model's chat template fails ({reason}); correct its {TEMPLATE}.") from error

    @cached_property
    def _template(self) -> Template:
        """The compiled template, with the filters and functions that Transformers provides."""
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
