"""A run on stories: stopping, cutting and moving change nothing, and its questions can be evaluated."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopformer.cli import app
from loopformer.config import load_run
from loopformer.data.stories import FOLDER, World
from loopformer.errors import LoopformerError
from loopformer.evaluation.stories import trained_world
from loopformer.inference.chat import was_tuned_to_answer
from loopformer.lm import load
from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch, plan

from .runs import Small, go_back, overriding, training_losses, weights


@pytest.fixture
def told() -> Small:
    base: dict[str, object] = {
        "model.width": 16,
        "model.heads": 2,
        "model.ffn": 32,
        "model.loops": 2,
        "training.steps": 4,
        "training.batch": 8,
        "training.device": "cpu",
        "training.threads": 1,
        "training.warmup": 2,
        "training.save_every": 2,
        "training.validate_every": 2,
        "training.validation_windows": 12,
        "training.log_every": 1,
    }
    return overriding(base)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The settings file of a world of one's own: shell games of two swaps at most."""
    path = tmp_path / "mine.yaml"
    path.write_text((FOLDER / "cups.yaml").read_text("utf-8").replace("hops: 6", "hops: 2"), "utf-8")
    return path


def test_a_run_resumes_to_the_same_bits_and_its_model_is_whole(tmp_path: Path, told: Small, mine: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    settings = told(data__stories=mine)
    assert launch("stories", settings, straight, quiet=True)["finished"]
    launch("stories", settings, stopped, quiet=True)
    go_back(stopped, 2)
    moved = stopped.rename(tmp_path / "moved")
    launch(None, [], moved, resume=True, quiet=True)
    assert weights(moved) == weights(straight)
    assert training_losses(moved, "any") == training_losses(straight, "any")
    assert trained_world(moved) == trained_world(checkpoints(moved)[-1]) == str(mine)
    assert was_tuned_to_answer(moved) is False
    lm = load(str(moved))
    text = "Mia swaps left and right. Where is the ball?"
    tokenizer = lm.need_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert lm.model.config.vocab == World.open("cups").vocab_size
    with pytest.raises(
        LoopformerError, match=r"The data in data\.stories=cups is not what this run was trained on"
    ):
        launch(None, ["data.stories=cups"], moved, resume=True, quiet=True)
    elsewhere = mine.rename(tmp_path / "elsewhere.yaml")
    assert launch(None, [f"data.stories={elsewhere}"], moved, resume=True, quiet=True)["finished"]
    elsewhere.rename(mine)
    mine.write_text(mine.read_text("utf-8").replace("laugh", "giggle"), "utf-8")
    with pytest.raises(LoopformerError, match=r"The data in .*mine\.yaml is not what this run was trained on"):
        launch(None, [f"data.stories={mine}"], moved, resume=True, quiet=True)


def test_micro_batches_see_the_same_stories(tmp_path: Path, told: Small, mine: Path) -> None:
    for name, rows in (("whole", 8), ("cut", 2)):
        settings = told(training__micro_batch=rows, data__stories=mine)
        launch("stories", settings, tmp_path / name, quiet=True)
    cut, whole = (training_losses(tmp_path / name, "any") for name in ("cut", "whole"))
    assert cut == pytest.approx(whole, abs=1e-3)  # Muon rounds its updates to bf16


def test_a_plan_knows_the_vocabulary(tmp_path: Path, told: Small) -> None:
    planned = plan("stories", told(), tmp_path / "run")
    assert planned["plan"]["epochs"] is None
    preset = load_run("stories")[0].model.vocab  # for estimates without the world
    assert planned["settings"]["model"]["vocab"] == preset == World.open("cups").vocab_size
    with pytest.raises(LoopformerError, match=r"model\.context is 40, too short for data\.stories=cups; set it to"):
        plan("stories", told(model__context=40), tmp_path / "run")


def test_the_questions_of_a_run_are_evaluated(tmp_path: Path, told: Small, mine: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "answers.json"
    launch("stories", told(data__stories=mine), run, quiet=True)
    command = ["eval", "stories", str(run), "--stories", "8", "--device", "cpu"]
    shown = CliRunner().invoke(app, [*command, "--generate", "2", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "one of 6 pairs that training keeps apart" in shown.output
    answers = json.loads(out.read_text("utf-8"))["stories"]
    assert (answers["hops"], answers["chance"], answers["kinds"]) == (
        [1, 2],
        pytest.approx([1 / 3] * 2),
        {"cup": 16},
    )
    assert [row["budget"] for row in answers["trajectories"]] == [1, 2]
    for row in answers["continued"]:  # a model that has not learned to tell stories
        assert 0 <= row["contradictions"] <= row["sentences"] - row["unreadable"]
    assert "2 stories continued" in shown.output
    shown = CliRunner().invoke(app, [*command, "--world", "cups", "--stories", "0"])
    assert "--stories must be 1 or more" in str(shown.exception or shown.output)
    shown = CliRunner().invoke(app, ["eval", "text", str(run)])
    assert "its own questions with loopformer eval stories" in str(shown.exception or shown.output)
    shown = CliRunner().invoke(app, ["eval", "stories"])
    assert "was not trained on stories; name a world with --world" in str(shown.exception or shown.output)
