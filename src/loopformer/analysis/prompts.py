"""Prompts of one length out of any text: the first windows of a source that `prepare` reads or has prepared.

    prompts = read_prompts("data/demo", tokenizer, count=64, length=128)     # of the validation split
    prompts = read_prompts("books/*.txt", tokenizer, count=64, length=128)

Windows lie inside documents and do not overlap. Every document gives its first one; only where there are too few
documents do they give a second, a third, … So 64 prompts are 64 documents if the text has them.
"""

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import require
from loopformer.evaluation.text import Ids, Text, read_text

SHORTEST = 4  # tokens; fewer have no curvature, and one prompt of fewer no debiased CKA
_FIRST_LOOK = 16  # how many times the tokens of all prompts are read at first; most documents are long enough


@dataclass(frozen=True)
class Prompts:
    """Token ids, and where they come from."""

    ids: Tensor  # [N, T] int64
    text: str  # the source as the user wrote it
    part: str  # which part of it, in words
    documents: int  # how many different ones the prompts come from

    @property
    def hash(self) -> str:
        """The sha256 of the ids, prompt after prompt, as little-endian int32."""
        return hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()


def read_prompts(given: str, tokenizer: Tokenizer, count: int, length: int, field: str = "text") -> Prompts:
    """The first `count` windows of `length` tokens; refused where the text has fewer."""
    require(count >= 1, f"The number of prompts must be 1 or more, got {count}.")
    require(length >= SHORTEST, f"A prompt must have {SHORTEST} tokens or more, got {length}.")
    limit = _FIRST_LOOK * count * length
    while True:
        text = read_text(given, tokenizer, field, max_tokens=limit)
        found = _windows(text, count, length)
        if len(found) == count or text.tokens <= limit:  # enough documents, or that was all of it
            break
        limit *= 8
    total = sum(map(len, found))
    require(total > 0, f"{given} has no document of {length} tokens; choose another text or a smaller length.")
    require(
        total >= count,
        f"{given} has {total} windows of {length} tokens where {count} prompts were asked for; "
        "ask for fewer or shorter ones, or give more text.",
    )
    rounds = itertools.zip_longest(*found)
    chosen = [window for one in rounds for window in one if window is not None][:count]
    return Prompts(torch.from_numpy(np.stack(chosen)), given, text.part, len(found))


def _windows(text: Text, count: int, length: int) -> list[list[Ids]]:
    """The windows of each of the first `count` documents that have any."""
    cut = (
        [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)] for ids in text.documents
    )
    return list(itertools.islice(filter(None, cut), count))
