"""`loopformer report`: every table and figure of several models in one folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import (
    TEXT,
    BatchTokens,
    BudgetsOption,
    Device,
    Dtype,
    Examples,
    Field,
    MaxTokens,
    ModelsOption,
    TaskData,
    complete_model,
)
from loopformer.cli.output import output_folder, progress, stoppable
from loopformer.config import parse_counts


@stoppable("what is finished is kept, the same command continues")
def report(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write, empty or an earlier report.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Runs, models or published weights.", autocompletion=complete_model),
    ] = None,
    models_option: ModelsOption = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME=SOURCE, a name for the report and a text: {TEXT}; repeat it for more texts. "
            "Default: the data of the first run. Schedules and states are measured on the first text."
        ),
    ] = None,
    data: TaskData = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks: paper (its ten), or names such as piqa,arc_easy; paper if --data is given."),
    ] = None,
    limit: Examples = None,
    budgets: BudgetsOption = None,
    search: Annotated[int | None, typer.Option(help="The budget to search schedules for. Default: L/2.")] = None,
    search_tasks: Annotated[
        bool, typer.Option("--search-tasks", help="Also score the schedules on the tasks, which takes long.")
    ] = False,
    prompts: Annotated[int, typer.Option(help="Number of prompts for the analysis of states.")] = 64,
    skip: Annotated[str | None, typer.Option(help="Parts to leave out: perplexity,tasks,search,analysis.")] = None,
    max_tokens: MaxTokens = None,
    field: Field = "text",
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Write a report: perplexity, tasks, schedules, states and costs of all models, as a page, CSV and JSON.

    Reuses results of eval, search and earlier reports, and measures only what is missing.

    Example: loopformer report runs/elastic runs/fixed --out report --text news=news.jsonl --data data/eval
    """
    from loopformer.analysis.collect import ReportRequest, collect, read_skip, read_texts
    from loopformer.analysis.report import PART_NAMES, check_folder, gaps, write_report

    request = ReportRequest(
        (*(models or []), *(models_option or [])),
        texts=read_texts(text) if text else None,
        tasks=tasks,
        data=data,
        limit=limit,
        budgets=tuple(sorted(set(parse_counts(budgets, "--budgets")))) if budgets else None,
        search=search,
        search_tasks=search_tasks,
        prompts=prompts,
        skip=read_skip(skip),
        max_tokens=max_tokens,
        field=field,
        device=device,
        dtype=dtype,
        batch_tokens=batch_tokens,
    )
    with output_folder(out):
        check_folder(out)
        with progress("done") as display:
            measured = collect(request, display)
        files = write_report(measured, out)
    for part in PART_NAMES:
        for gap in gaps(measured["models"], part):
            typer.echo(f"not in the report: {gap}", err=True)
    typer.echo(json.dumps([str(file) for file in files]) if as_json else f"{files[0]}")
