"""What a run says while it trains: metrics.jsonl always, a live line on a terminal, plain lines elsewhere.

    reporter.record("train", step, {"loss_full": 3.2})
    read_metrics(Path("runs/mine"))        # [{"kind": "train", "step": 10, "loss_full": 3.2, …}, …]
    draw_curves(Path("runs/mine"))         # curves.png: training losses, validation perplexity by budget

`metrics.jsonl` has one JSON object per record; TensorBoard and Weights & Biases get the same numbers when asked.
After a resume, records beyond the checkpoint are dropped, so the file reads as if nothing had happened.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO, cast

import torch

from loopformer.config import RunConfig
from loopformer.device import peak_flops
from loopformer.errors import LoopformerError, unreadable
from loopformer.files import write_atomic, writing
from loopformer.plots import Line, Panel, available, line_figure, save, wide

METRICS = "metrics.jsonl"


class Reporter:
    """Records and shows metrics; on ranks other than the main one it does nothing.

    It writes from `with reporter:` on, so that a run which cannot start leaves nothing behind; it speaks before.
    """

    def __init__(self, run: RunConfig, out: Path, active: bool, first_step: int, quiet: bool = False) -> None:
        self.active, self.steps = active, run.training.steps
        self._path, self._quiet = out / METRICS, quiet
        self._writers: list[_TensorBoard | _WandB] = []
        self._bar: Any = None
        self._started, self._first = time.perf_counter(), first_step
        if active and run.training.tensorboard:
            self._writers.append(_TensorBoard(out, first_step))
        if active and run.training.wandb is not None:
            self._writers.append(_WandB(run.training.wandb, out))
        if active and sys.stderr.isatty() and not quiet:
            self._bar = _bar(self.steps, first_step)

    def say(self, sentence: str) -> None:
        """A sentence for the user, on stderr."""
        if not self.active or self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(sentence, highlight=False)
        else:
            _Terminal(sys.stderr).write(sentence + "\n")

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl and pass it on."""
        if not self.active:
            return
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self._file.flush()
        for writer in self._writers:
            writer.write(kind, step, values)

    def tick(self, step: int) -> None:
        """A step is done: move the bar."""
        if self._bar is not None:
            self._bar.update(0, completed=step)

    def progress(self, step: int, values: dict[str, Any]) -> None:
        """Show a training record."""
        if not self.active:
            return
        losses = "  ".join(
            f"{name.replace('loss_full', 'loss').removeprefix('loss_')} {value:.4f}"
            for name, value in values.items()
            if name.startswith("loss_")
        )
        text = f"{losses}  {values['tokens_per_second']:,.0f} tok/s  lr {values['learning_rate']:.2e}"
        if self._bar is not None:
            self._bar.update(0, note=text)
        else:
            spent = time.perf_counter() - self._started
            left = spent / max(1, step - self._first) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  {text}  {_clock(left)} left")

    def __enter__(self) -> Reporter:
        for writer in self._writers:  # first: one that cannot start leaves nothing behind
            writer.open()
        if self.active:
            _drop_after(self._path, self._first)
            with writing(self._path):
                self._file = self._path.open("a", encoding="utf-8")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for writer in self._writers:
            writer.close()
        if self.active:
            with suppress(OSError):  # what a full disk did not take was said when it happened
                self._file.close()


class _TensorBoard:
    def __init__(self, out: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LoopformerError("TensorBoard is not installed; run: pip install 'loopformer[log]'.") from error
        self._open = partial(SummaryWriter, str(out / "tensorboard"), purge_step=first_step + 1)

    def open(self) -> None:
        self._writer: Any = self._open()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, project: str, out: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise LoopformerError("wandb is not installed; run: pip install 'loopformer[log]'.") from error
        self._open = partial(wandb.init, project=project, dir=str(out), name=out.name)

    def open(self) -> None:
        try:
            self._run: Any = self._open()
        except Exception as error:  # its own, of many kinds
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise LoopformerError(
                f"wandb could not be started ({why}); log in with `wandb login`, set WANDB_MODE=offline, or leave "
                "training.wandb out."
            ) from error

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class SpeedMeter:
    """Speed since the last reading, without the time that validation and saving take."""

    def __init__(self, run: RunConfig, device: torch.device, world: int) -> None:
        self._tokens_per_step = run.training.batch * run.model.context
        self._device, self._world, self._peak = device, world, peak_flops(device)
        self._reset()

    def _reset(self) -> None:
        self._steps, self._flops, self._since = 0, 0.0, time.perf_counter()
        self._away = 0.0
        self._last = self._since

    def add(self, flops: float) -> None:
        self._steps += 1
        self._flops += flops
        self._last = time.perf_counter()

    def skip(self) -> None:
        """What happened since the last step was not training."""
        now = time.perf_counter()
        self._away += now - self._last
        self._last = now

    def read(self) -> dict[str, float | None]:
        seconds = max(1e-9, time.perf_counter() - self._since - self._away)
        flops = self._flops / seconds / self._world
        memory = torch.cuda.max_memory_allocated() / 2**30 if self._device.type == "cuda" else _peak_rss()
        values = {
            "tokens_per_second": self._steps * self._tokens_per_step / seconds,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self._peak if self._peak else None,
            "peak_memory_gib": memory,
        }
        self._reset()
        return values


def _peak_rss() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole records of a run. Lines that are none are left out: one cut by a crash, or damaged on the disk."""
    path = run / METRICS
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise unreadable(path, error) from error
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """A record as `Reporter.record` writes it: its kind, its step, numbers and nulls."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # a wrong encoding is a ValueError
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("train", "validation"):
        return None
    numbers = all(
        value is None or isinstance(value, int | float) for name, value in record.items() if name != "kind"
    )
    return record if numbers and isinstance(record.get("step"), int) else None


def _drop_after(path: Path, step: int) -> None:
    if path.is_file():
        kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


class _Terminal(io.TextIOBase):
    """A stream as long as somebody reads it: a terminal may be closed at any moment."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream  # as it was before a bar took its place

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Done with each write."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _bar(steps: int, first_step: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(file=cast("IO[str]", _Terminal(sys.stderr))),
        expand=True,
    )
    bar.add_task("train", total=steps, completed=first_step, note="starting")
    return bar


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


FILE = "curves.png"


def draw_curves(run: Path) -> str | None:
    """Draw `curves.png` from metrics.jsonl and return its path; None without matplotlib or records."""
    records = read_metrics(run)
    train = [record for record in records if record["kind"] == "train"]
    names = dict.fromkeys(name for record in train for name in record if name.startswith("loss_"))
    tested = [record for record in records if record["kind"] == "validation"]
    if not names or not available():
        return None
    losses = []
    for name in names:
        followed = [record for record in train if record.get(name)]  # earlier versions wrote 0 where there was none
        if followed:
            label = {"loss_full": "full trajectory", "loss_short": "short ones"}.get(
                name, name.removeprefix("loss_")
            )
            losses.append(
                Line(label, [record["step"] for record in followed], [record[name] for record in followed])
            )
    perplexities = [
        Line(
            f"M = {name.removeprefix('loss_at_')}",
            [record["step"] for record in tested],
            [None if record[name] is None else math.exp(min(record[name], 30)) for record in tested],
        )
        for name in (tested[0] if tested else ())
        if name.startswith("loss_at_")
    ]
    panels = [Panel(losses, title="training", xlabel="optimizer step", ylabel="cross-entropy")]
    if perplexities:
        log = wide(value for line in perplexities for value in line.y)
        panels.append(Panel(perplexities, "validation", "optimizer step", "perplexity", log_y=log))
    return str(save(line_figure(panels, legend=None), run / FILE))
