"""Depth by certainty in generation: settled tokens, alone and among others, with a draft, with shared prompts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference.decode import PlainBackend
from loopformer.inference.draft import Draft
from loopformer.inference.engine import Engine
from loopformer.inference.fused.backend import obstacle
from loopformer.inference.request import Request, Result
from loopformer.inference.score import Span, score_spans
from loopformer.model.looped import Certainty

from .models import spread

PROMPTS = ["every pass is told", "its", "time and its step", "naïve café", "told its time and its step"]
CERTAINTIES = [0.3, None, 0.5, 0.7, 0.3]
ROUTES = ["4", "4", "2-1-1", "4", "1-3"]


@pytest.fixture(scope="module")
def lm(lm: LM) -> LM:
    """A model whose tokens differ in how sure they are, and when."""
    return LM(spread(lm.model.config, std=0.7), lm.tokenizer)


def mixed(lm: LM, max_tokens: int = 16) -> list[Request]:
    """Requests with and without certainty, along several trajectories."""
    return [
        lm.requests([prompt], trajectory=route, certainty=certainty, max_tokens=max_tokens)[0]
        for prompt, route, certainty in zip(PROMPTS, ROUTES, CERTAINTIES, strict=True)
    ]


def run(engine: Engine, requests: list[Request]) -> list[Result]:
    tickets = [engine.submit(request) for request in requests]
    results = {event.ticket: event.result for event in engine.run() if event.result is not None}
    return [results[ticket] for ticket in tickets]


@torch.no_grad()
def uncached(lm: LM, request: Request) -> tuple[list[int], list[float], list[int]]:
    """Greedy tokens by whole runs of the model: their ids, log-probabilities and passes."""
    ids, logprobs, passes = list(request.prompt), [], []
    for _ in range(request.max_tokens):
        certainty = Certainty(request.certainty)
        logits = lm.model(torch.tensor([ids]), request.trajectory, certainty=certainty).logits
        assert logits is not None
        last = log_softmax(logits[0, -1, : lm.model.config.vocab], -1)
        ids.append(int(last.argmax()))
        logprobs.append(float(last.max()))
        passes.append(int(certainty.passes[0, -1]))
    return ids[len(request.prompt) :], logprobs, passes


def test_text_is_that_of_the_uncached_model(lm: LM) -> None:
    seen = set()
    for request in mixed(lm):
        (result,) = run(Engine(lm.model, lm.need_tokenizer(), rows=1), [request])
        ids, logprobs, passes = uncached(lm, request)
        assert (list(result.ids), list(result.passes)) == (ids, passes)
        torch.testing.assert_close(list(result.logprobs), logprobs, atol=1e-4, rtol=1e-4)
        assert result.mean_passes == pytest.approx(sum(passes) / len(passes))
        if request.certainty is None:
            assert set(passes) == {4}
        seen |= set(passes)
    assert seen == {1, 2, 3, 4}  # some are sure at once, others never


@pytest.mark.parametrize(
    "draft", [None, Draft(Trajectory.uniform(1), 3), Draft(Trajectory.uniform(1), None)], ids=str
)
@pytest.mark.parametrize("rows", [2, 5])
def test_a_text_does_not_depend_on_company_or_draft(lm: LM, rows: int, draft: Draft | None) -> None:
    requests = mixed(lm)
    together = run(Engine(lm.model, lm.need_tokenizer(), rows=rows, draft=draft), requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = run(Engine(lm.model, lm.need_tokenizer(), rows=1), [request])
        assert (result.ids, result.text, result.passes) == (alone.ids, alone.text, alone.passes)


def test_a_threshold_of_1_is_no_certainty_at_all(lm: LM) -> None:
    never, plain = lm.generate("told", certainty=1.0, max_tokens=9), lm.generate("told", max_tokens=9)
    assert never == plain
    assert plain.mean_passes == 4
    assert lm.generate("told", budget=2, max_tokens=9).passes == (2,) * 9
    assert set(lm.generate("told", certainty=1e-6, max_tokens=9).passes) == {1}


def test_only_prompts_of_the_same_certainty_share_keys(lm: LM) -> None:
    prompt = "every pass is told its time and its step"
    requests = [lm.requests([prompt], certainty=one, max_tokens=6)[0] for one in (None, 0.3, 0.5, 0.3, None)]
    backend = PlainBackend(lm.model, slots=1)
    engine = Engine(lm.model, lm.need_tokenizer(), backend=backend)
    shared, results = [], []
    for request in requests:
        before = backend.shared_tokens
        results += run(engine, [request])
        shared.append(backend.shared_tokens - before)
    tokens = len(requests[0].prompt)
    assert shared == [0, 0, 0, tokens - 1, tokens - 1]
    for request, result in zip(requests, results, strict=True):
        (alone,) = run(Engine(lm.model, lm.need_tokenizer(), remember=0), [request])
        assert (result.ids, result.passes) == (alone.ids, alone.passes)
    side_by_side = run(Engine(lm.model, lm.need_tokenizer(), rows=5), requests)
    assert [result.ids for result in side_by_side] == [result.ids for result in results]


def test_it_streams_and_samples(lm: LM) -> None:
    options: dict[str, Any] = {"certainty": 0.3, "max_tokens": 12, "temperature": 0.8, "seed": 3}
    assert "".join(lm.stream("told", **options)) == lm.generate("told", **options).text
    many = lm.generate(["told", "its"], **options)
    assert many[0].ids == lm.generate("told", **options).ids
    assert many[0].mean_passes < 4


def test_rows_that_share_a_beginning_are_scored_as_if_alone(lm: LM) -> None:
    question = tuple(range(40, 70))
    spans = [Span((*question, *answer), len(answer)) for answer in ((1, 2, 3), (4, 5), (6,), (1, 2, 9, 8))]
    trajectories = [Trajectory.uniform(4), Trajectory.parse("2-1-1")]
    (packed,) = score_spans(lm.model, spans, trajectories, certainty=0.3)
    (apart,) = score_spans(lm.model, spans, trajectories, share=False, certainty=0.3)
    assert packed.tokens < apart.tokens
    for trajectory in trajectories:
        by_span = [
            dict(zip(batch.spans, torch.split(batch.along[trajectory][0], batch.sizes), strict=True))
            for batch in (packed, apart)
        ]
        for number in range(len(spans)):
            torch.testing.assert_close(by_span[0][number], by_span[1][number], atol=1e-4, rtol=1e-4)
        assert packed.passes[trajectory].total() == packed.tokens
        assert len(packed.passes[trajectory]) > 1


def test_what_is_no_certainty_is_refused(lm: LM) -> None:
    untyped: Any = lm
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: lm.generate("a", certainty=0.0), r"certainty must lie in \(0, 1\], got 0.0"),
        (lambda: lm.generate("a", certainty=1.5), r"certainty must lie in \(0, 1\], got 1.5"),
        (lambda: untyped.generate("a", certainty="0.5"), r"certainty must lie in \(0, 1\], got '0.5'"),
        (lambda: Request((1,), Trajectory.uniform(2), certainty=float("nan")), "certainty must lie in"),
    ]
    for call, said in cases:
        with pytest.raises(LoopformerError, match=said):
            call()


def test_fused_kernels_leave_it_to_the_plain_path(lm: LM) -> None:
    assert obstacle(lm.model, certainty=True) == "has no kernels for certainty"
    plain = lm.generate("told", certainty=0.3, max_tokens=8, fast=False)
    assert lm.generate("told", certainty=0.3, max_tokens=8) == plain
    with pytest.raises(LoopformerError, match="fast has no kernels for certainty; leave it out"):
        lm.generate("told", certainty=0.3, fast=True)
