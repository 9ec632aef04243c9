"""A run on words over a group: nothing on disk is needed, and stopping, cutting and moving change nothing."""

from pathlib import Path

import pytest

from loopformer.errors import LoopformerError
from loopformer.evaluation.states import trained_group
from loopformer.lm import load
from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch, plan

from .runs import Small, go_back, overriding, training_losses, weights


@pytest.fixture
def tracked() -> Small:
    base: dict[str, object] = {
        "model.width": 16,
        "model.heads": 2,
        "model.ffn": 32,
        "model.loops": 3,
        "model.context": 6,
        "training.steps": 6,
        "training.batch": 8,
        "training.device": "cpu",
        "training.threads": 1,
        "training.warmup": 2,
        "training.save_every": 2,
        "training.validate_every": 3,
        "training.validation_windows": 12,
        "training.log_every": 1,
    }
    return overriding(base)


def test_a_run_resumes_to_the_same_bits_and_its_model_is_whole(tmp_path: Path, tracked: Small) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert launch("states", tracked(), straight, quiet=True)["finished"]
    launch("states", tracked(), stopped, quiet=True)
    go_back(stopped, 2)
    moved = stopped.rename(tmp_path / "moved")
    launch(None, [], moved, resume=True, quiet=True)
    assert weights(moved) == weights(straight)
    assert training_losses(moved, "any") == training_losses(straight, "any")
    assert trained_group(moved) == trained_group(checkpoints(moved)[-1]) == "S3"
    lm = load(str(moved))
    assert lm.need_tokenizer().encode("(12) ()") == [2, 0]
    assert lm.model.config.vocab == 7
    assert lm.score(["(12) (13)"])
    with pytest.raises(LoopformerError, match=r"started with data\.states = S3, not S5"):
        launch("states", tracked(data__states="S5"), moved, resume=True, quiet=True)


def test_micro_batches_see_the_same_words(tmp_path: Path, tracked: Small) -> None:
    for name, rows in (("whole", 8), ("cut", 2)):
        launch("states", tracked(training__micro_batch=rows), tmp_path / name, quiet=True)
    cut, whole = (training_losses(tmp_path / name, "any") for name in ("cut", "whole"))
    assert cut == pytest.approx(whole, abs=1e-3)  # Muon rounds its updates to bf16


def test_a_run_starts_from_a_model_of_its_own_group(tmp_path: Path, tracked: Small) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    launch("states", tracked(), first, quiet=True)
    launch("states", [*tracked(training__seed=1), f"init_from={first}"], second, quiet=True)
    assert weights(second) != weights(first)
    with pytest.raises(LoopformerError, match=r"start from a model that was trained with data\.states=A5"):
        launch("states", [*tracked(data__states="A5"), f"init_from={first}"], tmp_path / "third", quiet=True)


def test_a_plan_needs_no_data_and_counts_no_epochs(tmp_path: Path, tracked: Small) -> None:
    planned = plan("states", tracked(data__states="A5"), tmp_path / "run")
    assert planned["settings"]["model"]["vocab"] == 61
    assert planned["plan"]["epochs"] is None
    assert planned["plan"]["tokens"] == 6 * 8 * 6
