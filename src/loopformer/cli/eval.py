"""`loopformer eval text`, `eval tasks`, `eval states`: how good a model is at each budget.

Tasks can be scored in three steps where lm-evaluation-harness is on another machine than the model: write the
requests to a file (--export-requests), answer them (--score-requests), compute the metrics (--aggregate).
"""

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from loopformer.cli.options import (
    MODEL,
    TEXT,
    BatchTokens,
    Budgets,
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
    Trajectories,
    Window,
    complete_model,
    text_of_model,
)
from loopformer.cli.output import number, output_file, print_table, progress, stoppable
from loopformer.config.model import BOX
from loopformer.files import write_json

if TYPE_CHECKING:
    from loopformer.lm_eval import Suite

ModelPath = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{MODEL}.", autocompletion=complete_model)]
ScheduleOption = Annotated[
    str, typer.Option(help="Steps of --budgets: uniform, or best, as `loopformer search` found them.")
]

_Cell = Callable[[dict[str, Any]], str]
_KEPT = "what is finished is kept, the same command continues"
_FRACTIONS = ("acc", "exact_match")  # metrics that are shown in percent
_TASK_OPTIONS = {"--tasks", "--export-requests", "--score-requests", "--aggregate"}


class EvalGroup(TyperGroup):
    """The subcommands, and for one more version the earlier form without one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_help = bool(args) and args[0] in ctx.help_option_names
        if not ctx.resilient_parsing and not is_help and (not args or args[0].startswith("-")):
            args = _with_subcommand(args)
            typer.echo(f"Note: eval has subcommands; use `{shlex.join(['loopformer', 'eval', *args])}`.", err=True)
        return super().parse_args(ctx, args)


def _with_subcommand(args: list[str]) -> list[str]:
    """Arguments of the earlier `eval` as those of today's subcommands."""
    from loopformer.errors import require
    from loopformer.evaluation.states import trained_group

    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if _TASK_OPTIONS.intersection(words):
        require("--text" not in words, "Texts and tasks are two commands: `eval text` and `eval tasks`.")
        return ["tasks", *args]
    named = [value for option, value in pairwise(words) if option in ("--model", "-m")]
    if "--states" in words or ("--text" not in words and trained_group(named[-1] if named else BOX)):
        return ["states", *(word.replace("--states", "--group", 1) for word in args)]
    return ["text", *args]


evaluate = typer.Typer(cls=EvalGroup, help="Measure how good a model is at any budgets.")


@evaluate.command("text")
@stoppable(_KEPT)
def eval_text(
    path: ModelPath = None,
    model: Model = BOX,
    text: Annotated[
        list[str] | None,
        typer.Option(help=f"{TEXT}; may be given several times. What is held out for the model by default."),
    ] = None,
    budgets: Budgets = None,
    trajectory: Trajectories = None,
    schedule: ScheduleOption = "uniform",
    certainty: Annotated[
        str | None,
        typer.Option(
            help="Early exit, beside fixed budgets: a position takes no further loop once the probability of its "
            "top token exceeds this threshold, as in 0.5,0.9."
        ),
    ] = None,
    window: Window = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from one window to the next; no overlap.")] = None,
    join: Join = False,
    max_tokens: MaxTokens = None,
    field: Field = "text",
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity and bits per byte; started again, it continues.

    Example: loopformer eval text runs/mine --text news.jsonl --budgets 1,2,4 --trajectory 4-2-1-1
    """
    from loopformer.evaluation.store import LoadedModel
    from loopformer.evaluation.text import Protocol, perplexity, read_text

    model = _named(path, model)
    thresholds = [] if certainty is None else _thresholds(certainty)
    with output_file(out):
        loaded = LoadedModel.open(model, device, dtype)
        trajectories = loaded.trajectories(budgets, trajectory or (), schedule)
        protocol = Protocol(window, stride, join, max_tokens)
        protocol.sizes(loaded.model.config.context)  # before a text is read, which may take long
        rows = []
        with progress() as report:
            for source in text or [text_of_model(model)]:
                read = read_text(source, loaded.lm.need_tokenizer(), field, max_tokens, report)
                for threshold in (None, *thresholds):
                    rows += perplexity(
                        loaded.model,
                        read,
                        trajectories if threshold is None else [max(trajectories, key=len)],
                        protocol,
                        certainty=threshold,
                        weights=loaded.weights,
                        store=loaded.store,
                        batch_tokens=batch_tokens,
                        report=report,
                    )
        if write_results({"model": model, "weights": loaded.weights, "perplexity": rows}, out, as_json):
            _show_perplexity(rows)
            _show_store(rows, loaded.store.folder)


@evaluate.command("tasks")
@stoppable(_KEPT)
def eval_tasks(
    path: ModelPath = None,
    model: Model = BOX,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="paper for its ten, the default, or names of lm-evaluation-harness, as in piqa,arc_easy."
        ),
    ] = None,
    data: TaskData = None,
    include: Annotated[Path | None, typer.Option(help="A folder of your own task definitions (YAML).")] = None,
    limit: Examples = None,
    budgets: Budgets = None,
    trajectory: Trajectories = None,
    schedule: ScheduleOption = "uniform",
    export: Annotated[
        Path | None,
        typer.Option("--export-requests", help="Write the requests of the tasks to this file and stop."),
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option("--score-requests", help="Answer the requests of this file, without lm-evaluation-harness."),
    ] = None,
    collect: Annotated[
        Path | None, typer.Option("--aggregate", help="Compute the metrics from the answers in this file.")
    ] = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on zero-shot tasks; started again, it continues.

    Example: loopformer eval tasks runs/mine --tasks paper --data data/eval --limit 50
    """
    from loopformer.errors import require
    from loopformer.evaluation.store import LoadedModel
    from loopformer.evaluation.tasks import (
        Answers,
        model_facts,
        read_answers,
        read_requests,
        run_requests,
        write_answers,
        write_requests,
    )

    model = _named(path, model)
    require(
        sum(file is not None for file in (export, score, collect)) <= 1,
        "Give one of --export-requests, --score-requests and --aggregate.",
    )
    require(
        (score is None and collect is None) or (tasks is None and limit is None),
        "The file says which tasks; leave out --tasks and --limit.",
    )
    require(score is None or (data is None and include is None), "--score-requests needs no --data or --include.")
    with output_file(out), output_file(export, "--export-requests"):
        if collect is not None:
            answers = read_answers(collect)
            suite = load_tasks(",".join(answers.facts["names"]), data, include, answers.facts["limit"])
            results = suite.collect(answers)
            if write_results({"tasks": results}, out, as_json):
                _show_tasks(results)
            return
        if export is not None:
            suite = load_tasks(tasks or "paper", data, include, limit)
            write_requests(export, suite)
            count = sum(map(len, suite.queries.values()))
            typer.echo(f"{count:,} requests of {len(suite.tasks)} tasks written to {export}", err=True)
            return
        loaded = LoadedModel.open(model, device, dtype)  # before the tasks, which may take long
        trajectories = loaded.trajectories(budgets, trajectory or (), schedule)
        if score is not None:
            requests = read_requests(score)
            with progress("requests") as report:
                runs = run_requests(loaded, requests.queries, trajectories, batch_tokens, report)
            out = out or score.with_name(f"{score.name.removesuffix('.jsonl')}.answers.jsonl")
            write_answers(out, Answers(requests.facts, model_facts(loaded, runs), runs))
            along = ", ".join(runs)
            typer.echo(f"answers along {along} written to {out}; --aggregate {out} computes the metrics", err=True)
            return
        suite = load_tasks(tasks or "paper", data, include, limit)
        with progress("requests") as report:
            runs = run_requests(loaded, suite.queries, trajectories, batch_tokens, report)
        results = suite.results(model_facts(loaded, runs), runs)
        if write_results({"model": model, "weights": loaded.weights, "tasks": results}, out, as_json):
            _show_tasks(results)


@evaluate.command("states")
@stoppable(_KEPT)
def eval_states(
    path: ModelPath = None,
    model: Model = BOX,
    group: Annotated[
        str | None, typer.Option(help="Track products over S3, A5 or S5; by default the group of a run.")
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Loops: 1,2,4,8; 1 to L by default.")] = None,
    trajectory: Trajectories = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Allow more loops than L.")] = False,
    certainty: Annotated[
        str | None, typer.Option(help="Thresholds of depth by certainty, beside fixed budgets: 0.5,0.9.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Words to track.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of the words.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the accuracy by position and budget: a .png, .pdf or .svg.")
    ] = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure how many elements of a word over a group a model can multiply.

    Example: loopformer eval states runs/s3 --budgets 1,2,4 --figure s3.png
    """
    from loopformer.config import parse_counts
    from loopformer.data.states import Group
    from loopformer.errors import LoopformerError, require
    from loopformer.evaluation.states import THRESHOLDS, state_figure, track_states, trained_group
    from loopformer.evaluation.store import LoadedModel
    from loopformer.plots import check_drawing, save

    model = _named(path, model)
    if (group := group or trained_group(model)) is None:
        raise LoopformerError(f"{model} was not trained to track states; name a group with --group, such as S3.")
    thresholds = [] if certainty is None else _thresholds(certainty)
    if figure is not None:
        check_drawing(figure)
    with output_file(out), output_file(figure, "--figure"):
        loaded = LoadedModel.open(model, device, dtype)
        numbers = [] if trajectory else list(range(1, loaded.model.config.loops + 1))
        if budgets is not None:
            numbers = parse_counts(budgets, "--budgets")
        resolved = (loaded.model.resolve(each, beyond) for each in (*numbers, *(trajectory or ())))
        trajectories = list(dict.fromkeys(resolved))
        elements, tokenizer = Group.named(group), loaded.lm.tokenizer
        require(
            tokenizer is not None and tokenizer.hash == elements.tokenizer.hash,
            f"The model's tokens are not the elements of {group}; name the group it was trained on.",
        )
        with progress("words") as report:
            tracking = track_states(
                loaded.model,
                elements,
                trajectories,
                sequences,
                seed,
                batch_tokens,
                report,
                thresholds or THRESHOLDS,
            )
        if figure is not None:
            save(state_figure(tracking), figure)
        if write_results({"model": model, "weights": loaded.weights, "states": tracking}, out, as_json):
            _show_states(tracking)


def _named(path: str | None, model: str) -> str:
    """The model, given as the first argument or with --model."""
    from loopformer.errors import require

    require(path is None or model == BOX, "Give the model once: as the first argument or with --model.")
    return path or model


def _thresholds(text: str) -> list[float]:
    from loopformer.errors import LoopformerError
    from loopformer.evaluation.early_exit import check_threshold

    try:
        thresholds = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise LoopformerError(f"--certainty takes numbers such as 0.5,0.9, not {text!r}.") from error
    for threshold in thresholds:
        check_threshold(threshold)
    return thresholds


def load_tasks(tasks: str, data: Path | None, include: Path | None, limit: int | None) -> "Suite":
    """Tasks by name, as in piqa,arc_easy, or all of the paper's."""
    from loopformer.lm_eval import Suite

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with progress("tasks") as report:
        return Suite.load(names, data, include, limit, report)


def write_results(report: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write results to the file, if there is one, and print them if JSON is wanted; true if tables are wanted."""
    if out is not None:
        write_json(out, report)
    if as_json:
        typer.echo(json.dumps(report))
    return not as_json


def _show_perplexity(rows: list[dict[str, Any]]) -> None:
    """Print for each text what was scored, and a table."""
    for name in dict.fromkeys(row["text"] for row in rows):
        own = [row for row in rows if row["text"] == name]
        first = own[0]
        documents = "1 document" if first["documents"] == 1 else f"{first['documents']:,} documents"
        how = "joined" if first["joined"] else "each on its own"
        stride = "no overlap" if first["stride"] == first["window"] else f"stride {first['stride']}"
        typer.echo(
            f"{name} ({first['part']}): {first['tokens']:,} tokens scored, {first['bytes']:,} bytes, {documents}, "
            f"{how}, windows of {first['window']}, {stride}, {first['dtype']} on {first['device']}\n"
            f"sha256 {first['sha256']}"
        )
        columns = _columns(early_exit=any("certainty" in row for row in own))
        print_table(list(columns), [[cell(row) for cell in columns.values()] for row in own])


def _columns(early_exit: bool) -> dict[str, _Cell]:
    """The columns of a perplexity table. Early exit has no times, as its evaluation runs every loop in full."""
    followed: dict[str, _Cell] = {
        "budget": lambda row: str(row["budget"]),
        "schedule": lambda row: "uniform" if row["trajectory"] == str(row["budget"]) else row["trajectory"],
    }
    depth: dict[str, _Cell] = {
        "certainty": lambda row: number(row.get("certainty"), "g", missing="-"),
        "passes": lambda row: f"{row.get('mean_passes', row['budget']):.2f}",
    }
    measured: dict[str, _Cell] = {
        "perplexity": lambda row: number(row["perplexity"], ".3f"),
        "bits/byte": lambda row: number(row["bits_per_byte"], ".4f"),
        "MFLOP/token": lambda row: f"{row['flops_per_scored_token'] / 1e6:,.4g}",
    }
    times: dict[str, _Cell] = {
        "seconds": lambda row: f"{row['seconds']:.1f}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    }
    return {**followed, **depth, **measured} if early_exit else {**followed, **measured, **times}


def _show_states(tracking: dict[str, Any]) -> None:
    """Accuracy by runs of places, doubling in length, along each trajectory; then early exit."""
    typer.echo(
        f"products over {tracking['group']} ({tracking['elements']} elements, chance "
        f"{100 * tracking['chance']:.1f} %), {tracking['sequences']:,} words of {tracking['places']}, "
        f"seed {tracking['seed']}, {tracking['dtype']} on {tracking['device']}; accuracy in percent"
    )
    ends = [1 << power for power in range(tracking["places"].bit_length()) if 1 << power < tracking["places"]]
    runs = list(pairwise([0, *ends, tracking["places"]]))
    print_table(
        ["budget", "schedule", *(f"{a + 1}-{b}" if b > a + 1 else str(b) for a, b in runs), "tracked"],
        [
            [
                str(row["budget"]),
                "uniform" if row["trajectory"] == str(row["budget"]) else row["trajectory"],
                *(f"{100 * sum(row['accuracy'][a:b]) / (b - a):.1f}" for a, b in runs),
                str(row["tracked"]),
            ]
            for row in tracking["trajectories"]
        ],
    )
    typer.echo("tracked: the longest prefix with 95 % or more at every place")
    typer.echo(
        "\nearly exit: a position takes no further loop once its top element is likelier than this certainty"
    )
    print_table(
        ["trajectory", "certainty", "accuracy", "passes", "tracked"],
        [
            [
                row["trajectory"],
                f"{row['threshold']:g}",
                f"{100 * row['mean_accuracy']:.1f}",
                f"{row['mean_passes']:.2f}",
                str(row["tracked"]),
            ]
            for row in tracking["certainty"]
        ],
    )


def _show_store(rows: list[dict[str, Any]], folder: Path | None) -> None:
    """Print on stderr where results are stored, and how many came from there."""
    if folder is None:
        typer.echo("not kept: neither the model's folder nor the user's cache can be written", err=True)
        return
    again = sum(row["reused"] for row in rows)
    typer.echo(f"kept in {folder}" + (f"; {again} of {len(rows)} were there" if again else ""), err=True)


def _show_tasks(results: dict[str, Any]) -> None:
    """Print a row per task and a column per trajectory, in percent, then the data and any deviation."""
    from loopformer.evaluation.tasks import PAPER

    runs = results["runs"]
    heads = [f"M={run['budget']}" if run["trajectory"] == str(run["budget"]) else run["trajectory"] for run in runs]
    rows = []
    for name, facts in results["tasks"].items():
        scores = [run["tasks"][name] for run in runs]
        cells = [_metric(task["metric"], task["value"], task["stderr"]) for task in scores]
        rows.append([name, scores[0]["metric"], f"{facts['examples']:,}", *cells])
    for name in dict.fromkeys(name for run in runs for name in run["groups"]):
        for metric in (metric for metric in runs[0]["groups"][name] if "_stderr" not in metric):
            cells = [_metric(metric, run["groups"][name].get(metric)) for run in runs]
            rows.append([f"{name} (group)", metric, "", *cells])
    if all(run["paper"] for run in runs):
        for name, label in (("arc", "ARC, mean of both"), ("average", f"average of {len(PAPER)}")):
            rows.append([label, "", "", *(_metric("acc", run["paper"][name]) for run in runs)])
    rows.append(["MFLOP/token", "", "", *(f"{run['flops_per_token'] / 1e6:,.4g}" for run in runs)])
    rows.append(["seconds", "", "", *(f"{run['seconds']:.1f}" for run in runs)])
    print_table(["task", "metric", "examples", *heads], rows, left=2)

    model = results["model"]
    limit = "all examples" if results["limit"] is None else f"the first {results['limit']} examples of each task"
    typer.echo(
        f"accuracy in percent ± standard error; {limit}; lm-evaluation-harness {results['harness']}; "
        f"{model['dtype']} on {model['device']}"
    )
    for name, facts in results["tasks"].items():
        data, cut = facts["data"], runs[0]["tasks"][name]["cut"]
        source = f"{data['file']} sha256 {data['sha256']}" if "file" in data else data["dataset"]
        short = f"; {cut:,} of {facts['requests']:,} requests lost their beginning" if cut else ""
        typer.echo(f"{name}: {facts['examples']:,} of {facts['of']:,} examples, {source}{short}")
    for note in results["notes"]:
        typer.echo(f"note: {note}")


def _metric(metric: str, value: float | None, stderr: float | None = None) -> str:
    """A metric for a table, fractions in percent, with its standard error if there is one."""
    if value is None:
        return "none"
    shown = f"{100 * value:.2f}" if metric.startswith(_FRACTIONS) else f"{value:.4g}"
    return shown if stderr is None else f"{shown} ± {_metric(metric, stderr)}"
