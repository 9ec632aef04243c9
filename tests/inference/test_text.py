from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.text import TextStream


def push_all(tokenizer: Tokenizer, text: str, stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stops)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@given(text=st.text(max_size=40))
def test_pieces_join_to_the_text_and_are_whole_characters(lm: LM, text: str) -> None:
    assert lm.tokenizer is not None
    pieces, stream = push_all(lm.tokenizer, text, [])
    assert "".join(pieces) == stream.text == lm.tokenizer.decode(lm.tokenizer.encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    before=st.text("ab日", max_size=12),
    stop=st.text("ab日", min_size=1, max_size=4),
    after=st.text("ab", max_size=5),
)
def test_nothing_of_a_stop_string_is_ever_shown(lm: LM, before: str, stop: str, after: str) -> None:
    assert lm.tokenizer is not None
    text = before + stop + after
    pieces, stream = push_all(lm.tokenizer, text, [stop])
    assert stream.stopped
    assert "".join(pieces) == text[: text.index(stop)] == stream.text
