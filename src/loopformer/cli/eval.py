"""`loopformer eval`: how good a model is at each budget: on texts, on benchmarks, in state tracking.

Benchmarks can be taken in three steps where lm-evaluation-harness is on another machine than the model: write what
they ask to a file (--export-requests), answer it (--score-requests), make numbers of the answers (--aggregate).
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import (
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
    own_text,
)
from loopformer.cli.output import number, output_file, print_table, progress, stoppable
from loopformer.config.model import BOX
from loopformer.files import write_json

if TYPE_CHECKING:
    from loopformer.evaluation.store import LoadedModel
    from loopformer.evaluation.text import Protocol
    from loopformer.lm_eval import Suite
    from loopformer.trajectory import Trajectory

_Cell = Callable[[dict[str, Any]], str]
_FRACTIONS = ("acc", "exact_match")  # metrics that are shown in percent


@stoppable("what is finished is kept, the same command continues")
def eval_(
    model: Model = BOX,
    text: Annotated[
        list[str] | None,
        typer.Option(help=f"{TEXT}; may be given several times. What is held out for the model by default."),
    ] = None,
    budgets: Budgets = None,
    trajectory: Trajectories = None,
    schedule: Annotated[
        str, typer.Option(help="Steps of --budgets: uniform, or best, as `loopformer search` found them.")
    ] = "uniform",
    certainty: Annotated[
        str | None,
        typer.Option(
            help="Depth by certainty, beside fixed budgets: a token whose next one is likelier takes no further "
            "pass. Thresholds: 0.5,0.9."
        ),
    ] = None,
    window: Window = None,
    stride: Annotated[int | None, typer.Option(help="Windows begin so many tokens apart; no overlap.")] = None,
    join: Join = False,
    max_tokens: MaxTokens = None,
    field: Field = "text",
    tasks: Annotated[
        str | None,
        typer.Option(help="Benchmarks: paper (its ten), or names of lm-evaluation-harness, as in piqa,arc_easy."),
    ] = None,
    data: TaskData = None,
    include: Annotated[Path | None, typer.Option(help="A folder of your own task definitions (YAML).")] = None,
    limit: Examples = None,
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
    states: Annotated[
        str | None,
        typer.Option(help="Track products over S3, A5 or S5, at 1…L by default. What a run with data.states does."),
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Words to track; 4096.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which words; 0.")] = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Allow more passes than L, in tracking.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the accuracy of tracking by place and budget: a .png, .pdf or .svg.")
    ] = None,
    batch_tokens: BatchTokens = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: OutFile = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity, accuracy on benchmarks, or state tracking, at any budgets; started again, it continues.

    Examples: loopformer eval --model runs/mine --text news.jsonl --budgets 1,2,4 --trajectory 4-2-1-1

    loopformer eval --model runs/mine --tasks paper --data data/eval --limit 50

    loopformer eval --model runs/s3 --states S3 --figure s3.png
    """
    from loopformer.errors import require
    from loopformer.evaluation.states import own_group, state_figure
    from loopformer.evaluation.store import LoadedModel
    from loopformer.evaluation.text import Protocol
    from loopformer.plots import check_drawing, save

    steps = (export, score, collect)
    require(
        sum(file is not None for file in steps) <= 1,
        "Give one of --export-requests, --score-requests and --aggregate.",
    )
    require(export is None or tasks is not None, "Say what to export with --tasks, such as paper.")
    require(tasks is None or (score is None and collect is None), "The file says which tasks; leave out --tasks.")
    require(limit is None or tasks is not None, "--limit goes with --tasks.")
    for name, folder in (("--data", data), ("--include", include)):
        require(folder is None or tasks is not None or collect is not None, f"{name} goes with --tasks.")
    others = text or tasks is not None or any(file is not None for file in steps)
    require(states is None or not others, "--states is measured on its own; leave out texts and tasks.")
    if states is None and not others:
        states = own_group(model)
    for name, given in (("--sequences", sequences), ("--seed", seed), ("--figure", figure)):
        require(given is None or states is not None, f"{name} goes with --states.")
    require(not beyond or states is not None, "--beyond goes with --states.")
    require(states is None or schedule == "uniform", "--schedule is for texts and tasks; use --trajectory.")
    reads_text = bool(text) or (states is None and not others)
    texts_only = {
        "--window": window is not None,
        "--stride": stride is not None,
        "--join": join,
        "--max-tokens": max_tokens is not None,
        "--field": field != "text",
    }
    for name, is_given in texts_only.items():
        require(reads_text or not is_given, f"{name} is for texts; leave it out.")
    require(
        certainty is None or bool(text) or not others, "--certainty is for texts and --states; leave out tasks."
    )
    thresholds = [] if certainty is None else _thresholds(certainty)
    if figure is not None:
        check_drawing(figure)
    with output_file(out), output_file(export, "--export-requests"), output_file(figure, "--figure"):
        if collect is not None:
            _finish({"tasks": _aggregate(collect, data, include)}, out, as_json)
            return
        if export is None:  # first, since tasks may take long to load
            loaded = LoadedModel.open(model, device, dtype)
            if states is None:
                trajectories = loaded.trajectories(budgets, trajectory or (), schedule)
            else:
                trajectories = _tracked_along(loaded, budgets, trajectory or (), beyond)
        suite = None if tasks is None else load_tasks(tasks, data, include, limit)
        if export is not None and suite is not None:
            _export_requests(export, suite)
            return
        if score is not None:
            _score_requests(score, loaded, trajectories, out, batch_tokens)
            return
        report: dict[str, Any] = {"model": model, "weights": loaded.weights}
        if states is not None:
            report["states"] = _track(loaded, states, trajectories, sequences, seed, batch_tokens, thresholds)
            if figure is not None:
                save(state_figure(report["states"]), figure)
        elif text or suite is None:
            protocol = Protocol(window, stride, join, max_tokens)
            texts = text or [own_text(model)]
            report["perplexity"] = _perplexity(
                loaded, texts, trajectories, thresholds, protocol, field, batch_tokens
            )
        if suite is not None:
            report["tasks"] = _accuracy(loaded, suite, trajectories, batch_tokens)
        _finish(report, out, as_json)
    if not as_json and "perplexity" in report:
        _say_kept(report["perplexity"], loaded.store.folder)


def _thresholds(text: str) -> list[float]:
    from loopformer.errors import LoopformerError
    from loopformer.model.looped import Certainty

    try:
        thresholds = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise LoopformerError(f"--certainty takes numbers such as 0.5,0.9, not {text!r}.") from error
    Certainty(*thresholds)  # refuses what is none
    return thresholds


# Measuring.


def _perplexity(
    loaded: "LoadedModel",
    texts: Sequence[str],
    trajectories: "list[Trajectory]",
    thresholds: list[float],
    protocol: "Protocol",
    field: str,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """One row for each text and trajectory, and one for each threshold along the longest of them."""
    from loopformer.evaluation.text import perplexity, read_text

    protocol.sizes(loaded.model.config.context)  # before a text is read, which may take long
    rows = []
    with progress() as report:
        for source in texts:
            text = read_text(source, loaded.lm.need_tokenizer(), field, protocol.max_tokens, report)
            for certainty in (None, *thresholds):
                rows += perplexity(
                    loaded.model,
                    text,
                    trajectories if certainty is None else [max(trajectories, key=len)],
                    protocol,
                    certainty=certainty,
                    weights=loaded.weights,
                    store=loaded.store,
                    batch_tokens=batch_tokens,
                    report=report,
                )
    return rows


def load_tasks(tasks: str, data: Path | None, include: Path | None, limit: int | None) -> "Suite":
    """Tasks by name, as in piqa,arc_easy, or all of the paper's."""
    from loopformer.lm_eval import Suite

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with progress("tasks") as report:
        return Suite.load(names, data, include, limit, report)


def _accuracy(
    loaded: "LoadedModel", suite: "Suite", trajectories: "list[Trajectory]", batch_tokens: int
) -> dict[str, Any]:
    """Ask a model all requests along each trajectory and put the numbers together."""
    from loopformer.evaluation.tasks import model_facts, run_requests

    with progress("requests") as report:
        runs = run_requests(loaded, suite.queries, trajectories, batch_tokens, report)
    return suite.results(model_facts(loaded, runs), runs)


def _tracked_along(
    loaded: "LoadedModel", budgets: str | None, trajectories: Sequence[str], beyond: bool
) -> "list[Trajectory]":
    """Budgets and trajectories, every budget by default; with `beyond` also of more passes than L."""
    from loopformer.config import whole_numbers

    numbers = [] if trajectories else list(range(1, loaded.model.config.loops + 1))
    if budgets is not None:
        numbers = whole_numbers(budgets, "--budgets")
    by_budget = [loaded.model.resolve(number, beyond) for number in numbers]
    by_name = [loaded.model.resolve(name, beyond) for name in trajectories]
    return list(dict.fromkeys([*by_budget, *by_name]))


def _track(
    loaded: "LoadedModel",
    group: str,
    trajectories: "list[Trajectory]",
    sequences: int | None,
    seed: int | None,
    batch_tokens: int,
    thresholds: list[float],
) -> dict[str, Any]:
    """Products over a group, by place and trajectory, at the usual thresholds where none is given."""
    from loopformer.data.states import Group
    from loopformer.errors import LoopformerError
    from loopformer.evaluation.states import SEQUENCES, THRESHOLDS, track_states

    words, elements = SEQUENCES if sequences is None else sequences, Group.named(group)
    if loaded.lm.tokenizer is None or loaded.lm.tokenizer.hash != elements.tokenizer.hash:
        raise LoopformerError(
            f"The model's tokens are not the elements of {group}; name the group it was trained on."
        )
    with progress("words") as report:
        return track_states(
            loaded.model, elements, trajectories, words, seed or 0, batch_tokens, report, thresholds or THRESHOLDS
        )


# The same in three steps.


def _export_requests(file: Path, suite: "Suite") -> None:
    """Write what the tasks ask, for a machine without the harness."""
    from loopformer.evaluation.tasks import write_requests

    write_requests(file, suite.requests)
    count = sum(map(len, suite.queries.values()))
    typer.echo(f"{count:,} requests of {len(suite.tasks)} tasks written to {file}", err=True)


def _score_requests(
    file: Path, loaded: "LoadedModel", trajectories: "list[Trajectory]", out: Path | None, batch_tokens: int
) -> None:
    """Answer the requests of a file; the harness is not needed."""
    from loopformer.evaluation.tasks import Answers, model_facts, read_requests, run_requests, write_answers

    requests = read_requests(file)
    out = out or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    with progress("requests") as report:
        runs = run_requests(loaded, requests.queries, trajectories, batch_tokens, report)
    write_answers(out, Answers(requests.facts, model_facts(loaded, runs), runs))
    typer.echo(
        f"answers along {', '.join(runs)} written to {out}; --aggregate {out} makes numbers of them", err=True
    )


def _aggregate(file: Path, data: Path | None, include: Path | None) -> dict[str, Any]:
    """The numbers of a file of answers, by the harness."""
    from loopformer.evaluation.tasks import read_answers

    answers = read_answers(file)
    suite = load_tasks(",".join(answers.facts["names"]), data, include, answers.facts["limit"])
    return suite.collect(answers)


# Showing.


def _finish(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Results to a file, if one is asked for, and to the screen."""
    if out is not None:
        write_json(out, report)
    if as_json:
        typer.echo(json.dumps(report))
        return
    if "perplexity" in report:
        _show_perplexity(report["perplexity"])
    if "tasks" in report:
        _show_tasks(report["tasks"])
    if "states" in report:
        _show_states(report["states"])


def _show_perplexity(rows: list[dict[str, Any]]) -> None:
    """For each text what it is and how it was read, and a table."""
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
        columns = _columns(settling=any("certainty" in row for row in own))
        print_table(list(columns), [[cell(row) for cell in columns.values()] for row in own])


def _columns(settling: bool) -> dict[str, _Cell]:
    """What is shown of a row of perplexity. Where tokens settle no times: a batch waits for its last token."""
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
    return {**followed, **depth, **measured} if settling else {**followed, **measured, **times}


def _show_states(tracking: dict[str, Any]) -> None:
    """Accuracy by runs of places, doubling in length, along each trajectory; then depth by certainty."""
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
    typer.echo("\ndepth by certainty: a place whose best element is likelier than this takes no further pass")
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


def _say_kept(rows: list[dict[str, Any]], folder: Path | None) -> None:
    """Where finished pieces are, and how many came from there, on stderr."""
    if folder is None:
        typer.echo("not kept: neither the model's folder nor the user's cache can be written", err=True)
        return
    again = sum(row["reused"] for row in rows)
    typer.echo(f"kept in {folder}" + (f"; {again} of {len(rows)} were there" if again else ""), err=True)


def _show_tasks(results: dict[str, Any]) -> None:
    """A row for each task and a column for each trajectory, in percent; then the data, and what is not standard."""
    from loopformer.evaluation.tasks import PAPER

    runs = results["runs"]
    heads = [f"M={run['budget']}" if run["trajectory"] == str(run["budget"]) else run["trajectory"] for run in runs]
    rows = []
    for name, facts in results["tasks"].items():
        scores = [run["tasks"][name] for run in runs]
        cells = [_score(task["metric"], task["value"], task["stderr"]) for task in scores]
        rows.append([name, scores[0]["metric"], f"{facts['examples']:,}", *cells])
    for name in dict.fromkeys(name for run in runs for name in run["groups"]):
        for metric in (metric for metric in runs[0]["groups"][name] if "_stderr" not in metric):
            rows.append(
                [f"{name} (group)", metric, "", *(_score(metric, run["groups"][name].get(metric)) for run in runs)]
            )
    if all(run["paper"] for run in runs):
        for name, label in (("arc", "ARC, mean of both"), ("average", f"average of {len(PAPER)}")):
            rows.append([label, "", "", *(_score("acc", run["paper"][name]) for run in runs)])
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


def _score(metric: str, value: float | None, stderr: float | None = None) -> str:
    """A fraction in percent, any other number as it is, with its standard error if there is one."""
    if value is None:
        return "none"
    shown = f"{100 * value:.2f}" if metric.startswith(_FRACTIONS) else f"{value:.4g}"
    return shown if stderr is None else f"{shown} ± {_score(metric, stderr)}"
