"""The numbers of a report in rows, one for each model and budget, and how numbers are written.

    rows = entries(found)                     # found: what collect.collect returned
    rows[0]["model"], rows[0]["budget"], rows[0]["flops_per_token"], rows[0]["ppl:demo"], rows[0]["average"]
    counted(3_244_032)                        # "3.244 M"

Of the paper's tasks the ten scores and their average are taken; of any others each task's own metric, and their
mean where all of them are shares of right answers. Errors are standard errors; that of a mean takes the tasks for
independent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopformer.evaluation.paper_tasks import PAPER
from loopformer.evaluation.store import Piece
from loopformer.training.validation import validation_budgets

_SHARES = ("acc", "exact_match")  # metrics that are shares of right answers
_SHORT = {"hellaswag": "HS", "lambada": "LB", "openbookqa": "OBQA", "social_iqa": "SIQA", "winogrande": "WG"}
# What guessing scores: one of so many choices; LAMBADA asks for a word.
CHANCE = {
    "copa": 1 / 2,
    "hellaswag": 1 / 4,
    "lambada": 0.0,
    "openbookqa": 1 / 4,
    "piqa": 1 / 2,
    "race": 1 / 4,
    "social_iqa": 1 / 3,
    "arc": 1 / 4,
    "sciq": 1 / 4,
    "winogrande": 1 / 2,
}
CHANCE_AVERAGE = sum(CHANCE.values()) / len(CHANCE)


class Benchmark(NamedTuple):
    """One column of scores."""

    key: str
    label: str  # short, for a heading
    name: str  # in full
    share: bool  # of right answers, shown in percent


def texts(found: Piece) -> list[str]:
    """The names of the texts that a perplexity was measured on."""
    return list(dict.fromkeys(row["text"] for model in found["models"] for row in model["perplexity"] or []))


def is_paper(found: Piece) -> bool:
    """Whether the scores are the paper's ten."""
    runs = _runs(found)
    return bool(runs) and all(run["paper"] for run in runs)


def benchmarks(found: Piece) -> list[Benchmark]:
    """The columns of scores."""
    if is_paper(found):
        return [Benchmark(key, _SHORT.get(key, one.label), one.label, True) for key, one in PAPER.items()]
    tasks = {name: task["metric"] for run in _runs(found)[:1] for name, task in run["tasks"].items()}
    return [
        Benchmark(name, name, f"{name} ({metric})", metric.startswith(_SHARES)) for name, metric in tasks.items()
    ]


def entries(found: Piece) -> list[dict[str, Any]]:
    """One row for each model and budget, the deepest budget last."""
    rows = []
    for model in found["models"]:
        by_budget: dict[int, dict[str, Any]] = {}
        for one in model["perplexity"] or []:
            row = by_budget.setdefault(one["budget"], _cost(model, one["budget"]))
            row |= {f"ppl:{one['text']}": one["perplexity"], f"bpb:{one['text']}": one["bits_per_byte"]}
        for run in model["tasks"] or []:
            row = by_budget.setdefault(run["budget"], _cost(model, run["budget"]))
            row |= _scores(run, benchmarks(found), is_paper(found))
        rows += [by_budget[budget] for budget in sorted(by_budget)] or [
            _cost(model, budget) for budget in validation_budgets(model["settings"]["loops"])
        ]
    return rows


def _cost(model: Piece, budget: int) -> dict[str, Any]:
    blocks = model["settings"]["blocks"]
    return {
        "label": f"{model['name']} ({model['shape']})",
        "model": model["name"],
        "shape": model["shape"],
        "budget": budget,
        "paper_cost": f"{blocks}x / {blocks * budget}x",
        "parameters": model["parameters"]["total"],
        "stack": model["parameters"]["stack"],
        "flops_per_token": model["flops_per_token"][str(budget)],
        "training_flops": model["training"] and model["training"]["flops"],
    }


def _scores(run: Piece, columns: Sequence[Benchmark], paper: bool) -> dict[str, Any]:
    """Scores and their standard errors, and their average."""
    tasks: Mapping[str, Piece] = run["tasks"]
    row: dict[str, Any] = {}
    for one in columns:
        members = PAPER[one.key].tasks if paper else (one.key,)
        row[f"score:{one.key}"] = _mean([tasks[name]["value"] for name in members])
        row[f"error:{one.key}"] = _mean_error([tasks[name]["stderr"] for name in members])
    if all(one.share for one in columns):
        row["average"] = _mean([row[f"score:{one.key}"] for one in columns])
        row["average_error"] = _mean_error([row[f"error:{one.key}"] for one in columns])
    return row


def _runs(found: Piece) -> list[Piece]:
    return [run for model in found["models"] for run in model["tasks"] or []]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _mean_error(errors: Sequence[float | None]) -> float | None:
    """The standard error of a mean of independent values."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None


def counted(value: float) -> str:
    """A count with four digits and its thousands as a letter."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def perplexity(value: float | None) -> str:
    """Two digits behind the point; fewer where they say nothing."""
    if value is None:
        return "not a number"
    return f"{value:.2f}" if value < 1000 else f"{value:.4g}"


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
