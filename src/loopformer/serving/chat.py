"""A chat as the tokens that a model continues: by its tokenizer's own template, or the plain one of fine-tuning.

    ChatTemplate(tokenizer, find_chat_template(folder)).encode([{"role": "user", "content": "2 + 2?"}])

Without a template the turns are written as `--supervised` data is (data/supervised.py). A template is Jinja, run in
a sandbox; its special tokens count as such, so a message may not hold one.
"""

from __future__ import annotations

from typing import NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loopformer.data.supervised import encode_prompt
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError

Message = dict[str, str]  # role and content


class ChatTemplate:
    """How a chat is written for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = None if source is None else _compiled(source)

    def encode(self, messages: list[Message]) -> list[int]:
        """The ids of a chat so far, ready for the model to answer as the assistant."""
        if self._template is None:
            return encode_prompt(self._tokenizer, messages)
        for message in messages:
            for special in self._tokenizer.special_tokens:
                if special in message["content"]:
                    raise LoopformerError(
                        f"A message may not hold the token {special}, which ends or begins turns."
                    )
        end = self._tokenizer.decode([self._tokenizer.eot], special=True)
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=end,
                eos_token=end,
                raise_exception=_refuse,
            )
        except LoopformerError:
            raise
        except Exception as error:  # a template is a program
            raise LoopformerError("The model's chat template does not take these messages.") from error
        return self._tokenizer.encode_with_special(text)


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise FileProblem(f"The model's chat template cannot be read ({error}); mend or remove it.") from error


def _refuse(sentence: str) -> NoReturn:
    """What a template calls `raise_exception`."""
    raise LoopformerError(f"The model's chat template refuses these messages: {sentence}")
