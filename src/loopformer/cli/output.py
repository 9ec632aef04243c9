"""What a verb shows and writes: tables on stdout, progress on stderr, results in a file.

with progress("prompts") as report:
    report("runs/mine", 12, 64)                     # what is being done, how much of it, of how much
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

P = ParamSpec("P")
Display = Callable[[str, float, float | None], None]  # what is done, how much of it, of how much (None: not known)

_LINE_SECONDS = 5.0  # between two lines where there is no terminal


@contextmanager
def progress(unit: str = "tokens") -> Iterator[Display]:
    """Show how far long work is, on stderr: a bar on a terminal, a line every few seconds elsewhere."""
    pace = _Pace()
    if not sys.stderr.isatty():
        last_line = time.monotonic()

        def show_line(doing: str, done: float, total: float | None) -> None:
            nonlocal last_line
            speed = pace.speed(doing, done)
            if time.monotonic() - last_line < _LINE_SECONDS:
                return
            last_line = time.monotonic()
            line = f"{doing}: {_amount(done)} {f'of {_amount(total)} ' if total else ''}{unit}"
            if speed:
                line += f", {_amount(speed)} {unit}/s"
                line += f", about {duration(max(0, total - done) / speed)} left" if total else ""
            typer.echo(line, err=True)

        yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        current: dict[str, TaskID] = {}

        def show_bar(doing: str, done: float, total: float | None) -> None:
            if doing not in current:
                for task in current.values():
                    bars.remove_task(task)
                current.clear()
                current[doing] = bars.add_task(doing, total=total, count="")
            count = f"{_amount(done)} {unit}"
            if speed := pace.speed(doing, done):
                count += f", {_amount(speed)} {unit}/s"
            bars.update(current[doing], completed=done, total=total, count=count)

        yield show_bar


class _Pace:
    """How much is done per second, since each thing was begun or continued."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, float]] = {}

    def speed(self, doing: str, done: float) -> float:
        now = time.monotonic()
        began, before = self._first.setdefault(doing, (now, done))
        speed = (done - before) / (now - began) if now > began else 0.0
        return round(speed) if isinstance(done, int) else speed


def _amount(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def duration(seconds: float) -> str:
    """A time that a person can plan with."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = (("minutes", 60.0), ("hours", 3600.0), ("days", 86_400.0), ("years", 365.25 * 86_400))
    name, size = [unit for unit in units if unit[1] <= seconds][-1]
    return f"{seconds / size:,.1f} {name}"


def number(value: float | None, form: str, missing: str = "not a number") -> str:
    """A number for a table, and what stands there where the model could not compute one."""
    return missing if value is None else format(value, form)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 0,
    lines: bool = False,
    text: Sequence[int] = (),
) -> None:
    """Print plain cells: the first `left` columns and those of `text` to the left, all others to the right; with
    `lines` in a frame."""
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=HEAVY_HEAD if lines else None, pad_edge=lines, show_lines=lines)
    for place, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if place < left or place in text else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table, highlight=False)


def print_files(files: Iterable[Path]) -> None:
    """Where the results are."""
    typer.secho(f"written: {', '.join(map(str, files))}", dim=True)


# Where results go: checked before the work, and left as it was if nothing came of it.


@contextmanager
def output_folder(out: Path, option: str = "--out") -> Iterator[None]:
    """Make a folder for what is written inside, and refuse one that cannot be written to."""
    from loopformer.errors import FileProblem
    from loopformer.files import check_writable, no_empty_folder

    if out.exists() and not out.is_dir():
        raise FileProblem(f"{out} is a file; give a folder with {option}.")
    with no_empty_folder(out):
        out.mkdir(parents=True, exist_ok=True)
        check_writable(out, option)
        yield


@contextmanager
def output_file(path: Path | None, option: str = "--out") -> Iterator[None]:
    """The same for the folder of a file, if one is to be written."""
    from loopformer.errors import LoopformerError

    if path is None:
        yield
        return
    if path.is_dir():
        raise LoopformerError(f"{option} names a file to write, but {path} is a folder.")
    with output_folder(path.parent, option):
        yield


def stoppable(kept: str | Callable[..., str]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a verb: Ctrl-C anywhere in it is one sentence, what is kept and how to go on, and exit code 130.

    What is `kept` may follow from the verb's options.
    """

    def decorate(verb: Callable[P, None]) -> Callable[P, None]:
        @wraps(verb)
        def run(*args: P.args, **options: P.kwargs) -> None:
            pressed = False

            def note(number: int, frame: FrameType | None) -> None:
                nonlocal pressed
                pressed = True
                signal.default_int_handler(number, frame)

            in_main_thread = threading.current_thread() is threading.main_thread()
            ours = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if ours:
                signal.signal(signal.SIGINT, note)
            try:
                # Code of others may swallow the interruption, and go on or fail in words of its own.
                try:
                    verb(*args, **options)
                except Exception:
                    if not pressed:
                        raise
                if pressed:
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                after_the_key = "\n" if sys.stderr.isatty() else ""  # a terminal has shown ^C
                said = kept if isinstance(kept, str) else kept(*args, **options)
                typer.echo(f"{after_the_key}loopformer: stopped; {said}.", err=True)
                raise typer.Exit(130) from None
            finally:
                if ours:
                    signal.signal(signal.SIGINT, signal.default_int_handler)

        return run

    return decorate
