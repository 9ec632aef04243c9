"""The one scorer: each token scored once, what is common computed once, and nothing changes by it."""

import math
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from evaluation.small import make_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopformer import LM, LoopedLM
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.tasks import encode_pairs, encode_texts
from loopformer.evaluation.text import Text, perplexity
from loopformer.scoring import (
    BATCH_TOKENS,
    Answer,
    Pack,
    Span,
    Tokens,
    TrajectoryTree,
    count_loops,
    loglikelihoods,
    plan_batches,
    score_texts,
)
from loopformer.trajectory import Trajectory

ROUTE = Trajectory.parse("2-1-1")
PROMPTS = ["every pass", "its", "time and step and time", "told"]
ROUTES = ["1", "4", "2-1-1", "3-1"]
QUESTION = "every pass is told its time and its step, and its naïve step"
PAIRS = [
    (QUESTION, " its time"),
    (QUESTION, " its step"),
    (QUESTION, " t"),
    (QUESTION, " x"),
    (QUESTION + "日本語", " its time"),
    ("its step ", "and on"),
    ("", " every pass"),
    ("café ☕", " " + "its time and its step, " * 4),
    (QUESTION * 5, " its step"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["every pass is told its time and its step, naïve café ☕ 日本語"] * 20, 300)


@pytest.fixture
def lm(tokenizer: Tokenizer) -> LM:
    return LM(make_model(tokenizer), tokenizer)


@torch.no_grad()
def by_hand(model: LoopedLM, span: Span, trajectory: Trajectory) -> Answer:
    """Token by token, each given the `context` tokens before it; the first part of a scored text is one window."""
    total, greedy = 0.0, True
    limit, start = model.config.context, len(span.tokens) - span.scored
    for place in range(start, len(span.tokens)):
        part = start + (place - start) // limit * limit  # tokens are scored in parts of at most a context
        end = min(part + limit, len(span.tokens))
        given = span.tokens[max(0, end - limit - 1) : place]
        logits = model(torch.tensor([given]), trajectory).logits[0, -1, : model.config.vocab]
        total += float(logits.log_softmax(-1)[span.tokens[place]])
        greedy &= int(logits.argmax()) == span.tokens[place]
    return total, greedy


@pytest.mark.parametrize("context", [16, 128])
@pytest.mark.parametrize("batch_tokens", [1, 300, 8192])
def test_equals_one_row_at_a_time(tokenizer: Tokenizer, context: int, batch_tokens: int) -> None:
    model = make_model(tokenizer, context=context)
    spans = encode_pairs(tokenizer, PAIRS) + encode_texts(tokenizer, ["its step, " * 9, "", "x"])
    found = loglikelihoods(model, spans, [ROUTE], batch_tokens)[ROUTE]
    for span, (total, greedy) in zip(spans, found.answers, strict=True):
        expected = by_hand(model, span, ROUTE)
        assert total == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]


def test_sharing_runs_fewer_tokens_for_the_same_numbers(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, context=128)
    run = 0

    def add(_: object, inputs: tuple[torch.Tensor, ...], __: object) -> None:
        nonlocal run
        run += inputs[0].shape[0] * inputs[0].shape[1]

    model.stack.register_forward_hook(add)
    pairs = [
        (f"{QUESTION} {number}", f" {choice}") for number in range(5) for choice in ("its", "time", "café", "x")
    ]
    spans = encode_pairs(tokenizer, pairs)
    plain, plain_run = loglikelihoods(model, spans, [ROUTE], share=False)[ROUTE], run
    run = 0
    shared = loglikelihoods(model, spans, [ROUTE])[ROUTE]
    assert plain.tokens == sum(map(len, {span.tokens[:-1] for span in spans}))
    assert shared.tokens < 0.5 * plain.tokens
    assert run < 0.5 * plain_run  # token-passes, padding included
    for one, other in zip(plain.answers, shared.answers, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert one[1] == other[1]


def test_the_greedy_flag_is_that_of_greedy_decoding(lm: LM) -> None:
    context = "its step"
    full = Trajectory.uniform(3)
    best = lm.generate(context, budget=3, max_tokens=4)
    ids = tuple(lm.need_tokenizer().encode(context))
    good = Span((*ids, *best.ids), len(best.ids))
    bad = Span((*ids, *best.ids[:-1], (best.ids[-1] + 1) % 256), len(best.ids))
    found = loglikelihoods(lm.model, [good, bad], [full])[full].answers
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] == pytest.approx(sum(best.logprobs), abs=1e-4)


def test_answers_come_in_the_order_asked(lm: LM, tokenizer: Tokenizer) -> None:
    spans = encode_pairs(tokenizer, PAIRS[:7])
    forward = loglikelihoods(lm.model, spans, [ROUTE])[ROUTE].answers
    assert loglikelihoods(lm.model, spans[::-1], [ROUTE])[ROUTE].answers[::-1] == forward
    assert loglikelihoods(lm.model, [], [ROUTE])[ROUTE].answers == []


def test_a_trajectory_is_followed(lm: LM, tokenizer: Tokenizer) -> None:
    spans = encode_pairs(tokenizer, PAIRS[:4])
    found = {
        str(trajectory): loglikelihoods(lm.model, spans, [trajectory])[trajectory].answers[0][0]
        for trajectory in map(lm.model.resolve, (1, 4))
    }
    assert found["1"] != pytest.approx(found["4"], abs=1e-3)


def test_an_empty_context_is_the_end_token(tokenizer: Tokenizer) -> None:
    (span,) = encode_pairs(tokenizer, [("", " its")])
    assert span.tokens == (tokenizer.eot, *tokenizer.encode(" its"))
    assert span.scored == len(span.tokens) - 1
    assert encode_pairs(tokenizer, [("  ", "its")])[0].tokens == (tokenizer.eot, *tokenizer.encode("  its"))


@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_spaces_belong_to_the_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> None:
    continuation = f" x{continuation}"
    moved = context.rstrip(), context[len(context.rstrip()) :] + continuation
    assert encode_pairs(tokenizer, [moved]) == encode_pairs(tokenizer, [(context, continuation)])


def test_progress_ends_at_the_number_of_requests(lm: LM, tokenizer: Tokenizer) -> None:
    said: list[tuple[int, int]] = []
    count: Callable[[int, int], None] = lambda done, total: said.append((done, total))  # noqa: E731
    loglikelihoods(lm.model, encode_pairs(tokenizer, PAIRS), [ROUTE], batch_tokens=64, count=count)
    assert said[-1] == (len(PAIRS), len(PAIRS))
    assert said == sorted(said)


def test_batches_that_do_not_fit_are_one_sentence(lm: LM, tokenizer: Tokenizer) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    lm.model.final_norm.register_forward_hook(full)
    with pytest.raises(RunFailed, match=r"Batches of 64 tokens do not fit .* lower --batch-tokens"):
        loglikelihoods(lm.model, encode_pairs(tokenizer, PAIRS), [ROUTE], batch_tokens=64)


def test_what_cannot_be_scored_is_one_sentence(lm: LM, tokenizer: Tokenizer) -> None:
    with pytest.raises(LoopformerError, match="adds no token"):
        encode_pairs(tokenizer, [("its", "")])
    with pytest.raises(LoopformerError, match="batch-tokens must be 1 or more"):
        loglikelihoods(lm.model, encode_pairs(tokenizer, PAIRS[:1]), [ROUTE], batch_tokens=0)
    vocab = lm.model.config.vocab
    loglikelihoods(lm.model, [Span((0, vocab - 1), 1)], [ROUTE])
    with pytest.raises(LoopformerError, match=f"token ids up to {vocab} but the model knows {vocab}"):
        loglikelihoods(lm.model, [Span((0, vocab), 1)], [ROUTE])
    with torch.no_grad():
        lm.model.final_norm.weight.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RunFailed, match="not a number"):
        loglikelihoods(lm.model, encode_pairs(tokenizer, PAIRS[:1]), [ROUTE])


def test_several_trajectories_share_their_first_steps(lm: LM) -> None:
    spans = encode_pairs(lm.need_tokenizer(), PAIRS)
    trajectories = list(Trajectory.enumerate(4, 3))
    seen: list[int] = []
    hook = lm.model.stack.register_forward_hook(lambda *_: seen.append(1))
    found = loglikelihoods(lm.model, spans, trajectories)
    hook.remove()
    batches = len(
        plan_batches(
            [w for span in spans for w in span.windows(lm.model.config.context, reach_back=True)],
            lm.model.config.context,
            BATCH_TOKENS,
            True,
        )
    )
    assert len(seen) == batches * count_loops(trajectories) < batches * 3 * len(trajectories)
    for trajectory in trajectories:
        assert found[trajectory] == loglikelihoods(lm.model, spans, [trajectory])[trajectory]


# Few different tokens and repeated beginnings, so that much is shared.
_heads = st.sampled_from([(), (1,) * 9, (1,) * 9 + (2,) * 11, (1, 2) * 12, (3,) * 30])
_suffixes = st.lists(st.integers(1, 3), min_size=1, max_size=20).map(tuple)


@st.composite
def _spans(draw: st.DrawFn) -> list[Span]:
    spans = []
    for _ in range(draw(st.integers(1, 20))):
        tokens = (0, *draw(_heads), *draw(_suffixes))
        spans.append(Span(tokens, draw(st.integers(1, len(tokens) - 1))))
    return spans


@given(_spans(), st.integers(1, 40))
def test_each_scored_token_is_asked_once_given_what_fits(spans: list[Span], limit: int) -> None:
    for span in spans:
        windows = span.windows(limit, reach_back=True)
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
    windows = [window for span in spans for window in span.windows(limit, reach_back=True)]
    answered, rows = [], list[Tokens]()
    for batch in plan_batches(windows, limit, batch_tokens, share):
        for number, pack, end in batch.spans:
            row = batch.packs[pack].ends.index(end)
            assert batch.packs[pack].rows[row] == windows[number].inputs
            # No output is another row's.
            assert len(batch.packs[pack].suffixes[row]) >= len(windows[number].targets)
            answered.append(number)
        for one in batch.packs:
            assert len(one) <= 2 * limit or len(one.suffixes) == 1
            assert one.prefix or len(one.suffixes) == 1
        rows += [row for one in batch.packs for row in one.rows]
        assert len(batch.packs) == 1 or len(batch.packs) * max(map(len, batch.packs)) <= batch_tokens
        assert {one.is_shared for one in batch.packs} == {max(len(one.suffixes) for one in batch.packs) > 1}
    assert sorted(answered) == list(range(len(windows)))
    assert sorted(rows) == sorted({window.inputs for window in windows})


def test_what_is_common_runs_once() -> None:
    question = tuple(range(100, 130))
    windows = [Span((*question, *([choice] * 5)), 5) for choice in range(4)]
    (batch,) = plan_batches(windows, 64)
    # The question's last token runs with each choice: its output is the first that is asked for.
    assert [pack.prefix for pack in batch.packs] == [question[:-1]]
    assert batch.tokens == 29 + 4 * 5
    assert sum(one.tokens for one in plan_batches(windows, 64, share=False)) == 4 * 34


@pytest.mark.parametrize(("answers", "context", "packs"), [(3, 22, 1), (3, 21, 2), (2, 20, 1), (2, 19, 2)])
def test_a_pack_has_up_to_two_contexts(answers: int, context: int, packs: int) -> None:
    question = tuple(range(100, 130))
    windows = [Span((*question, *([choice] * 5)), 5) for choice in range(answers)]
    batches = plan_batches(windows, context)  # together they are 29 + 5 · answers tokens
    assert sum(len(batch.packs) for batch in batches) == packs


def test_a_pack_may_fill_two_contexts() -> None:
    question = tuple(range(100, 130))
    windows = [Span((*question, *([choice] * 5)), 5) for choice in range(10)]
    (full,) = plan_batches(windows[:9], 37)  # 29 + 9 · 5 tokens
    assert [len(pack) for pack in full.packs] == [74]
    assert sum(len(batch.packs) for batch in plan_batches(windows, 37)) == 2


def test_rows_that_are_the_same_run_once() -> None:
    windows = [Span((1, 2, 3, target), 1) for target in (4, 5, 6)]
    (batch,) = plan_batches(windows, 64)
    assert batch.packs == (Pack((), ((1, 2, 3),)),)
    assert batch.spans == ((0, 0, 3), (1, 0, 3), (2, 0, 3))


def test_a_short_common_beginning_joins_no_strangers() -> None:
    hint, first, second = (9,) * 8, tuple(range(20, 40)), tuple(range(40, 60))
    windows = [Span((*hint, *text, choice, 0, 0), 2) for text in (first, second) for choice in (1, 2)]
    (batch,) = plan_batches(windows, 64)
    assert [pack.prefix for pack in batch.packs] == [(*hint, *first), (*hint, *second)]


@pytest.mark.parametrize(("loops", "budget", "shared", "separate"), [(8, 4, 90, 140), (12, 6, 1253, 2772)])
def test_all_schedules_in_as_few_passes_as_can_be(
    tokenizer: Tokenizer, loops: int, budget: int, shared: int, separate: int
) -> None:
    model = make_model(tokenizer, loops)
    trajectories = list(Trajectory.enumerate(loops, budget))
    kept: list[weakref.ref[Tensor]] = []
    count = most = 0

    def note(_module: object, _inputs: object, output: Tensor) -> None:
        nonlocal count, most, kept
        kept = [*(one for one in kept if one() is not None), weakref.ref(output)]
        count, most = count + 1, max(most, len(kept))

    model.stack.register_forward_hook(note)
    seen = [trajectory for trajectory, _ in TrajectoryTree(model, trajectories).run(torch.tensor([[5, 6, 7]]))]
    assert sorted(seen, key=str) == sorted(trajectories, key=str)
    assert count == shared == count_loops(trajectories)
    assert sum(map(len, trajectories)) == separate
    assert most == budget  # only the states on the current path


def test_states_equal_those_of_each_trajectory_alone(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 6)
    ids = torch.randint(0, tokenizer.vocab_size, (3, 16))
    trajectories = [
        *Trajectory.enumerate(6, 3),
        *Trajectory.enumerate(6, 2),
        Trajectory.uniform(4),
        Trajectory.uniform(6),
    ]
    found = dict(TrajectoryTree(model, trajectories).run(ids))
    assert set(found) == set(trajectories)
    for trajectory, hidden in found.items():
        torch.testing.assert_close(hidden, model(ids, trajectory, logits=False).hidden)


def test_scores_are_the_models_own(lm: LM) -> None:
    assert lm.tokenizer is not None
    scores = lm.score(PROMPTS, trajectory=ROUTES)
    for prompt, trajectory, scored in zip(PROMPTS, ROUTES, scores, strict=True):
        ids = torch.tensor([[lm.tokenizer.eot, *lm.tokenizer.encode(prompt)]])
        logits = lm.model(ids, trajectory).logits
        assert logits is not None
        logs = logits[0, :, : lm.model.config.vocab].log_softmax(-1)
        expected = [float(logs[i, ids[0, i + 1]].detach()) for i in range(ids.shape[1] - 1)]
        assert scored.ids == tuple(ids[0, 1:].tolist())
        assert scored.logprobs == pytest.approx(expected, abs=1e-4)
        assert scored.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-3)
    result = lm.generate("every pass", max_tokens=6, budget=2)
    (first, *others) = [*lm.tokenizer.encode("every pass"), *result.ids]
    (scored,) = score_texts(lm.model, [others], [Trajectory.uniform(2)], end=first)
    assert scored.logprobs[-6:] == pytest.approx(result.logprobs, abs=1e-3)


@pytest.mark.parametrize("trajectory", ["1", "2-1-1"])
def test_score_and_eval_have_one_definition(lm: LM, trajectory: str) -> None:
    tokenizer, context = lm.need_tokenizer(), lm.model.config.context
    ids = tokenizer.encode("its time and its step, every pass is told its time")[:context]
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text) == ids
    assert len(ids) == context  # the longest text that can be scored
    document = Text("a text", "all of it", (np.array(ids, np.int64),), "0", tokenizer)
    (row,) = perplexity(lm.model, document, [trajectory])
    (scored,) = lm.score([text], trajectory=trajectory)
    assert len(scored.logprobs) == row["tokens"] == context
    assert scored.perplexity == pytest.approx(row["perplexity"], rel=1e-5)
    with pytest.raises(LoopformerError, match=f"but the context is {context}; shorten it"):
        lm.score([text + " its"], trajectory=trajectory)


def test_many_texts_are_scored_a_few_at_a_time(lm: LM) -> None:
    seen: list[int] = []
    hook = lm.model.stack.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0][..., 0].numel())
    )
    texts = [*(f"its time {number}" for number in range(2 * BATCH_TOKENS - 1)), "told"]  # the same would run once
    scores = lm.score(texts, budget=1)
    hook.remove()
    assert max(seen) <= BATCH_TOKENS
    assert len(scores) == 2 * BATCH_TOKENS
    assert scores[-1].logprobs == pytest.approx(lm.score(["told"], budget=1)[0].logprobs, abs=1e-4)


def test_one_token_is_a_text_and_a_token_beyond_the_vocabulary_is_refused(lm: LM) -> None:
    vocab, route = lm.model.config.vocab, Trajectory.uniform(1)
    (score,) = score_texts(lm.model, [[5]], [route], 0)
    logits = lm.model(torch.tensor([[0]]), route).logits
    assert logits is not None
    assert score.logprobs == pytest.approx([logits[0, 0, :vocab].log_softmax(-1)[5].item()], abs=1e-4)
    for spans in ([Span((1, vocab, 2), 2), Span((1, 2), 1)], [Span((1, 2), 1), Span((vocab, 1), 1)]):
        with pytest.raises(LoopformerError, match=f"token ids up to {vocab} but the model knows {vocab}"):
            loglikelihoods(lm.model, spans, [route])
    assert loglikelihoods(lm.model, [Span((1, vocab - 1), 1)], [route])[route].tokens == 1
