"""What the experiments share: a queue of runs, text from a corpus, and the loss on held-out windows.

The verb `run` works through the queue of an experiment, `--workers` runs at a time, each in a process of its own,
which is the same command with `--single NAME`. A finished run is skipped, and one that was stopped resumes from its
last checkpoint. SIGTERM stops all runs in order. The log of a run is RUNS/NAME.log.
"""

import argparse
import io
import json
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch

from loopformer.data.loader import Windows
from loopformer.data.shards import TokenData
from loopformer.loading import find_model
from loopformer.model import LoopedLM
from loopformer.scoring import token_logprobs
from loopformer.training.launch import launch, plan
from loopformer.trajectory import Trajectory

RAW = "raw.json"  # written into the folder of a finished run
TEXT, DATA = "text", "data"  # folders that `prepare` writes: the chosen text, and its tokens
WINDOWS = 512  # held-out windows, as long as the context
EVAL_BATCH = 64  # windows
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# A queue of runs


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that `run` has in every experiment."""
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of `loopformer train`, over all else"
    )
    parser.add_argument("--single", metavar="NAME", help="train this run in this process")


def run_queue(commands: Mapping[str, Sequence[str]], runs: Path, workers: int) -> None:
    """Run every command that has not left its `raw.json` yet."""
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
        print(f"{name}: {'done' if code == 0 else f'exit code {code}'}", flush=True)

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, commands))


def suite_parser(
    description: str | None, suites: Collection[str], results: Path
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of an experiment with suites of named runs, and that of its verb `run`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    add_run_options(run)
    run.add_argument("suite", choices=list(suites))
    run.add_argument("names", nargs="*", metavar="RUN", help="all of the suite by default")
    run.add_argument("--seeds", type=int, nargs="+", help="those of the suite by default")
    collecting = verbs.add_parser("collect")
    collecting.add_argument("--runs", type=Path, required=True)
    collecting.add_argument("--out", type=Path, default=results)
    return parser, run


def run_suite(
    args: argparse.Namespace,
    names: Collection[str],
    seeds: Sequence[int],
    run_name: str,
    train_and_measure: Callable[[argparse.Namespace, str, int, Path], None],
) -> None:
    """Run the names and seeds that were asked for. `run_name` is a format of suite, name and seed."""
    chosen = [args.single] if args.single else args.names or list(names)
    if unknown := set(chosen) - set(names):
        sys.exit(f"{args.suite} has no {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    runs = {
        run_name.format(suite=args.suite, name=name, seed=seed): (name, seed)
        for seed in args.seeds or seeds
        for name in chosen
    }
    if args.single:
        ((folder, (name, seed)),) = runs.items()
        train_and_measure(args, name, seed, args.runs / folder)
        return
    # Of an option that is given twice, argparse takes the last.
    commands = {
        folder: [sys.executable, *sys.argv, "--single", name, "--seeds", str(seed)]
        for folder, (name, seed) in runs.items()
    }
    run_queue(commands, args.runs, args.workers)


def train_run(
    preset: str, settings: Mapping[str, Any], changes: Sequence[str], run: Path, commit: str
) -> dict[str, Any]:
    """Train or resume a run to its end; return its command, commit, plan, settings and training curve."""
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *changes]
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


def collect_results(runs: Path, out: Path) -> list[dict[str, Any]]:
    """Copy the results of every finished run into `out`, and read all that are there."""
    out.mkdir(parents=True, exist_ok=True)
    for raw in sorted(runs.glob(f"*/{RAW}")):
        (out / f"{raw.parent.name}.json").write_text(raw.read_text("utf-8") + "\n", encoding="utf-8")
    return [json.loads(file.read_text("utf-8")) for file in sorted(out.glob("*.json"))]


def mean_and_range(values: Sequence[float]) -> str:
    """A table cell: the mean over the seeds, with the lowest and the highest."""
    if not values:
        return ""
    return f"{fmean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def to_json(value: Any) -> str:
    """JSON with six digits of each number, which is more than any of them is worth."""
    return json.dumps(
        json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}")), ensure_ascii=False
    )


# Text from a corpus


def read_zst_lines(path: Path) -> Iterator[str]:
    """The lines of a .zst file."""
    import zstandard  # not installed where the models are trained

    with path.open("rb") as file:
        unpacked = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        yield from io.TextIOWrapper(unpacked, encoding="utf-8", newline="")


def write_texts(corpus: Path, out: Path, sources: Mapping[str, int]) -> None:
    """Write the first megabytes of each source as JSON lines, whole documents only."""
    out.mkdir(parents=True, exist_ok=True)
    for name, megabytes in sources.items():
        bytes_left = megabytes * 1_000_000
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for record in map(json.loads, read_zst_lines(corpus / f"{name}.jsonl.zst")):
                size = len(record["text"].encode())
                if size <= bytes_left and not record.get("sciq_overlap"):
                    file.write(json.dumps({"text": record["text"]}, ensure_ascii=False) + "\n")
                    bytes_left -= size


# The loss on held-out windows


def measure_windows(run: Path, data: Path) -> dict[str, Any]:
    """The nats of every held-out window at each budget, and per token along each schedule of half the loops."""
    model = find_model(run)[0].to(DEVICE).eval()
    windows = Windows(TokenData.open(str(data), "val"), model.config.context, WINDOWS)
    loops, tokens = model.config.loops, model.config.context
    uniform = [Trajectory.uniform(budget) for budget in range(1, loops + 1)]
    nats = {str(trajectory): window_losses(model, windows, trajectory) for trajectory in uniform}
    schedules: dict[str, float] = {}
    if model.config.conditioning == "trajectory":
        for trajectory in Trajectory.enumerate(loops, (loops + 1) // 2):
            if not trajectory.is_uniform:
                schedules[str(trajectory)] = fmean(window_losses(model, windows, trajectory)) / tokens
    return {"tokens": tokens, "nats": nats, "schedules": schedules}


@torch.no_grad()
def window_losses(model: LoopedLM, windows: Windows, trajectory: Trajectory) -> list[float]:
    """The summed nats of every window, in bf16 on a GPU."""
    sums: list[float] = []
    for start in range(0, len(windows), EVAL_BATCH):
        batch = windows.batch(start, min(start + EVAL_BATCH, len(windows)))
        inputs, targets = batch.inputs.to(model.device), batch.targets.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            hidden = model(inputs, trajectory, logits=False, check=False).hidden
            logprobs = token_logprobs(model, hidden.flatten(0, 1), targets.flatten())[0]
        sums += (-logprobs.view(targets.shape).sum(1)).tolist()
    return sums


def perplexities(result: Mapping[str, Any]) -> dict[str, float]:
    """Held-out perplexity at every budget, from the stored nats."""
    tokens, nats = result["windows"]["tokens"], result["windows"]["nats"]
    return {budget: math.exp(fmean(sums) / tokens) for budget, sums in nats.items()}
