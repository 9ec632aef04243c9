"""Tokens per second of whole training runs: with steps as CUDA graphs and without, and by how rows are drawn.

    python benchmarks/training_steps.py DATA [--names elastic-row,…] [--rounds 3] [--out FILE]

DATA is a folder of `loopformer prepare`. Unlike in `loopformer bench train`, a step has everything that it has in a
run: the loader, clipping and the optimizer. A case is a short run of a preset. Its speed is the median of the log
records of its last half, when all entries of the objective are active and most passes are recorded. The cases take
turns, `--rounds` times, and `ratio` compares a case with the first case of the same model and round. The last line
is JSON.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from publish import publish

from loopformer.benchmark.machine import describe, free_memory, reset_peak
from loopformer.device import choose_device
from loopformer.training.launch import launch, plan
from loopformer.training.reporting import read_metrics

Settings = Mapping[str, Any]
LARGE: Settings = {  # 106 M parameters
    "model.width": 2048,
    "model.heads": 32,
    "model.ffn": 6144,
    "training.steps": 80,
}
EACH: Settings = {
    "training.steps": 300,
    "training.micro_batch": 128,
    "training.log_every": 10,
    "training.validate_every": 1000,
    "training.save_every": 1000,
}
CASES: dict[str, Settings] = {  # a model, what is drawn, and what runs it
    "elastic part": {"objective.draws": "part", "training.graphs": False},
    "elastic part graphs": {"objective.draws": "part", "training.graphs": True},
    "elastic row": {"objective.draws": "row", "training.graphs": False},
    "elastic row graphs": {"objective.draws": "row", "training.graphs": True},
    "elastic row compiled": {"objective.draws": "row", "training.graphs": False, "training.fused": False},
    "elastic row compiled graphs": {"objective.draws": "row", "training.graphs": True, "training.fused": False},
    "elastic row fp8 graphs": {"objective.draws": "row", "training.graphs": True, "training.dtype": "float8"},
    "large row": {**LARGE, "objective.draws": "row", "training.graphs": False},
    "large row graphs": {**LARGE, "objective.draws": "row", "training.graphs": True},
    "large row fp8 graphs": {
        **LARGE,
        "objective.draws": "row",
        "training.graphs": True,
        "training.dtype": "float8",
    },
}


def measure(name: str, data: Path, folder: Path) -> dict[str, float]:
    """Speed, MFU and peak memory of a run of this case."""
    settings = {**EACH, "data.path": data, **CASES[name]}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    device = choose_device("auto")
    free_memory(device)  # of the case before
    reset_peak(device)
    launch("elastic", overrides, folder / "run", quiet=True)
    records = [record for record in read_metrics(folder / "run") if record["kind"] == "train"]
    later = records[len(records) // 2 :]
    found = {key: statistics.median(record[key] for record in later) for key in ("tokens_per_second", "mfu")}
    return {**found, "peak_gib": max(record["peak_memory_gib"] for record in records)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--names", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.names.split(",")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(measure(name, args.data, Path(folder)))
            print(number, name, found[name][-1], file=sys.stderr, flush=True)
    rows = []
    for name, rounds in found.items():
        first = next(other for other in names if other.split()[0] == name.split()[0])
        pairs = zip(rounds, found[first], strict=True)
        ratio = statistics.median(one["tokens_per_second"] / two["tokens_per_second"] for one, two in pairs)
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        rows.append({"name": name, "settings": dict(CASES[name]), **medians, "ratio": ratio, "rounds": rounds})
    with tempfile.TemporaryDirectory() as folder:
        planned = plan("elastic", [f"data.path={args.data}", "objective.draws=row"], folder)
    report = {
        "command": f"python {' '.join(sys.argv)}",
        "seed": 0,
        **describe(choose_device("auto")),
        "training_gflops_per_token": planned["plan"]["training_gflops_per_token"],
        "rows": rows,
    }
    publish(report, args.out)


if __name__ == "__main__":
    main()
