"""Every token is scored once, given exactly what the protocol says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.evaluation.text import Cut, Protocol, Text, windows

from .small import DOCUMENTS, Scored, by_rule, make_text

TOKENIZER = Tokenizer.train(["every pass is told its time and its step"] * 9, 257)


def scored(cut: Cut) -> Scored:
    found: Scored = []
    for row in cut.rows:
        ids = row.ids.tolist()
        found += [(tuple(ids[:place]), ids[place]) for place in range(len(ids) - row.scored, len(ids))]
    return found


@given(
    st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.integers(1, 60),
)
def test_each_token_once_given_what_the_rule_says(
    documents: list[list[int]], window: int, stride: int, join: bool, most: int | None
) -> None:
    text = Text("t", "", tuple(np.array(ids) for ids in documents), "0", TOKENIZER)
    protocol = Protocol(window, min(stride, window), join, most)
    expected = by_rule(text, protocol, 12)
    if len(expected) < window:
        with pytest.raises(LoopformerError, match="fewer than one window"):
            windows(text, protocol, 12)
        return
    cut = windows(text, protocol, 12)
    assert scored(cut) == expected
    targets = [target for _, target in expected]
    assert cut.tokens == len(expected)
    assert cut.ends == targets.count(TOKENIZER.eot)
    assert cut.bytes == TOKENIZER.byte_count(targets)
    assert all(len(row.ids) - 1 <= window for row in cut.rows)


def test_bytes_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    text = make_text(DOCUMENTS, tokenizer)
    apart = windows(text, Protocol(), 16)
    assert apart.bytes == sum(len(document.encode()) for document in DOCUMENTS)
    assert (apart.documents, apart.ends) == (5, 0)
    joined = windows(text, Protocol(join=True), 16)
    assert joined.bytes == apart.bytes - tokenizer.byte_count([tokenizer.encode(DOCUMENTS[0])[0]])
    assert (joined.documents, joined.ends) == (5, 4)
    assert joined.tokens == apart.tokens - 1 + 4


def test_a_cut_document_counts_its_part(tokenizer: Tokenizer) -> None:
    text = make_text(DOCUMENTS, tokenizer)
    first = len(text.documents[0])
    cut = windows(text, Protocol(max_tokens=first + 3), 4)
    assert (cut.documents, cut.tokens) == (2, first + 3)
    assert cut.bytes == len(DOCUMENTS[0].encode()) + tokenizer.byte_count(text.documents[1][:3].tolist())
    at_the_end = windows(text, Protocol(join=True, max_tokens=first), 4)  # the last one scored is an end token
    assert (at_the_end.documents, at_the_end.ends) == (1, 1)


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        (Protocol(window=17), "--window must be 1 to the model's context of 16, got 17"),
        (Protocol(window=0), "--window must be 1"),
        (Protocol(stride=0), "--stride must be 1 to the window of 16, got 0"),
        (Protocol(window=8, stride=9), "--stride must be 1 to the window of 8, got 9"),
    ],
)
def test_impossible_windows(text: Text, protocol: Protocol, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        windows(text, protocol, 16)


def test_too_little_text(tokenizer: Tokenizer) -> None:
    short = make_text(["time"], tokenizer)
    with pytest.raises(LoopformerError, match=r"test\.txt has \d tokens? to score, fewer than one window of 16"):
        windows(short, Protocol(), 16)
    with pytest.raises(LoopformerError, match="has 0 tokens to score"):
        windows(make_text(["x"], tokenizer), Protocol(window=1, join=True), 16)
