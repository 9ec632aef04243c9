"""`loopformer report`: every table and figure of one or several models in one folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.eval import TEXT_HELP
from loopformer.cli.output import shown


def report(
    models: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, model folders or published weights.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write, empty or an earlier report.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME=SOURCE, the name it has in the report and the text: {TEXT_HELP}; may be given several "
            "times. A run's own data by default. Schedules and states are measured on the first one."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with the paper's benchmarks as files, instead of the Hub.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Benchmarks: paper (its ten), or names, as in piqa,arc_easy; paper if --data is given."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many examples of each task.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Loops: 1,2,4,8; 1, L/4, L/2 and L by default.")] = None,
    search: Annotated[int | None, typer.Option(help="The budget whose schedules are searched; L/2.")] = None,
    search_tasks: Annotated[
        bool, typer.Option("--search-tasks", help="Score the schedules on the benchmarks, too, which takes long.")
    ] = False,
    prompts: Annotated[int, typer.Option(help="Prompts for the analysis of the states.")] = 64,
    skip: Annotated[str | None, typer.Option(help="Parts to leave out: perplexity,tasks,search,analysis.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first so many tokens of a text.")] = None,
    field: Annotated[str, typer.Option(help="The field of .jsonl, .parquet and datasets that is text.")] = "text",
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a batch.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Write a report: perplexity, benchmarks, schedules, states and costs of all models, as a page, CSV and JSON.

    What eval, search and an earlier report have measured is taken over; only what is missing is run.

    Example: loopformer report runs/elastic runs/fixed --out report --text news=news.jsonl --data data/eval
    """
    from loopformer.analysis.report.collect import ReportRequest, collect, read_budgets, read_skip, read_texts
    from loopformer.analysis.report.content import PART_NAMES, gaps
    from loopformer.analysis.report.page import check_folder, write_report
    from loopformer.analysis.results import ReportResults

    request = ReportRequest(
        tuple(models),
        texts=read_texts(text or []),
        tasks=tasks,
        data=data,
        limit=limit,
        budgets=read_budgets(budgets),
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
    check_folder(out)
    try:
        with shown("done") as progress:
            found = collect(request, progress)
        files = write_report(found, out)
    except KeyboardInterrupt:
        typer.echo("loopformer: stopped; what is finished is kept, the same command continues.", err=True)
        raise typer.Exit(130) from None
    results = ReportResults.from_json(found)
    for sentence in (sentence for part in PART_NAMES for sentence in gaps(results, part)):
        typer.echo(f"not in the report: {sentence}", err=True)
    typer.echo(json.dumps([str(file) for file in files]) if as_json else f"{files[0]}")
