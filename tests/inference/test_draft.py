"""Speculation changes how fast text comes, not what it is."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference.draft import Draft, DraftReport, best_length, updated_rate
from loopformer.inference.engine import speculate
from loopformer.inference.request import Request, Result
from loopformer.inference.sampling import Draw, Sampling, log_probabilities

PROMPTS = ["every pass", "its", "time and step and time", "told"]
ROUTES = ["4", "4", "2-1-1", "3-1"]


def run(lm: LM, draft: Draft, tokens: int = 20) -> tuple[list[Result], DraftReport]:
    return speculate(
        lm.model, lm.need_tokenizer(), lm.requests(PROMPTS, trajectory=ROUTES, max_tokens=tokens), draft
    )


@pytest.mark.parametrize("length", [1, 3, 7, None])
def test_greedy_text_is_the_full_models(lm: LM, length: int | None) -> None:
    draft = Draft(Trajectory.uniform(2), length)
    results, report = run(lm, draft)
    plain = lm.generate(PROMPTS, trajectory=ROUTES, max_tokens=20)
    assert [(r.text, r.ids, r.reason) for r in results] == [(r.text, r.ids, r.reason) for r in plain]
    assert report.acceptance is not None
    assert 0 <= report.acceptance <= 1
    assert lm.generate(PROMPTS[0], trajectory=ROUTES[0], max_tokens=20, draft=draft).ids == plain[0].ids
    assert report.tokens == sum(len(result.ids) for result in plain)


def test_drafting_along_the_full_trajectory_is_always_right_and_saves_passes(lm: LM) -> None:
    requests = lm.requests(PROMPTS[:2], budget=4, max_tokens=21)
    results, report = speculate(lm.model, lm.need_tokenizer(), requests, Draft(Trajectory.uniform(4), 6))
    assert report.acceptance is not None
    assert report.acceptance > 0.9  # all that was drafted, but for the tokens beyond a request's end
    assert report.verifications <= sum(1 + -(-(len(result.ids) - 1) // 7) for result in results)  # 1: the prompt


@pytest.mark.parametrize("length", [60, 62, 64])
def test_the_context_limit_holds(lm: LM, length: int) -> None:
    request = Request(tuple(range(40, 40 + length)), Trajectory.uniform(4), max_tokens=500)
    (result,), _ = speculate(lm.model, lm.need_tokenizer(), [request], Draft(Trajectory.uniform(1), 4))
    assert (result.reason, len(result.ids)) == ("context", 64 - length + 1)


def test_sampled_text_follows_the_full_models_distribution(lm: LM) -> None:
    """Two tokens of 4000 texts, sorted into nine bins, against their exact probabilities."""
    rows, vocab, end = 4000, lm.model.config.vocab, lm.need_tokenizer().eot
    prompt, trajectory = [50, 60, 70], Trajectory.uniform(4)
    sampling = Sampling(temperature=5.0)
    requests = [
        Request(tuple(prompt), trajectory, replace(sampling, seed=seed), max_tokens=3) for seed in range(rows)
    ]
    results, report = speculate(lm.model, lm.need_tokenizer(), requests, Draft(Trajectory.uniform(1), 1))
    assert report.acceptance is not None
    assert 0.2 < report.acceptance < 0.95  # drafts are both kept and thrown away

    def exact(texts: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = lm.model(torch.tensor(texts), trajectory).logits
        assert logits is not None
        return log_probabilities(logits[:, -1, :vocab], [Draw(sampling)] * len(logits)).exp()

    first = exact([prompt])[0]
    second = exact([[*prompt, token] for token in range(vocab)])
    bins = Counter((result.ids[0] % 3, result.ids[:2][-1] % 3) for result in results)
    expected: defaultdict[tuple[int, int], float] = defaultdict(float)
    for one in range(vocab):
        for two in range(vocab) if one != end else (end,):
            expected[one % 3, two % 3] += float(first[one] * (second[one, two] if one != end else 1))
    assert sum(expected.values()) == pytest.approx(1)
    chi = sum((bins[cell] - rows * p) ** 2 / (rows * p) for cell, p in expected.items())
    assert chi < 30  # 8 degrees of freedom; passed by chance once in 5,000


def test_sampled_text_is_the_same_with_and_without_a_draft(lm: LM) -> None:
    options: dict[str, Any] = {"trajectory": ROUTES, "max_tokens": 24, "temperature": 1.5, "top_p": 0.9}
    options |= {"repetition_penalty": 1.2, "seed": 5}
    plain = lm.generate(PROMPTS, **options)
    for draft in (Draft(Trajectory.uniform(1), 3), Draft(Trajectory.uniform(1), None)):
        assert [result.ids for result in lm.generate(PROMPTS, draft=draft, **options)] == [r.ids for r in plain]


def test_the_length_adapts_to_acceptance(lm: LM) -> None:
    draft = Draft(Trajectory.uniform(1), None)
    lengths = [best_length(lm.model.cost, draft, 4, rate) for rate in (0.0, 0.5, 0.9, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] > 3
    assert best_length(lm.model.cost, draft, 1, 0.9) == 1  # a draft that costs as much as what it saves


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_the_rate_is_the_chance_of_one_token_to_be_kept(chance: float) -> None:
    """Not the share of a draft that is kept, which is less: nothing after the first mistake is."""
    draws, rate, rates = random.Random(0), 0.7, []
    for _ in range(4000):
        kept = next((kept for kept in range(6) if draws.random() > chance), 6)
        rate = updated_rate(rate, 6, kept)
        rates.append(rate)
    assert sum(rates) / len(rates) == pytest.approx(chance, abs=0.03)
    assert updated_rate(0.4, 0, 0) == 0.4  # nothing drafted, nothing learnt


def test_no_more_is_drafted_than_is_wanted(lm: LM) -> None:
    _, report = run(lm, Draft(Trajectory.uniform(1), 6), tokens=1)
    assert (report.drafted, report.acceptance, report.verifications) == (0, None, len(PROMPTS))
    _, report = run(lm, Draft(Trajectory.uniform(1), 6), tokens=3)
    assert report.drafted <= (2 + 1) * len(PROMPTS)


def test_mistakes_are_one_clear_sentence(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="1 token or more"):
        Draft(Trajectory.uniform(1), 0)
    wrong: Any = 2.5
    with pytest.raises(LoopformerError, match=r"whole number; got 2\.5"):
        Draft(Trajectory.uniform(1), wrong)
    with pytest.raises(LoopformerError, match=r"follows a Trajectory, not 2\.5"):
        Draft(wrong)
    with pytest.raises(LoopformerError, match="above the model's 4 loops"):
        run(lm, Draft(Trajectory.uniform(6), 2))
