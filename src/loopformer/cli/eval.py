"""The benchmarks of `loopformer eval`: run them, or only one side of it where the harness is elsewhere.

`loopformer eval`: how good a model is at each budget.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.output import shown

if TYPE_CHECKING:
    from loopformer.evaluation.benchmarks import LoadedModel
    from loopformer.evaluation.harness import Suite
    from loopformer.evaluation.text import Protocol
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


def run_tasks(
    subject: "LoadedModel", trajectories: "list[Trajectory]", suite: "Suite", batch_tokens: int
) -> dict[str, Any]:
    """Ask a model all requests along each trajectory and put the numbers together."""
    from loopformer.evaluation.benchmarks import ask, model_facts, results

    with shown(_UNIT) as report:
        runs = ask(subject, suite.queries, trajectories, batch_tokens, report)
    return results(suite, model_facts(subject, runs), runs)


def load_tasks(tasks: str, data: Path | None, include: Path | None, limit: int | None) -> "Suite":
    """Tasks by name, as in piqa,arc_easy, or all of the paper's."""
    from loopformer.evaluation.harness import Suite

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with shown("tasks") as report:
        return Suite.load(names, data, include, limit, report)


def export_requests(file: Path, suite: "Suite") -> None:
    """Write what the tasks ask, for a machine without the harness."""
    from loopformer.evaluation.tasks import write_requests

    write_requests(file, suite.requests)
    count = sum(map(len, suite.queries.values()))
    typer.echo(f"{count:,} requests of {len(suite.tasks)} tasks written to {file}", err=True)


def score_requests(
    file: Path, subject: "LoadedModel", trajectories: "list[Trajectory]", out: Path | None, batch_tokens: int
) -> None:
    """Answer the requests of a file; the harness is not needed."""
    from loopformer.evaluation.benchmarks import ask, model_facts
    from loopformer.evaluation.tasks import Answers, read_requests, write_answers

    asked = read_requests(file)
    out = out or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    with shown(_UNIT) as report:
        runs = ask(subject, asked.queries, trajectories, batch_tokens, report)
    write_answers(out, Answers(asked.facts, model_facts(subject, runs), runs))
    typer.echo(
        f"answers along {', '.join(runs)} written to {out}; --aggregate {out} makes numbers of them", err=True
    )


def aggregate(file: Path, data: Path | None, include: Path | None) -> dict[str, Any]:
    """The numbers of a file of answers, by the harness."""
    from loopformer.evaluation.benchmarks import collect
    from loopformer.evaluation.tasks import read_answers

    answers = read_answers(file)
    suite = load_tasks(",".join(answers.facts["names"]), data, include, answers.facts["limit"])
    return collect(suite, answers)


def show_tasks(found: dict[str, Any]) -> None:
    """A row for each task and a column for each trajectory, in percent; then the data, and what is not standard."""
    from rich.console import Console
    from rich.table import Table

    from loopformer.evaluation.tasks import PAPER

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


TEXT_HELP = (
    "Files, folders or globs of .txt .md .jsonl .parquet (also .gz .xz .zst), hf:DATASET[:config][:split], a "
    "prepared folder (its validation split), or the held-out part of stdlib, pile, fineweb-edu or openwebtext"
)


def eval_(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A run, a model folder or published weights.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help=f"{TEXT_HELP}; may be given several times. A run's own data by default."),
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Loops: 1,2,4,8; 1, L/4, L/2 and L by default.")] = None,
    trajectory: Annotated[
        list[str] | None, typer.Option(help="A schedule, such as 4-2-1-1; may be given several times.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Steps of --budgets: uniform, or best, as `loopformer search` found them.")
    ] = "uniform",
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at a time; its context.")] = None,
    stride: Annotated[int | None, typer.Option(help="Windows begin so many tokens apart; no overlap.")] = None,
    join: Annotated[bool, typer.Option("--join", help="Join documents into one stream, as in training.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first so many tokens of a text.")] = None,
    field: Annotated[str, typer.Option(help="The field of .jsonl, .parquet and datasets that is text.")] = "text",
    tasks: Annotated[
        str | None,
        typer.Option(help="Benchmarks: paper (its ten), or names of lm-evaluation-harness, as in piqa,arc_easy."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with the paper's benchmarks as files, instead of the Hub.")
    ] = None,
    include: Annotated[Path | None, typer.Option(help="A folder of your own task definitions (YAML).")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many examples of each task.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export-requests", help="Write what --tasks ask to this file, and end.")
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option("--score-requests", help="Answer the requests of this file, without lm-evaluation-harness."),
    ] = None,
    collect: Annotated[
        Path | None, typer.Option("--aggregate", help="Make numbers of the answers in this file.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a batch.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the results to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity, or the accuracy on benchmarks, at any budgets; started again, it continues.

    Examples: loopformer eval --model runs/mine --text news.jsonl --budgets 1,2,4 --trajectory 4-2-1-1

    loopformer eval --model runs/mine --tasks paper --data data/eval --limit 50
    """
    from loopformer.cli import eval as eval_tasks
    from loopformer.errors import LoopformerError, require
    from loopformer.evaluation.benchmarks import LoadedModel
    from loopformer.evaluation.text import Protocol

    eval_tasks.check(tasks, data, include, limit, export, score, collect)
    require(out is None or not out.is_dir(), f"--out names a file to write, but {out} is a folder.")
    report: dict[str, Any] = {}
    try:
        suite = None if tasks is None else eval_tasks.load_tasks(tasks, data, include, limit)
        if export is not None and suite is not None:
            eval_tasks.export_requests(export, suite)
            return
        if collect is not None:
            report["tasks"] = eval_tasks.aggregate(collect, data, include)
            _write(report, out, as_json)
            return
        if model is None:
            raise LoopformerError("Say which model to evaluate with --model, such as runs/mine.")
        subject = LoadedModel.open(model, device, dtype)
        trajectories = subject.trajectories(budgets, trajectory or (), schedule)
        if score is not None:
            eval_tasks.score_requests(score, subject, trajectories, out, batch_tokens)
            return
        report |= {"model": model, "weights": subject.weights}
        if text or suite is None:
            protocol = Protocol(window, stride, join, max_tokens)
            texts = text or [own_text(model)]
            report["perplexity"] = evaluate_texts(subject, texts, trajectories, protocol, field, batch_tokens)
        if suite is not None:
            report["tasks"] = eval_tasks.run_tasks(subject, trajectories, suite, batch_tokens)
    except KeyboardInterrupt:
        typer.echo("loopformer: stopped; what is finished is kept, the same command continues.", err=True)
        raise typer.Exit(130) from None
    _write(report, out, as_json)
    if not as_json and "perplexity" in report:
        say_kept(report["perplexity"], subject)


def _write(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Results to a file, if one is asked for, and to the screen."""
    from loopformer.cli import eval as eval_tasks
    from loopformer.files import write_atomic

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(report))
        return
    if "perplexity" in report:
        show_texts(report["perplexity"])
    if "tasks" in report:
        eval_tasks.show_tasks(report["tasks"])


def own_text(model: str) -> str:
    """The data that a run was trained with, for its validation split."""
    from loopformer.errors import LoopformerError
    from loopformer.evaluation.text import default_text

    if found := default_text(model):
        return found
    raise LoopformerError(f"{model} has no prepared data of its own; say what to measure on with --text.")


def evaluate_texts(
    subject: "LoadedModel",
    texts: list[str],
    trajectories: "list[Trajectory]",
    protocol: "Protocol",
    field: str,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """One row for each text and trajectory."""
    from loopformer.evaluation.text import perplexity, read_text

    protocol.sizes(subject.model.config.context)  # before a text is read, which may take long
    rows = []
    with shown() as report:
        for given in texts:
            text = read_text(given, subject.lm.need_tokenizer(), field, protocol.max_tokens, report)
            rows += perplexity(
                subject.model,
                text,
                trajectories,
                protocol,
                weights=subject.weights,
                store=subject.store,
                batch_tokens=batch_tokens,
                report=report,
            )
    return rows


def show_texts(rows: list[dict[str, Any]]) -> None:
    """A table for each text."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name in dict.fromkeys(row["text"] for row in rows):
        own = [row for row in rows if row["text"] == name]
        console.print(describe_text(own[0]), highlight=False, markup=False, soft_wrap=True)
        columns = ("budget", "schedule", "perplexity", "bits/byte", "MFLOP/token", "seconds", "tokens/s")
        table = Table(*columns, box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for row in own:
            schedule = "uniform" if row["trajectory"] == str(row["budget"]) else row["trajectory"]
            table.add_row(
                str(row["budget"]),
                schedule,
                number(row["perplexity"], ".3f"),
                number(row["bits_per_byte"], ".4f"),
                f"{row['flops_per_scored_token'] / 1e6:,.4g}",
                f"{row['seconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
            )
        console.print(table, highlight=False)


def describe_text(row: dict[str, Any]) -> str:
    """What was measured on, and how, in two lines."""
    documents = "1 document" if row["documents"] == 1 else f"{row['documents']:,} documents"
    how = "joined" if row["joined"] else "each on its own"
    stride = "no overlap" if row["stride"] == row["window"] else f"stride {row['stride']}"
    return (
        f"{row['text']} ({row['part']}): {row['tokens']:,} tokens scored, {row['bytes']:,} bytes, {documents}, "
        f"{how}, windows of {row['window']}, {stride}, {row['dtype']} on {row['device']}\nsha256 {row['sha256']}"
    )


def say_kept(rows: list[dict[str, Any]], subject: "LoadedModel") -> None:
    """Where finished pieces are, and how many came from there, on stderr."""
    if subject.store.folder is None:
        typer.echo("not kept: neither the model's folder nor the user's cache can be written", err=True)
        return
    again = sum(row["reused"] for row in rows)
    typer.echo(
        f"kept in {subject.store.folder}" + (f"; {again} of {len(rows)} were there" if again else ""), err=True
    )


def number(value: float | None, form: str) -> str:
    """A number for a table; what the model could not compute is said to be none."""
    return "not a number" if value is None else format(value, form)
