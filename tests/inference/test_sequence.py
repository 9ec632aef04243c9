import itertools
import math
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM
from loopformer.inference.request import Choice, Request, Result
from loopformer.inference.sequence import Sequence, Status


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
