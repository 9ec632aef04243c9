"""Answers to stories: counts by hops are those of the model itself."""

import numpy as np
import pytest
import torch
from inference.models import spread

from loopformer import LoopedLM, ModelConfig
from loopformer.data.loader import IGNORE_INDEX
from loopformer.data.states import TEST
from loopformer.data.stories import HELD_OUT, StoryWindows, World
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.stories import answer_stories, story_figure, trained_world
from loopformer.lm import LM
from loopformer.plots import has_matplotlib
from loopformer.trajectory import Trajectory

ALL = [Trajectory.uniform(1), Trajectory.uniform(2), Trajectory.parse("3-1")]


@pytest.fixture(scope="module")
def world() -> World:
    return World.open("cups")


@pytest.fixture(scope="module")
def model(world: World) -> LoopedLM:
    shape = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=160, vocab=world.vocab_size)
    return spread(shape, std=0.5)


def test_counts_are_those_of_the_model_itself(model: LoopedLM, world: World) -> None:
    # A model that only knows the words for cups is right by chance, not never.
    for token in set(range(world.vocab_size)) - {world.book.vocab[word] for word in world.words["cup"]}:
        torch.nn.init.zeros_(model.tokens.weight[token])
    found = answer_stories(LM(model, world.tokenizer), world, ALL, stories=20, seed=3, batch_tokens=1000)
    for stream, name in ((TEST, ""), (HELD_OUT, "held_out_")):
        batch = StoryWindows(world, 160, 20 * world.hops, seed=3, stream=stream).batch(0, 999)
        is_answer = (batch.targets != IGNORE_INDEX) & (batch.targets != world.tokenizer.eot)
        for row, trajectory in zip(found["trajectories"], ALL, strict=True):
            logits = model(batch.inputs, trajectory).logits
            assert logits is not None
            right = (
                (logits[is_answer][:, : world.vocab_size].argmax(-1) == batch.targets[is_answer])
                .view(20, world.hops)
                .sum(0)
            )
            assert row[f"{name}right"] == right.tolist()
            assert row[f"{name}accuracy"] == pytest.approx((right / 20).tolist())
            assert (row["budget"], row["trajectory"]) == (trajectory.budget, str(trajectory))
    assert found["chance"] == pytest.approx([1 / 3] * 6)
    assert (found["hops"], found["stories"], found["kinds"]) == ([1, 2, 3, 4, 5, 6], 20, {"cup": 120})
    assert sum(found["trajectories"][0]["right"]) == found["trajectories"][0]["right_by_kind"]["cup"]


def test_what_is_wrong_is_one_sentence(model: LoopedLM, world: World, tmp_path: object) -> None:
    with pytest.raises(LoopformerError, match="--stories must be 1 or more, got 0"):
        answer_stories(LM(model, world.tokenizer), world, ALL, stories=0)
    broken = LoopedLM(model.config)
    torch.nn.init.constant_(broken.tokens.weight, float("nan"))
    with pytest.raises(RunFailed, match="is not a number"):
        answer_stories(LM(broken, world.tokenizer), world, ALL, stories=2)
    assert trained_world(str(tmp_path)) is None


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
def test_a_heat_map_of_hops_and_budgets(model: LoopedLM, world: World) -> None:
    axis = story_figure(answer_stories(LM(model, world.tokenizer), world, ALL, stories=5)).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["chance", "M = 1", "M = 2", "3-1"]
    assert np.asarray(axis.get_images()[0].get_array()).shape == (4, 6)
