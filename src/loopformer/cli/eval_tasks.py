"""The benchmarks of `loopformer eval`: run them, or only one side of it where the harness is elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from loopformer.cli.progress import shown

if TYPE_CHECKING:
    from loopformer.evaluation.subject import Subject
    from loopformer.evaluation.suite import Suite
    from loopformer.trajectory import Trajectory

_UNIT = "requests"
_FRACTIONS = ("acc", "exact_match")  # metrics that are shown in percent


def check(
    tasks: str | None,
    data: Path | None,
    include: Path | None,
    limit: int | None,
    export: Path | None,
    score: Path | None,
    collect: Path | None,
) -> None:
    """Refuse options that do not go together."""
    from loopformer.errors import require

    given = sum(one is not None for one in (export, score, collect))
    require(given <= 1, "Give one of --export-requests, --score-requests and --aggregate.")
    require(export is None or tasks is not None, "Say what to export with --tasks, such as paper.")
    require(tasks is None or (score is None and collect is None), "The file says which tasks; leave out --tasks.")
    require(limit is None or tasks is not None, "--limit goes with --tasks.")
    for name, value in (("--data", data), ("--include", include)):
        require(value is None or tasks is not None or collect is not None, f"{name} goes with --tasks.")


def run_tasks(subject: "Subject", routes: "list[Trajectory]", suite: "Suite", batch_tokens: int) -> dict[str, Any]:
    """Ask a model all requests along each trajectory and put the numbers together."""
    from loopformer.evaluation.benchmarks import ask, model_facts, results

    with shown(_UNIT) as report:
        runs = ask(subject, suite.queries, routes, batch_tokens, report)
    return results(suite, model_facts(subject, runs), runs)


def load_tasks(tasks: str, data: Path | None, include: Path | None, limit: int | None) -> "Suite":
    """Tasks by name, as in piqa,arc_easy, or all of the paper's."""
    from loopformer.evaluation.suite import Suite

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with shown("tasks") as report:
        return Suite.load(names, data, include, limit, report)


def export_requests(file: Path, suite: "Suite") -> None:
    """Write what the tasks ask, for a machine without the harness."""
    from loopformer.evaluation.exchange import write_requests

    write_requests(file, suite.requests)
    count = sum(map(len, suite.queries.values()))
    typer.echo(f"{count:,} requests of {len(suite.tasks)} tasks written to {file}", err=True)


def score_requests(
    file: Path, subject: "Subject", routes: "list[Trajectory]", out: Path | None, batch_tokens: int
) -> None:
    """Answer the requests of a file; the harness is not needed."""
    from loopformer.evaluation.benchmarks import ask, model_facts
    from loopformer.evaluation.exchange import Answers, read_requests, write_answers

    asked = read_requests(file)
    out = out or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    with shown(_UNIT) as report:
        runs = ask(subject, asked.queries, routes, batch_tokens, report)
    write_answers(out, Answers(asked.facts, model_facts(subject, runs), runs))
    typer.echo(
        f"answers along {', '.join(runs)} written to {out}; --aggregate {out} makes numbers of them", err=True
    )


def aggregate(file: Path, data: Path | None, include: Path | None) -> dict[str, Any]:
    """The numbers of a file of answers, by the harness."""
    from loopformer.evaluation.benchmarks import collect
    from loopformer.evaluation.exchange import read_answers

    answers = read_answers(file)
    suite = load_tasks(",".join(answers.facts["names"]), data, include, answers.facts["limit"])
    return collect(suite, answers)


def show_tasks(found: dict[str, Any]) -> None:
    """A row for each task and a column for each trajectory, in percent; then the data, and what is not standard."""
    from rich.console import Console
    from rich.table import Table

    from loopformer.evaluation.paper_tasks import PAPER

    console, runs = Console(), found["runs"]
    heads = [f"M={run['budget']}" if run["trajectory"] == str(run["budget"]) else run["trajectory"] for run in runs]
    table = Table("task", "metric", "examples", *heads, box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for name, facts in found["tasks"].items():
        cells = [_cell(run["tasks"][name]) for run in runs]
        table.add_row(name, runs[0]["tasks"][name]["metric"], f"{facts['examples']:,}", *cells)
    for name in dict.fromkeys(name for run in runs for name in run["groups"]):
        for metric in (metric for metric in runs[0]["groups"][name] if "_stderr" not in metric):
            cells = [_shown(metric, run["groups"][name].get(metric)) for run in runs]
            table.add_row(f"{name} (group)", metric, "", *cells)
    if all(run["paper"] for run in runs):
        table.add_section()
        for name, label in (("arc", "ARC, mean of both"), ("average", f"average of {len(PAPER)}")):
            table.add_row(label, "", "", *(_shown("acc", run["paper"][name]) for run in runs))
    table.add_section()
    table.add_row("MFLOP/token", "", "", *(f"{run['flops_per_token'] / 1e6:,.4g}" for run in runs))
    table.add_row("seconds", "", "", *(f"{run['seconds']:.1f}" for run in runs))
    console.print(table, highlight=False)
    for line in _notes(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cell(task: dict[str, Any]) -> str:
    value = _shown(task["metric"], task["value"])
    return value if task["stderr"] is None else f"{value} ± {_shown(task['metric'], task['stderr'])}"


def _shown(metric: str, value: float | None) -> str:
    """A fraction in percent, any other number as it is."""
    if value is None:
        return "none"
    return f"{100 * value:.2f}" if metric.startswith(_FRACTIONS) else f"{value:.4g}"


def _notes(found: dict[str, Any]) -> list[str]:
    """How the numbers were made, in lines."""
    model = found["model"]
    limit = "all examples" if found["limit"] is None else f"the first {found['limit']} examples of each task"
    lines = [
        f"accuracy in percent ± standard error; {limit}; lm-evaluation-harness {found['harness']}; "
        f"{model['dtype']} on {model['device']}"
    ]
    for name, facts in found["tasks"].items():
        data = facts["data"]
        source = f"{data['file']} sha256 {data['sha256']}" if "file" in data else data["dataset"]
        cut = found["runs"][0]["tasks"][name]["cut"]
        short = f"; {cut:,} of {facts['requests']:,} requests lost their beginning" if cut else ""
        lines.append(f"{name}: {facts['examples']:,} of {facts['of']:,} examples, {source}{short}")
    return lines + [f"note: {note}" for note in found["notes"]]
