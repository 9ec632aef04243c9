import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LoopformerError
from loopformer.inference.sampling import Sampling, choose, probabilities

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def test_greedy_takes_the_most_likely() -> None:
    assert choose(LOGITS, Sampling(), 0.99, []) == 0
    assert choose(LOGITS, Sampling(repetition_penalty=9.0), 0.0, [0]) == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e300])
def test_any_temperature_gives_probabilities(temperature: float) -> None:
    likely = probabilities(torch.tensor([-3.0, 5.0, 4.0]), Sampling(temperature=temperature), [])
    expected = [1 / 3, 1 / 3, 1 / 3] if temperature > 1 else [0, 1, 0]
    assert likely.tolist() == pytest.approx(expected)


def test_draws_follow_the_distribution() -> None:
    rng, sampling = random.Random(0), Sampling(temperature=0.7)
    exact = (LOGITS / 0.7).softmax(-1).tolist()
    seen = Counter(choose(LOGITS, sampling, rng.random(), []) for _ in range(20_000))
    assert sum((seen[i] - 20_000 * p) ** 2 / (20_000 * p) for i, p in enumerate(exact)) < 18.5  # χ², 4 dof, 0.1 %


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=30), st.data())
def test_filters_keep_what_they_say(values: list[float], data: st.DataObject) -> None:
    logits = torch.tensor(values)
    k, p, m = data.draw(st.integers(1, 30)), data.draw(st.floats(0.05, 1)), data.draw(st.floats(0, 1))
    plain = probabilities(logits, Sampling(temperature=1), [])
    only_k = probabilities(logits, Sampling(temperature=1, top_k=k), [])
    assert int((only_k > 0).sum()) >= min(k, len(values))
    assert only_k[plain.argmax()] > 0
    only_p = probabilities(logits, Sampling(temperature=1, top_p=p), [])
    assert float(plain[only_p > 0].sum()) >= p - 1e-9
    smallest = plain[only_p > 0].min()
    assert float(plain[only_p > 0].sum() - smallest) < p + 1e-9
    only_m = probabilities(logits, Sampling(temperature=1, min_p=m), [])
    assert bool((plain[only_m > 0] >= m * plain.max() - 1e-12).all())
    for one in (plain, only_k, only_p, only_m):
        assert float(one.sum()) == pytest.approx(1)
    draw = data.draw(st.floats(0, 1, exclude_max=True))
    assert only_p[choose(logits, Sampling(temperature=1, top_p=p), draw, [])] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": -1}, "0 \\(greedy\\) or more"),
        ({"top_k": 0}, "top_k must be 1 or more"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"top_p": 0}, "top_p must lie in"),
        ({"min_p": 2}, "min_p must lie in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be positive"),
    ],
)
def test_wrong_settings_are_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        Sampling(**options)
