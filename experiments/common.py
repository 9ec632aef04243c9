"""A queue of runs on one machine, some at a time, each in a process of its own; what is done already is left out.

work_through({"a": ["python", "train.py", "a"], …}, Path("runs"), workers=4)     # logs in runs/a.log, …
facts = trained("states", {"training.seed": 1}, [], Path("runs/a"), commit)      # what such a command begins with

A suite has two verbs: `run` works through its queue, and calls itself as `model` for each run in it.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch

from loopformer.training.launch import launch, plan

RAW = "raw.json"  # what a run that is done leaves in its folder


def add_run_options(parser: argparse.ArgumentParser, workers: int) -> None:
    """The options that `run` and `model` have in every suite."""
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of `loopformer train`, over all else"
    )


def passed_on(asked: argparse.Namespace) -> list[str]:
    """Those of them that `run` gives to each `model`."""
    changes = [word for change in asked.set for word in ("--set", change)]
    return ["--runs", str(asked.runs), "--commit", asked.commit, *changes]


def work_through(commands: Mapping[str, Sequence[str]], runs: Path, workers: int) -> None:
    """Run each command that has not left its `raw.json` yet; SIGTERM stops all of them in order."""
    runs.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for process in running.values():
            process.terminate()

    def work(name: str) -> None:
        if stopped or (runs / name / RAW).exists():
            return
        with (runs / f"{name}.log").open("ab") as log:
            running[name] = subprocess.Popen(commands[name], stdout=log, stderr=subprocess.STDOUT)
            code = running[name].wait()
        print(f"{name}: {'done' if code == 0 else f'ended with {code}'}", flush=True)

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, commands))


def trained(
    preset: str, settings: Mapping[str, Any], trial: Sequence[str], run: Path, commit: str
) -> dict[str, Any]:
    """Train a run to its end, or go on with it, and say what it was: command, commit, plan, settings and curve."""
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *trial]
    if not launch(preset, overrides, run, resume=True)["finished"]:
        sys.exit(128 + signal.SIGTERM)
    return {
        "preset": preset,
        "command": " ".join(["loopformer", "train", preset, *map(shlex.quote, overrides)]),
        "commit": commit,
        "torch": torch.__version__,
        **plan(preset, overrides, run, resume=True),
        "training": [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()],
    }


def collected(runs: Path, out: Path) -> list[dict[str, Any]]:
    """Keep the results of every run that is done, one file each; all that are there, those kept before included."""
    out.mkdir(parents=True, exist_ok=True)
    for raw in sorted(runs.glob(f"*/{RAW}")):
        (out / f"{raw.parent.name}.json").write_text(raw.read_text("utf-8") + "\n", encoding="utf-8")
    return [json.loads(file.read_text("utf-8")) for file in sorted(out.glob("*.json"))]


def spread(values: Sequence[float]) -> str:
    """The mean of the seeds, and from the lowest to the highest."""
    if not values:
        return ""
    return f"{fmean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def rounded(value: Any) -> str:
    """JSON with six digits of each number, which is more than any of them is worth."""
    return json.dumps(
        json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}")), ensure_ascii=False
    )
