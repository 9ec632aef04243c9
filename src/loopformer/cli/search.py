"""`loopformer search`: the best schedule of a budget."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.eval import load_tasks, show_table, write_results
from loopformer.cli.options import (
    TEXT,
    BatchTokens,
    Device,
    Dtype,
    Examples,
    Field,
    Join,
    Json,
    MaxTokens,
    Model,
    OutFile,
    TaskData,
    Window,
    complete_budget,
    text_of_model,
)
from loopformer.cli.output import format_number, output_file, progress, stoppable
from loopformer.config.model import BOX
from loopformer.errors import require

_SHOWN_PER_END = 5  # best and worst schedules in the table


@stoppable("what is finished is kept, the same command continues")
def search(
    budget: Annotated[int, typer.Option(help="Loops M, 1 to L.", autocompletion=complete_budget)],
    model: Model = BOX,
    text: Annotated[str | None, typer.Option(help=f"{TEXT}. The data of a run by default.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks: paper, or names, as in piqa,arc_easy.")] = None,
    by: Annotated[str | None, typer.Option(help="Rank by perplexity, accuracy or both.")] = None,
    data: TaskData = None,
    examples: Examples = None,
    limit: Annotated[int, typer.Option(help="Measure at most this many schedules, chosen at random.")] = 500,
    window: Window = None,
    max_tokens: MaxTokens = None,
    join: Join = False,
    field: Field = "text",
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    figure: Annotated[Path | None, typer.Option(help="Draw all schedules: a .png, .pdf or .svg.")] = None,
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Rank the step schedules of a budget by perplexity, accuracy or both, and save the best one with the model.

    If the best one is within noise of equal steps, equal steps are saved.

    Example: loopformer search --model runs/mine --budget 4 --text news.jsonl --figure schedules.png
    """
    from loopformer.analysis.figures import search_figure
    from loopformer.evaluation.loaded import LoadedModel
    from loopformer.evaluation.schedules import save_best
    from loopformer.evaluation.schedules import search as run
    from loopformer.evaluation.text import Protocol, read_text
    from loopformer.plots import check_drawing, save

    require(tasks is not None or (data is None and examples is None), "--data and --examples go with --tasks.")
    if figure is not None:
        check_drawing(figure)
    with output_file(out), output_file(figure, "--figure"), progress("done") as report:
        by = by or ("perplexity" if tasks is None else "both")
        loaded = LoadedModel.open(model, device, dtype)
        tokenizer = loaded.lm.need_tokenizer()
        loaded.model.resolve(budget)  # refuse a wrong budget or window before the text is read, which may take long
        protocol = Protocol(window=window, join=join, max_tokens=max_tokens)
        protocol.sizes(loaded.model.config.context)
        suite = None if tasks is None else load_tasks(tasks, data, None, examples, report)
        source = None if by == "accuracy" and text is None else (text or text_of_model(model))
        score = None if suite is None else partial(suite.accuracy, loaded, batch_tokens=batch_tokens, report=report)
        ranking = run(
            loaded.model,
            budget,
            text=None if source is None else read_text(source, tokenizer, field, max_tokens, report),
            accuracy=score,
            tasks=None if suite is None else suite.facts,
            by=by,
            limit=limit,
            protocol=protocol,
            weights=loaded.weights,
            store=loaded.store,
            batch_tokens=batch_tokens,
            report=report,
        )
    if write_results({"model": model, **ranking}, out, as_json):
        _show(ranking)
    chosen = ranking["chosen"]
    is_uniform = chosen == ranking["uniform"]
    if path := save_best(model, ranking):
        name = "the schedule of equal steps" if is_uniform else chosen["schedule"]
        typer.echo(f"{name} saved in {path}; use it with --schedule best", err=True)
    elif not is_uniform:
        remedy = f"use it with --trajectory {chosen['trajectory']}"
        typer.echo(f"best schedule not saved, because {model} is not writable; {remedy}", err=True)
    if figure is not None:
        typer.echo(f"drawn: {save(search_figure(ranking), figure)}", err=True)


def _show(ranking: dict[str, Any]) -> None:
    """Print the best and the worst schedules, and what each group has in common."""
    budget, loops, on_grid, measured = (ranking[key] for key in ("budget", "loops", "on_grid", "measured"))
    count = "the only schedule" if on_grid == 1 else f"all {on_grid:,} schedules"
    if ranking["method"] == "sample":
        count = f"{measured:,} of {on_grid:,} schedules, drawn at random,"
    extra = " and the uniform one" if measured > on_grid else ""
    text = ranking["text"] and f" on {ranking['text']['tokens']:,} tokens of {ranking['text']['text']}"
    typer.echo(f"M = {budget}, L = {loops}: {count} in steps of 1/{loops}{extra}{text or ''}")

    rows = ranking["schedules"]
    measures = [name for name in ("perplexity", "bits_per_byte", "accuracy") if rows[0].get(name) is not None]
    show_table(
        {
            "rank": str(row["rank"]),
            "schedule": row["schedule"],
            **{name.replace("_", " "): format_number(row[name], ".4f") for name in measures},
            "": " ".join(name for name in ("best", "worst", "uniform") if ranking[name]["rank"] == row["rank"]),
        }
        for row in rows
        if row["rank"] <= _SHOWN_PER_END or row["rank"] > len(rows) - _SHOWN_PER_END or row == ranking["uniform"]
    )
    if (gain := ranking["gain"]) is not None:
        typer.echo(_gain_sentence(gain, ranking))
    typer.echo(f"spread: {', '.join(f'{name} {value:.4g}' for name, value in ranking['spread'].items())}")
    for which in ("best_tenth", "worst_tenth"):
        steps = ", ".join(f"{step:.3f}" for step in ranking["mean_steps"][which])
        typer.echo(f"mean step by position, {which.replace('_', ' ')}: {steps}")
    if (correlation := ranking["rank_correlation"]) is not None:
        typer.echo(f"rank correlation: {correlation:.3f} (1: perplexity and accuracy rank alike)")
    if (loops := ranking["passes"]) is not None:
        typer.secho(f"loops per batch: {loops['shared']:,}, {loops['separate']:,} without sharing", dim=True)


def _gain_sentence(gain: dict[str, Any], ranking: dict[str, Any]) -> str:
    """Whether the best schedule is better than equal steps by more than noise."""

    def percent(nats: float) -> str:
        return f"{100 * (1 - math.exp(-nats)):.2f} %"

    found = f"{ranking['best']['schedule']} has {percent(gain['nats_per_token'])} less perplexity than equal steps"
    if gain["stderr"] is None:
        return f"{found}; the text is too short to tell whether that is more than noise"
    threshold = (
        f"{percent(gain['needed'] * gain['stderr'])} that the best of {ranking['measured']} may gain by chance"
    )
    if gain["is_significant"]:
        return f"{found}, more than the {threshold}"
    return f"{found}, within the {threshold}, so equal steps are as good"
