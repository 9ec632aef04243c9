"""What stays in the folder of checkpoints after a crash, and checkpoints that training never wrote."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopformer.errors import FileProblem
from loopformer.files import sha256_of
from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch

from .runs import Small


def test_the_rest_of_a_removed_checkpoint_is_deleted_at_the_next_start(small: Small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("demo", small(), run, quiet=True)
    folder = run / "checkpoints"
    shutil.copytree(checkpoints(run)[0], folder / "step-00000001.old.part")
    for name in ("step-00000001.part", "step-mine.old.part", "notes.old.part", "step-00000001.damaged"):
        (folder / name).mkdir()
    before = {path.name for path in folder.iterdir()}
    launch("demo", small(), run, resume=True, quiet=True)  # already finished: it saves and rotates nothing
    assert {path.name for path in folder.iterdir()} == before - {"step-00000001.old.part"}


def reseal(checkpoint: Path) -> None:
    """Make the checksums match the files again."""
    sums = json.loads((checkpoint / "checksums.json").read_text())
    (checkpoint / "checksums.json").write_text(json.dumps({name: sha256_of(checkpoint / name) for name in sums}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("step", None, "step must be a whole number, got None"),
        ("step", 4, "step is 4"),
        ("step", 10**400, "step is 10+"),
        ("updates", "six", "updates must be a whole number, got 'six'"),
        ("updates", -1, "updates must be 0 or more, got -1"),
        ("tokens", True, "tokens must be a whole number, got True"),
        ("best_loss", math.nan, "best_loss must be a finite number or null, got nan"),
        ("micro_batch", 0, "micro_batch must be 1 or more, got 0"),
        ("micro_batch", 5, "micro_batch is 5, above training.batch"),
        ("threads", 10**9, "threads must be 1 or more and at most 65,536, got 1000000000"),
        ("data", None, "data must be text, got None"),
        ("rng", "random", "rng must be a list, got 'random'"),
        ("rng", [300] * 5056, "has no state of the generator as rng"),
        ("rng", [1], "has no state of the generator as rng"),
        ("rng", [10**30], "has no state of the generator as rng"),
        ("mood", 1, "mood; valid are step"),
    ],
)
def test_a_sealed_state_that_training_never_wrote_is_one_sentence(
    key: str, value: object, said: str, small: Small, tmp_path: Path
) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    (checkpoint,) = checkpoints(tmp_path / "run")
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {key: value}))
    reseal(checkpoint)
    with pytest.raises(
        FileProblem, match=rf"state\.json.*{said}.*; move {checkpoint} away, so that --resume"
    ) as error:
        launch(None, ["training.steps=3"], tmp_path / "run", resume=True, quiet=True)
    assert "\n" not in str(error.value)


def test_a_sealed_checkpoint_of_another_model_or_optimizer_is_one_sentence(small: Small, tmp_path: Path) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    (checkpoint,) = checkpoints(tmp_path / "run")
    moments = checkpoint / "optimizer" / "optimizer.safetensors"
    tensors = load_file(moments)
    save_file({**tensors, min(tensors): torch.zeros(3)}, moments)
    reseal(checkpoint)
    with pytest.raises(FileProblem, match=r"optimizer is not the state of this run's optimizer \(Size mismatch"):
        launch(None, ["training.steps=3"], tmp_path / "run", resume=True, quiet=True)
    settings = tmp_path / "run" / "run.yaml"
    settings.write_text(settings.read_text().replace("heads: 2", "heads: 4"))
    with pytest.raises(FileProblem, match=rf"{settings} has other model settings than {checkpoint}/run\.yaml"):
        launch(None, ["training.steps=3"], tmp_path / "run", resume=True, quiet=True)
