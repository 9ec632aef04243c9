"""How a text is cut into rows for a model, so that every token is scored once.

    cut = windows(text, Protocol(stride=64), context=128)
    cut.rows, cut.tokens, cut.bytes

**Documents apart** (the default). Each document is read after one end token: its first token is scored given that
end token, every other token given those before it. All tokens of a document are scored and no others, so the bytes
are those of the documents. The end token itself is never scored.

**Joined** (`join`). Documents follow one another with an end token between two, as in training; attention goes
across. End tokens are scored too, but count neither in the bytes nor in bits per byte. The first token of the
stream has nothing before it and is not scored, nor are its bytes counted. Without a stride these are the windows
of training's own validation, and the tail that is shorter than a window.

**Windows.** A row holds at most `window` inputs. Without a stride, rows follow one another: the last token of a row
is the first input of the next, and all that it has before it there. With a stride of S, each row begins S tokens
after the one before and scores only the tokens that are new in it, so each has at least window - S before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loopformer.errors import require
from loopformer.evaluation.text import Ids, Text


@dataclass(frozen=True)
class Protocol:
    """How perplexity is measured; None for `window` is the model's context, for `stride` the window."""

    window: int | None = None
    stride: int | None = None
    join: bool = False
    max_tokens: int | None = None  # score only the first so many

    def sizes(self, context: int) -> tuple[int, int]:
        """Window and stride for a model of this context."""
        window = context if self.window is None else self.window
        require(1 <= window <= context, f"--window must be 1 to the model's context of {context}, got {window}.")
        stride = window if self.stride is None else self.stride
        require(1 <= stride <= window, f"--stride must be 1 to the window of {window}, got {stride}.")
        return window, stride


class Row(NamedTuple):
    """Consecutive tokens: all but the last go in, and of all but the first the last `scored` are scored."""

    ids: Ids
    scored: int


@dataclass(frozen=True)
class Cut:
    """The rows of a text and what their scored tokens stand for."""

    rows: tuple[Row, ...]
    window: int
    stride: int
    documents: int
    tokens: int  # scored, `ends` included
    ends: int  # end tokens among them
    bytes: int  # of text that the others stand for


def windows(text: Text, protocol: Protocol, context: int) -> Cut:
    """Cut a text for a model of this context."""
    window, stride = protocol.sizes(context)
    sequences = _sequences(text, protocol)
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    require(
        tokens >= window,
        f"{text.name} has {tokens} tokens to score, fewer than one window of {window}; "
        "give more text or a smaller --window.",
    )
    end = text.tokenizer.eot
    rows = tuple(row for sequence in sequences for row in _rows(sequence, window, stride))
    ends = sum(int((sequence[1:] == end).sum()) for sequence in sequences)
    documents = len(sequences) + ends - sum(int(sequence[-1] == end) for sequence in sequences)
    size = sum(text.tokenizer.byte_count(sequence[1:].tolist()) for sequence in sequences)
    return Cut(rows, window, stride, documents, tokens, ends, size)


def _sequences(text: Text, protocol: Protocol) -> list[Ids]:
    """Tokens of which all but the first are scored: one sequence per document, or one for all."""
    end = np.array([text.tokenizer.eot])
    if protocol.join:
        stream = np.concatenate([part for ids in text.documents for part in (end, ids)])[1:]
        return [stream if protocol.max_tokens is None else stream[: protocol.max_tokens + 1]]
    sequences, left = [], text.tokens if protocol.max_tokens is None else protocol.max_tokens
    for ids in text.documents:
        if left > 0:
            sequences.append(np.concatenate([end, ids[:left]]))
            left -= len(ids)
    return sequences


def _rows(sequence: Ids, window: int, stride: int) -> list[Row]:
    rows, done, start = list[Row](), 0, 0  # `done` tokens after the first are scored
    while done < len(sequence) - 1:
        stop = min(start + window, len(sequence) - 1)
        rows.append(Row(sequence[start : stop + 1], stop - done))
        start, done = start + stride, stop
    return rows
