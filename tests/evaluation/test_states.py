"""State tracking: counts of answers made by hand, what certainty costs, and a model's own passes."""

import numpy as np
import pytest
import torch

from loopformer import LoopedLM, ModelConfig
from loopformer.data.states import TEST, Group, StateWindows
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.states import by_certainty, own_group, state_figure, track_states
from loopformer.plots import available
from loopformer.trajectory import Trajectory

GROUP = Group.named("S3")
ALL = [Trajectory.uniform(1), Trajectory.uniform(2), Trajectory.parse("3-1"), Trajectory.uniform(5)]


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    torch.manual_seed(0)
    model = LoopedLM(ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=7, vocab=7))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


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
    assert [row["after"] for row in found["exits"]] == [1, 2, 3, 4]
    full = model(batch.inputs, None)
    assert found["exits"][-1]["right"] == (full.logits[:, 1:, :6].argmax(-1) == labels).sum(0).tolist()
    assert (found["chance"], found["sequences"], found["places"], found["seed"]) == (1 / 6, 50, 6, 3)
    assert [row["depth"] for row in found["certainty"]["escalation"]["fixed"]] == [1, 2]  # within L, uniform
    assert [row["depth"] for row in found["certainty"]["exit"]["fixed"]] == [1, 2, 3, 4]
    together = track_states(model, GROUP, ALL, sequences=50, seed=3)
    assert together["trajectories"] == found["trajectories"]


def test_a_perfect_model_tracks_everything() -> None:
    class Perfect(LoopedLM):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*hidden.shape[:2], 64)
            labels = torch.from_numpy(GROUP.products(np.asarray(self.ids[:, 1:])))
            labels[:, 4] = (labels[:, 4] + 1) % 6  # but for one place
            return logits.scatter(-1, labels[..., None], 9.0)

        def embed(self, ids: torch.Tensor, documents: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
            self.ids = ids
            return super().embed(ids, documents)

    model = Perfect(ModelConfig(blocks=1, loops=2, width=16, heads=2, ffn=32, context=7, vocab=7))
    found = track_states(model, GROUP, [Trajectory.uniform(2)], sequences=9)
    (row,) = found["trajectories"]
    assert row["right"] == [9, 9, 9, 9, 0, 9]
    assert row["tracked"] == 4
    assert row["mean_accuracy"] == pytest.approx(5 / 6)
    assert [one["right"] for one in found["exits"]] == [[9, 9, 9, 9, 0, 9]] * 2
    assert found["certainty"]["exit"]["by_certainty"][0]["mean_depth"] == 1


def test_certainty_and_all_that_it_costs() -> None:
    # Two words of three places at three depths; chosen at 0.8: [0, 1, 0] and [2, 0, 2].
    certainty = np.array(
        [
            [[0.9, 0.5, 0.9], [0.3, 0.9, 0.1]],
            [[0.1, 0.9, 0.9], [0.8, 0.9, 0.2]],
            [[0.1, 0.1, 0.1], [0.1, 0.1, 0.3]],
        ],
        dtype=np.float32,
    )
    right = np.zeros((3, 2, 3), bool)
    right[0, 0, 0] = right[1, 0, 1] = right[2, 1, 2] = right[0, 1, 1] = True
    right[1, 0, 0] = right[0, 1, 0] = True  # at depths that are not chosen
    (row,) = by_certainty(right, certainty, depths=[1, 2, 4], passes=[1, 3, 7], thresholds=[0.8])
    assert row["chosen"] == [3, 1, 2]
    assert row["accuracy"] == pytest.approx(4 / 6)
    assert row["mean_depth"] == pytest.approx((1 + 2 + 1 + 4 + 1 + 4) / 6)
    assert row["mean_passes"] == pytest.approx((1 + 3 + 1 + 7 + 1 + 7) / 6)
    assert row["mean_passes_filled"] == pytest.approx((3 + 3 + 1 + 7 + 7 + 7) / 6)
    assert row["accuracy_by_place"] == [0.5, 1.0, 0.5]
    assert row["depth_by_place"] == [2.5, 1.5, 2.5]
    everything, nothing = by_certainty(right, certainty, [1, 2, 4], [1, 3, 7], [0.0, 1.0])
    assert (everything["mean_passes"], everything["chosen"]) == (1, [6, 0, 0])
    assert (nothing["mean_passes"], nothing["mean_depth"], nothing["chosen"]) == (7, 4, [0, 0, 6])


def test_what_is_wrong_is_one_sentence(model: LoopedLM) -> None:
    with pytest.raises(LoopformerError, match="The model knows 7 tokens, A5 has 60 elements and the end token"):
        track_states(model, Group.named("A5"), ALL, sequences=2)
    with pytest.raises(LoopformerError, match="--sequences must be 1 or more, got 0"):
        track_states(model, GROUP, ALL, sequences=0)
    broken = LoopedLM(model.config)
    torch.nn.init.constant_(broken.tokens.weight, float("nan"))
    with pytest.raises(RunFailed, match="is not a number"):
        track_states(broken, GROUP, ALL, sequences=2)


def test_only_some_models_have_a_group(tmp_path: object) -> None:
    assert own_group(str(tmp_path)) is None


@pytest.mark.skipif(not available(), reason="needs matplotlib")
def test_a_heat_map_of_places_and_budgets(model: LoopedLM) -> None:
    found = track_states(model, GROUP, ALL, sequences=20)
    axis = state_figure(found).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["M = 1", "M = 2", "3-1", "M = 5"]
    assert np.asarray(axis.get_images()[0].get_array()).shape == (4, 6)
