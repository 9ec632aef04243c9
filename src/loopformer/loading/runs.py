"""A run folder: its checkpoints, and which of them can be trusted.

    runs/x/run.yaml, metrics.jsonl, checkpoints/step-00000100/…

Each checkpoint is also a model folder of ours, with checksums over all its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from loopformer.data.shards import sha256_of
from loopformer.errors import FileProblem
from loopformer.loading.tensors import read_json

FOLDER, CHECKSUMS, STATE, SETTINGS = "checkpoints", "checksums.json", "state.json", "run.yaml"


def is_run_folder(path: str | Path) -> bool:
    return (Path(path) / SETTINGS).is_file() and (Path(path) / FOLDER).is_dir()


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; unfinished ones are not among them."""
    found = (run / FOLDER).glob("step-*") if (run / FOLDER).is_dir() else []
    return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: None when every file is there and matches its checksum."""
    try:
        sums = read_json(checkpoint / CHECKSUMS)
    except FileProblem:
        return f"{CHECKSUMS} is missing or unreadable"
    for name, expected in sums.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if sha256_of(checkpoint / name) != expected:
            return f"{name} does not match its checksum"
    return None


def latest_good(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; damaged ones on the way are named."""
    for path in reversed(checkpoints(run)):
        wrong = problem(path)
        if wrong is None:
            return path
        say(f"The checkpoint {path} is damaged ({wrong}).")
    return None


def newest_model(run: str | Path, say: Callable[[str], None]) -> Path:
    """The model folder to use of a run: its newest whole checkpoint."""
    notes: list[str] = []
    found = latest_good(Path(run), notes.append)
    if found is None:
        raise FileProblem(
            f"No checkpoint of {run} is whole: {' '.join(notes)}"
            if notes
            else f"The run {run} has no checkpoint yet; let it train to its first one."
        )
    for note in notes:
        say(note)
    return found
