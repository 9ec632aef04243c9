"""Metrics of a run: metrics.jsonl always, a progress bar on a terminal, plain lines elsewhere.

    reporter.record("train", step, {"loss_full": 3.2})
    read_metrics(Path("runs/mine"))        # [{"kind": "train", "step": 10, "loss_full": 3.2, …}, …]
    draw_curves(Path("runs/mine"), run.objective)  # curves.png: training losses, validation perplexity by budget

`metrics.jsonl` has one JSON object per record; TensorBoard and Weights & Biases get the same numbers if set.
A resumed run drops records beyond its checkpoint, so the file reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from loopformer.config import ObjectiveConfig, RunConfig
from loopformer.device import peak_flops
from loopformer.errors import LoopformerError, import_optional, unreadable
from loopformer.files import explain_write_errors, write_atomic
from loopformer.plots import Line, Panel, has_matplotlib, line_figure, needs_log_axis, save

METRICS, CURVES = "metrics.jsonl", "curves.png"
_STEPS = {"uniform": "even", "compositions": "uneven", "sequential": "sequential", "continuous": "continuous"}
WriteRecord = Callable[[str, int, dict[str, Any]], None]  # (kind, step, values)


class Reporter:
    """Records and shows metrics; on ranks other than the main one it does nothing.

    Nothing is written before `with reporter:`, so that a run which cannot start leaves nothing behind. `say` works
    before that.
    """

    def __init__(self, run: RunConfig, out: Path, active: bool, first_step: int, quiet: bool = False) -> None:
        self.active, self.steps = active, run.training.steps
        self._training, self._objective = run.training, run.objective
        self._path, self._quiet = out / METRICS, quiet
        self._started, self._first = 0.0, first_step
        self._exit_stack, self._writers = ExitStack(), list[WriteRecord]()
        has_bar = active and sys.stderr.isatty() and not quiet
        self._bar = _progress_bar(self.steps, first_step) if has_bar else None

    def say(self, sentence: str) -> None:
        """Show a sentence on stderr."""
        if not self.active or self._quiet:
            return
        with suppress(OSError):  # a terminal may be closed at any moment, and the run must still save
            if self._bar is not None:
                self._bar.console.print(sentence, highlight=False)
            else:
                print(sentence, file=sys.stderr, flush=True)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a record to all logs. In metrics.jsonl, numbers that are not finite become null."""
        if not self.active:
            return
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        with explain_write_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        for write in self._writers:
            write(kind, step, values)

    def tick(self, step: int) -> None:
        """Advance the progress bar to a finished step."""
        if self._bar is not None:
            self._bar.update(0, completed=step)

    def progress(self, step: int, values: dict[str, Any]) -> None:
        """Show the values of a step, with the time left unless it is the first, which takes longer than others."""
        losses = {_label(name, self._objective): value for name, value in values.items() if _is_loss(name)}
        shown = " · ".join(f"{label} {value:.2f}" for label, value in losses.items())
        text = f"loss {shown}  {values['tokens_per_second']:,.0f} tok/s  lr {values['learning_rate']:.1e}"
        if self._bar is not None:
            self._bar.update(0, note=text)
            return
        done = step - self._first
        seconds = int((time.perf_counter() - self._started) / done * (self.steps - step))
        left = f"  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left" if done > 1 else ""
        self.say(f"step {step}/{self.steps}  {text}{left}")

    def __enter__(self) -> Reporter:
        self._started = time.perf_counter()
        if self.active:
            out = self._path.parent
            # wandb first: it fails without a login, and then no other log must have been created.
            if self._training.wandb is not None:
                self._writers.append(self._exit_stack.enter_context(_wandb(self._training.wandb, out)))
            if self._training.tensorboard:
                self._writers.append(self._exit_stack.enter_context(_tensorboard(out, self._first)))
            records = [record for record in read_metrics(out) if record["step"] <= self._first]
            write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in records).encode())
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
        self._exit_stack.close()


def _is_loss(name: str) -> bool:
    return name.startswith("loss_")


def _label(name: str, objective: ObjectiveConfig) -> str:
    """What people read for the name of a loss: full, short, M=1, M=4–7, or M=4–7 uneven.

    If entries share a budget, the names of all but the first end in their number. Their labels say what differs.
    """
    budget, _, number = name.removeprefix("loss_").partition("_")
    label = f"M={budget.replace('-', '–')}" if budget[:1].isdigit() else budget
    if not number:
        return label
    *before, entry = objective.trajectories[: int(number)]
    first = next(other for other in before if str(other) == budget)
    if entry.sampler != first.sampler:
        return f"{label} {_STEPS[entry.sampler]}"
    differing = (key for key in ("weight", "match", "rows") if getattr(entry, key) != getattr(first, key))
    key = next(differing, None)
    return f"{label} #{number}" if key is None else f"{label} {key} {getattr(entry, key):g}"


@contextmanager
def _tensorboard(out: Path, first_step: int) -> Iterator[WriteRecord]:
    make = import_optional("torch.utils.tensorboard", "training.tensorboard", "log").SummaryWriter
    with make(str(out / "tensorboard"), purge_step=first_step + 1) as writer:

        def write(kind: str, step: int, values: dict[str, Any]) -> None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    writer.add_scalar(f"{kind}/{name}", value, step)

        yield write


@contextmanager
def _wandb(project: str, out: Path) -> Iterator[WriteRecord]:
    wandb = import_optional("wandb", "training.wandb", "log")
    try:
        run = wandb.init(project=project, dir=str(out), name=out.name)
    except Exception as error:  # wandb raises many kinds of its own
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise LoopformerError(
            f"wandb could not be started ({reason}); log in with `wandb login`, set WANDB_MODE=offline, or "
            "leave training.wandb out."
        ) from error
    try:
        yield lambda kind, step, values: run.log({f"{kind}/{n}": v for n, v in values.items()}, step=step)
    finally:
        run.finish()


class SpeedMeter:
    """Training speed since the last `read`, excluding validation and checkpoints."""

    def __init__(self, run: RunConfig, device: torch.device, world: int) -> None:
        self._tokens_per_step = run.training.batch * run.model.context
        self._device, self._world, self._peak = device, world, peak_flops(device)
        self._reset()

    def _reset(self) -> None:
        self._steps, self._flops, self._skipped = 0, 0.0, 0.0
        self._since = self._last = time.perf_counter()

    def add(self, flops: float) -> None:
        """Count a finished step."""
        self._steps += 1
        self._flops += flops
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Exclude the time since the last step."""
        now = time.perf_counter()
        self._skipped += now - self._last
        self._last = now

    def read(self) -> dict[str, float | None]:
        seconds = max(1e-9, time.perf_counter() - self._since - self._skipped)
        flops = self._flops / seconds / self._world
        values = {
            "tokens_per_second": self._steps * self._tokens_per_step / seconds,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self._peak if self._peak else None,
            "peak_memory_gib": _peak_memory_gib(self._device),
        }
        self._reset()
        return values


def _peak_memory_gib(device: torch.device) -> float | None:
    """Peak memory: allocated on a GPU, resident elsewhere; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, without lines that are damaged or cut off by a crash."""
    path = run / METRICS
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise unreadable(path, error) from error
    return [record for line in lines if (record := _parse_record(line)) is not None]


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None unless `Reporter.record` could have written it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # a wrong encoding is a ValueError
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("train", "validation"):
        return None
    values = [value for name, value in record.items() if name != "kind"]
    are_numbers = all(value is None or isinstance(value, int | float) for value in values)
    return record if are_numbers and isinstance(record.get("step"), int) else None


def _progress_bar(steps: int, first_step: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        expand=True,
    )
    bar.add_task("train", total=steps, completed=first_step, note="starting")
    return bar


def draw_curves(run: Path, objective: ObjectiveConfig) -> str | None:
    """Draw `curves.png` from metrics.jsonl and return its path; None without matplotlib or records."""
    records = read_metrics(run)
    train = [record for record in records if record["kind"] == "train"]
    validations = [record for record in records if record["kind"] == "validation"]
    names = dict.fromkeys(name for record in train for name in record if _is_loss(name))
    if not names or not has_matplotlib():
        return None
    losses = []
    for name in names:
        # A step without an active entry has no loss for it. Earlier versions wrote 0.
        points = [(record["step"], record[name]) for record in train if record.get(name)]
        if points:
            losses.append(
                Line(_label(name, objective), [step for step, _ in points], [value for _, value in points])
            )
    perplexities = []
    for name in validations[0] if validations else ():
        if name.startswith("loss_at_"):
            values = [None if record[name] is None else math.exp(min(record[name], 30)) for record in validations]
            steps = [record["step"] for record in validations]
            perplexities.append(Line(f"M={name.removeprefix('loss_at_')}", steps, values))
    panels = [Panel(losses, title="training", xlabel="optimizer step", ylabel="cross-entropy")]
    if perplexities:
        log = needs_log_axis(value for line in perplexities for value in line.y)
        panels.append(Panel(perplexities, "validation", "optimizer step", "perplexity", log_y=log))
    return str(save(line_figure(panels, legend=None), run / CURVES))
