"""The best schedules of a model, saved with it: `schedules.json` in the folder of the run or model.

    save_best("runs/mine", found)                                    # what schedules.search returned
    scheduled("runs/mine", model, budget=4, schedule="best")         # a Trajectory

    {"4": {"trajectory": "4-2-1-1", "perplexity": 20.1, "by": "perplexity", "text": …, "weights": …}, …}

An entry belongs to the weights it was found with and is refused for others.
"""

import json
import os
from pathlib import Path
from typing import Any

from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.evaluation.schedules import count_schedules
from loopformer.evaluation.store import Piece, weights_hash
from loopformer.files import read_json, write_atomic
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

FILE = "schedules.json"
SCHEDULES = ("uniform", "best")


def can_save(source: str | Path) -> bool:
    """Whether the source is a folder that schedules can be saved in."""
    return Path(source).is_dir() and os.access(source, os.W_OK)


def save_best(source: str | Path, found: Piece) -> Path:
    """Write the best schedule of a search; those of other budgets stay."""
    path = Path(source) / FILE
    saved = _entries(path)
    text = found["text"] and {name: found["text"][name] for name in ("text", "sha256", "tokens")}
    numbers = {name: found["best"][name] for name in ("perplexity", "accuracy") if name in found["best"]}
    facts = {name: found[name] for name in ("by", "method", "measured", "weights")}
    facts |= {"text": text, "tasks": found["tasks"] and found["tasks"]["names"]}
    saved[str(found["budget"])] = {"trajectory": found["best"]["trajectory"], **numbers, **facts}
    ordered = dict(sorted(saved.items(), key=lambda pair: int(pair[0])))
    write_atomic(path, (json.dumps(ordered, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def scheduled(
    source: str | Path, model: LoopedLM, budget: int, schedule: str, weights: str | None = None
) -> Trajectory:
    """The trajectory of a budget: uniform, or the best that is saved."""
    require(schedule in SCHEDULES, f"There is no schedule {schedule!r}; {nearest(schedule, list(SCHEDULES))}")
    return model.route(budget) if schedule == "uniform" else best_schedule(source, model, budget, weights)


def best_schedule(source: str | Path, model: LoopedLM, budget: int, weights: str | None = None) -> Trajectory:
    """The saved schedule of a budget; where there is only one schedule, that one."""
    route = model.route(budget)
    if count_schedules(model.config.loops, route.budget) == 1:
        return route
    entry = _entries(Path(source) / FILE).get(str(route.budget))
    command = f"loopformer search --model {source} --budget {route.budget}"
    if entry is None:
        raise LoopformerError(
            f"No best schedule of budget {budget} is saved with {source}; find it with {command}."
        )
    if entry.get("weights") != (weights or weights_hash(model)):
        raise LoopformerError(
            f"The best schedule of budget {budget} was found for other weights of {source}; find it again with "
            f"{command}."
        )
    return model.route(str(entry.get("trajectory")))


def _entries(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    saved = read_json(path)
    if not all(budget.isdigit() and isinstance(entry, dict) for budget, entry in saved.items()):
        raise FileProblem(f"{path} is damaged; delete it and run loopformer search again.")
    return saved
