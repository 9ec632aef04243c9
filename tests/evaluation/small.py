"""A small model, small texts, and the protocol of perplexity written out token by token."""

from collections.abc import Sequence

import numpy as np
from inference.models import spread

from loopformer import LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.evaluation.text import Protocol, Text

Scored = list[tuple[tuple[int, ...], int]]  # what a token is given, and the token

DOCUMENTS = [
    "every pass is told its time",
    "naïve café ☕",
    "x",
    "its step, its time, its step " * 6,
    "日本語 and on",
]


def make_model(tokenizer: Tokenizer, loops: int = 4, context: int = 16) -> LoopedLM:
    """A conditioned model of tiny width with weights spread out, so that every choice shows."""
    config = ModelConfig(
        blocks=1, loops=loops, width=16, heads=2, ffn=32, context=context, vocab=tokenizer.vocab_size
    )
    return spread(config, std=0.3)


def make_text(documents: Sequence[str], tokenizer: Tokenizer, sha256: str = "0") -> Text:
    ids = tuple(np.array(tokenizer.encode(document), np.int64) for document in documents)
    return Text("test.txt", "all of it", ids, sha256, tokenizer)


def by_rule(text: Text, protocol: Protocol, context: int) -> Scored:
    """The protocol, token by token."""
    end = text.tokenizer.eot
    window = protocol.window or context
    stride = protocol.stride or window
    if protocol.join:
        stream: list[int] = []
        for ids in text.documents:
            stream += [*([end] if stream else []), *ids.tolist()]
        sequences = [stream]
    else:
        sequences = [[end, *ids.tolist()] for ids in text.documents]
    found: Scored = []
    for sequence in sequences:
        for place in range(1, len(sequence)):
            start = 0
            while place > start + window:
                start += stride
            found.append((tuple(sequence[start:place]), sequence[place]))
    return found[: protocol.max_tokens]
