"""A model under evaluation, and what is stored with it: finished results and the best schedules.

    loaded = LoadedModel.open("runs/mine")
    loaded.trajectories("1,2,4", ["4-2-1-1"], schedule="best")
    key = {"weights": loaded.weights, "text": sha256, "trajectory": "4-2-1-1"}
    value = loaded.store.get(key) or loaded.store.put(key, measure())    # plain JSON

A finished result is one file in the folder `evaluation`, named by the hash of its key and written atomically. So an
interrupted or extended evaluation computes only what is missing. Everything that changes a number belongs in the
key. The hash of the weights does, so results of other weights are never found.

The best schedules of a model are in `schedules.json` in the folder of the run or model, written by `save_best` in
schedules.py. An entry belongs to the weights it was found with and is refused for others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loopformer.config import parse_counts
from loopformer.config.run import validation_budgets
from loopformer.device import choose_device, dtype_of
from loopformer.errors import FileProblem, LoopformerError, nearest
from loopformer.files import read_json, write_json
from loopformer.lm import LM, load
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

JsonDict = dict[str, Any]
ReportProgress = Callable[[str, int, int | None], None]  # what is done, how much, of how much (None: unknown)

RESULTS_VERSION = 1  # of what results hold and how they are measured; a new version finds none of the old ones
SCHEDULES_FILE = "schedules.json"
SCHEDULES = ("uniform", "best")


class Store:
    """A folder of finished results; with None nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, source: str | Path) -> Store:
        """The store in the folder of a run or model, or in the user's cache where there is no writable folder.

        Where the cache cannot be written either, nothing is stored: numbers are worth more than their copies.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "loopformer"
        parents = (Path(source), cache) if Path(source).is_dir() else (cache,)
        for folder in (parent / "evaluation" for parent in parents):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            if existing.is_dir() and os.access(existing, os.W_OK):
                return cls(folder)
        return cls(None)

    def get(self, key: Mapping[str, Any]) -> JsonDict | None:
        """The value stored under this key; a damaged file counts as none."""
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            piece = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None
        value = piece.get("value") if isinstance(piece, dict) else None
        return value if isinstance(value, dict) else None

    def put(self, key: Mapping[str, Any], value: JsonDict) -> JsonDict:
        """Store a value and return it."""
        path = self._path(key)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"key": dict(key), "value": value})
        return value

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        name = hashlib.sha256(json.dumps({"version": RESULTS_VERSION, **key}, sort_keys=True).encode()).hexdigest()[
            :32
        ]
        return self.folder and self.folder / f"{name}.json"


def weights_hash(model: LoopedLM) -> str:
    """The hash of what the model computes: its settings, and its weights in their dtype."""
    digest = hashlib.sha256(json.dumps(model.config.plain(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def device_and_dtype(model: LoopedLM) -> dict[str, str]:
    """The dtype and the kind of device a model runs in, as results state them."""
    return {"dtype": model.dtype_name, "device": model.device.type}


@dataclass(frozen=True)
class LoadedModel:
    """A model under evaluation, the hash of its weights, and the store of its finished results."""

    source: str
    lm: LM
    weights: str  # as loaded: casting to another dtype does not change it
    store: Store

    @classmethod
    def open(cls, source: str, device: str = "auto", dtype: str = "float32") -> LoadedModel:
        """Load a run, a model folder or published weights onto a device."""
        number_type, chosen = dtype_of(dtype), choose_device(device)  # before the weights are loaded
        lm = load(source)
        weights = weights_hash(lm.model)  # before the cast, so that all dtypes share one hash
        return cls(source, lm.to(chosen, number_type), weights, Store.beside(source))

    @property
    def model(self) -> LoopedLM:
        return self.lm.model

    @property
    def identity(self) -> JsonDict:
        """What answers depend on besides the requests and the trajectory."""
        return {"weights": self.weights, "tokenizer": self.lm.need_tokenizer().hash, **device_and_dtype(self.model)}

    def trajectories(
        self, budgets: str | None = None, trajectories: Sequence[str] = (), schedule: str = "uniform"
    ) -> list[Trajectory]:
        """Budgets such as "1,2,4" at uniform or best schedules, and trajectories; 1, L/4, L/2 and L by default."""
        numbers = [] if trajectories else validation_budgets(self.model.config.loops)
        if budgets is not None:
            numbers = parse_counts(budgets, "--budgets")
        by_budget = [
            scheduled_trajectory(self.source, self.model, number, schedule, self.weights) for number in numbers
        ]
        return list(dict.fromkeys([*by_budget, *map(self.model.resolve, trajectories)]))


def scheduled_trajectory(
    source: str | Path, model: LoopedLM, budget: int, schedule: str, weights: str | None = None
) -> Trajectory:
    """The trajectory of a budget: the uniform one, or the best one that is saved with the model."""
    if schedule not in SCHEDULES:
        raise LoopformerError(f"There is no schedule {schedule!r}; {nearest(schedule, list(SCHEDULES))}")
    trajectory = model.resolve(budget)
    if schedule == "uniform" or count_schedules(model.config.loops, trajectory.budget) == 1:
        return trajectory
    entry = saved_schedules(source).get(str(trajectory.budget))
    command = f"loopformer search --model {source} --budget {trajectory.budget}"
    if entry is None:
        raise LoopformerError(
            f"No best schedule of budget {budget} is saved with {source}; find it with {command}."
        )
    if entry.get("weights") != (weights or weights_hash(model)):
        raise LoopformerError(
            f"The best schedule of budget {budget} was found for other weights of {source}; find it again with "
            f"{command}."
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
