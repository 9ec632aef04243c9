import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, LoopformerError
from loopformer.inference.request import Choice, Request, Result
from loopformer.inference.sequence import Sequence, Status

NAN, END, A, B = range(-4, 0)  # in place of their tokens


@given(
    tokens=st.lists(st.integers(0, 255) | st.sampled_from([NAN, END, A, B]), min_size=1, max_size=14),
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
    ids = {NAN: 0, END: tokenizer.eot, A: tokenizer.encode("a")[0], B: tokenizer.encode("b")[0]}
    choices = [Choice(ids.get(token, token), math.nan if token == NAN else -1.0) for token in tokens]

    def taken(sizes: Iterable[int]) -> tuple[str, Result | None]:
        sequence, shown, left = Sequence(0, request, tokenizer, config), "", choices
        for size in sizes:
            if not left:
                break
            before = sequence.progress
            sequence.append(left[:size])
            event = sequence.event_since(before)
            shown, left = shown + event.piece, left[size:]
            if event.result is not None:
                assert sequence.status is Status.FINISHED
                assert shown == event.result.text
                return shown, event.result
        return shown + sequence.progress.text.finish(), None

    assert taken(groups) == taken(itertools.repeat(1))


def test_what_was_held_back_comes_with_a_failure(lm: LM) -> None:
    tokenizer = lm.need_tokenizer()
    (request,) = lm.requests(["its"], stops="ever and ever")
    sequence = Sequence(0, request, tokenizer, lm.model.config)
    sequence.append([Choice(token, -1.0) for token in tokenizer.encode("for ever")])
    before = sequence.progress
    sequence.fail("no luck")
    failed = sequence.event_since(before)
    assert failed.result is not None
    assert failed.result.text.endswith("ever")
    assert failed.piece
    assert failed.result.text.endswith(failed.piece)


def test_what_comes_after_cancelling_is_ignored(lm: LM) -> None:
    (request,) = lm.requests(["its"])
    sequence = Sequence(0, request, lm.need_tokenizer(), lm.model.config)
    statuses = [sequence.status]
    sequence.append([Choice(9, -1.0)])
    statuses.append(sequence.status)
    before = sequence.progress
    sequence.cancel()
    sequence.append([Choice(10, -1.0)])
    assert [*statuses, sequence.status] == [Status.WAITING, Status.RUNNING, Status.FINISHED]
    assert sequence.progress is before
    sequence.cancel()
    assert sequence.event_since(sequence.initial).choices == (Choice(9, -1.0),)


def test_tokens_after_the_end_are_dropped(lm: LM) -> None:
    """Whatever ends a text: its end token, a stop string, or a length."""
    tokenizer, config = lm.need_tokenizer(), lm.model.config
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    for most, stop, reason, kept in ((9, (), "end", 4), (9, ("b",), "stop", 2), (3, (), "length", 3)):
        request = Request((5,), lm.model.resolve(2), max_tokens=most, stops=stop)
        sequence = Sequence(0, request, tokenizer, config)
        tokens = [a, b, a, tokenizer.eot, a, b]
        sequence.append([Choice(token, -1.0) for token in tokens])
        assert sequence.progress.result is not None
        assert (sequence.progress.result.reason, sequence.ids) == (reason, tuple(tokens[:kept]))


def test_only_further_progress_of_a_prompt_forgives_a_failure(lm: LM) -> None:
    """Otherwise a prompt whose last chunk always fails would be tried forever."""
    sequence = Sequence(0, Request((5,) * 32, lm.model.resolve(2)), lm.need_tokenizer(), lm.model.config)
    for tokens, is_forgiven in ((8, True), (8, False), (4, False), (16, True), (16, False)):
        sequence.has_failed = True
        sequence.advance_prefill(tokens)
        assert sequence.has_failed is not is_forgiven


def test_token_ids_are_those_of_the_vocabulary(lm: LM) -> None:
    vocab, tokenizer = lm.model.config.vocab, lm.need_tokenizer()
    Sequence(0, Request((0, vocab - 1), lm.model.resolve(2)), tokenizer, lm.model.config)
    for wrong in (-1, vocab):
        with pytest.raises(LoopformerError, match=f"Token ids must lie in 0…{vocab - 1}, got"):
            Sequence(0, Request((5, wrong), lm.model.resolve(2)), tokenizer, lm.model.config)


def test_a_token_has_as_many_likely_tokens_as_its_own_request_wants(lm: LM) -> None:
    """The rows of a batch are given as many as the greediest of them wants."""
    likely = ((5, -1.0), (6, -2.0), (7, -3.0))
    for wanted in (0, 1, 3):
        request = Request((5,), lm.model.resolve(2), top_logprobs=wanted)
        sequence = Sequence(0, request, lm.need_tokenizer(), lm.model.config)
        sequence.append([Choice(5, -1.0, likely)])
        assert sequence.event_since(sequence.initial).choices == (Choice(5, -1.0, likely[:wanted]),)
