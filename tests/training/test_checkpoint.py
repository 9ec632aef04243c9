"""What stays in the folder of checkpoints after a crash."""

import shutil
from pathlib import Path

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
