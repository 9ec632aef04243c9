"""`loopformer prepare`: turn text into token shards that training reads."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from loopformer.cli.options import Field, Json, OutFolder
from loopformer.cli.output import Display, progress, stoppable
from loopformer.errors import FileProblem


def _outcome_of_stop(**options: Any) -> str:
    """What Ctrl-C leaves: nothing until the tokenizer is written. An import here would delay the exit."""
    if any(options["out"].glob("*.json")):
        return "the same command continues where this one stopped"
    return "nothing was written yet, so the same command starts from the beginning"


@stoppable(_outcome_of_stop)
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Files, folders or globs of .txt .md .jsonl .parquet (also .gz .xz .zst), "
            "hf:DATASET[:config][:split], pile, fineweb-edu, openwebtext, or stdlib, which is the default; "
            "each may have a weight, as in news.jsonl=2; once one source has a weight, the others count 1.",
            show_default=False,
        ),
    ] = None,
    out: OutFolder = Path("data"),
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, box, a tokenizer.json, or a folder with one or with encoder.json and vocab.bpe."),
    ] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE of this many ids on the sources.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of held-out documents. Default: 0.01, or that of a preset.")
    ] = None,
    train_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many training tokens of each source.")
    ] = None,
    val_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many held-out tokens of each source.")
    ] = None,
    field: Field = "text",
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Records are prompt and response, or chat messages.")
    ] = False,
    on_bad: Annotated[
        str,
        typer.Option(
            help="What to do about an unusable record: stop, or skip it; skipped records are counted and listed."
        ),
    ] = "stop",
    workers: Annotated[int | None, typer.Option(help="Cores for tokenizing; all of them by default.")] = None,
    as_json: Json = False,
) -> None:
    """Turn text into token shards. If interrupted, the same command continues.

    Example: loopformer prepare 'books/*.txt=1' news.jsonl.zst=3 --out data/mix --train-tokenizer 8192
    """
    from loopformer.data.formats import BadRecord
    from loopformer.data.prepare import OnBad
    from loopformer.data.prepare import prepare as run

    try:
        with progress("MB") as display:
            index = run(
                sources or ["stdlib"],
                out,
                tokenizer=tokenizer,
                train_tokenizer=train_tokenizer,
                val_fraction=val_fraction,
                train_tokens=train_tokens,
                val_tokens=val_tokens,
                field=field,
                supervised=supervised,
                on_bad=cast(OnBad, on_bad),
                workers=workers,
                report=lambda step: _report(display, step.source, step.phase, step.text_bytes / 1e6, step.fraction),
            )
    except BadRecord as error:
        raise FileProblem(f"{error} Or leave such records out, with --on-bad skip.") from error
    if as_json:
        summary = {key: index[key] for key in ("tokens", "tokenizer", "dtype", "sources")}
        typer.echo(json.dumps({"out": str(out), **summary}))
    else:
        _show(out, index)


def _report(display: Display, source: str, phase: str, megabytes: float, fraction: float | None) -> None:
    """Show the progress of a source: text and checksums in megabytes, any other phase as a line."""
    if phase in ("tokenizing", "checksums"):
        name = source if phase == "tokenizing" else f"{source}: {phase}"
        display(name, megabytes, megabytes / fraction if fraction else None)
    else:
        typer.echo(f"{source}: {phase}", err=True)


def _show(out: Path, index: dict[str, Any]) -> None:
    """Print what is in the folder, source by source."""
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
        amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"
        typer.echo(f"  {source['name']}: {amount}, {counts}{weight}")
        if bad := source.get("bad"):
            typer.echo(f"  {source['name']}: {bad:,} bad records left out")
            for sentence in source["bad_first"]:
                typer.echo(f"    {sentence}")
            if bad > len(source["bad_first"]):
                typer.echo(f"    and {bad - len(source['bad_first']):,} more")
