"""Turn a chat into prompt tokens with the model's chat template, dropping the oldest turns if it is too long.

    template = ChatTemplate.find(tokenizer, Path("models/mine"))
    fitted = template.fit([{"role": "user", "content": "2 + 2?"}], max_tokens=200)
    request = Request(fitted.ids, trajectory, stops=template.stops)

A model's own template is Jinja, as in Transformers, and runs in Jinja's sandbox. Without it, the plain template of
supervised examples is used (data/tokenizer.py): `User: 2 + 2?`, an empty line, `Assistant:`. Special tokens of the
template are encoded as such. In a message they are encoded as text, so no user can end a turn.
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

from loopformer.config import load_run
from loopformer.data.shards import INDEX_FILE, read_index
from loopformer.data.splits import clean
from loopformer.data.tokenizer import ROLES, Tokenizer, encode_prompt
from loopformer.errors import LoopformerError
from loopformer.files import read_json
from loopformer.loading.folder import (
    CONFIG,
    SETTINGS,
    TEMPLATE,
    TOKENIZER_CONFIG,
    data_folder,
    find_chat_template,
    is_model_folder,
    resolve_model_path,
    run_folder_of,
)

Message = dict[str, str]  # role and content
TUNED = "tuned_to_answer"  # key in `source` of an export's config.json
_SEPARATOR = "\ufdd0"  # a Unicode noncharacter, which ordinary text never contains


def was_tuned_to_answer(model: str | Path) -> bool | None:
    """Whether a model was trained to answer, rather than only to continue text.

    It was if it has a chat template, or if its run learned supervised examples, or if it was exported from such a
    run. None: the settings or the data of its run cannot be read, so nobody knows.
    """
    folder, run = resolve_model_path(model), run_folder_of(model)
    if find_chat_template(folder, run) is not None:
        return True
    if run is None:
        source = read_json(folder / CONFIG).get("source") if is_model_folder(folder) else None
        return isinstance(source, dict) and TUNED in source
    try:
        settings = load_run(run / SETTINGS)[0].data
        if settings.is_generated:
            return False
        data = data_folder(run, settings.path)
        return None if data is None else bool(read_index(data / INDEX_FILE)["settings"]["supervised"])
    except LoopformerError:
        return None


class FittedChat(NamedTuple):
    """The turns of a chat that fit, and their tokens up to the beginning of the answer."""

    messages: list[Message]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """Turns a chat into tokens. The end token of `tokenizer` ends an answer."""

    tokenizer: Tokenizer
    source: str | None = None  # Jinja; None is the plain template

    @classmethod
    def find(cls, tokenizer: Tokenizer, *folders: Path | None) -> ChatTemplate:
        """The template of the first folder that has one, or else the plain template.

        The first tokenizer config in these folders names the end token.
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
        """Stop strings of an answer. A model that never learned the end token would write the user's next turn."""
        return () if self.source is not None else (f"\n\n{ROLES['user']}", f"\n{ROLES['user']}")

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a chat, up to the beginning of the answer."""
        if self.source is None:
            return encode_prompt(self.tokenizer, messages)
        safe = [{**message, "content": self._split_special_tokens(message["content"])} for message in messages]
        rendered = self._render(safe)
        return [token for part in rendered.split(_SEPARATOR) for token in self.tokenizer.encode_template(part)]

    def fewest_tokens(self, messages: Sequence[Message]) -> int:
        """A lower bound on the number of tokens of a chat, without encoding it; 0 where nothing is certain."""
        if self.source is not None:  # it may leave out messages
            return 0
        return self.tokenizer.fewest_tokens("".join(clean(message["content"]) for message in messages))

    def _split_special_tokens(self, content: str) -> str:
        """A message with `_SEPARATOR` inside every special token that it spells out.

        `encode` splits the rendered chat there and encodes the parts one by one, so the tokenizer never sees the
        special token.
        """
        for special in self.tokenizer.special_tokens:
            content = content.replace(special, f"{special[:1]}{_SEPARATOR}{special[1:]}")
        return content

    def fit(self, messages: Sequence[Message], max_tokens: int) -> FittedChat:
        """The chat without its oldest questions and answers, cut until it has at most `max_tokens` tokens.

        The system message and the last question always stay, even if they alone have more.
        """
        kept = list(messages)
        first_turn = sum(message["role"] == "system" for message in kept[:1])
        while len(ids := self.encode(kept)) > max_tokens and len(kept) > first_turn + 1:
            del kept[first_turn : first_turn + 2]  # a question and its answer
        return FittedChat(kept, tuple(ids))

    def _render(self, messages: Sequence[Message]) -> str:
        end = self.tokenizer.decode([self.tokenizer.eot], special=True)
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, bos_token=end, eos_token=end, pad_token=end
            )
        except Exception as error:  # a template is a program, so it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LoopformerError(f"The model's chat template fails ({reason}); correct its {TEMPLATE}.") from error

    @cached_property
    def _template(self) -> Template:
        """The compiled template, with the filters and functions that Transformers provides."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {
            "raise_exception": _raise_template_error,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        return environment.from_string(self.source or "")


def _raise_template_error(sentence: str) -> Any:
    raise TemplateError(sentence)
