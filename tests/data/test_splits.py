"""The split is by hash, covers the text, never overlaps and is never empty."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.splits import Splitter, clean, cut, make_splitter, reconcile
from loopformer.errors import LoopformerError

text = st.text(st.sampled_from("ab \n"), max_size=300)


@given(text, st.integers(1, 50), st.integers(0, 100))
def test_pieces_join_to_the_text(text: str, least: int, extra: int) -> None:
    pieces = cut(text, least, least + extra)
    assert "".join(pieces) == text
    assert all(least <= len(piece) for piece in pieces[:-1])
    assert all(len(piece) <= least + extra for piece in pieces[:-1])
    assert all(pieces)


def test_cuts_prefer_paragraphs_then_lines_then_words() -> None:
    assert cut("aaaa bb\ncc\n\ndd", 3, 100) == ["aaaa bb\ncc\n\n", "dd"]
    assert cut("aaaa bb\ncc dd", 3, 100) == ["aaaa bb\n", "cc dd"]
    assert cut("aaaa bb ccc", 3, 100) == ["aaaa ", "bb ", "ccc"]
    assert cut("aaaaaaaaa", 2, 4) == ["aaaa", "aaaa", "a"]
    assert cut("a\n\nbbbb bbbb bbbb", 1, 10) == ["a\n\n", "bbbb ", "bbbb bbbb"]


def test_fraction_of_documents() -> None:
    texts = [f"document {number}" for number in range(20_000)]
    splitter = make_splitter(lambda: iter(texts), 0.05, "texts")
    assert splitter == Splitter(0.05)
    held_out = sum(splitter.choose(text) == "val" for text in texts)
    assert 850 < held_out < 1150


@given(st.lists(st.text(st.sampled_from("abc \n"), min_size=1).filter(str.strip), min_size=1, max_size=30))
def test_few_documents_give_two_disjoint_parts(texts: list[str]) -> None:
    try:
        splitter = make_splitter(lambda: iter(texts), 0.1, "texts")
    except LoopformerError as error:
        assert "too little text" in str(error)  # noqa: PT017
        return
    parts = [part for text in texts for part in splitter.split(text)]
    assert {split for split, _ in parts} == {"train", "val"}
    assert "".join(piece for _, piece in parts) == "".join(texts)
    pieces = {
        split: {piece.strip() for own, part in parts if own == split for piece in splitter.pieces(part)}
        for split in ("train", "val")
    }
    assert not {piece for piece in pieces["train"] & pieces["val"] if len(piece) >= splitter.piece}


def test_same_paragraph_goes_to_the_same_split() -> None:
    paragraphs = [f"Paragraph {number} " + "words " * 20 for number in range(50)]
    splitter = make_splitter(lambda: iter(["\n\n".join(paragraphs)]), 0.2, "text")
    again = [splitter.choose(paragraph + "\n\n") for paragraph in paragraphs]
    assert again == [splitter.choose("\n" + paragraph) for paragraph in paragraphs]
    assert set(again) == {"train", "val"}


def test_neighbours_stay_together() -> None:
    text = "\n\n".join(f"Paragraph {number} " + "words " * 20 for number in range(50))
    parts = make_splitter(lambda: iter([text]), 0.1, "text").split(text)
    assert all(before[0] != after[0] for before, after in itertools.pairwise(parts))


def test_no_validation() -> None:
    splitter = make_splitter(lambda: iter(["one"]), 0.0, "text")
    assert splitter.split("one") == [("train", "one")]


@pytest.mark.parametrize(
    ("texts", "fraction", "sentence"),
    [
        ([], 0.1, "source holds no text"),
        ([], 0.0, "source holds no text"),
        (["x"], 0.1, "source has too little text"),
        (["x"], 1.0, "validation fraction must be"),
        (["x"], -0.1, "validation fraction must be"),
    ],
)
def test_impossible(texts: list[str], fraction: float, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        make_splitter(lambda: iter(texts), fraction, "source")


def test_sources_prepared_together_never_disagree() -> None:
    """What a small source must hold out, to have any validation text at all, a large one must not train on."""
    few = [f"document {number}" for number in range(40)]
    many = few + [f"other {number}" for number in range(2000)]
    splitters = reconcile(
        [
            make_splitter(lambda: iter(few), 0.01, "few", can_cut=False),
            make_splitter(lambda: iter(many), 0.05, "many", can_cut=False),
        ]
    )
    assert {splitter.fraction for splitter in splitters} == {0.05}
    chosen = [[splitter.choose(text) for text in few] for splitter in splitters]
    assert chosen[0] == chosen[1]
    assert {"train", "val"} == set(chosen[0])


def test_half_a_surrogate_is_replaced() -> None:
    assert clean("a\ud800b") == "a\ufffdb"
    assert clean("a🙂b") == "a🙂b"
