"""How far a long evaluation is: a bar on a terminal, a line every few seconds elsewhere; both on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from loopformer.evaluation.text import ReportProgress


_LINE_SECONDS = 5.0


@contextmanager
def shown(unit: str = "tokens") -> "Iterator[ReportProgress]":
    """A function to call with what is being done, how much of it is done, and of how much."""
    if not sys.stderr.isatty():
        yield _lines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        current: dict[str, TaskID] = {}

        def report(doing: str, done: int, total: int | None) -> None:
            if doing not in current:
                for task in current.values():
                    bars.remove_task(task)
                current.clear()
                current[doing] = bars.add_task(doing, total=total, count="")
            bars.update(current[doing], completed=done, total=total, count=f"{done:,} {unit}")

        yield report


def _lines(unit: str) -> "ReportProgress":
    said = time.monotonic()

    def report(doing: str, done: int, total: int | None) -> None:
        nonlocal said
        if time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            typer.echo(f"{doing}: {done:,} {f'of {total:,} ' if total else ''}{unit}", err=True)

    return report
