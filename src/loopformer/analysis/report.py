"""A report on disk: report.html, report.md, report.json, tables/*.csv and figures/*.png, *.svg.

    check_folder(out)                    # before measuring: the folder is free or holds an earlier report
    files = write_report(measured, out)  # measured: what collect.collect returned

Numbers stay the plain JSON that was measured; ReportData adds one row for each model and budget. report_tables.yaml
has the columns of the tables, report.j2 the text of the page, report.html.j2 and report.md.j2 its two layouts.

For the paper's tasks a report shows their ten scores and the average. For other tasks it shows the metrics of each,
and an average only if every metric is a share of correct answers. The standard error of an average assumes that
tasks are independent.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from loopformer.analysis.dynamics import DEFINITIONS, Row, cka_rows, metric_rows, to_csv
from loopformer.analysis.figures import accuracy_figure, perplexity_figure, search_figure, state_figures
from loopformer.config.run import validation_budgets
from loopformer.errors import FileProblem
from loopformer.evaluation.store import JsonDict
from loopformer.evaluation.tasks import PAPER, SHARE_METRICS, TASKS
from loopformer.files import json_bytes, read_yaml, write_together
from loopformer.plots import figure_bytes, has_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, FIGURES, TABLES = "report.json", "figures", "tables"
REPORT_FORMAT, REPORT_VERSION = "loopformer-report", 1  # of report.json
PART_NAMES = {  # part → how a sentence about a missing part begins
    "perplexity": "Perplexity",
    "tasks": "Tasks",
    "search": "Schedules",
    "analysis": "Representations",
    "training": "Training",
}
TOLERANCE = 0.05  # rows are compared if their costs differ by at most this share

# Answers to choose from in an example behind each score.
_CHOICES = {"copa": 2, "hellaswag": 4, "openbookqa": 4, "piqa": 2, "race": 4, "social_iqa": 3, "arc": 4, "sciq": 4}
_CHOICES |= {"winogrande": 2}
# The accuracy of guessing. LAMBADA offers no answers: any word may come next.
CHANCE = {"lambada": 0.0} | {name: 1 / count for name, count in _CHOICES.items()}
CHANCE_AVERAGE = sum(CHANCE.values()) / len(CHANCE)

_SHORT_LABELS = {"hellaswag": "HS", "lambada": "LB", "openbookqa": "OBQA", "social_iqa": "SIQA", "winogrande": "WG"}
_DPI = 170
_DOTS_PER_REM = 20  # the same for all figures, so that their text has the same size


def join_words(words: Sequence[str]) -> str:
    """Words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def with_si_prefix(value: float) -> str:
    """Four significant digits and an SI prefix: 3.244 M."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def perplexity(value: float | None) -> str:
    if value is None:
        return "not a number"
    return f"{value:.2f}" if value < 1000 else f"{value:.4g}"


def short_hash(value: str) -> str:
    """The first 16 digits of a hash, set as code; the CSV file has all digits."""
    return f"`{value[:16]}`"


FORMATS: dict[str, Callable[[Any], str]] = {  # report_tables.yaml uses these names and Python formats
    "words": str,
    "with_si_prefix": with_si_prefix,
    "percent": percent,
    "perplexity": perplexity,
    "hash": short_hash,
}


class ScoreColumn(NamedTuple):
    """A score, and the tasks that it is the mean of."""

    key: str
    label: str  # short, for a heading
    name: str
    is_share: bool  # a share of correct answers, shown in percent
    tasks: tuple[str, ...]


class ReportData:
    """The measured numbers of a report, and one row of cost and quality for each model and budget."""

    def __init__(self, measured: Mapping[str, Any]) -> None:
        self.made, self.asked, self.suite = measured["made"], measured["asked"], measured["tasks"]
        self.models: list[JsonDict] = [
            {**model, "perplexity": model["perplexity"] or [], "tasks": model["tasks"] or []}
            for model in measured["models"]
        ]
        self.names = [model["name"] for model in self.models]
        self.labels = [f"{model['name']} ({model['shape']})" for model in self.models]
        self.texts = list(dict.fromkeys(row["text"] for model in self.models for row in model["perplexity"]))
        self.task_runs = [run for model in self.models for run in model["tasks"]]
        self.is_paper = bool(self.task_runs) and all(run["paper"] for run in self.task_runs)
        self.scores = self._score_columns()
        self.has_average = bool(self.task_runs) and all(score.is_share for score in self.scores)
        self.dynamics = [model["analysis"] for model in self.models if model["analysis"]]
        self.rows = [row for model in self.models for row in self._rows(model)]
        self.tables = build_tables(self)

    def _score_columns(self) -> list[ScoreColumn]:
        if self.is_paper:
            return [
                ScoreColumn(key, _SHORT_LABELS.get(key, label), label, True, tuple(tasks))
                for key, tasks in PAPER.items()
                for label in [TASKS[tasks[0]].label]
            ]
        metrics = {name: task["metric"] for run in self.task_runs[:1] for name, task in run["tasks"].items()}
        return [
            ScoreColumn(name, name, f"{name} ({metric})", metric.startswith(SHARE_METRICS), (name,))
            for name, metric in metrics.items()
        ]

    def _rows(self, model: JsonDict) -> list[Row]:
        """One row for each budget, the largest last. Without measurements the rows still have the costs."""
        blocks, runs = model["settings"]["blocks"], {run["budget"]: run for run in model["tasks"]}
        measured = {row["budget"] for row in model["perplexity"]} | runs.keys()
        rows: list[Row] = []
        for budget in sorted(measured) or validation_budgets(model["settings"]["loops"]):
            row = {
                "label": f"{model['name']} ({model['shape']})",
                "model": model["name"],
                "shape": model["shape"],
                "budget": budget,
                "paper_cost": f"{blocks}x / {blocks * budget}x",
                "parameters": model["parameters"]["total"],
                "stack": model["parameters"]["stack"],
                "flops_per_token": model["flops_per_token"][str(budget)],
                "training_flops": model["training"]["flops"] if model["training"] else None,
                "average": None,
                "average_error": None,
                "is_scored": budget in runs and bool(self.scores),
            }
            for text in model["perplexity"]:
                if text["budget"] == budget:
                    row[f"ppl:{text['text']}"] = text["perplexity"]
                    row[f"bpb:{text['text']}"] = text["bits_per_byte"]
            if budget in runs:
                row |= self._score_cells(runs[budget]["tasks"])
            rows.append(row)
        return rows

    def _score_cells(self, tasks: JsonDict) -> JsonDict:
        scores, errors = {}, {}
        for score in self.scores:
            scores[f"score:{score.key}"] = _mean([tasks[name]["value"] for name in score.tasks])
            errors[f"error:{score.key}"] = _mean_error([tasks[name]["stderr"] for name in score.tasks])
        if not self.has_average:
            return {**scores, **errors}
        average, error = _mean(list(scores.values())), _mean_error(list(errors.values()))
        return {**scores, **errors, "average": average, "average_error": error}


def _mean(values: Sequence[Any]) -> float | None:
    return None if not values or None in values else sum(values) / len(values)


def _mean_error(errors: Sequence[Any]) -> float | None:
    """The standard error of a mean of independent values."""
    return None if not errors or None in errors else math.hypot(*errors) / len(errors)


def gaps(models: Sequence[JsonDict], part: str) -> list[str]:
    """A sentence for each reason why a part is missing, naming the models unless all lack it."""
    names: dict[str, list[str]] = {}
    for model in models:
        if part in model["missing"]:
            names.setdefault(model["missing"][part], []).append(model["name"])
    return [
        f"{PART_NAMES[part]}{'' if len(named) == len(models) else ' of ' + join_words(named)}: {reason}"
        for reason, named in names.items()
    ]


# The tables.


class Column(NamedTuple):
    """A column of a table: its key in a row and in the CSV file, and how the page shows it."""

    key: str
    heading: str = ""  # a column without a heading is only in the CSV file
    format: str = "{}"  # of FORMATS, or Python's

    def show(self, value: Any) -> str:
        if value is None:
            return "–"
        return FORMATS[self.format](value) if self.format in FORMATS else self.format.format(value)

    @property
    def is_text(self) -> bool:
        return self.format in ("words", "hash")


@dataclass(frozen=True)
class Table:
    """Rows in titled groups; a single group has an empty title. The first column says what a row describes."""

    columns: Sequence[Column]
    groups: Sequence[tuple[str, Sequence[Row]]]

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.groups for row in rows]

    @property
    def shown(self) -> list[Column]:
        return [column for column in self.columns if column.heading]

    def cells(self, row: Row) -> list[str]:
        return [column.show(row.get(column.key)) for column in self.shown]

    def to_csv(self) -> bytes:
        """All columns with their raw values."""
        titled = any(title for title, _ in self.groups)
        rows = [{"group": title, **row} for title, rows in self.groups for row in rows]
        return to_csv(rows, [*(["group"] if titled else []), *(column.key for column in self.columns)])


def build_tables(report: ReportData) -> dict[str, Table]:
    """The tables that have rows, by name, in the order of the page."""
    columns = read_yaml(Path(__file__).with_name("report_tables.yaml"))
    texts = [{**row, "model": model["name"]} for model in report.models for row in model["perplexity"]]
    text_keys = [key for key, *_ in columns["texts"]]
    scored = [row for row in report.rows if row["is_scored"]]
    guessing = {"label": "guessing", **{f"score:{name}": share for name, share in CHANCE.items()}}
    guessing["average"] = CHANCE_AVERAGE
    rows: dict[str, Sequence[Row]] = {
        "main": report.rows,
        "scores": [*scored, guessing] if report.is_paper else scored,
        "training": [
            {
                **model["training"],
                "model": model["name"],
                "objective": "elastic" if model["training"]["elastic"] else "fixed depth",
                "overhead": model["training"]["flops_per_token"] / model["training"]["fixed_flops_per_token"],
                "formula": model["training_overhead"] if model["training"]["elastic"] else None,
            }
            for model in report.models
            if model["training"]
        ],
        "models": [
            {
                **model["parameters"],
                # Settings must follow: their `conditioning`, the method, replaces the number of parameters.
                **model["settings"],
                **model,
                "conditioning_parameters": model["parameters"]["conditioning"],
                "step": model["training"]["step"] if model["training"] else None,
            }
            for model in report.models
        ],
        # Models with the same tokenizer measure the same texts, so equal rows are shown once.
        "texts": list({tuple(row[key] for key in text_keys): row for row in texts}.values()),
        "perplexity": texts,
        # The data of a task is the same for all models. The metric and the number of cut requests are those of
        # the first run.
        "tasks": [
            {
                "source": task["data"].get("file") or task["data"].get("dataset"),
                "sha256": task["data"].get("sha256"),
                **score,
                **task,
                "task": name,
            }
            for run in report.task_runs[:1]
            for name, score in run["tasks"].items()
            for task in [report.suite["tasks"][name]]
        ],
        "metrics": metric_rows(report.dynamics),
        "cka": cka_rows(report.dynamics),
        "schedules": [
            {"model": model["name"], "budget": model["search"]["budget"], **row}
            for model in report.models
            if model["search"]
            for row in model["search"]["schedules"]
        ],
    }
    groups: dict[str, Sequence[tuple[str, Sequence[Row]]]] = {name: [("", rows[name])] for name in rows}
    # A unit directly follows the SI prefix: 1.2 MFLOP per token.
    for name, cost, unit in (
        ("parameters_matched", "stack", " parameters in the stack"),
        ("flops_matched", "flops_per_token", "FLOP per token"),
    ):
        alike = group_by_cost(report.rows, cost)
        groups[name] = [(f"about {with_si_prefix(group[0][cost])}{unit}", group) for group in alike]
    tables = {name: Table(_expand_columns(columns[name], report), groups[name]) for name in columns}
    return {name: table for name, table in tables.items() if table.rows}


def _expand_columns(columns: Sequence[Sequence[str]], report: ReportData) -> list[Column]:
    """The columns of a table, with one for each text or score in place of a pattern."""
    expanded = []
    for column in (Column(*values) for values in columns):
        if "{text}" in column.key:
            for text in report.texts:
                key, heading = column.key.format(text=text), column.heading.format(text=text)
                expanded.append(column._replace(key=key, heading=heading))
        elif "{score}" in column.key:
            for score in report.scores:
                key, heading = column.key.format(score=score.key), column.heading.format(score=score.label)
                expanded.append(Column(key, heading, "percent" if score.is_share else "{:.4g}"))
        elif report.has_average or not column.key.startswith("average"):
            expanded.append(column)
    return expanded


def group_by_cost(rows: Sequence[Row], cost: str, tolerance: float = TOLERANCE) -> list[list[Row]]:
    """Groups of rows of different models that cost the same within the tolerance, the cheapest group first."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row[cost]):
        # A group starts with its smallest value, so no two of its rows differ by more than the tolerance.
        if groups and row[cost] <= groups[-1][0][cost] * (1 + tolerance):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group, key=rows.index) for group in groups if len({row["model"] for row in group}) > 1]


# The page.


def draw_figures(report: ReportData) -> dict[str, Figure]:
    """The figures that the numbers of the report suffice for, by name."""
    figures = {}
    if report.texts:
        figures["perplexity"] = perplexity_figure(report.rows, report.texts)
    if any(row["average"] is not None for row in report.rows):
        figures["accuracy"] = accuracy_figure(report.rows, CHANCE_AVERAGE if report.is_paper else None)
    if report.dynamics:
        figures |= state_figures(report.dynamics)
    for number, model in enumerate(report.models, 1):
        if model["search"]:
            figures[schedule_figure_name(number, model["name"])] = search_figure(model["search"])
    return figures


def schedule_figure_name(number: int, model: str) -> str:
    """The name of the figure of a model's schedules, which is also the name of its file."""
    return f"schedules-{number}-" + re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.")


def render(layout: str, report: ReportData, pictures: Mapping[str, bytes]) -> str:
    """The page as "html" or "md"; `pictures` are the PNG files of the figures by name."""
    templates = Environment(
        loader=PackageLoader("loopformer", "analysis"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        # Lines of a template become one line; str() so that the output of a macro is escaped like other text.
        "flow": lambda text: re.sub(r"[ \n]+", " ", str(text)).strip(" "),
        "code": lambda text: Markup("").join(_mark_code(text, escape, Markup("<code>{}</code>").format)),
        "markdown": lambda text: "".join(_mark_code(text, _escape_markdown, "`{}`".format)),
        "quote": lambda value: shlex.quote(str(value).replace("\n", " ")),  # a command is one line
        "base64": lambda picture: b64encode(picture).decode(),
        # Bytes 16 to 19 of a PNG file are its width.
        "rem": lambda picture: f"{int.from_bytes(picture[16:20]) / _DOTS_PER_REM:.1f}",
    }
    functions = (with_si_prefix, gaps, join_words, percent, perplexity, schedule_figure_name, short_hash)
    text = templates.get_template("report.j2").render(
        **vars(report),
        **{function.__name__: function for function in functions},
        layout=f"report.{layout}.j2",
        pictures=pictures,
        ends=lambda model, key: _format_ends(report.rows, model, key),
        definitions=DEFINITIONS,
        chance=CHANCE_AVERAGE,
        tolerance=TOLERANCE,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _mark_code(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> list[str]:
    """Text with the parts between two backticks as code."""
    return [code(part) if i % 2 else plain(part) for i, part in enumerate(re.split("`([^`]*)`", text))]


def _escape_markdown(text: str) -> str:
    text = re.sub(r"([\\`*<>|\[\]~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # between letters an underscore is no markup


def _format_ends(rows: Sequence[Row], model: str, key: str) -> str:
    """The value of a column at a model's largest budget and, if there are several, at its smallest."""
    measured = [row for row in rows if row["model"] == model and row.get(key) is not None]
    show = (lambda value: f"{percent(value)}\u00a0%") if key == "average" else perplexity
    values = [f"{show(row[key])} at M = {row['budget']}" for row in measured]
    return (f"{values[-1]} ({values[0]})" if len(values) > 1 else values[0]) if values else ""


def check_folder(out: Path) -> None:
    """Refuse a folder with files that are not of an earlier report."""
    # A killed process may have left temporary files.
    files = [path for path in out.iterdir() if path.suffix != ".tmp"] if out.is_dir() else []
    if files and _earlier_files(out) is None:
        raise FileProblem(f"The folder {out} is not empty and holds no report; choose another with --out.")


def write_report(measured: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the figures and write everything; returns the files, report.html first.

    All content is made before the first file is written. Of an earlier report, only files that its report.json
    lists are removed.
    """
    check_folder(out)
    earlier = _earlier_files(out) or []
    report = ReportData(measured)
    figures = draw_figures(report) if has_matplotlib() else {}
    pictures = {name: figure_bytes(figure, ".png", _DPI) for name, figure in figures.items()}
    contents = {f"report.{layout}": render(layout, report, pictures).encode() for layout in ("html", "md")}
    contents |= {f"{TABLES}/{name}.csv": table.to_csv() for name, table in report.tables.items()}
    for name, figure in figures.items():
        contents |= {f"{FIGURES}/{name}.png": pictures[name], f"{FIGURES}/{name}.svg": figure_bytes(figure, ".svg")}
    stored = {"format": REPORT_FORMAT, "version": REPORT_VERSION, **measured, "files": list(contents)}
    # report.json is replaced first: if that stops halfway, its list says which files the next report may replace.
    write_together(out, {REPORT: json_bytes(stored), **contents})
    # The old list may have been edited by hand, so only files in the two folders of a report are removed.
    for path in [*(out / FIGURES).glob("*"), *(out / TABLES).glob("*")]:
        name = path.relative_to(out).as_posix()
        if name in earlier and name not in contents:
            path.unlink()
    html, markdown, *others = contents
    return [out / name for name in (html, markdown, REPORT, *others)]


def _earlier_files(out: Path) -> list[Any] | None:
    """The files of the report in a folder; None if there is no report."""
    try:
        stored = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or stored.get("format") != REPORT_FORMAT:
        return None
    files = stored.get("files")
    return files if isinstance(files, list) else []
