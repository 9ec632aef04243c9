import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction as Fr
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LoopformerError, Trajectory
from loopformer.trajectory import FAMILIES, SAMPLERS, resolve

compositions = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(compositions)
def test_text_round_trips(weights: list[int]) -> None:
    trajectory = Trajectory.from_weights(weights)
    assert Trajectory.parse(str(trajectory)) == trajectory
    assert hash(Trajectory.parse(str(trajectory))) == hash(trajectory)
    assert len(trajectory) == trajectory.budget == len(weights)


@given(st.integers(1, 24), st.sampled_from(SAMPLERS), st.integers(0, 10**6), st.booleans())
def test_samples_are_trajectories_that_round_trip(loops: int, sampler: str, seed: int, numpy: bool) -> None:
    rng: Any = np.random.default_rng(seed) if numpy else random.Random(seed)
    trajectory = Trajectory.sample(loops + 1, rng, sampler=sampler)
    assert 1 <= trajectory.budget <= loops
    assert sum(trajectory.steps) == 1
    assert min(trajectory.steps) > 0
    assert Trajectory.parse(str(trajectory)) == trajectory


@given(compositions)
def test_floats_become_the_fractions_they_stand_for(weights: list[int]) -> None:
    exact = Trajectory.from_weights(weights)
    assert Trajectory([float(step) for step in exact.steps]) == exact


def test_reading() -> None:
    assert Trajectory.parse("4").steps == (Fr(1, 4),) * 4
    assert Trajectory.parse("2-1-2-3").steps == (Fr(1, 4), Fr(1, 8), Fr(1, 4), Fr(3, 8))
    assert Trajectory.parse("0.25,0.25,0.5") == Trajectory.parse("1/4,1/4,1/2") == Trajectory.parse("1-1-2")
    assert Trajectory.parse(" 0.333333, 0.333333, 0.333334 ") == Trajectory.uniform(3)
    assert Trajectory.parse("1") == Trajectory.parse("1/1") == Trajectory([1])
    assert Trajectory.parse("coarse-to-fine:3") == Trajectory.parse("3-2-1")
    assert Trajectory.parse("2-1-2-3").times == (Fr(0), Fr(1, 4), Fr(3, 8), Fr(5, 8))
    assert [str(Trajectory.parse(text)) for text in ("2-2", "4-2-4-6", "1/3,2/3")] == ["2", "2-1-2-3", "1-2"]


def test_floats_that_are_no_small_fraction_still_sum_to_one_exactly() -> None:
    steps = np.random.default_rng(0).dirichlet([1.0] * 7)
    trajectory = Trajectory(steps.tolist())
    assert sum(trajectory.steps) == 1
    assert np.allclose([float(step) for step in trajectory.steps], steps, atol=1e-5)
    assert Trajectory([0.1 + 0.2, 0.7]) == Trajectory.parse("3-7")
    assert Trajectory([1 - 1e-7, 1e-7]).steps[1] == Fr(1, 10**7)


def test_numpy_numbers_pass_for_numbers() -> None:
    four: Any = np.int64(4)
    assert Trajectory.uniform(four) == Trajectory.uniform(4)
    assert Trajectory.from_weights(np.array([2, 1, 2, 3])) == Trajectory(
        np.array([0.25, 0.125, 0.25, 0.375], np.float32)
    )
    assert Trajectory.sample(four, np.random.default_rng(0)).budget < 4


def test_immutable_and_hashable() -> None:
    trajectory = Trajectory.uniform(2)
    with pytest.raises(AttributeError):
        trajectory.steps = ()  # type: ignore[misc]
    assert len({trajectory, Trajectory([0.5, 0.5])}) == 1


@pytest.mark.parametrize(("loops", "budget"), [(8, 4), (12, 6), (4, 1), (5, 5)])
def test_enumerate_gives_every_composition_once(loops: int, budget: int) -> None:
    found = list(Trajectory.enumerate(loops, budget))
    assert len(set(found)) == len(found) == math.comb(loops - 1, budget - 1)
    assert all(step * loops == int(step * loops) for trajectory in found for step in trajectory.steps)


def _frequencies(sampler: str, draws: int = 40_000) -> Counter[tuple[int, ...]]:
    rng = random.Random(1)
    drawn = (Trajectory.sample(8, rng, budget=4, sampler=sampler) for _ in range(draws))
    return Counter(tuple(int(step * 8) for step in trajectory.steps) for trajectory in drawn)


def _sequential_probability(parts: tuple[int, ...], loops: int) -> float:
    probability, left = 1.0, loops
    for place, part in enumerate(parts[:-1]):
        probability /= left - (len(parts) - 1 - place)
        left -= part
    return probability


def test_sequential_sampler_has_the_exact_probabilities() -> None:
    exact = {parts: _sequential_probability(parts, 8) for parts in _parts_of_8()}
    assert math.isclose(sum(exact.values()), 1)
    assert math.isclose(exact[5, 1, 1, 1] / exact[1, 1, 1, 5], 25)
    _assert_frequencies("sequential", exact)


def test_compositions_sampler_is_uniform() -> None:
    _assert_frequencies("compositions", dict.fromkeys(_parts_of_8(), 1 / 35))


def _parts_of_8() -> list[tuple[int, ...]]:
    return [parts for parts in itertools.product(range(1, 6), repeat=4) if sum(parts) == 8]


def _assert_frequencies(sampler: str, exact: dict[tuple[int, ...], float], draws: int = 40_000) -> None:
    """Pearson's chi-square against 34 degrees of freedom; 65 is passed by chance once in a thousand."""
    seen = _frequencies(sampler, draws)
    assert set(seen) <= set(exact)
    assert sum((seen[parts] - draws * p) ** 2 / (draws * p) for parts, p in exact.items()) < 65


def test_length_is_uniform_below_the_full_one() -> None:
    rng = random.Random(0)
    lengths = Counter(Trajectory.sample(8, rng).budget for _ in range(14_000))
    assert sorted(lengths) == list(range(1, 8))
    assert all(1800 < count < 2200 for count in lengths.values())


def test_continuous_sampler_is_dirichlet() -> None:
    rng = np.random.default_rng(0)
    steps = np.array(
        [[float(s) for s in Trajectory.sample(8, rng, budget=4, sampler="continuous").steps] for _ in range(4000)]
    )
    assert np.allclose(steps.mean(0), 1 / 4, atol=0.01)
    assert np.allclose(steps.var(0), 3 / 80, atol=0.003)  # a(A-a) / (A²(A+1)) with a = 1, A = 4


def test_families() -> None:
    assert str(Trajectory.named("coarse-to-fine", 4)) == "4-3-2-1"
    assert str(Trajectory.named("fine-to-coarse", 4)) == "1-2-3-4"
    cosine = Trajectory.named("cosine", 4)
    ends = [float(t) for t in cosine.times] + [1.0]
    assert ends == pytest.approx([math.sin(math.pi * i / 8) for i in range(5)], abs=1e-5)
    assert all(Trajectory.named(family, 1) == Trajectory.uniform(1) for family in FAMILIES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Cannot read"),
        ("four", "Cannot read"),
        ("4-", "Cannot read"),
        ("1/0,1", "Cannot read"),
        ("1.2.3,0.5", "Cannot read"),
        ("0", "1 or more"),
        ("4-0-1", "positive"),
        ("0.5,0.4", "sum to 0.9"),
        ("1/2,1/3", "sum to 0.833333"),
        ("spiral:4", "Unknown trajectory family"),
        ("cosine:0", "1 or more"),
        ("cosine:1000000000", "Cannot read"),
        ("cosine:999999999", "at most 4096 steps"),
        ("1..5-2", "Cannot read"),
        ("²", "Cannot read"),
        ("9" * 5000, "Cannot read '9+…"),
        ("-".join(["1"] * 5000), "at most 4096 steps"),
    ],
)
def test_bad_text_is_one_clear_sentence(text: str, said: str) -> None:
    for read in (Trajectory.parse, lambda text: resolve(text, 8)):
        with pytest.raises(LoopformerError, match=said) as caught:
            read(text)
        assert "\n" not in str(caught.value)


def test_bad_values_are_one_clear_sentence() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Trajectory([]), "at least one step"),
        (lambda: Trajectory([float("nan"), 1]), "not a number"),
        (lambda: Trajectory([1.5, -0.5]), "positive"),
        (lambda: Trajectory([0.33333, 0.33333, 0.33333]), "sum to 0.99999"),
        (lambda: Trajectory.uniform(0), "1 or more"),
        (lambda: Trajectory.uniform(2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: Trajectory("4"), r"use Trajectory\.parse"),
        (lambda: Trajectory(None), "made of steps"),  # type: ignore[arg-type]
        (lambda: Trajectory.enumerate(4, 5), "above the model's 4 loops"),
        (lambda: Trajectory.sample(4, random.Random(0), budget=5), "above the model's 4 loops"),
        (lambda: Trajectory.sample(1, random.Random(0)), "no shorter trajectory"),
        (lambda: Trajectory.sample(4, random.Random(0), sampler="dice"), "Unknown sampler"),
    ]
    for make, said in cases:
        with pytest.raises(LoopformerError, match=said):
            make()


def test_a_trajectory_has_up_to_4096_steps() -> None:
    longest: list[Callable[[], Trajectory]] = [
        lambda: Trajectory.parse("4096"),
        lambda: Trajectory.parse("-".join(["1"] * 4096)),
        lambda: Trajectory([Fr(1, 4096)] * 4096),
        lambda: Trajectory.sample(4096, random.Random(0), 4096),
        lambda: resolve(4096, 1, beyond=True),
        lambda: resolve(None, 4096),
    ]
    assert all(make() == Trajectory.uniform(4096) for make in longest)
    too_long: list[Callable[[], object]] = [
        lambda: Trajectory.uniform(4097),
        lambda: Trajectory.parse("4097"),
        lambda: Trajectory.parse("-".join(["1"] * 4097)),
        lambda: Trajectory([Fr(1, 4097)] * 4097),
        lambda: Trajectory.sample(4097, random.Random(0), 2),
        lambda: resolve(4097, 1, beyond=True),
        lambda: resolve(None, 4097),
    ]
    for make_longer in too_long:
        with pytest.raises(LoopformerError, match="at most 4096 steps, not 4097"):
            make_longer()


def test_text_has_weights_up_to_4096_parts_and_fractions_beyond() -> None:
    assert str(Trajectory([Fr(1, 4096), Fr(4095, 4096)])) == "1-4095"
    assert str(Trajectory([Fr(1, 4097), Fr(4096, 4097)])) == "1/4097,4096/4097"
    assert Trajectory([1 / 4096, 1 - 1 / 4096]).steps[0] == Fr(1, 4096)
    assert Trajectory([1 / 4097, 1 - 1 / 4097]).steps[0] == Fr(1, 4096)  # within 1e-6 of it


def test_a_number_has_up_to_40_characters() -> None:
    assert Trajectory.parse("1".ljust(40, "0") + "-" + "3".ljust(40, "0")) == Trajectory.parse("1-3")
    assert Trajectory.parse("0." + "5".ljust(38, "0") + "," + "0." + "5".ljust(38, "0")) == Trajectory.uniform(2)
    for text in ("1".ljust(41, "0") + "-3", "0." + "5".ljust(39, "0") + ",0.5"):
        with pytest.raises(LoopformerError, match="Cannot read"):
            Trajectory.parse(text)


def test_a_trajectory_beyond_the_models_loops_must_be_allowed() -> None:
    for long in (9, "9", Trajectory.uniform(9)):
        with pytest.raises(LoopformerError, match="Budget 9 is above the model's 8 loops"):
            resolve(long, 8)
        assert resolve(long, 8, beyond=True) == Trajectory.uniform(9)
    assert resolve(None, 8) == resolve(8, 8) == Trajectory.uniform(8)


def test_decimals_are_rounded_to_denominators_of_at_most_4096() -> None:
    assert Trajectory([1 / 4096, 4095 / 4096]).steps[0] == Fr(1, 4096)
    assert Trajectory([1 / 4097, 4096 / 4097]).steps[0] == Fr(1, 4096)
    exact = Trajectory([Fr(1, 4097), Fr(4096, 4097)])
    assert str(exact) == "1/4097,4096/4097"
    assert str(Trajectory([Fr(1, 4096), Fr(4095, 4096)])) == "1-4095"


def test_a_truth_value_is_no_budget() -> None:
    for value in (True, False):
        with pytest.raises(LoopformerError, match="A budget is a whole number"):
            Trajectory.uniform(value)


def test_continuous_steps_lie_on_the_grid_of_every_version() -> None:
    drawn = [Trajectory.sample(8, random.Random(seed), 4, "continuous") for seed in range(20)]
    denominators = {step.denominator for trajectory in drawn for step in trajectory.steps}
    assert max(denominators) == 2**20
    assert all(2**20 % denominator == 0 for denominator in denominators)
