import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from loopformer import LM, LoopformerError
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.request import BROKEN, Request, Result, RowState, TextStream
from loopformer.inference.sampling import Choice

TEXT = "every pass is told its time and its step, naïve café ☕ 日本語, and so on"


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


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama's: spaces are ▁, and a character without a token of its own comes byte by byte."""
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    library.train_from_iterator(["every pass is told its time and its step"] * 9, trainer)
    return library


def wordpiece() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    library.train_from_iterator([TEXT] * 9, trainer)
    return library


@pytest.mark.parametrize("make", [sentencepiece, wordpiece])
def test_tokenizers_that_write_spaces_between_words_keep_them(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(make().to_str())
    ids = tokenizer.encode(TEXT)
    for prompt in range(len(ids)):
        stream = TextStream(tokenizer, after=ids[:prompt])
        pieces = [stream.push(token) for token in ids[prompt:]] + [stream.finish()]
        assert "".join(pieces) == stream.text
        before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
        assert whole in (before + stream.text, before.rstrip(BROKEN) + stream.text)


@given(ids=st.lists(st.integers(1, 299), min_size=1, max_size=12), data=st.data())
def test_any_tokens_continue_any_others(lm: LM, ids: list[int], data: st.DataObject) -> None:
    """Half a character at the end of a prompt is made whole by what follows."""
    tokenizer, prompt = lm.need_tokenizer(), data.draw(st.integers(0, len(ids) - 1))
    stream = TextStream(tokenizer, after=ids[:prompt])
    pieces = [stream.push(token) for token in ids[prompt:]] + [stream.finish()]
    assert "".join(pieces) == stream.text
    before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
    assert any(whole == before[:end] + stream.text for end in range(len(before.rstrip(BROKEN)), len(before) + 1))


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


@given(
    tokens=st.lists(st.integers(0, 299) | st.sampled_from([97, 98]), min_size=1, max_size=14),
    groups=st.lists(st.integers(1, 5), min_size=14, max_size=14),
    stop=st.text("ab", max_size=3),
    most=st.integers(1, 14),
    prompt=st.integers(1, 32),
)
def test_tokens_may_come_one_by_one_or_together(
    lm: LM, tokens: list[int], groups: list[int], stop: str, most: int, prompt: int
) -> None:
    tokenizer, config = lm.need_tokenizer(), lm.model.config
    request = Request((5,) * prompt, lm.model.resolve(2), max_tokens=most, stops=(stop,) if stop else ())
    choices = [Choice(token, math.nan if token == 7 else -1.0) for token in tokens]

    def taken(sizes: Iterable[int]) -> tuple[str, Result | None]:
        row, shown, left = RowState.start(0, request, tokenizer, config), "", choices
        for size in sizes:
            if not left:
                break
            row, event = row.append_tokens(left[:size])
            shown, left = shown + event.piece, left[size:]
            if event.result is not None:
                assert shown == event.result.text
                return shown, event.result
        return shown + row.text.finish(), None

    assert taken(groups) == taken(itertools.repeat(1))


def test_what_was_held_back_comes_with_a_failure(lm: LM) -> None:
    tokenizer = lm.need_tokenizer()
    (request,) = lm.requests(["its"], stops="ever and ever")
    row, _ = RowState.start(0, request, tokenizer, lm.model.config).append_tokens(
        [Choice(token, -1.0) for token in tokenizer.encode("for ever")]
    )
    failed = row.failed("no luck")
    assert failed.result is not None
    assert failed.result.text.endswith("ever")
    assert failed.piece
    assert failed.result.text.endswith(failed.piece)


def test_a_request_takes_stops_as_a_tuple(lm: LM) -> None:
    wrong: Any = "the"
    with pytest.raises(LoopformerError, match="must be a tuple of strings, not 'the'"):
        Request((1,), lm.model.resolve(1), stops=wrong)
    with pytest.raises(LoopformerError, match="takes a list of prompts"):
        lm.requests("abc")
