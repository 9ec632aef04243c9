"""Models and budgets that can be compared because they cost the same, within a stated tolerance.

    matched(rows, "flops_per_token")     # groups of rows of different models, the cheapest group first

A group begins with its smallest value and goes up to TOLERANCE above it, so no two rows of it differ by more. Only
groups with at least two models say anything.

The numbers of a report in rows, one for each model and budget, and how numbers are written.

    rows = entries(found)                     # found: what collect.collect returned
    rows[0]["model"], rows[0]["budget"], rows[0]["flops_per_token"], rows[0]["ppl:demo"], rows[0]["average"]
    counted(3_244_032)                        # "3.244 M"

Of the paper's tasks the ten scores and their average are taken; of any others each task's own metric, and their
mean where all of them are shares of right answers. Errors are standard errors; that of a mean takes the tasks for
independent.

The tables of a report, from its plain data: main, scores, matched by FLOPs or parameters, training, and the
numbers behind the figures.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from loopformer.analysis.dynamics import Dynamics
from loopformer.analysis.report.collect import listed, slowdown
from loopformer.analysis.report.document import Column, Group, Table
from loopformer.config.run import validation_budgets
from loopformer.evaluation.store import Piece
from loopformer.evaluation.tasks import PAPER

TOLERANCE = 0.05


Row = dict[str, Any]


def matched(rows: Sequence[Row], key: str, tolerance: float = TOLERANCE) -> list[list[Row]]:
    """Groups of rows whose `key` is the same within the tolerance, with more than one model in them."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: float(row[key])):
        if groups and row[key] <= groups[-1][0][key] * (1 + tolerance):
            groups[-1].append(row)
        else:
            groups.append([row])
    several = [group for group in groups if len({row["model"] for row in group}) > 1]
    order = {id(row): place for place, row in enumerate(rows)}
    return [sorted(group, key=lambda row: order[id(row)]) for group in several]


_SHARES = ("acc", "exact_match")  # metrics that are shares of right answers


_SHORT = {"hellaswag": "HS", "lambada": "LB", "openbookqa": "OBQA", "social_iqa": "SIQA", "winogrande": "WG"}


# What guessing scores: one of so many choices; LAMBADA asks for a word.
CHANCE = {
    "copa": 1 / 2,
    "hellaswag": 1 / 4,
    "lambada": 0.0,
    "openbookqa": 1 / 4,
    "piqa": 1 / 2,
    "race": 1 / 4,
    "social_iqa": 1 / 3,
    "arc": 1 / 4,
    "sciq": 1 / 4,
    "winogrande": 1 / 2,
}


CHANCE_AVERAGE = sum(CHANCE.values()) / len(CHANCE)


class Benchmark(NamedTuple):
    """One column of scores."""

    key: str
    label: str  # short, for a heading
    name: str  # in full
    share: bool  # of right answers, shown in percent


def texts(found: Piece) -> list[str]:
    """The names of the texts that a perplexity was measured on."""
    return list(dict.fromkeys(row["text"] for model in found["models"] for row in model["perplexity"] or []))


def is_paper(found: Piece) -> bool:
    """Whether the scores are the paper's ten."""
    runs = _runs(found)
    return bool(runs) and all(run["paper"] for run in runs)


def benchmarks(found: Piece) -> list[Benchmark]:
    """The columns of scores."""
    if is_paper(found):
        return [Benchmark(key, _SHORT.get(key, one.label), one.label, True) for key, one in PAPER.items()]
    tasks = {name: task["metric"] for run in _runs(found)[:1] for name, task in run["tasks"].items()}
    return [
        Benchmark(name, name, f"{name} ({metric})", metric.startswith(_SHARES)) for name, metric in tasks.items()
    ]


def entries(found: Piece) -> list[dict[str, Any]]:
    """One row for each model and budget, the deepest budget last."""
    rows = []
    for model in found["models"]:
        by_budget: dict[int, dict[str, Any]] = {}
        for one in model["perplexity"] or []:
            row = by_budget.setdefault(one["budget"], _cost(model, one["budget"]))
            row |= {f"ppl:{one['text']}": one["perplexity"], f"bpb:{one['text']}": one["bits_per_byte"]}
        for run in model["tasks"] or []:
            row = by_budget.setdefault(run["budget"], _cost(model, run["budget"]))
            row |= _scores(run, benchmarks(found), is_paper(found))
        rows += [by_budget[budget] for budget in sorted(by_budget)] or [
            _cost(model, budget) for budget in validation_budgets(model["settings"]["loops"])
        ]
    return rows


def _cost(model: Piece, budget: int) -> dict[str, Any]:
    blocks = model["settings"]["blocks"]
    return {
        "label": f"{model['name']} ({model['shape']})",
        "model": model["name"],
        "shape": model["shape"],
        "budget": budget,
        "paper_cost": f"{blocks}x / {blocks * budget}x",
        "parameters": model["parameters"]["total"],
        "stack": model["parameters"]["stack"],
        "flops_per_token": model["flops_per_token"][str(budget)],
        "training_flops": model["training"] and model["training"]["flops"],
    }


def _scores(run: Piece, columns: Sequence[Benchmark], paper: bool) -> dict[str, Any]:
    """Scores and their standard errors, and their average."""
    tasks: Mapping[str, Piece] = run["tasks"]
    row: dict[str, Any] = {}
    for one in columns:
        members = PAPER[one.key].tasks if paper else (one.key,)
        row[f"score:{one.key}"] = _mean([tasks[name]["value"] for name in members])
        row[f"error:{one.key}"] = _mean_error([tasks[name]["stderr"] for name in members])
    if all(one.share for one in columns):
        row["average"] = _mean([row[f"score:{one.key}"] for one in columns])
        row["average_error"] = _mean_error([row[f"error:{one.key}"] for one in columns])
    return row


def _runs(found: Piece) -> list[Piece]:
    return [run for model in found["models"] for run in model["tasks"] or []]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _mean_error(errors: Sequence[float | None]) -> float | None:
    """The standard error of a mean of independent values."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None


def counted(value: float) -> str:
    """A count with four digits and its thousands as a letter."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def perplexity(value: float | None) -> str:
    """Two digits behind the point; fewer where they say nothing."""
    if value is None:
        return "not a number"
    return f"{value:.2f}" if value < 1000 else f"{value:.4g}"


Rows = Sequence[dict[str, Any]]


TIMES = "{:.2f}×".format


def main_table(found: Piece) -> Table:
    """Models × budgets: cost, perplexities, average score."""
    caption = (
        "Every model at every budget M. kx / kMx is how the paper counts parameters and FLOPs: blocks held, "
        "blocks computed. Beside it the true counts: all parameters, and the FLOPs of a forward pass per token."
    )
    scores = [replace(column, hidden=True) for column in _score_columns(benchmarks(found))]
    return Table("main", caption, [*_columns(found), *scores], [Group(entries(found))])


def score_table(found: Piece) -> Table | None:
    """Models × budgets: every benchmark."""
    columns, rows = benchmarks(found), [row for row in entries(found) if "average" in row or _scored(row)]
    if not columns or not rows:
        return None
    chance = {"label": "guessing", **{f"score:{one.key}": CHANCE.get(one.key) for one in columns}}
    caption = "Score by benchmark, in percent where it is a share of right answers. " + _legend(columns)
    shown = [*_which(), *_score_columns(columns), *_average(found)]
    if is_paper(found):
        return Table("scores", caption, shown, [Group([*rows, {**chance, "average": CHANCE_AVERAGE}])])
    return Table("scores", caption, shown, [Group(rows)])


def flops_table(found: Piece) -> Table | None:
    """Models and budgets of the same compute."""
    groups = [
        Group(group, f"about {counted(group[0]['flops_per_token'])}FLOP per token")
        for group in matched(entries(found), "flops_per_token")
    ]
    caption = (
        f"Models and budgets whose forward FLOPs per token lie within {100 * TOLERANCE:g} % of one another; the "
        "best of each group in bold. The last column shows whether training was matched, too."
    )
    training = Column("training_flops", "FLOP in training", counted)
    columns = [*_columns(found, best=True, hidden="flops_per_token"), training]
    return Table("flops_matched", caption, columns, groups) if groups else None


def parameter_table(found: Piece) -> Table | None:
    """Models with stacks of the same size, at all their budgets."""
    groups = [
        Group(group, f"about {counted(group[0]['stack'])} parameters in the stack")
        for group in matched(entries(found), "stack")
    ]
    caption = (
        f"Models whose stacks of blocks have the same number of parameters within {100 * TOLERANCE:g} %, "
        "embeddings and conditioning not counted, as in the paper's kx; the best of each group in bold."
    )
    columns = [*_columns(found, best=True), Column("stack", "in the stack", hidden=True)]
    return Table("parameters_matched", caption, columns, groups) if groups else None


def training_table(found: Piece) -> Table | None:
    """What training took, and what elastic training adds."""
    rows = [_training_row(model, found["models"]) for model in found["models"] if model["training"]]
    if not rows:
        return None
    columns = [
        Column("model", "model", text=True),
        Column("objective", "objective", text=True),
        Column("fixed_flops_per_token", "FLOP per token, full route", counted),
        Column("flops_per_token", "as trained", counted),
        Column("overhead", "ratio as trained", TIMES),
        Column("formula", "ratio by the formula", TIMES),
        Column("tokens_per_second", "tokens/s, median", "{:,.0f}".format),
        Column("slowdown", "slower than fixed", TIMES),
        Column("compared_with", "compared with", text=True, hidden=True),
        Column("tokens", "tokens", counted),
        Column("flops", "FLOP in all", counted),
        Column("step", "step", hidden=True),
        Column("seed", "seed"),
    ]
    caption = "Training, forward and backward. FLOPs are counted; tokens per second are what the runs recorded."
    return Table("training", caption, columns, [Group(rows)])


def figure_tables(found: Piece) -> list[Table]:
    """The numbers behind the figures that are in no table on the page."""
    results = [Dynamics.from_json(model["analysis"]) for model in found["models"] if model["analysis"]]
    tables = []
    if results:
        model = ("model", "shape", "trajectory")
        tables.append(_plain("metrics", (*model, "loop", "depth", "metric", "mean", "std"), _metrics(results)))
        tables.append(_plain("cka", (*model, "loop_i", "loop_j", "cka", "cka_debiased"), _similar(results)))
    schedules = [
        {"model": model["name"], "budget": model["search"]["budget"], **row}
        for model in found["models"]
        if model["search"]
        for row in model["search"]["schedules"]
    ]
    if schedules:
        names = ("model", "budget", "rank", "schedule", "trajectory", "perplexity", "bits_per_byte", "accuracy")
        tables.append(_plain("schedules", names, schedules))
    return tables


def _columns(found: Piece, best: bool = False, hidden: str = "") -> list[Column]:
    """Which model, its cost, its perplexities and its average."""
    low, high = (min, max) if best else (None, None)
    names = texts(found)
    return [
        *_which(),
        Column("paper_cost", "kx\u00a0/\u00a0kMx"),
        Column("parameters", "parameters", counted),
        Column("flops_per_token", "FLOP per token", counted, hidden=hidden == "flops_per_token"),
        *(Column(f"ppl:{name}", f"perplexity: {name}", perplexity, best=low) for name in names),
        *(Column(f"bpb:{name}", f"bits per byte: {name}", hidden=True) for name in names),
        *_average(found, high),
    ]


def _which() -> list[Column]:
    plain = [Column(one, one, hidden=True) for one in ("model", "shape")]
    return [Column("label", "model", text=True), *plain, Column("budget", "M")]


def _average(found: Piece, best: Any = None) -> list[Column]:
    if not any("average" in row for row in entries(found)):
        return []
    return [Column("average", "average, %", percent, best=best), Column("average_error", "± std. error", percent)]


def _score_columns(columns: Sequence[Benchmark]) -> list[Column]:
    shown = [Column(f"score:{one.key}", one.label, percent if one.share else "{:.4g}".format) for one in columns]
    return shown + [Column(f"error:{one.key}", f"{one.label}, error", hidden=True) for one in columns]


def _scored(row: dict[str, Any]) -> bool:
    return any(key.startswith("score:") for key in row)


def _legend(columns: Sequence[Benchmark]) -> str:
    short = [f"{one.label} is {one.name}" for one in columns if one.label != one.name]
    return f"{listed(short)}." if short else ""


def _training_row(model: Piece, models: Sequence[Piece]) -> dict[str, Any]:
    facts = model["training"]
    row = {name: facts[name] for name in ("fixed_flops_per_token", "flops_per_token", "tokens_per_second")}
    row |= {name: facts[name] for name in ("tokens", "flops", "step", "seed")}
    row |= {"model": model["name"], "objective": "elastic" if facts["elastic"] else "fixed depth"}
    row |= {
        "overhead": facts["flops_per_token"] / facts["fixed_flops_per_token"],
        "formula": model["training_overhead"] if facts["elastic"] else None,
    }
    if facts["elastic"]:
        others = {one["name"]: one["training"] for one in models if one is not model}
        row["slowdown"], row["compared_with"] = slowdown(facts, others)
    return row


def _metrics(results: Sequence[Dynamics]) -> Iterator[dict[str, Any]]:
    for one in results:
        for metric, series in one.metrics.items():
            for loop, (depth, mean, std) in enumerate(zip(one.depth, series.mean, series.std, strict=True)):
                where = {"model": one.model, "shape": one.shape, "trajectory": one.trajectory, "loop": loop}
                yield {**where, "depth": depth, "metric": metric, "mean": mean, "std": std}


def _similar(results: Sequence[Dynamics]) -> Iterator[dict[str, Any]]:
    for one in results:
        for i, (row, debiased) in enumerate(zip(one.cka, one.cka_debiased, strict=True)):
            for j, (plain, other) in enumerate(zip(row, debiased, strict=True)):
                where = {"model": one.model, "shape": one.shape, "trajectory": one.trajectory}
                yield {**where, "loop_i": i, "loop_j": j, "cka": plain, "cka_debiased": other}


def _plain(name: str, columns: Sequence[str], rows: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> Table:
    return Table(name, "", [Column(one, one) for one in columns], [Group(list(rows))])
