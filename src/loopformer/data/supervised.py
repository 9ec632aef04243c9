"""Supervised examples: a prompt and a response, or a chat, as tokens with loss on the responses only.

    {"prompt": "2 + 2?", "response": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

Both become the same text, turn by turn, where ⏎ is a line break and END the tokenizer's end token:

    System: content⏎⏎
    User: content⏎⏎
    Assistant: contentEND

Loss is on the words of each assistant turn and on the END that closes it. For inference, `encode_prompt`
gives the ids up to and including "Assistant:".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopformer.data.corpus import clean
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError

LOSS = 1  # flag of a token that is learned
LAST = 2  # flag of the last token of an example; a chat has more end tokens than its last
ROLES = {"system": "System:", "user": "User:", "assistant": "Assistant:"}


class Segment(NamedTuple):
    """A stretch of text; with `loss` it is a response, and an end token follows."""

    text: str
    loss: bool


Example = tuple[Segment, ...]


def parse_example(record: dict[str, Any], where: str) -> Example:
    """The segments of one record; `where` names it in an error."""
    segments: list[Segment] = []
    context = ""
    for role, content in _messages(record, where):
        if role == "assistant":
            segments += [Segment(context + ROLES[role], False), Segment(" " + content, True)]
            context = ""
        else:
            context += f"{ROLES[role]} {content}\n\n"
    if not segments:
        raise LoopformerError(f"{where} has no assistant turn to learn; add one or remove the record.")
    return tuple(segments)


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids of a chat so far, ready for the model to answer as the assistant."""
    *known, _ = parse_example({"messages": [*messages, {"role": "assistant", "content": ""}]}, "The chat")
    encoded = tokenizer.encode_batch([segment.text for segment in known])
    ends = ([tokenizer.eot] if segment.loss else [] for segment in known)
    return [number for ids, end in zip(encoded, ends, strict=True) for number in (*ids, *end)]


def example_key(example: Example) -> str:
    """What decides the split: two examples of the same words are the same."""
    return json.dumps(example, ensure_ascii=False)


def example_text(example: Example) -> str:
    return "".join(segment.text for segment in example)


def encode_examples(
    tokenizer: Tokenizer, examples: Sequence[Example]
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]]:
    """Ids and flags of each example."""
    encoded = iter(tokenizer.encode_batch([segment.text for example in examples for segment in example]))
    result = []
    for example in examples:
        ids: list[int] = []
        flags: list[int] = []
        for segment in example:
            own = next(encoded) + ([tokenizer.eot] if segment.loss else [])
            ids += own
            flags += [LOSS if segment.loss else 0] * len(own)
        flags[-1] |= LAST
        result.append((np.array(ids, dtype=np.uint32), np.array(flags, dtype=np.uint8)))
    return result


def _messages(record: dict[str, Any], where: str) -> list[tuple[str, str]]:
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record and "response" in record:
        messages = [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["response"]},
        ]
    else:
        raise LoopformerError(f"{where} has neither prompt and response nor messages, as --supervised needs.")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise LoopformerError(f'{where} must have messages such as [{{"role": "user", "content": "…"}}].')
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    for role, content in pairs:
        if role not in ROLES or not isinstance(content, str):
            raise LoopformerError(
                f"{where} has a turn of role {role!r}; each needs a role of {', '.join(ROLES)} and text."
            )
    return [(role, clean(content)) for role, content in pairs]
