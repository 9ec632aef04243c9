import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, LoopformerError
from loopformer.inference.request import Request, Result, RowState
from loopformer.inference.sampling import Choice


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


def test_stop_strings_are_bounded(lm: LM) -> None:
    trajectory, longest = lm.model.resolve(1), "a" * 4096
    assert Request((1,), trajectory, stops=(longest,) * 256).stops == (longest,) * 256
    with pytest.raises(LoopformerError, match="A stop string may have 4096 characters, got 60000"):
        Request((1,), trajectory, stops=("a" * 60_000,))
    with pytest.raises(LoopformerError, match="A request may have 256 stop strings, got 257"):
        Request((1,), trajectory, stops=("a",) * 257)
