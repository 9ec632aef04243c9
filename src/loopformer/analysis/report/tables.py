"""The tables of a report: main, scores, matched by FLOPs or parameters, training, the numbers behind figures.

    rows = entries(results)                    # one for each model and budget; results: ReportResults
    rows[0].model, rows[0].budget, rows[0].flops_per_token, rows[0].perplexity["demo"], rows[0].average
    main_table(results).to_csv()
    counted(3_244_032)                         # "3.244 M"

A table holds raw values, which its CSV file gets; the page shows them as its columns say. Of the paper's tasks the
ten scores and their average are taken; of any others each task's own metric, and their mean where all of them are
shares of right answers. Errors are standard errors; that of a mean takes the tasks for independent.

Models and budgets can be compared where they cost the same. A matched group begins with its smallest value and goes
up to TOLERANCE above it, so no two rows of it differ by more; only groups with at least two models say anything.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from loopformer.analysis.results import (
    Cells,
    Entry,
    ReportResults,
    ScoreColumn,
    TrainingFacts,
    cka_rows,
    entries,
    metric_rows,
    score_columns,
)

NOTHING = "–"  # a cell without a value
TOLERANCE = 0.05
_HASH = 16  # digits of a hash on the page; the CSV file has all

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


# What a table is.


@dataclass(frozen=True)
class Column:
    """One column: its name in the CSV file, its heading on the page, and how a value is shown."""

    key: str
    label: str
    show: Callable[[Any], str] = str
    best: Callable[[Sequence[float]], float] | None = None  # min or max: which value of a group is set in bold
    text: bool = False  # words, not numbers
    hidden: bool = False  # only in the CSV file


@dataclass(frozen=True)
class RowGroup:
    """Rows that belong together, under a title of their own where there are several groups."""

    rows: Sequence[Cells]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table; `name` is that of its CSV file. The first column says what a row is about."""

    kind: ClassVar[str] = "table"
    name: str
    caption: str
    columns: Sequence[Column]
    groups: Sequence[RowGroup]

    @property
    def shown(self) -> list[Column]:
        return [column for column in self.columns if not column.hidden]

    def cells(self, group: RowGroup) -> Iterator[list[tuple[str, bool]]]:
        """The cells of each row of a group as text, and whether they are the best of their column."""
        best: dict[str, Any] = {}
        for column in self.shown:
            values: list[Any] = [row[column.key] for row in group.rows if row.get(column.key) is not None]
            best[column.key] = column.best(values) if column.best and len(values) > 1 else None
        for row in group.rows:
            yield [
                (NOTHING, False) if value is None else (column.show(value), value == best[column.key])
                for column, value in ((column, row.get(column.key)) for column in self.shown)
            ]

    def to_csv(self) -> str:
        """All columns with their raw values; what is not known is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        titled = any(group.title for group in self.groups)
        writer.writerow([*(["group"] if titled else []), *(column.key for column in self.columns)])
        for group in self.groups:
            for row in group.rows:
                values = [row.get(column.key) for column in self.columns]
                writer.writerow([group.title, *values] if titled else values)
        return text.getvalue()


# What can be compared.


class OfModel(Protocol):
    """Anything that belongs to a model."""

    @property
    def model(self) -> str: ...


R = TypeVar("R", bound=OfModel)


def matched(rows: Sequence[R], cost: Callable[[R], float], tolerance: float = TOLERANCE) -> list[list[R]]:
    """Groups of rows of different models that cost the same within the tolerance, the cheapest group first."""
    groups: list[list[R]] = []
    for row in sorted(rows, key=cost):
        if groups and cost(row) <= cost(groups[-1][0]) * (1 + tolerance):
            groups[-1].append(row)
        else:
            groups.append([row])
    several = [group for group in groups if len({row.model for row in group}) > 1]
    order = {id(row): place for place, row in enumerate(rows)}
    return [sorted(group, key=lambda row: order[id(row)]) for group in several]


# How things are written.


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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


def short_hash(value: str) -> str:
    return f"`{value[:_HASH]}`"


_times = "{:.2f}×".format
_whole = "{:,}".format


# The tables.


def main_table(results: ReportResults) -> Table:
    """Models × budgets: cost, perplexities, average score."""
    caption = (
        "Every model at every budget M. kx / kMx is how the paper counts parameters and FLOPs: blocks held, "
        "blocks computed. Beside it the true counts: all parameters, and the FLOPs of a forward pass per token."
    )
    scores = [replace(column, hidden=True) for column in _score_columns(score_columns(results))]
    rows = [_cells(entry) for entry in entries(results)]
    return Table("main", caption, [*_cost_and_quality(results), *scores], [RowGroup(rows)])


def score_table(results: ReportResults) -> Table | None:
    """Models × budgets: every benchmark."""
    columns, rows = score_columns(results), [_cells(entry) for entry in entries(results) if entry.scores]
    if not columns or not rows:
        return None
    full_names = [f"{column.label} is {column.name}" for column in columns if column.label != column.name]
    caption = "Score by benchmark, in percent where it is a share of right answers. "
    caption += f"{listed(full_names)}." if full_names else ""
    if results.is_paper:
        chance = {f"score:{column.key}": CHANCE.get(column.key) for column in columns}
        rows.append({"label": "guessing", **chance, "average": CHANCE_AVERAGE})
    shown = [*_which_model(), *_score_columns(columns), *_average(results)]
    return Table("scores", caption, shown, [RowGroup(rows)])


def flops_table(results: ReportResults) -> Table | None:
    """Models and budgets of the same compute."""
    groups = [
        RowGroup([_cells(entry) for entry in group], f"about {counted(group[0].flops_per_token)}FLOP per token")
        for group in matched(entries(results), lambda entry: entry.flops_per_token)
    ]
    caption = (
        f"Models and budgets whose forward FLOPs per token lie within {100 * TOLERANCE:g} % of one another; the "
        "best of each group in bold. The last column shows whether training was matched, too."
    )
    training = Column("training_flops", "FLOP in training", counted)
    columns = [*_cost_and_quality(results, best=True, hidden="flops_per_token"), training]
    return Table("flops_matched", caption, columns, groups) if groups else None


def parameter_table(results: ReportResults) -> Table | None:
    """Models with stacks of the same size, at all their budgets."""
    groups = [
        RowGroup([_cells(entry) for entry in group], f"about {counted(group[0].stack)} parameters in the stack")
        for group in matched(entries(results), lambda entry: entry.stack)
    ]
    caption = (
        f"Models whose stacks of blocks have the same number of parameters within {100 * TOLERANCE:g} %, "
        "embeddings and conditioning not counted, as in the paper's kx; the best of each group in bold."
    )
    columns = [*_cost_and_quality(results, best=True), Column("stack", "in the stack", hidden=True)]
    return Table("parameters_matched", caption, columns, groups) if groups else None


def _cells(entry: Entry) -> Cells:
    """An entry by the keys of its columns."""
    plain = {name: value for name, value in asdict(entry).items() if not isinstance(value, dict)}
    families = {"ppl": entry.perplexity, "bpb": entry.bits_per_byte, "score": entry.scores, "error": entry.errors}
    named = {f"{name}:{key}": value for name, family in families.items() for key, value in family.items()}
    return {"label": entry.label, **plain, **named}


def _cost_and_quality(results: ReportResults, best: bool = False, hidden: str = "") -> list[Column]:
    """Which model, its cost, its perplexities and its average."""
    low, high = (min, max) if best else (None, None)
    return [
        *_which_model(),
        Column("paper_cost", "kx\u00a0/\u00a0kMx"),
        Column("parameters", "parameters", counted),
        Column("flops_per_token", "FLOP per token", counted, hidden=hidden == "flops_per_token"),
        *(Column(f"ppl:{name}", f"perplexity: {name}", perplexity, best=low) for name in results.texts),
        *(Column(f"bpb:{name}", f"bits per byte: {name}", hidden=True) for name in results.texts),
        *_average(results, high),
    ]


def _which_model() -> list[Column]:
    hidden = [Column(name, name, hidden=True) for name in ("model", "shape")]
    return [Column("label", "model", text=True), *hidden, Column("budget", "M")]


def _average(results: ReportResults, best: Callable[[Sequence[float]], float] | None = None) -> list[Column]:
    if not results.task_runs or not all(column.share for column in score_columns(results)):
        return []
    return [Column("average", "average, %", percent, best=best), Column("average_error", "± std. error", percent)]


def _score_columns(scores: Sequence[ScoreColumn]) -> list[Column]:
    plain = "{:.4g}".format
    shown = [Column(f"score:{score.key}", score.label, percent if score.share else plain) for score in scores]
    return shown + [Column(f"error:{score.key}", f"{score.label}, error", hidden=True) for score in scores]


def training_costs(results: ReportResults) -> list[Cells]:
    """What training each model took that has a run, and how much slower it was than a fixed-depth run like it."""
    copied = ("fixed_flops_per_token", "flops_per_token", "tokens_per_second", "tokens", "flops", "step", "seed")
    rows: list[Cells] = []
    for model in results.models:
        facts = model.training
        if facts is None:
            continue
        times, compared = None, None
        if facts.elastic:
            others = {other.name: other.training for other in results.models if other is not model}
            times, compared = slowdown(facts, others)
        rows.append(
            {
                "model": model.name,
                "objective": "elastic" if facts.elastic else "fixed depth",
                **{name: getattr(facts, name) for name in copied},
                "overhead": facts.flops_per_token / facts.fixed_flops_per_token,
                "formula": model.training_overhead if facts.elastic else None,
                "slowdown": times,
                "compared_with": compared,  # the other run, or why there is none
            }
        )
    return rows


def slowdown(elastic: TrainingFacts, others: Mapping[str, TrainingFacts | None]) -> tuple[float | None, str]:
    """How many times slower than a fixed-depth run of the same settings, and which; or why that is not known.

    Elastic training takes a short trajectory beside the full one. Its cost in FLOPs follows from the sizes; its
    cost in time is the ratio of tokens per second of two runs that differ in the objective alone.
    """
    fixed = {name: facts for name, facts in others.items() if facts is not None and not facts.elastic}
    if not fixed:
        return None, "there is no fixed-depth run beside it"
    differences = {
        name: [
            *(f"model.{key}" for key, value in elastic.model.items() if facts.model.get(key) != value),
            *(key for key, value in elastic.same.items() if facts.same.get(key) != value),
        ]
        for name, facts in fixed.items()
    }
    name = min(differences, key=lambda name: len(differences[name]))
    if differences[name]:
        return None, f"{name} differs in {listed(differences[name])}"
    if not (elastic.tokens_per_second and fixed[name].tokens_per_second):
        return None, "no speed was recorded"
    return (fixed[name].tokens_per_second or 0.0) / elastic.tokens_per_second, name


def training_table(results: ReportResults) -> Table | None:
    """What training took, and what elastic training adds."""
    rows = training_costs(results)
    columns = [
        Column("model", "model", text=True),
        Column("objective", "objective", text=True),
        Column("fixed_flops_per_token", "FLOP per token, full trajectory", counted),
        Column("flops_per_token", "as trained", counted),
        Column("overhead", "ratio as trained", _times),
        Column("formula", "ratio by the formula", _times),
        Column("tokens_per_second", "tokens/s, median", "{:,.0f}".format),
        Column("slowdown", "slower than fixed", _times),
        Column("compared_with", "compared with", text=True, hidden=True),
        Column("tokens", "tokens", counted),
        Column("flops", "FLOP in all", counted),
        Column("step", "step", hidden=True),
        Column("seed", "seed"),
    ]
    caption = "Training, forward and backward. FLOPs are counted; tokens per second are what the runs recorded."
    return Table("training", caption, columns, [RowGroup(rows)]) if rows else None


def model_table(results: ReportResults) -> Table:
    rows = [
        {
            **{
                name: getattr(model, name)
                for name in ("name", "source", "shape", "weights", "tokenizer", "dtype", "device")
            },
            **{name: getattr(model.settings, name) for name in ("conditioning", "width", "context", "vocab")},
            **{name: getattr(model.parameters, name) for name in ("total", "embeddings", "stack")},
            "conditioning_parameters": model.parameters.conditioning,
            "step": model.training.step if model.training else None,
        }
        for model in results.models
    ]
    hidden = ("width", "context", "vocab", "dtype", "device", "tokenizer")
    columns = [
        Column("name", "model", text=True),
        Column("source", "source", text=True),
        Column("shape", "k⊗L", text=True),
        Column("conditioning", "conditioning", text=True),
        *(Column(name, name, hidden=True) for name in hidden),
        Column("total", "parameters", _whole),
        Column("embeddings", "in embeddings", _whole),
        Column("stack", "in the stack", _whole),
        Column("conditioning_parameters", "in conditioning", _whole),
        Column("step", "step", _whole, hidden=True),
        Column("weights", "weights, sha256", short_hash, text=True),
    ]
    caption = "The models. The hash is of settings and weights as they are on disk."
    return Table("models", caption, columns, [RowGroup(rows)])


def text_table(results: ReportResults) -> Table | None:
    names = ("text", "part", "documents", "tokens", "bytes", "window", "sha256")
    measured = [[getattr(row, name) for name in names] for model in results.models for row in model.perplexity]
    rows = [dict(zip(names, values, strict=True)) for values in dict.fromkeys(map(tuple, measured))]
    columns = [
        Column("text", "text", text=True),
        Column("part", "part", text=True),
        Column("documents", "documents", _whole),
        Column("tokens", "tokens scored", _whole),
        Column("bytes", "bytes", _whole),
        Column("window", "window", _whole),
        Column("sha256", "text, sha256", short_hash, text=True),
    ]
    caption = "The texts. The hash is of the documents' UTF-8, a zero byte between two."
    return Table("texts", caption, columns, [RowGroup(rows)]) if rows else None


def perplexity_table(results: ReportResults) -> Table:
    names = ("text", "budget", "perplexity", "bits_per_byte", "seconds", "tokens_per_second", "dtype", "device")
    rows = [
        {"model": model.name, **{name: getattr(row, name) for name in names}}
        for model in results.models
        for row in model.perplexity
    ]
    columns = [
        Column("model", "model", text=True),
        Column("text", "text", text=True),
        Column("budget", "M"),
        Column("perplexity", "perplexity", "{:.4f}".format),
        Column("bits_per_byte", "bits per byte", "{:.4f}".format),
        Column("seconds", "seconds", "{:.1f}".format),
        Column("tokens_per_second", "tokens/s", "{:,.0f}".format),
        Column("dtype", "dtype", hidden=True),
        Column("device", "device", hidden=True),
    ]
    return Table("perplexity", "Perplexity and bits per byte, and what measuring took.", columns, [RowGroup(rows)])


def task_table(results: ReportResults) -> Table:
    """The tasks and where their examples come from."""
    first, suite = results.task_runs[0], results.suite
    names = ("examples", "of", "requests", "requests_sha256", "note", "source", "sha256")
    rows = [
        {
            "task": name,
            "metric": first.tasks[name].metric,
            "cut": first.tasks[name].cut,
            **{key: getattr(task, key) for key in names},
        }
        for name, task in (suite.tasks.items() if suite else ())
    ]
    columns = [
        Column("task", "task", text=True),
        Column("metric", "metric", text=True),
        Column("examples", "examples", _whole),
        Column("of", "of", _whole),
        Column("requests", "requests", _whole),
        Column("cut", "cut", _whole),
        Column("source", "data", text=True),
        Column("sha256", "data, sha256", short_hash, text=True),
        Column("requests_sha256", "requests, sha256", hidden=True),
        Column("note", "stand-in", text=True, hidden=True),
    ]
    return Table("tasks", "The tasks and their data.", columns, [RowGroup(rows)])


def figure_tables(results: ReportResults) -> list[Table]:
    """The numbers behind the figures that are in no table on the page."""
    tables = []
    if results.dynamics:
        model = ("model", "shape", "trajectory")
        metrics = metric_rows(results.dynamics)
        tables.append(_raw_table("metrics", (*model, "loop", "depth", "metric", "mean", "std"), metrics))
        similarity = cka_rows(results.dynamics)
        tables.append(_raw_table("cka", (*model, "loop_i", "loop_j", "cka", "cka_debiased"), similarity))
    schedules = [
        {"model": model.name, "budget": model.search.budget, **asdict(row)}
        for model in results.models
        if model.search
        for row in model.search.schedules
    ]
    if schedules:
        names = ("model", "budget", "rank", "schedule", "trajectory", "perplexity", "bits_per_byte", "accuracy")
        tables.append(_raw_table("schedules", names, schedules))
    return tables


def _raw_table(name: str, keys: Sequence[str], rows: Iterable[Cells]) -> Table:
    return Table(name, "", [Column(key, key) for key in keys], [RowGroup(list(rows))])
