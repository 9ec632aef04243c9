"""Everything asked is answered once, and what rows begin with in common is run once."""

from hypothesis import given
from hypothesis import strategies as st

from loopformer.evaluation.score import Pack, Span, Tokens, Window, plan

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


@given(_spans(), st.integers(4, 60), st.integers(1, 400), st.booleans())
def test_a_plan_runs_every_row_and_fits(spans: list[Span], limit: int, batch_tokens: int, share: bool) -> None:
    windows = [window for span in spans for window in span.windows(limit)]
    answered, rows = [], list[Tokens]()
    for batch in plan(windows, limit, batch_tokens, share):
        for pack, end, number in batch.questions:
            row = batch.packs[pack].ends.index(end)
            assert batch.packs[pack].rows[row] == windows[number].inputs
            assert len(batch.packs[pack].rests[row]) >= len(windows[number].targets)  # no output is another row's
            answered.append(number)
        for one in batch.packs:
            assert len(one) <= 2 * limit or len(one.rests) == 1
            assert one.shared or len(one.rests) == 1
        rows += [row for one in batch.packs for row in one.rows]
        assert len(batch.packs) == 1 or len(batch.packs) * max(map(len, batch.packs)) <= batch_tokens
        assert batch.plain == (max(len(one.rests) for one in batch.packs) == 1)
    assert sorted(answered) == list(range(len(windows)))
    assert sorted(rows) == sorted({window.inputs for window in windows})


def test_what_is_common_runs_once() -> None:
    question = tuple(range(100, 130))
    windows = [Window((*question, *([choice] * 4)), (choice,) * 5) for choice in range(4)]
    (batch,) = plan(windows, 64)
    # The question's last token runs with each choice: its output is the first that is asked for.
    assert [pack.shared for pack in batch.packs] == [question[:-1]]
    assert batch.tokens == 29 + 4 * 5
    assert sum(one.tokens for one in plan(windows, 64, share=False)) == 4 * 34


def test_rows_that_are_the_same_run_once() -> None:
    windows = [Window((1, 2, 3), (target,)) for target in (4, 5, 6)]
    (batch,) = plan(windows, 64)
    assert batch.packs == (Pack((), ((1, 2, 3),)),)
    assert batch.questions == ((0, 3, 0), (0, 3, 1), (0, 3, 2))


def test_a_short_common_beginning_joins_no_strangers() -> None:
    hint, first, second = (9,) * 8, tuple(range(20, 40)), tuple(range(40, 60))
    windows = [Window((*hint, *text, choice, 0), (0, 0)) for text in (first, second) for choice in (1, 2)]
    (batch,) = plan(windows, 64)
    assert [pack.shared for pack in batch.packs] == [(*hint, *first), (*hint, *second)]
