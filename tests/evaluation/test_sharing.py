"""Everything asked is answered once, and what rows begin with in common is run once."""

from hypothesis import given
from hypothesis import strategies as st

from loopformer.evaluation.sharing import Span, Window, plan

# Few different tokens and repeated beginnings, so that much is shared.
_heads = st.sampled_from([(), (1,) * 9, (1,) * 9 + (2,) * 11, (1, 2) * 12, (3,) * 30])
_rests = st.lists(st.integers(1, 3), min_size=1, max_size=20).map(tuple)


@st.composite
def _spans(draw: st.DrawFn) -> list[Span]:
    spans = []
    for _ in range(draw(st.integers(1, 20))):
        tokens = (0, *draw(_heads), *draw(_rests))
        spans.append(Span(tokens, draw(st.integers(1, len(tokens) - 1))))
    return spans


@given(_spans(), st.integers(1, 40))
def test_each_scored_token_is_asked_once_given_what_fits(spans: list[Span], limit: int) -> None:
    for span in spans:
        windows = span.windows(limit)
        assert sum((window.targets for window in windows), ()) == span.tokens[-span.scored :]
        end = len(span.tokens) - span.scored
        for window in windows:
            end += len(window.targets)
            whole = span.tokens[:end]
            assert (*window.inputs, window.targets[-1]) == whole[-(limit + 1) :]


def test_nothing_scored_is_no_window() -> None:
    assert Span((1,), 0).windows(8) == []


@given(_spans(), st.integers(20, 60), st.integers(1, 400), st.booleans())
def test_a_plan_runs_every_row_and_fits(spans: list[Span], limit: int, batch_tokens: int, share: bool) -> None:
    windows = [window for span in spans for window in span.windows(limit)]
    answered = []
    for batch in plan(windows, limit, batch_tokens, share):
        assert list(batch.owners) == sorted(batch.owners)
        before = [batch.prefixes[owner] if batch.prefixes else () for owner in batch.owners]
        for row, number in batch.questions:
            assert before[row] + batch.rows[row] == windows[number].inputs
            assert len(batch.rows[row]) >= len(windows[number].targets)  # outputs of a prefix are not at hand
            answered.append(number)
        room = max(map(len, before)) + max(map(len, batch.rows))
        assert room <= limit
        assert len(batch.rows) == 1 or room * len(batch.rows) <= batch_tokens
    assert sorted(answered) == list(range(len(windows)))


def test_what_is_common_runs_once() -> None:
    question = tuple(range(100, 130))
    windows = [Window((*question, *([choice] * 4)), (choice,) * 5) for choice in range(4)]
    (batch,) = plan(windows, 64)
    # The question's last token runs with each choice: its output is the first that is asked for.
    assert batch.prefixes == (question[:-1],)
    assert batch.tokens == 29 + 4 * 5
    assert sum(one.tokens for one in plan(windows, 64, share=False)) == 4 * 34


def test_rows_that_are_the_same_run_once() -> None:
    windows = [Window((1, 2, 3), (target,)) for target in (4, 5, 6)]
    (batch,) = plan(windows, 64)
    assert batch.rows == ((1, 2, 3),)
    assert batch.questions == ((0, 0), (0, 1), (0, 2))


def test_a_short_common_beginning_joins_no_strangers() -> None:
    hint, first, second = (9,) * 8, tuple(range(20, 40)), tuple(range(40, 60))
    windows = [Window((*hint, *text, choice, 0), (0, 0)) for text in (first, second) for choice in (1, 2)]
    (batch,) = plan(windows, 64)
    assert batch.prefixes == ((*hint, *first), (*hint, *second))
