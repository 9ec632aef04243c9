"""State tracking: counts of answers made by hand, early exit, and a model's own passes."""

import numpy as np
import pytest
import torch
from inference.models import spread

from loopformer import LoopedLM, ModelConfig
from loopformer.data.states import TEST, Group, StateWindows
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.early_exit import early_exit
from loopformer.evaluation.states import state_figure, summarize_answers, track_states, trained_group
from loopformer.plots import has_matplotlib
from loopformer.trajectory import Trajectory

GROUP = Group.named("S3")
ALL = [Trajectory.uniform(1), Trajectory.uniform(2), Trajectory.parse("3-1"), Trajectory.uniform(5)]


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    return spread(ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=7, vocab=7), std=0.5)


def test_counts_are_those_of_the_model_itself(model: LoopedLM) -> None:
    found = track_states(model, GROUP, ALL, sequences=50, seed=3, batch_tokens=36)
    batch = StateWindows(GROUP, 7, 50, seed=3, stream=TEST).batch(0, 50)
    labels = batch.targets[:, 1:]
    for row, trajectory in zip(found["trajectories"], ALL, strict=True):
        logits = model(batch.inputs, trajectory, beyond=True).logits
        assert logits is not None
        right = (logits[:, 1:, :6].argmax(-1) == labels).sum(0)
        assert row["right"] == right.tolist()
        assert row["accuracy"] == pytest.approx((right / 50).tolist())
        assert (row["budget"], row["trajectory"]) == (trajectory.budget, str(trajectory))
    assert (found["chance"], found["sequences"], found["places"], found["seed"]) == (1 / 6, 50, 6, 3)
    for row in found["certainty"]:
        out = early_exit(model, batch.inputs, row["threshold"], row["trajectory"], beyond=True)
        logits = model.head(out.hidden)
        assert row["right"] == (logits[:, 1:, :6].argmax(-1) == labels).sum(0).tolist()
        assert row["passes"] == pytest.approx(out.loops[:, 1:].float().mean(0).tolist())
    assert {row["trajectory"] for row in found["certainty"]} == {"4", "5"}  # the full one, the longest asked for
    together = track_states(model, GROUP, ALL, sequences=50, seed=3)
    assert together["trajectories"] == found["trajectories"]


def test_thresholds_are_those_asked_for(model: LoopedLM) -> None:
    found = track_states(model, GROUP, ALL[:1], sequences=4, thresholds=[0.3])
    assert [row["threshold"] for row in found["certainty"]] == [0.3]


def test_the_longest_prefix_that_is_right() -> None:
    right = np.ones((20, 6), bool)
    right[0, 2] = right[:2, 4] = False  # 95 % of place 3, 90 % of place 5
    found = summarize_answers(right)
    assert found["right"] == [20, 20, 19, 20, 18, 20]
    assert found["tracked"] == 4
    assert found["mean_accuracy"] == pytest.approx(117 / 120)
    assert summarize_answers(np.ones((2, 6), bool))["tracked"] == 6


def test_what_is_wrong_is_one_sentence(model: LoopedLM) -> None:
    with pytest.raises(LoopformerError, match="--sequences must be 1 or more, got 0"):
        track_states(model, GROUP, ALL, sequences=0)
    broken = LoopedLM(model.config)
    torch.nn.init.constant_(broken.tokens.weight, float("nan"))
    with pytest.raises(RunFailed, match="is not a number"):
        track_states(broken, GROUP, ALL, sequences=2)


def test_only_some_models_have_a_group(tmp_path: object) -> None:
    assert trained_group(str(tmp_path)) is None


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
def test_a_heat_map_of_places_and_budgets(model: LoopedLM) -> None:
    found = track_states(model, GROUP, ALL, sequences=20)
    axis = state_figure(found).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["M = 1", "M = 2", "3-1", "M = 5"]
    assert np.asarray(axis.get_images()[0].get_array()).shape == (4, 6)
