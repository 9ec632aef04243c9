"""Sampling: what the filters keep, what the noise draws, and that a batch changes nothing."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopformer import LoopformerError
from loopformer.inference.request import Draw, Sampling
from loopformer.inference.sampling import gumbel_noise, log_probabilities, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def probabilities(logits: Tensor, sampling: Sampling, history: tuple[int, ...] = ()) -> Tensor:
    """The distribution [V] that a row is drawn from."""
    return log_probabilities(logits[None], [Draw(sampling, history=history)])[0].exp()


def drawn(logits: Tensor, sampling: Sampling, seed: int = 0, position: int = 0) -> int:
    return sample(logits[None], [Draw(sampling, seed, position)])[0].token


def test_greedy_takes_the_most_likely() -> None:
    assert drawn(LOGITS, Sampling()) == 0
    penalised = Draw(Sampling(repetition_penalty=9.0), history=(0,))
    assert sample(LOGITS[None], [penalised])[0].token == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e300])
def test_any_temperature_gives_probabilities(temperature: float) -> None:
    likely = probabilities(torch.tensor([-3.0, 5.0, 4.0]), Sampling(temperature=temperature))
    expected = [1 / 3, 1 / 3, 1 / 3] if temperature > 1 else [0, 1, 0]
    assert likely.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seeds", [range(20_000), [7] * 20_000])
def test_draws_follow_the_distribution_over_seeds_and_over_positions(seeds: range | list[int]) -> None:
    sampling = Sampling(temperature=0.7)
    exact = (LOGITS / 0.7).softmax(-1).tolist()
    draws = [Draw(sampling, seed, position) for position, seed in enumerate(seeds)]
    seen = Counter(choice.token for choice in sample(LOGITS.expand(len(draws), -1), draws))
    assert sum((seen[i] - 20_000 * p) ** 2 / (20_000 * p) for i, p in enumerate(exact)) < 18.5  # χ², 4 dof, 0.1 %


def test_noise_is_gumbel_and_neighbours_are_independent() -> None:
    keys = [0, 1, 2, 2**63, 2**64 - 1]
    noise = gumbel_noise(keys, 40_000, torch.device("cpu"))
    assert noise.mean(-1).tolist() == pytest.approx([0.5772] * 5, abs=0.03)
    assert noise.std(-1).tolist() == pytest.approx([math.pi / math.sqrt(6)] * 5, abs=0.03)
    assert float((torch.corrcoef(noise) - torch.eye(5)).abs().max()) < 0.03
    correlation = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1]
    assert abs(float(correlation)) < 0.03


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=30), st.data())
def test_filters_keep_what_they_say(values: list[float], data: st.DataObject) -> None:
    logits = torch.tensor(values)
    k, p, m = data.draw(st.integers(1, 30)), data.draw(st.floats(0.05, 1)), data.draw(st.floats(0, 1))
    plain = probabilities(logits, Sampling(temperature=1))
    only_k = probabilities(logits, Sampling(temperature=1, top_k=k))
    below_max = logits.double() - logits.max()  # as they are ranked: tiny differences are rounded away
    assert bool(((only_k > 0) == (below_max >= below_max.sort(descending=True)[0][:k].min())).all())
    assert only_k[logits.argmax()] > 0
    only_p = probabilities(logits, Sampling(temperature=1, top_p=p))
    assert float(plain[only_p > 0].sum()) >= p - 1e-9
    smallest = plain[only_p > 0].min()
    assert float(plain[only_p > 0].sum() - smallest) < p + 1e-9
    only_m = probabilities(logits, Sampling(temperature=1, min_p=m))
    assert bool((plain[only_m > 0] >= m * plain.max() - 1e-12).all())
    for distribution in (plain, only_k, only_p, only_m):
        assert float(distribution.sum()) == pytest.approx(1)
    assert only_p[drawn(logits, Sampling(temperature=1, top_p=p), data.draw(st.integers()))] > 0


def test_the_nucleus_is_no_larger_than_top_p_needs() -> None:
    two_equal = torch.tensor([1.0, 1.0, -math.inf])
    assert probabilities(two_equal, Sampling(temperature=1, top_p=0.5)).tolist() == [1, 0, 0]
    assert probabilities(two_equal, Sampling(temperature=1, top_p=0.51)).tolist() == [0.5, 0.5, 0]


LIMITS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 2, 3, 4, 10]),
    top_p=st.sampled_from([1.0, 0.93, 0.71, 0.37]),
    min_p=st.sampled_from([0.0, 0.07, 0.31, 1.0]),
    repetition_penalty=st.sampled_from([1.5, 0.8, 1.0]),
)


def reference(logits: list[float], draw: Draw) -> list[float]:
    """The probabilities that a row is drawn from, by the definitions of the settings."""
    sampling = draw.sampling
    scores = list(logits)
    for token in set(draw.history):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token])  # of equal tokens the first comes first
    if sampling.top_k is not None:  # tokens as likely as the k-th stay
        smallest = scores[ranked[: sampling.top_k][-1]]
        ranked = [token for token in ranked if scores[token] >= smallest]
    weights = [math.exp((scores[token] - scores[ranked[0]]) / sampling.temperature) for token in ranked]
    before = [sum(weights[:rank]) / sum(weights) for rank in range(len(ranked))]
    kept = {
        token: weight
        for token, weight, share in zip(ranked, weights, before, strict=True)
        if share < sampling.top_p and weight >= sampling.min_p
    }
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(scores))]


@given(st.data())
def test_probabilities_follow_the_definitions_exactly(data: st.DataObject) -> None:
    """Logits are quarters, so that many are equal. No limit is so near a probability that rounding decides."""
    vocab = data.draw(st.integers(2, 9))
    logits = st.lists(st.integers(-12, 12).map(lambda number: number / 4), min_size=vocab, max_size=vocab)
    history = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=5).map(tuple)
    values = data.draw(st.lists(logits, min_size=8, max_size=8))
    draws = [Draw(data.draw(LIMITS), history=data.draw(history)) for _ in values]
    results = log_probabilities(torch.tensor(values), draws).exp().tolist()
    for row, draw, result in zip(values, draws, results, strict=True):
        expected = reference(row, draw)
        assert [p > 0 for p in result] == [p > 0 for p in expected]
        assert result == pytest.approx(expected, rel=1e-9)


def test_top_k_alone_keeps_k_tokens() -> None:
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))  # many probabilities sum to 1 - ε
    kept = log_probabilities(logits, [Draw(Sampling(temperature=1, top_k=5))] * 200) > -math.inf
    assert kept.sum(-1).tolist() == [5] * 200


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([5.0, 3.0, 2.0]).log()  # of the first two, the first has 5 of 8
    kept = probabilities(logits, Sampling(temperature=1, top_k=2, top_p=0.6))
    assert kept.tolist() == pytest.approx([1, 0, 0])


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)


@given(st.lists(st.tuples(SETTINGS, st.integers(), st.integers(0, 2000)), min_size=1, max_size=6))
def test_a_row_is_drawn_alike_alone_and_in_a_batch(rows: list[tuple[Sampling, int, int]]) -> None:
    logits = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(1)) * 3
    draws = [Draw(sampling, seed, position, (1, 5, 5, 9)) for sampling, seed, position in rows]
    together = sample(logits, draws)
    for row, draw in enumerate(draws):
        (alone,) = sample(logits[row : row + 1], [draw])
        assert together[row].token == alone.token
        assert together[row].logprob == pytest.approx(float(logits[row].log_softmax(-1)[alone.token]), abs=1e-5)


def test_equal_logits_are_ranked_alike_in_a_batch() -> None:
    logits = torch.zeros(2, 500)
    greedy, drawn_beside = Draw(Sampling(top_p=0.5)), Draw(Sampling(temperature=1.0, top_p=0.5), seed=1)
    (alone,) = sample(logits[:1], [greedy])
    assert sample(logits, [greedy, drawn_beside])[0].token == alone.token


def test_nan_shows_in_the_log_probability() -> None:
    logits = torch.stack([LOGITS, LOGITS.where(LOGITS != 1.0, math.nan)])
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9)):
        good, bad = sample(logits, [Draw(sampling)] * 2)
        assert math.isfinite(good.logprob)
        assert math.isnan(bad.logprob)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"temperature": -1}, "0 \\(greedy\\) or more"),
        ({"top_k": 0}, "top_k must be 1 or more"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"top_p": 0}, "top_p must lie in"),
        ({"min_p": 2}, "min_p must lie in"),
        ({"repetition_penalty": 0}, r"repetition_penalty must lie in \[0\.01, 100\], got 0"),
        ({"repetition_penalty": 5e-324}, r"repetition_penalty must lie in \[0\.01, 100\]"),
        ({"repetition_penalty": 1e308}, r"repetition_penalty must lie in \[0\.01, 100\]"),
    ],
)
def test_wrong_settings_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoopformerError, match=message):
        Sampling(**options)


def test_what_is_not_given_changes_nothing() -> None:
    assert Draw(Sampling()) == (Sampling(), 0, 0, (), 0)
    assert Sampling().is_argmax
    assert not Sampling(repetition_penalty=2.0).is_argmax
    assert not Sampling(temperature=1.0).is_argmax
