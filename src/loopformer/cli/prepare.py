"""`loopformer prepare`: turn text into token shards that training reads."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from loopformer.data.prepare import PrepareProgress

_LINE_SECONDS = 5.0  # between two lines where there is no terminal


def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or globs of .txt .md .jsonl .parquet (also .gz .xz .zst), "
            "hf:DATASET[:config][:split], pile, fineweb-edu, openwebtext, or stdlib, which is the default; "
            "each may have a weight: news.jsonl=2.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")] = Path("data"),
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, a tokenizer.json, or a folder with one or with encoder.json and vocab.bpe."),
    ] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE of this many ids on the sources.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the documents held out; 0.01, or what a preset says.")
    ] = None,
    train_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many training tokens of each source.")
    ] = None,
    val_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many held-out tokens of each source.")
    ] = None,
    field: Annotated[str, typer.Option(help="The field of .jsonl, .parquet and datasets that is text.")] = "text",
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Records are prompt and response, or chat messages.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Cores for tokenizing; all of them by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn text into token shards; interrupted and started again, it continues.

    Example: loopformer prepare 'books/*.txt=1' news.jsonl.zst=3 --out data/mix --train-tokenizer 8192
    """
    from loopformer.data.prepare import prepare as prepare_data

    try:
        with _display() as display:
            index = prepare_data(
                sources or ["stdlib"],
                out,
                tokenizer=tokenizer,
                train_tokenizer=train_tokenizer,
                val_fraction=val_fraction,
                train_tokens=train_tokens,
                val_tokens=val_tokens,
                field=field,
                supervised=supervised,
                workers=workers,
                report=display,
            )
    except KeyboardInterrupt:
        typer.echo("loopformer: stopped; the same command continues where this one was.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        summary = {key: index[key] for key in ("tokens", "tokenizer", "dtype", "sources")}
        typer.echo(json.dumps({"out": str(out), **summary}))
    else:
        _show(out, index)


def _show(out: Path, index: dict[str, Any]) -> None:
    tokens = index["tokens"]
    typer.echo(
        f"{out}: {tokens['train']:,} training and {tokens['val']:,} validation tokens, "
        f"vocabulary {index['tokenizer']['vocab_size']:,}"
    )
    for source in index["sources"]:
        splits = source["splits"]
        size = sum(written["text_bytes"] for written in splits.values())
        counts = ", ".join(f"{split} {written['documents']:,} documents" for split, written in splits.items())
        weight = "" if source["weight"] is None else f", weight {source['weight']:g}"
        typer.echo(f"  {source['name']}: {size / 1e6:.1f} MB, {counts}{weight}")


class _Display(Protocol):
    def __call__(self, progress: "PrepareProgress") -> None: ...


@contextmanager
def _display() -> Iterator[_Display]:
    """A bar on a terminal, a line every few seconds elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}
        pace = _Pace()

        def show(progress: "PrepareProgress") -> None:
            if progress.source not in tasks:
                tasks[progress.source] = bars.add_task(progress.source, total=None, speed="")
            if progress.phase != "tokenizing":
                bars.update(tasks[progress.source], speed=progress.phase)
                return
            if "tokenizer" in tasks:
                bars.remove_task(tasks.pop("tokenizer"))
            bars.update(
                tasks[progress.source],
                total=None if progress.fraction is None else 1.0,
                completed=progress.fraction or 0.0,
                speed=f"{progress.text_bytes / 1e6:.1f} MB {pace.speed(progress) / 1e6:.1f} MB/s",
            )

        yield show


class _Pace:
    """Bytes of text per second since a source was begun or continued."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, int]] = {}

    def speed(self, progress: "PrepareProgress") -> float:
        now = time.monotonic()
        began, size = self._first.setdefault(progress.source, (now, progress.text_bytes))
        return (progress.text_bytes - size) / (now - began) if now > began else 0.0


class _Lines:
    """Plain lines for logs."""

    def __init__(self) -> None:
        self._pace, self._said = _Pace(), time.monotonic()

    def __call__(self, progress: "PrepareProgress") -> None:
        if progress.phase != "tokenizing":
            typer.echo(f"{progress.source}: {progress.phase}", err=True)
            return
        speed, now = self._pace.speed(progress), time.monotonic()
        if now - self._said < _LINE_SECONDS:
            return
        self._said = now
        line = f"{progress.source}: {progress.text_bytes / 1e6:.1f} MB, {progress.tokens:,} tokens"
        if speed:
            line += f", {speed / 1e6:.1f} MB/s"
            if progress.fraction:
                left = progress.text_bytes * (1 / progress.fraction - 1) / speed
                line += f", {progress.fraction:.0%}, about {left:.0f} s left"
        typer.echo(line, err=True)
