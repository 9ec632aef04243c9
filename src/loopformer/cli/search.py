"""`loopformer search`: which schedule of a budget is best."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.eval import TEXT_HELP, number, own_text
from loopformer.cli.output import shown

_SHOWN = 5  # schedules at each end of the table


def search(
    model: Annotated[str, typer.Option("--model", "-m", help="A run, a model folder or published weights.")],
    budget: Annotated[int, typer.Option(help="Loops M, 1 to L.")],
    text: Annotated[str | None, typer.Option(help=f"{TEXT_HELP}. A run's own data by default.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Benchmarks, as in `loopformer eval`: paper, or names, as in piqa,arc_easy.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Rank by perplexity, accuracy or both; both if --tasks are given.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with the paper's benchmarks as files, instead of the Hub.")
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Only the first so many examples of each task.")] = None,
    limit: Annotated[
        int, typer.Option(help="Measure all schedules up to so many, else search along a beam.")
    ] = 500,
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at a time; its context.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first so many tokens of the text.")] = None,
    join: Annotated[bool, typer.Option("--join", help="Join documents into one stream, as in training.")] = False,
    field: Annotated[str, typer.Option(help="The field of .jsonl, .parquet and datasets that is text.")] = "text",
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a batch.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    figure: Annotated[Path | None, typer.Option(help="Draw all schedules: a .png, .pdf or .svg.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the results to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank the step schedules of a budget by perplexity, accuracy or both, and save the best one with the model.

    Example: loopformer search --model runs/mine --budget 4 --text news.jsonl --figure schedules.png
    """
    from loopformer.analysis.figures import search_figure
    from loopformer.analysis.results import SearchResults
    from loopformer.cli.eval import load_tasks
    from loopformer.errors import require
    from loopformer.evaluation.benchmarks import accuracy
    from loopformer.evaluation.schedules import can_save, save_best
    from loopformer.evaluation.schedules import search as run
    from loopformer.evaluation.subject import Subject
    from loopformer.evaluation.text import Protocol, read_text
    from loopformer.files import write_atomic
    from loopformer.plots import check_drawing, save

    require(tasks is not None or (data is None and examples is None), "--data and --examples go with --tasks.")
    if figure is not None:
        check_drawing(figure)
    by = by or ("perplexity" if tasks is None else "both")
    subject = Subject.open(model, device, dtype)
    subject.model.resolve(budget)  # before anything is read, which may take long
    protocol = Protocol(window=window, join=join, max_tokens=max_tokens)
    protocol.sizes(subject.model.config.context)
    try:
        suite = None if tasks is None else load_tasks(tasks, data, None, examples)
        given = None if by == "accuracy" and text is None else text or own_text(model)
        with shown("done") as report:
            tokenizer = subject.lm.need_tokenizer()
            found = run(
                subject.model,
                budget,
                text=None if given is None else read_text(given, tokenizer, field, max_tokens, report),
                accuracy=None if suite is None else accuracy(subject, suite, batch_tokens, report),
                tasks=None if suite is None else suite.facts,
                by=by,
                limit=limit,
                protocol=protocol,
                weights=subject.weights,
                store=subject.store,
                batch_tokens=batch_tokens,
                report=report,
            )
    except KeyboardInterrupt:
        typer.echo("loopformer: stopped; what is finished is kept, the same command continues.", err=True)
        raise typer.Exit(130) from None
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, (json.dumps({"model": model, **found}, indent=1, ensure_ascii=False) + "\n").encode())
    if as_json:
        typer.echo(json.dumps({"model": model, **found}))
    else:
        show_search(found)
    if can_save(model):
        typer.echo(f"best schedule saved in {save_best(model, found)}; use it with --schedule best", err=True)
    else:
        typer.echo(f"best schedule not saved: {model} is no folder that can be written", err=True)
    if figure is not None:
        typer.echo(f"drawn: {save(search_figure(SearchResults.from_json(found)), figure)}", err=True)


def show_search(found: dict[str, Any]) -> None:
    """The best and the worst schedules, and what they have in common."""
    from rich.console import Console
    from rich.table import Table

    console, rows = Console(), found["schedules"]
    console.print(_measured(found), highlight=False, markup=False, soft_wrap=True)
    measures = [name for name in ("perplexity", "bits_per_byte", "accuracy") if rows[0].get(name) is not None]
    table = Table("rank", "schedule", *(name.replace("_", " ") for name in measures), "", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    names = {row["rank"]: "" for row in rows}
    for name in ("best", "worst", "uniform"):
        names[found[name]["rank"]] += f" {name}"
    for row in rows:
        if row["rank"] <= _SHOWN or row["rank"] > len(rows) - _SHOWN or row is found["uniform"]:
            values = (number(row[name], ".4f") for name in measures)
            table.add_row(str(row["rank"]), row["schedule"], *values, names[row["rank"]])
    console.print(table, highlight=False)
    spread = ", ".join(f"{name} {value:.4g}" for name, value in found["spread"].items())
    console.print(f"spread: {spread}", highlight=False)
    for which in ("best_tenth", "worst_tenth"):
        steps = ", ".join(f"{step:.3f}" for step in found["mean_steps"][which])
        console.print(f"mean step by position, {which.replace('_', ' ')}: {steps}", highlight=False)
    if found["rank_correlation"] is not None:
        agreement = f"{found['rank_correlation']:.3f} (1: the better perplexity, the better accuracy)"
        console.print(f"rank correlation: {agreement}", highlight=False)
    if found["passes"] is not None:
        passes = found["passes"]
        console.print(
            f"passes per batch: {passes['shared']:,}, {passes['separate']:,} without sharing", style="dim"
        )


def _measured(found: dict[str, Any]) -> str:
    """How many schedules, and on what."""
    count = "the only schedule" if found["on_grid"] == 1 else f"all {found['on_grid']:,} schedules"
    if found["method"] == "beam":
        count = f"{found['measured']:,} of {found['on_grid']:,} schedules, along a beam,"
    extra = " and the uniform one" if found["measured"] > found["on_grid"] else ""
    text = found["text"] and f" on {found['text']['tokens']:,} tokens of {found['text']['text']}"
    return f"M = {found['budget']}, L = {found['loops']}: {count} in steps of 1/{found['loops']}{extra}{text or ''}"
