"""Text streams: whole characters, spaces between words, and nothing of a stop string."""

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.detokenizer import REPLACEMENT_CHARACTER, TextStream

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
        assert whole in (before + stream.text, before.rstrip(REPLACEMENT_CHARACTER) + stream.text)


@given(ids=st.lists(st.integers(1, 299), min_size=1, max_size=12), data=st.data())
def test_any_tokens_continue_any_others(lm: LM, ids: list[int], data: st.DataObject) -> None:
    """Half a character at the end of a prompt is made whole by what follows."""
    tokenizer, prompt = lm.need_tokenizer(), data.draw(st.integers(0, len(ids) - 1))
    stream = TextStream(tokenizer, after=ids[:prompt])
    pieces = [stream.push(token) for token in ids[prompt:]] + [stream.finish()]
    assert "".join(pieces) == stream.text
    before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
    assert any(
        whole == before[:end] + stream.text
        for end in range(len(before.rstrip(REPLACEMENT_CHARACTER)), len(before) + 1)
    )


@pytest.mark.parametrize("make", [sentencepiece, wordpiece])
@pytest.mark.parametrize("ending", ["", "[SEP]" * 9, "☕" * 9, " " * 40])
def test_the_end_of_a_long_prompt_decides_what_follows_it(
    make: Callable[[], tokenizers.Tokenizer], ending: str
) -> None:
    """Nothing else of it is decoded, unless its end has no text."""
    tokenizer, decoded = Tokenizer(make().to_str()), []

    class Counting:
        eot = 0

        def decode(self, ids: Sequence[int]) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    prompt, new = tokenizer.encode(TEXT * 50 + ending), tokenizer.encode("its step, naïve")
    stream, whole = TextStream(Counting(), after=prompt), TextStream(tokenizer)
    whole.push(*prompt)
    before = whole.text
    for token in new:
        stream.push(token)
        whole.push(token)
    stream.finish()
    whole.finish()
    assert whole.text[len(before) :] == stream.text
    if not ending:
        assert max(decoded) < 40 < len(prompt)


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


class Letters:
    """A detokenizer whose tokens are code points, so that a text has a single tokenization."""

    eot = -1

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def visible(text: str, stops: list[str]) -> str:
    """The part of a text that may be shown, by the rule: no stop string, and no beginning of one at the end."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    if ends:
        return text[: min(ends)]
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return text[: len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)]


@given(
    groups=st.lists(st.text("ab", min_size=1, max_size=4), max_size=12),
    stops=st.lists(st.text("ab", max_size=9) | st.just("abababab"), max_size=4),
)
def test_text_is_held_back_exactly_while_it_may_begin_a_stop_string(groups: list[str], stops: list[str]) -> None:
    stream, shown, text = TextStream(Letters(), stops), "", ""
    for text in accumulate(groups):
        shown += stream.push(*map(ord, text[len(stream.text) :]))
        assert shown == visible(text, stops)
        assert stream.stopped == any(stop in text for stop in stops if stop)
        if stream.stopped:
            break
    end = visible(text, stops) if stream.stopped else text
    assert shown + stream.finish() == stream.text == end


def test_a_stopped_stream_takes_no_more_text() -> None:
    stream = TextStream(Letters(), ["b"])
    assert stream.push(*b"abc") == "a"
    assert stream.push(*b"def") == stream.finish() == ""
    assert stream.text == "a"


def test_a_long_stop_string_takes_memory_for_its_characters_only() -> None:
    stop = "a" * 59_999 + "b"
    tracemalloc.start()
    stream = TextStream(Letters(), [stop])
    pieces = [stream.push(*b"a" * 1000) for _ in range(70)]
    pieces += [stream.push(ord("b")), stream.finish()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "".join(pieces) == "a" * 10_001
    assert peak < 5_000_000
