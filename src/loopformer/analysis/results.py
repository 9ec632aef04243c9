"""Results on disk: analysis.json (everything), metrics.csv and cka.csv (one number per line, for other tools).

write_results(results, Path("analysis"))
results = read_results(Path("analysis/analysis.json"))
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from loopformer.analysis.dynamics import DEFINITIONS, Dynamics
from loopformer.errors import FileProblem
from loopformer.files import write_atomic

FILE, METRICS, CKA = "analysis.json", "metrics.csv", "cka.csv"


def to_json(results: Sequence[Dynamics]) -> dict[str, Any]:
    """Everything as plain data, with what each number means."""
    return {
        "torch": torch.__version__,
        "definitions": DEFINITIONS,
        "results": [result.to_json() for result in results],
    }


def write_results(results: Sequence[Dynamics], folder: Path) -> list[Path]:
    """Write all three files, each whole or not at all."""
    metrics = (
        (one.model, one.shape, one.trajectory, one.states, loop, depth, name, mean, std)
        for one in results
        for name, series in one.metrics.items()
        for loop, (depth, mean, std) in enumerate(zip(one.depth, series.mean, series.std, strict=True))
    )
    similar = (
        (one.model, one.shape, one.trajectory, one.states, i, j, plain, debiased)
        for one in results
        for i, (row, debiased_row) in enumerate(zip(one.cka, one.cka_debiased, strict=True))
        for j, (plain, debiased) in enumerate(zip(row, debiased_row, strict=True))
    )
    model = ("model", "shape", "trajectory", "states")
    content = {
        FILE: json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n",
        METRICS: _table((*model, "loop", "depth", "metric", "mean", "std"), metrics),
        CKA: _table((*model, "loop_i", "loop_j", "cka", "cka_debiased"), similar),
    }
    for name, text in content.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in content]


def read_results(path: Path) -> list[Dynamics]:
    """The results of an analysis.json."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return [Dynamics.from_json(one) for one in plain["results"]]
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileProblem(f"{path} is no result of loopformer analyze; make it again.") from error


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """CSV; an empty cell is a value that has no meaning."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
