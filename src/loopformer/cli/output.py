"""What a command prints and writes: tables on stdout, progress on stderr, results in files.

with progress("prompts") as report:
    report("runs/mine", 12, 64)                     # the work, how much is done, the total
print_table(["text", "loss"], [["news", "3.21"]], left=1)
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import ParamSpec

import typer

from loopformer.errors import FileProblem, LoopformerError
from loopformer.files import check_writable, remove_empty_on_failure

P = ParamSpec("P")
Display = Callable[[str, float, float | None], None]  # (work, done, total if known)

LINE_SECONDS = 5.0  # between two progress lines if stderr is not a terminal


@contextmanager
def progress(unit: str = "tokens") -> Iterator[Display]:
    """Show the progress of long work on stderr: a bar on a terminal, a line every few seconds elsewhere."""
    # For each work: the time of its first report and how much was done then. Resumed work does not start at zero,
    # so the rate counts only what was done since.
    first_reports: dict[str, tuple[float, float]] = {}

    def rate(work: str, done: float) -> float:
        now = time.monotonic()
        start, before = first_reports.setdefault(work, (now, done))
        per_second = (done - before) / (now - start) if now > start else 0.0
        return round(per_second) if isinstance(done, int) else per_second

    if not sys.stderr.isatty():
        last_line = time.monotonic()

        def show_line(work: str, done: float, total: float | None) -> None:
            nonlocal last_line
            per_second = rate(work, done)  # also if nothing is printed, as the first call starts the clock
            if time.monotonic() - last_line < LINE_SECONDS or (total is not None and done >= total):
                return
            last_line = time.monotonic()
            line = f"{work}: {_amount(done)} {f'of {_amount(total)} ' if total else ''}{unit}"
            if per_second:
                line += f", {_amount(per_second)} {unit}/s"
                line += f", about {format_duration(max(0, total - done) / per_second)} left" if total else ""
            typer.echo(line, err=True)

        yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        current: dict[str, TaskID] = {}  # the bar on screen; new work replaces it

        def show_bar(work: str, done: float, total: float | None) -> None:
            if work not in current:
                for task in current.values():
                    bars.remove_task(task)
                current.clear()
                current[work] = bars.add_task(work, total=total, count="")
            count = f"{_amount(done)} {unit}"
            if per_second := rate(work, done):
                count += f", {_amount(per_second)} {unit}/s"
            bars.update(current[work], completed=done, total=total, count=count)

        yield show_bar


def _amount(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def format_duration(seconds: float) -> str:
    """A duration in its largest unit, such as `1.5 hours`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = (("minutes", 60.0), ("hours", 3600.0), ("days", 86_400.0), ("years", 365.25 * 86_400))
    name, size = [unit for unit in units if unit[1] <= seconds][-1]
    return f"{seconds / size:,.1f} {name}"


def format_number(value: float | None, form: str, missing: str = "not a number") -> str:
    """A table cell for a number, or `missing` if the value is None."""
    return missing if value is None else format(value, form)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 0,
    lines: bool = False,
    text: Sequence[int] = (),
) -> None:
    """Print a table of plain text cells.

    The first `left` columns and the columns in `text` are aligned left, all others right. `lines` adds a frame.
    """
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=HEAVY_HEAD if lines else None, pad_edge=lines, show_lines=lines)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index < left or index in text else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table, highlight=False)


def print_files(files: Iterable[Path]) -> None:
    """Print the paths of the files that were written."""
    typer.secho(f"written: {', '.join(map(str, files))}", dim=True)


@contextmanager
def output_folder(out: Path, option: str = "--out") -> Iterator[None]:
    """Create the output folder before the work starts, and raise if it cannot be written to.

    If the work fails and leaves the folder empty, the folder is removed again.
    """

    if out.exists() and not out.is_dir():
        raise FileProblem(f"{out} is a file; give a folder with {option}.")
    with remove_empty_on_failure(out):
        out.mkdir(parents=True, exist_ok=True)
        check_writable(out, option)
        yield


@contextmanager
def output_file(path: Path | None, option: str = "--out") -> Iterator[None]:
    """Create the parent folder of an output file as `output_folder` does. None means that no file is written."""

    if path is None:
        yield
        return
    if path.is_dir():
        raise LoopformerError(f"{option} names a file to write, but {path} is a folder.")
    with output_folder(path.parent, option):
        yield


def stoppable(outcome: str | Callable[..., str]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a command so that Ctrl-C anywhere in it prints one sentence and exits with code 130.

    `outcome` says what is saved and how to continue. It may be a function of the command's options.
    """

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def run(*args: P.args, **options: P.kwargs) -> None:
            pressed = False

            def interrupt(number: int, frame: FrameType | None) -> None:
                nonlocal pressed
                pressed = True
                signal.default_int_handler(number, frame)

            # Python allows handlers only in the main thread. Any other handler stays, such as SIG_IGN of a
            # background job.
            in_main_thread = threading.current_thread() is threading.main_thread()
            installs_handler = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if installs_handler:
                signal.signal(signal.SIGINT, interrupt)
            try:
                # A library may swallow the KeyboardInterrupt and return, or raise another error instead. `pressed`
                # remembers it, so that both end like Ctrl-C.
                try:
                    command(*args, **options)
                except Exception:
                    if not pressed:
                        raise
                if pressed:
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                newline = "\n" if sys.stderr.isatty() else ""  # the terminal has echoed ^C
                sentence = outcome if isinstance(outcome, str) else outcome(*args, **options)
                typer.echo(f"{newline}loopformer: stopped; {sentence}.", err=True)
                raise typer.Exit(130) from None
            finally:
                if installs_handler:
                    signal.signal(signal.SIGINT, signal.default_int_handler)

        return run

    return decorate
