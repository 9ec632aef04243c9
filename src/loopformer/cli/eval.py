"""`loopformer eval text`, `eval tasks`, `eval states`, `eval stories`: measure a model at each budget.

If lm-evaluation-harness is on another machine than the model, tasks take three steps: write the requests to a file
(--export-requests), answer them (--score-requests), and compute the metrics (--aggregate).
"""

import json
import shlex
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import (
    TEXT,
    BatchTokens,
    BudgetsOption,
    Device,
    Dtype,
    Examples,
    Field,
    Join,
    Json,
    MaxTokens,
    ModelArgument,
    ModelOption,
    OutFile,
    TaskData,
    TrajectoriesOption,
    Verb,
    VerbGroup,
    Window,
    check_at_most_one,
    text_of_model,
    the_model,
)
from loopformer.cli.output import format_number, output_file, print_table, progress, stoppable
from loopformer.config.model import BOX, parse_names
from loopformer.errors import LoopformerError, require
from loopformer.files import write_json
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.store import ReportProgress
    from loopformer.lm_eval import Suite

ScheduleOption = Annotated[str, typer.Option(help="Steps of --budgets: uniform, or best, as saved by `search`.")]
Certainty = Annotated[str | None, typer.Option(help="Also measure early exit at these thresholds, as in 0.5,0.9.")]

_STOPPED = "what is finished is kept, the same command continues"
_TASK_OPTIONS = {"--tasks", "--export-requests", "--score-requests", "--aggregate"}


AllBudgets = Annotated[str | None, typer.Option(help="Loops: 1,2,4,8; 1 to L by default.")]
Beyond = Annotated[bool, typer.Option("--beyond", help="Allow more loops than L.")]
AccuracyFigure = Annotated[Path | None, typer.Option(help="Draw the accuracies: a .png, .pdf or .svg.")]


class EvalGroup(VerbGroup):
    """The subcommands. For one more version, `eval` without a subcommand works as before."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_help = bool(args) and args[0] in ctx.help_option_names
        if not ctx.resilient_parsing and not is_help and (not args or args[0].startswith("-")):
            args = _with_subcommand(args)
            typer.echo(f"Note: eval has subcommands; use `{shlex.join(['loopformer', 'eval', *args])}`.", err=True)
        return super().parse_args(ctx, args)


def _with_subcommand(args: list[str]) -> list[str]:
    """The arguments of an `eval` without a subcommand, with the subcommand that they imply."""
    from loopformer.evaluation.states import trained_on

    parts = [part for word in args for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if _TASK_OPTIONS.intersection(parts):
        require("--text" not in parts, "Texts and tasks are two commands: `eval text` and `eval tasks`.")
        return ["tasks", *args]
    named = [value for option, value in pairwise(parts) if option in ("--model", "-m")]
    if "--text" in parts and "--states" not in parts:
        return ["text", *args]
    data = None if "--states" in parts else trained_on(named[-1] if named else BOX)
    if "--states" in parts or (data is not None and data.states is not None):
        return ["states", *(word.replace("--states", "--group", 1) for word in args)]
    return ["stories" if data is not None and data.is_generated else "text", *args]


evaluate = typer.Typer(cls=EvalGroup, help="Measure how good a model is at any budgets.")


@evaluate.command("text", cls=Verb)
@stoppable(_STOPPED)
def eval_text(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    text: Annotated[list[str] | None, typer.Option(help=f"{TEXT}; repeatable. Default: held-out text.")] = None,
    budgets: BudgetsOption = None,
    trajectory: TrajectoriesOption = None,
    schedule: ScheduleOption = "uniform",
    certainty: Certainty = None,
    window: Window = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between window starts. Default: no overlap.")] = None,
    join: Join = False,
    max_tokens: MaxTokens = None,
    field: Field = "text",
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity and bits per byte. Repeat an interrupted command to continue.

    Example: loopformer eval text runs/mine --text news.jsonl --budgets 1,2,4 --trajectory 2-1-2-3
    """
    from loopformer.evaluation.loaded import LoadedModel
    from loopformer.evaluation.text import Protocol, perplexity, read_text

    source, thresholds = the_model(model, model_option), _thresholds(certainty)
    with output_file(out), progress() as report:
        loaded = LoadedModel.open(source, device, dtype)
        trajectories = loaded.trajectories(budgets, trajectory or (), schedule)
        protocol = Protocol(window, stride, join, max_tokens)
        # Refuse a wrong --window or --stride before reading texts, which may take long.
        protocol.sizes(loaded.model.config.context)
        measure = partial(
            perplexity, weights=loaded.weights, store=loaded.store, batch_tokens=batch_tokens, report=report
        )
        rows = []
        for name in text or [text_of_model(source)]:
            content = read_text(name, loaded.lm.need_tokenizer(), field, max_tokens, report)
            rows += measure(loaded.model, content, trajectories, protocol)
            for threshold in thresholds:
                longest = max(trajectories, key=len)
                rows += measure(loaded.model, content, [longest], protocol, certainty=threshold)
    if write_results({"model": source, "weights": loaded.weights, "perplexity": rows}, out, as_json):
        _show_perplexity(rows)
        reused = sum(row["reused"] for row in rows)
        stored = f"kept in {loaded.store.folder}" + (f"; {reused} of {len(rows)} were reused" if reused else "")
        typer.echo(stored if loaded.store.folder else "not kept: no results folder is writable", err=True)


@evaluate.command("tasks", cls=Verb)
@stoppable(_STOPPED)
def eval_tasks(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    tasks: Annotated[str | None, typer.Option(help="paper (the default), or names as in piqa,arc_easy.")] = None,
    data: TaskData = None,
    include: Annotated[Path | None, typer.Option(help="A folder of your own task definitions (YAML).")] = None,
    limit: Examples = None,
    budgets: BudgetsOption = None,
    trajectory: TrajectoriesOption = None,
    schedule: ScheduleOption = "uniform",
    export_requests: Annotated[Path | None, typer.Option(help="Write the requests to this file and stop.")] = None,
    score_requests: Annotated[Path | None, typer.Option(help="Answer this file; needs no lm-eval.")] = None,
    aggregate: Annotated[Path | None, typer.Option(help="Compute the metrics of this file of answers.")] = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on zero-shot tasks. Repeat an interrupted command to continue.

    Example: loopformer eval tasks runs/mine --tasks paper --data data/eval --limit 50
    """
    from loopformer.evaluation import tasks as task_files
    from loopformer.evaluation.loaded import LoadedModel

    source = the_model(model, model_option)
    score_or_aggregate = {"--score-requests": score_requests, "--aggregate": aggregate}
    check_at_most_one({"--export-requests": export_requests, **score_or_aggregate})
    for name, value in {"--tasks": tasks, "--limit": limit}.items():
        check_at_most_one({**score_or_aggregate, name: value})  # the file already fixes tasks and examples
    for name, folder in {"--data": data, "--include": include}.items():
        check_at_most_one({"--score-requests": score_requests, name: folder})
    with output_file(out), output_file(export_requests, "--export-requests"), progress("done") as report:
        if export_requests is not None:
            suite = load_tasks(tasks, data, include, limit, report)
            task_files.write_requests(export_requests, suite)
            count = sum(map(len, suite.queries.values()))
            typer.echo(f"{count:,} requests of {len(suite.tasks)} tasks written to {export_requests}", err=True)
            return
        if aggregate is not None:
            answers = task_files.read_answers(aggregate)
            names, limit = ",".join(answers.facts["names"]), answers.facts["limit"]
            suite = load_tasks(names, data, include, limit, report)
        else:
            # Refuse a wrong model or trajectory before loading tasks, which may take long.
            loaded = LoadedModel.open(source, device, dtype)
            trajectories = loaded.trajectories(budgets, trajectory or (), schedule)
            if score_requests is not None:
                requests = task_files.read_requests(score_requests)
                answers = task_files.run_requests(loaded, requests, trajectories, batch_tokens, report)
                out = out or score_requests.with_suffix(".answers.jsonl")
                task_files.write_answers(out, answers)
                along = ", ".join(answers.runs)
                typer.echo(f"answers along {along} written to {out}; use --aggregate {out} for metrics", err=True)
                return
            suite = load_tasks(tasks, data, include, limit, report)
            answers = task_files.run_requests(loaded, suite, trajectories, batch_tokens, report)
        results = suite.results(answers)
    named = {"model": answers.model["path"], "weights": answers.model["weights"]}
    if write_results({**named, "tasks": results}, out, as_json):
        _show_tasks(results)


@evaluate.command("states", cls=Verb)
@stoppable(_STOPPED)
def eval_states(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    group: Annotated[str | None, typer.Option(help="S3, A5 or S5. Default: the group of the training run.")] = None,
    budgets: AllBudgets = None,
    trajectory: TrajectoriesOption = None,
    beyond: Beyond = False,
    certainty: Certainty = None,
    sequences: Annotated[int, typer.Option(help="Number of random words.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the random words.")] = 0,
    figure: AccuracyFigure = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure state tracking: how long a word over a group may be for a model to multiply it out.

    Example: loopformer eval states runs/s3 --budgets 1,2,4 --figure s3.png
    """
    from loopformer.data.states import Group
    from loopformer.evaluation.loaded import LoadedModel
    from loopformer.evaluation.states import THRESHOLDS, state_figure, track_states, trained_group
    from loopformer.plots import check_drawing, save

    source, thresholds = the_model(model, model_option), _thresholds(certainty) or THRESHOLDS
    if (group := group or trained_group(source)) is None:
        raise LoopformerError(f"{source} was not trained to track states; name a group with --group, such as S3.")
    if figure is not None:
        check_drawing(figure)
    with output_file(out), output_file(figure, "--figure"), progress("words") as report:
        loaded = LoadedModel.open(source, device, dtype)
        all_budgets = range(1, loaded.model.config.loops + 1)
        trajectories = loaded.trajectories(budgets, trajectory or (), default=all_budgets, beyond=beyond)
        elements, tokenizer = Group.named(group), loaded.lm.tokenizer
        require(
            tokenizer is not None and tokenizer.hash == elements.tokenizer.hash,
            f"The model's tokens are not the elements of {group}; name the group it was trained on.",
        )
        tracking = track_states(
            loaded.model, elements, trajectories, sequences, seed, batch_tokens, report, thresholds
        )
        if figure is not None:
            save(state_figure(tracking), figure)
    if write_results({"model": source, "weights": loaded.weights, "states": tracking}, out, as_json):
        _show_states(tracking)


@evaluate.command("stories", cls=Verb)
@stoppable(_STOPPED)
def eval_stories(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    world: Annotated[str | None, typer.Option(help="A world or its .yaml. Default: that of the run.")] = None,
    budgets: AllBudgets = None,
    trajectory: TrajectoriesOption = None,
    beyond: Beyond = False,
    stories: Annotated[int, typer.Option(help="Number of stories for each number of hops.")] = 500,
    generate: Annotated[int, typer.Option(help="Also continue so many stories and count contradictions.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the stories.")] = 0,
    figure: AccuracyFigure = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure stories: how many facts a model can chain to answer a question.

    Example: loopformer eval stories runs/cups --budgets 1,2,4,6 --figure hops.png
    """
    from loopformer.data.stories import World
    from loopformer.evaluation.loaded import LoadedModel
    from loopformer.evaluation.stories import answer_stories, continue_stories, story_figure, trained_world
    from loopformer.plots import check_drawing, save

    source = the_model(model, model_option)
    if (world := world or trained_world(source)) is None:
        raise LoopformerError(f"{source} was not trained on stories; name a world with --world, such as cups.")
    require(len(parse_names(world)) == 1, f"Stories are measured in one world at a time, not {world}; set --world.")
    if figure is not None:
        check_drawing(figure)
    with output_file(out), output_file(figure, "--figure"), progress("stories") as report:
        loaded = LoadedModel.open(source, device, dtype)
        all_budgets = range(1, loaded.model.config.loops + 1)
        trajectories = loaded.trajectories(budgets, trajectory or (), default=all_budgets, beyond=beyond)
        opened = World.open(world)
        # First what may be refused.
        continued = continue_stories(loaded.lm, opened, trajectories, generate, seed) if generate else []
        answers = answer_stories(loaded.lm, opened, trajectories, stories, seed, batch_tokens, report)
        if continued:
            answers["continued"] = continued
        if figure is not None:
            save(story_figure(answers), figure)
    if write_results({"model": source, "weights": loaded.weights, "stories": answers}, out, as_json):
        _show_stories(answers)


def _thresholds(certainty: str | None) -> list[float]:
    from loopformer.evaluation.early_exit import check_threshold

    try:
        thresholds = [float(part) for part in certainty.split(",")] if certainty else []
        for threshold in thresholds:
            check_threshold(threshold)
    except ValueError as error:
        sentence = f"--certainty takes numbers above 0 and up to 1, such as 0.5,0.9, not {certainty!r}."
        raise LoopformerError(sentence) from error
    return thresholds


def load_tasks(
    tasks: str | None, data: Path | None, include: Path | None, limit: int | None, report: "ReportProgress"
) -> "Suite":
    """The tasks with these names, as in piqa,arc_easy. By default all tasks of the paper."""
    from loopformer.lm_eval import Suite

    return Suite.load(parse_names(tasks or "paper"), data, include, limit, report)


def write_results(report: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write results to `out`, if given, and print them with `as_json`. True if tables should be shown instead."""
    if out is not None:
        write_json(out, report)
    if as_json:
        typer.echo(json.dumps(report))
    return not as_json


def show_table(rows: Iterable[dict[str, str]]) -> None:
    """Print rows that map columns to cells."""
    cells = list(rows)
    print_table(list(cells[0]), [list(row.values()) for row in cells])


def _schedule(row: dict[str, Any]) -> str:
    return "uniform" if row["trajectory"] == str(row["budget"]) else str(row["trajectory"])


def _show_perplexity(rows: list[dict[str, Any]]) -> None:
    """Print what was scored and a table for each text."""
    has_exits = any("certainty" in row for row in rows)

    # Measuring early exit runs every loop for every token, so its times say nothing about early exit.
    hidden = ("seconds", "tokens/s") if has_exits else ("certainty", "loops")

    def cells(row: dict[str, Any]) -> dict[str, str]:
        columns = {
            "budget": str(row["budget"]),
            "schedule": _schedule(row),
            "certainty": format_number(row.get("certainty"), "g", missing="-"),
            "loops": f"{row.get('mean_passes', row['budget']):.2f}",
            "perplexity": format_number(row["perplexity"], ".3f"),
            "bits/byte": format_number(row["bits_per_byte"], ".4f"),
            "MFLOP/token": f"{row['flops_per_scored_token'] / 1e6:,.4g}",
            "seconds": f"{row['seconds']:.1f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
        }
        return {name: cell for name, cell in columns.items() if name not in hidden}

    for name in dict.fromkeys(row["text"] for row in rows):
        text_rows = [row for row in rows if row["text"] == name]
        first = text_rows[0]
        documents = "1 document" if first["documents"] == 1 else f"{first['documents']:,} documents"
        joining = "joined" if first["joined"] else "each on its own"
        stride = "no overlap" if first["stride"] == first["window"] else f"stride {first['stride']}"
        typer.echo(
            f"{name} ({first['part']}): {first['tokens']:,} tokens scored, {first['bytes']:,} bytes, {documents}, "
            f"{joining}, windows of {first['window']}, {stride}, {first['dtype']} on {first['device']}\n"
            f"sha256 {first['sha256']}"
        )
        show_table(map(cells, text_rows))


def _show_states(tracking: dict[str, Any]) -> None:
    """Print a table of accuracies per trajectory, in ranges of positions that double in length, then early exit."""
    length = tracking["places"]
    typer.echo(
        f"products over {tracking['group']} ({tracking['elements']} elements, chance "
        f"{100 * tracking['chance']:.1f} %), {tracking['sequences']:,} words of {length}, "
        f"seed {tracking['seed']}, {tracking['dtype']} on {tracking['device']}; accuracy in percent"
    )
    ends = [1 << power for power in range(length.bit_length()) if 1 << power < length]
    ranges = {f"{a + 1}-{b}" if b > a + 1 else str(b): (a, b) for a, b in pairwise([0, *ends, length])}
    show_table(
        {
            "budget": str(row["budget"]),
            "schedule": _schedule(row),
            **{name: f"{100 * sum(row['accuracy'][a:b]) / (b - a):.1f}" for name, (a, b) in ranges.items()},
            "tracked": str(row["tracked"]),
        }
        for row in tracking["trajectories"]
    )
    typer.echo("tracked: the longest prefix with 95 % or more at every position\n")
    typer.echo("early exit: a position runs no further loop once its top element is likelier than this certainty")
    show_table(
        {
            "trajectory": row["trajectory"],
            "certainty": f"{row['threshold']:g}",
            "accuracy": f"{100 * row['mean_accuracy']:.1f}",
            "loops": f"{row['mean_passes']:.2f}",
            "tracked": str(row["tracked"]),
        }
        for row in tracking["certainty"]
    )


def _show_stories(answers: dict[str, Any]) -> None:
    """Print a table of accuracies by number of hops, first of chance, then per trajectory."""
    typer.echo(
        f"stories of {answers['world']}, {answers['stories']:,} for each number of hops, seed {answers['seed']}, "
        f"{answers['dtype']} on {answers['device']}; accuracy in percent by hops"
    )

    def cells(budget: str, schedule: str, accuracy: list[float]) -> dict[str, str]:
        by_hops = {str(hops): f"{100 * value:.1f}" for hops, value in zip(answers["hops"], accuracy, strict=True)}
        mean = sum(accuracy) / len(accuracy)
        return {"budget": budget, "schedule": schedule, **by_hops, "mean": f"{100 * mean:.1f}"}

    rows = answers["trajectories"]
    chance = cells("chance", "", answers["chance"])
    show_table([chance, *(cells(str(row["budget"]), _schedule(row), row["accuracy"]) for row in rows)])
    if answers["held_out_pairs"]:
        typer.echo(f"\nthe same with one of {answers['held_out_pairs']} pairs that training keeps apart")
        show_table(cells(str(row["budget"]), _schedule(row), row["held_out_accuracy"]) for row in rows)
    if continued := answers.get("continued"):
        typer.echo(f"\n{continued[0]['stories']:,} stories continued: sentences that contradict the story so far")
        names = ("sentences", "unreadable", "contradictions")
        show_table(
            {"budget": str(row["budget"]), "schedule": _schedule(row), **{name: f"{row[name]:,}" for name in names}}
            for row in continued
        )


def _show_tasks(results: dict[str, Any]) -> None:
    """Print a row per task and a column per trajectory, in percent. Then name the data and any notes."""
    runs = results["runs"]
    heads = [Trajectory.parse(run["trajectory"]).label for run in runs]
    rows = []
    for name, facts in results["tasks"].items():
        scores = [run["tasks"][name] for run in runs]
        cells = [_format_metric(score["metric"], score["value"], score["stderr"]) for score in scores]
        rows.append([name, scores[0]["metric"], f"{facts['examples']:,}", *cells])
    for name, metrics in runs[0]["groups"].items():
        for metric in (metric for metric in metrics if "_stderr" not in metric):
            cells = [_format_metric(metric, run["groups"][name].get(metric)) for run in runs]
            rows.append([f"{name} (group)", metric, "", *cells])
    if all(run["paper"] for run in runs):
        for name, label in {"arc": "ARC, mean of both", "average": "average of 10"}.items():
            rows.append([label, "", "", *(_format_metric("acc", run["paper"][name]) for run in runs)])
    rows.append(["MFLOP/token", "", "", *(f"{run['flops_per_token'] / 1e6:,.4g}" for run in runs)])
    rows.append(["seconds", "", "", *(f"{run['seconds']:.1f}" for run in runs)])
    print_table(["task", "metric", "examples", *heads], rows, left=2)

    model = results["model"]
    limit = "all examples" if results["limit"] is None else f"the first {results['limit']} examples of each task"
    harness = f"lm-evaluation-harness {results['harness']}; {model['dtype']} on {model['device']}"
    typer.echo(f"accuracy in percent ± standard error; {limit}; {harness}")
    for name, facts in results["tasks"].items():
        data, cut = facts["data"], runs[0]["tasks"][name]["cut"]
        source = f"{data['file']} sha256 {data['sha256']}" if "file" in data else data["dataset"]
        short = f"; {cut:,} of {facts['requests']:,} requests lost their beginning" if cut else ""
        typer.echo(f"{name}: {facts['examples']:,} of {facts['of']:,} examples, {source}{short}")
    for note in results["notes"]:
        typer.echo(f"note: {note}")


def _format_metric(metric: str, value: float | None, stderr: float | None = None) -> str:
    """The cell of a metric, fractions in percent, with its standard error if there is one."""
    from loopformer.evaluation.tasks import SHARE_METRICS

    if value is None:
        return "none"
    shown = f"{100 * value:.2f}" if metric.startswith(SHARE_METRICS) else f"{value:.4g}"
    return shown if stderr is None else f"{shown} ± {_format_metric(metric, stderr)}"
