"""The search for the best schedule, and the best ones that are saved."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.schedules import (
    best_gain,
    describe,
    rank,
    save_best,
    search,
    spearman,
)
from loopformer.evaluation.store import SCHEDULES_FILE, Store, saved_schedules, scheduled_trajectory, weights_hash
from loopformer.evaluation.text import Protocol, Text, perplexity
from loopformer.trajectory import Trajectory

from .small import make_model


def test_equals_plain_evaluation_of_each_schedule(tokenizer: Tokenizer, text: Text) -> None:
    model = make_model(tokenizer, loops=6)
    found = search(model, 3, text=text, protocol=Protocol(join=True))
    plain = perplexity(model, text, [row["trajectory"] for row in found["schedules"]], Protocol(join=True))
    for row, one in zip(found["schedules"], plain, strict=True):
        assert row["perplexity"] == pytest.approx(one["perplexity"], rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-6)
    assert (found["method"], found["on_grid"], found["measured"]) == ("all", 10, 10)
    values = [row["perplexity"] for row in found["schedules"]]
    assert values == sorted(values)
    assert found["spread"]["perplexity"] == values[-1] - values[0] > 0
    assert (found["best"], found["worst"]) == (found["schedules"][0], found["schedules"][-1])
    assert (found["uniform"]["trajectory"], found["uniform"]["schedule"]) == ("3", "2-2-2")
    assert found["text"]["tokens"] == text.tokens - 1 + 4


def test_first_steps_are_computed_once(tokenizer: Tokenizer, text: Text) -> None:
    model = make_model(tokenizer, loops=8)
    count = 0

    def add(*_: object) -> None:
        nonlocal count
        count += 1

    model.stack.register_forward_hook(add)
    found = search(model, 4, text=text, batch_tokens=100_000)
    assert found["passes"] == {"shared": 90, "separate": 140}
    assert (count, found["measured"]) == (90, 35)


def test_started_again_it_continues(lm: LM, text: Text, loops_run: Callable[[], int], tmp_path: Path) -> None:
    def stop(doing: str, done: int, total: int | None) -> None:
        if doing.startswith("schedule 3 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # first steps 1/4 (1-3) and 2/4 (2-2) are done, 3/4 is not
        search(lm.model, 2, text=text, store=Store(tmp_path), report=stop, batch_tokens=100_000)
    assert loops_run() == 6
    found = search(lm.model, 2, text=text, store=Store(tmp_path), batch_tokens=100_000)
    assert loops_run() == 2
    again = search(lm.model, 2, text=text, store=Store(tmp_path))
    assert loops_run() == 0
    assert again["schedules"] == found["schedules"]


def test_the_uniform_schedule_is_measured_off_the_grid_too(lm: LM, text: Text) -> None:
    found = search(lm.model, 3, text=text)
    assert (found["on_grid"], found["measured"]) == (3, 4)
    assert (found["uniform"]["trajectory"], found["uniform"]["schedule"]) == ("3", "uniform")
    assert search(lm.model, 4, text=text)["measured"] == 1


def test_by_accuracy_and_by_both(lm: LM, text: Text) -> None:
    accuracies = {"1-3": 0.5, "2-2": 0.7, "3-1": 0.6}

    def score(trajectories: Sequence[Trajectory]) -> dict[Trajectory, float]:
        return {
            trajectory: accuracies["-".join(str(int(step * 4)) for step in trajectory.steps)]
            for trajectory in trajectories
        }

    found = search(lm.model, 2, accuracy=score, by="accuracy")
    assert [row["schedule"] for row in found["schedules"]] == ["2-2", "3-1", "1-3"]
    assert found["text"] is found["rank_correlation"] is None
    assert found["spread"] == {"accuracy": pytest.approx(0.2)}
    both = search(lm.model, 2, text=text, accuracy=score, by="both")
    assert {"perplexity", "accuracy"} <= set(both["best"])
    assert -1 <= both["rank_correlation"] <= 1


def losses(rng: np.random.Generator, tokens: list[int], gain: float = 0.0) -> dict[Trajectory, list[float | None]]:
    """Nats of all schedules of M = 4, L = 8, block by block: one is better than the others by `gain` per token."""
    sizes = np.array(tokens)
    text, shared = rng.normal(4, 1, len(sizes)) * sizes, rng.normal(size=len(sizes))
    nats: dict[Trajectory, list[float | None]] = {}
    for number, trajectory in enumerate(Trajectory.enumerate(8, 4)):
        noise = 0.3 * np.sqrt(sizes) * (shared + rng.normal(size=len(sizes)))
        nats[trajectory] = list(text if trajectory.is_uniform else text + noise - gain * sizes * (number == 3))
    return nats


def test_the_best_of_many_that_are_equal_is_noise() -> None:
    rng, uniform = np.random.default_rng(0), Trajectory.uniform(4)
    counts = {"noise": [0, 0], "gain": [0, 0]}
    for _ in range(200):
        tokens = rng.integers(100, 512, 40).tolist()
        for name, gain in (("noise", 0.0), ("gain", 0.03)):
            if (found := best_gain(losses(rng, tokens, gain), uniform, tokens)) is not None:
                counts[name][0] += found["is_significant"]
                counts[name][1] += found["nats_per_token"] > 1.645 * found["stderr"]  # as if it were the only one
    assert counts["noise"][0] <= 20 < 60 < counts["noise"][1]
    assert counts["gain"][0] >= 190


def test_a_gain_needs_numbers_and_more_than_one_block() -> None:
    one, uniform, other = Trajectory.enumerate(4, 2)
    assert best_gain({one: [9.0, 9.0], uniform: [9.0, 8.0], other: [10.0, 9.0]}, uniform, [3, 3]) is None
    assert best_gain({one: [8.0, None], uniform: [9.0, 9.0]}, uniform, [3, 3]) is None
    assert best_gain({uniform: [9.0]}, uniform, [3]) is None
    found = best_gain({one: [6.0], uniform: [9.0]}, uniform, [3])
    assert found == {"nats_per_token": 1.0, "stderr": None, "needed": None, "is_significant": False}
    found = best_gain({one: [8.0, 6.0, 7.5], uniform: [9.0, 7.0, 8.0]}, uniform, [2, 2, 1])
    assert found is not None
    assert found["nats_per_token"] == pytest.approx(0.5)
    assert not found["is_significant"]  # the residuals are zero, so there is no noise to compare with


def test_what_is_noise_is_not_chosen(lm: LM, text: Text, tmp_path: Path) -> None:
    found = search(lm.model, 2, text=text, protocol=Protocol(window=4), store=Store(tmp_path))
    assert found["gain"] is None or not found["gain"]["is_significant"]  # of random weights
    assert found["chosen"] == found["uniform"]
    gains = {
        row["schedule"]: math.log(found["uniform"]["perplexity"] / row["perplexity"]) for row in found["schedules"]
    }
    if found["gain"] is not None:
        assert found["gain"]["nats_per_token"] == pytest.approx(max(gains.values()), rel=1e-4)
    for file in tmp_path.iterdir():  # results of earlier versions have no blocks, so they cannot be tested
        stored = json.loads(file.read_text())
        assert len(stored["value"].pop("blocks")) > 4
        file.write_text(json.dumps(stored))
    again = search(lm.model, 2, text=text, protocol=Protocol(window=4), store=Store(tmp_path))
    assert again["schedules"] == found["schedules"]
    assert (again["gain"], again["chosen"]) == (None, again["best"])


def test_rank_by_both_is_by_mean_rank() -> None:
    trajectories = list(Trajectory.enumerate(4, 2))
    rows = [
        {"perplexity": 1.0, "accuracy": 0.1},
        {"perplexity": 2.0, "accuracy": 0.9},
        {"perplexity": 3.0, "accuracy": 0.8},
    ]
    measured = dict(zip(trajectories, rows, strict=True))  # ranks 1+3, 2+1, 3+2
    assert rank(measured, "both") == [trajectories[1], trajectories[0], trajectories[2]]
    nothing: dict[Trajectory, dict[str, float | None]] = {
        trajectories[0]: {"perplexity": None},
        trajectories[1]: {"perplexity": 9.0},
    }
    assert rank(nothing, "perplexity") == [trajectories[1], trajectories[0]]


def test_mean_steps_tell_front_heavy_from_back_heavy() -> None:
    measured = {
        trajectory: {"perplexity": -float(trajectory.steps[0])} for trajectory in Trajectory.enumerate(8, 4)
    }
    steps = describe(measured, Trajectory.uniform(4), "perplexity", 8)["mean_steps"]
    assert steps["all"] == pytest.approx([0.25] * 4)
    assert steps["best_tenth"][0] > 0.4 > 0.125 == steps["worst_tenth"][0]


@pytest.mark.parametrize(
    ("count", "tenth"), [(1, 1), (4, 1), (9, 1), (10, 1), (11, 2), (15, 2), (19, 2), (20, 2), (21, 3), (35, 4)]
)
def test_a_tenth_of_the_schedules_is_rounded_up(count: int, tenth: int) -> None:
    schedules = [Trajectory.uniform(4), *(each for each in Trajectory.enumerate(8, 4) if not each.is_uniform)][
        :count
    ]
    measured = {trajectory: {"perplexity": float(number)} for number, trajectory in enumerate(schedules)}
    steps = describe(measured, Trajectory.uniform(4), "perplexity", 8)["mean_steps"]
    for name, group in (("best_tenth", schedules[:tenth]), ("worst_tenth", schedules[count - tenth :])):
        expected = [float(sum(column) / tenth) for column in zip(*(each.steps for each in group), strict=True)]
        assert steps[name] == pytest.approx(expected, abs=1e-12)


@given(st.permutations(range(8)))
def test_spearman_without_ties(order: list[int]) -> None:
    differences = sum((place - number) ** 2 for place, number in enumerate(order))
    assert spearman(range(8), order) == pytest.approx(1 - 6 * differences / (8 * 63))


def test_spearman_with_ties_and_without_order() -> None:
    assert spearman([1, 2, 2, 3], [10, 20, 20, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 2, 3], [3, 2, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / math.sqrt(5))
    assert spearman([1, 2], [5, 5]) is None


def test_no_more_than_the_limit_is_measured(lm: LM, text: Text) -> None:
    found = search(lm.model, 2, text=text, limit=2)
    assert (found["method"], found["measured"], found["passes"]) == ("sample", 2, None)
    assert found["uniform"]["trajectory"] == "2"
    assert search(lm.model, 2, text=text, limit=2)["schedules"] == found["schedules"]  # of a fixed seed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": 5}, "above the model's 4 loops"),
        ({"budget": 0}, "1 or more"),
        ({"by": "perplexty"}, "did you mean perplexity"),
        ({"by": "both"}, "needs tasks"),
        ({"text": None}, "needs a text"),
        ({"limit": 0}, "--limit must be 1"),
    ],
)
def test_impossible_searches(lm: LM, text: Text, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        search(lm.model, **{"budget": 2, "text": text, **options})


def test_no_number_is_no_best_schedule(lm: LM, text: Text) -> None:
    with torch.no_grad():
        lm.model.tokens.weight.fill_(math.nan)
    with pytest.raises(RunFailed, match="No schedule gives a number"):
        search(lm.model, 2, text=text)


def test_a_model_that_is_not_told_its_steps_has_nothing_to_search(tiny: ModelConfig, text: Text) -> None:
    model = LoopedLM(
        ModelConfig(conditioning="none", blocks=1, loops=4, width=16, heads=2, ffn=32, context=16, vocab=300)
    )
    with pytest.raises(LoopformerError, match="there is nothing to search"):
        search(model, 2, text=text)
    assert search(model, 4, text=text)["measured"] == 1


def test_saved_schedules_are_used_and_merged(lm: LM, text: Text, tmp_path: Path) -> None:
    two, three = (search(lm.model, budget, text=text) for budget in (2, 3))
    save_best(tmp_path, three)
    save_best(tmp_path, two)
    saved = json.loads((tmp_path / SCHEDULES_FILE).read_text())
    assert list(saved) == ["2", "3"]
    assert saved["2"]["perplexity"] == two["chosen"]["perplexity"]
    assert saved["2"]["text"] == {"text": "test.txt", "sha256": "0", "tokens": text.tokens}
    assert saved["2"]["weights"] == weights_hash(lm.model)
    for found in (two, three):
        best = Trajectory.parse(found["chosen"]["trajectory"])
        assert scheduled_trajectory(tmp_path, lm.model, found["budget"], "best") == best
    assert scheduled_trajectory(tmp_path, lm.model, 3, "uniform") == Trajectory.uniform(3)
    assert not list(tmp_path.glob("*.tmp"))


def test_the_last_search_counts(lm: LM, text: Text, tmp_path: Path) -> None:
    found = search(lm.model, 2, text=text)
    assert save_best(tmp_path, found) == tmp_path / SCHEDULES_FILE
    save_best(tmp_path, {**found, "chosen": found["worst"]})
    assert saved_schedules(tmp_path)["2"]["trajectory"] == found["worst"]["trajectory"]


def test_the_only_schedule_needs_no_search(lm: LM, tmp_path: Path) -> None:
    assert scheduled_trajectory(tmp_path, lm.model, 1, "best") == Trajectory.uniform(1)
    assert scheduled_trajectory(tmp_path, lm.model, 4, "best") == Trajectory.uniform(4)


def test_what_is_refused(lm: LM, text: Text, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match=r"No best schedule of budget 2 .* loopformer search --model"):
        scheduled_trajectory(tmp_path, lm.model, 2, "best")
    with pytest.raises(LoopformerError, match="above the model's 4 loops"):
        scheduled_trajectory(tmp_path, lm.model, 5, "best")
    with pytest.raises(LoopformerError, match="did you mean best"):
        scheduled_trajectory(tmp_path, lm.model, 2, "bets")
    save_best(tmp_path, search(lm.model, 2, text=text))
    with torch.no_grad():
        lm.model.tokens.weight += 1
    with pytest.raises(LoopformerError, match=r"No best schedule of budget 2 .* for its weights"):
        scheduled_trajectory(tmp_path, lm.model, 2, "best")
    (tmp_path / SCHEDULES_FILE).write_text('{"2": 3}')
    with pytest.raises(LoopformerError, match="is damaged; delete it"):
        scheduled_trajectory(tmp_path, lm.model, 2, "best")


def test_what_is_no_folder_holds_none(lm: LM, text: Text, tmp_path: Path) -> None:
    assert save_best(tmp_path / "none", search(lm.model, 2, text=text)) is None
