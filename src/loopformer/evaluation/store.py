"""What is stored with a model under evaluation: finished results and the best schedules.

    store = Store.beside("runs/mine")
    key = {"weights": weights_hash(model), "text": sha256, "trajectory": "2-1-2-3"}
    value = store.get(key) or store.put(key, measure())    # plain JSON
    scheduled_trajectory("runs/mine", model, budget=4, schedule="best")

A finished result is one file in the folder `evaluation`, named by the hash of its key and written atomically. So an
interrupted or extended evaluation computes only what is missing. Everything that changes a number belongs in the
key, such as the hash of the weights. So results of other weights are never used.

The best schedules of a model are in `schedules.json` in the folder of the run or model, written by `save_best` in
schedules.py. An entry belongs to the weights it was measured with and is refused for others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from loopformer.errors import FileProblem, LoopformerError, nearest
from loopformer.files import read_json, write_json
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

JsonDict = dict[str, Any]
ReportProgress = Callable[[str, int, int | None], None]  # description, amount done, total or None

RESULTS_VERSION = 1  # raise it when a measurement or its fields change; results of other versions are ignored
SCHEDULES_FILE = "schedules.json"
SCHEDULES = ("uniform", "best")


class Store:
    """A folder of finished results; with None nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, source: str | Path) -> Store:
        """The store in the folder of a run or model, or in the user's cache where there is no writable folder.

        If the cache is not writable either, nothing is stored, so that the evaluation still runs.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "loopformer"
        parents = (Path(source), cache) if Path(source).is_dir() else (cache,)
        for folder in (parent / "evaluation" for parent in parents):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            if existing.is_dir() and os.access(existing, os.W_OK):
                return cls(folder)
        return cls(None)

    def get(self, key: Mapping[str, Any]) -> JsonDict | None:
        """The value stored under this key; None if there is none or its file is damaged."""
        path = self._path(key)
        with suppress(FileProblem, KeyError, TypeError, ValueError):
            if path is not None and path.is_file():
                return dict(read_json(path)["value"])
        return None

    def put(self, key: Mapping[str, Any], value: JsonDict) -> JsonDict:
        """Store a value and return it."""
        path = self._path(key)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"key": dict(key), "value": value})
        return value

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        text = json.dumps({"version": RESULTS_VERSION, **key}, sort_keys=True)
        return self.folder and self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def weights_hash(model: LoopedLM) -> str:
    """One hash of the model's settings and weights. The dtype counts: a cast changes the hash."""
    digest = hashlib.sha256(json.dumps(model.config.plain(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def device_and_dtype(model: LoopedLM) -> dict[str, str]:
    """The dtype and device type that a model runs in, as fields of a result."""
    return {"dtype": model.dtype_name, "device": model.device.type}


def scheduled_trajectory(
    source: str | Path, model: LoopedLM, budget: int, schedule: str, weights: str | None = None
) -> Trajectory:
    """The trajectory of a budget: the uniform one, or the best one that is saved with the model."""
    if schedule not in SCHEDULES:
        raise LoopformerError(f"There is no schedule {schedule!r}; {nearest(schedule, list(SCHEDULES))}")
    trajectory = model.resolve(budget)
    if schedule == "uniform" or count_schedules(model.config.loops, trajectory.budget) == 1:
        return trajectory
    entry = saved_schedules(source).get(str(trajectory.budget), {})
    if entry.get("weights") != (weights or weights_hash(model)):
        raise LoopformerError(
            f"No best schedule of budget {budget} is saved with {source} for its weights; find it with "
            f"loopformer search --model {source} --budget {trajectory.budget}."
        )
    return model.resolve(str(entry.get("trajectory")))


def saved_schedules(source: str | Path) -> dict[str, Any]:
    """The best schedules saved with a model, by budget."""
    path = Path(source) / SCHEDULES_FILE
    if not path.is_file():
        return {}
    saved = read_json(path)
    if not all(budget.isdigit() and isinstance(entry, dict) for budget, entry in saved.items()):
        raise FileProblem(f"{path} is damaged; delete it and run loopformer search again.")
    return saved


def count_schedules(loops: int, budget: int) -> int:
    """How many schedules of M steps lie on the training grid of L."""
    return math.comb(loops - 1, budget - 1)
