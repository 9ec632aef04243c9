"""A report on disk: report.html, report.md, report.json, tables/*.csv and figures/*.png, *.svg.

    check_folder(out)                  # before the work: is it free, or an earlier report?
    files = write_report(plain, out)   # plain: what collect.collect returned

The pages are the templates page.html.j2 and page.md.j2, filled with what content.py composes. Everything is made
before the first file is written. An earlier report in the folder is replaced; of it only the files that it lists
are removed.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from loopformer.analysis.figures import search_figure, state_figures
from loopformer.analysis.report.content import Page, compose, schedule_name
from loopformer.analysis.report.tables import CHANCE_AVERAGE
from loopformer.analysis.results import REPORT_FORMAT, Entry, ReportResults, entries
from loopformer.errors import FileProblem
from loopformer.files import json_bytes, write_together
from loopformer.plots import Line, Panel, available, line_figure, rendered, wide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, FIGURES, TABLES = "report.json", "figures", "tables"

_DPI = 170
_DOTS = 20  # of a figure in a rem: one scale for all figures, so that their text is of one size
_MOST_LABELLED = 3  # models; the budgets beside the points of more cover one another


def check_folder(out: Path) -> None:
    """Refuse a folder that something else is in, or that cannot be written; it is made when there is a report."""
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir():
        raise FileProblem(f"{there} is a file; give a folder with --out.")
    if not os.access(there, os.W_OK):
        raise FileProblem(f"The folder {out} cannot be written to; choose another with --out.")
    left = [path for path in out.iterdir() if path.suffix != ".tmp"] if out.is_dir() else []
    if left and _earlier_files(out) is None:
        raise FileProblem(f"The folder {out} is not empty and holds no report of ours; choose another with --out.")


def write_report(plain: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the figures and write everything; the files, report.html first."""
    check_folder(out)
    earlier = _earlier_files(out) or []
    results = ReportResults.from_json(plain)
    figures = draw_figures(results) if available() else {}
    pictures = {name: rendered(figure, ".png", _DPI) for name, figure in figures.items()}
    page = compose(results, pictures.keys())
    contents = {
        "report.html": to_html(page, pictures).encode(),
        "report.md": to_markdown(page).encode(),
        **{f"{TABLES}/{table.name}.csv": table.to_csv().encode() for table in page.tables},
    }
    for name, figure in figures.items():
        contents |= {f"{FIGURES}/{name}.png": pictures[name], f"{FIGURES}/{name}.svg": rendered(figure, ".svg")}
    stored = json_bytes({**plain, "files": list(contents)})
    write_together(out, {REPORT: stored, **contents})  # the list first: by it a report is known as ours
    _remove(out, [name for name in earlier if name not in contents])
    html, markdown, *others = contents
    return [out / name for name in (html, markdown, REPORT, *others)]


def _earlier_files(out: Path) -> list[Any] | None:
    """The files of the report that is in a folder; None where there is none."""
    try:
        plain = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return (
        list(plain.get("files", [])) if isinstance(plain, dict) and plain.get("format") == REPORT_FORMAT else None
    )


def _remove(out: Path, names: Sequence[Any]) -> None:
    """Remove what an earlier report had and this one has not; never anything outside its own two folders."""
    for name in names:
        path = PurePosixPath(str(name))
        if len(path.parts) == 2 and path.parts[0] in (FIGURES, TABLES) and path.parts[1] != "..":
            (out / path).unlink(missing_ok=True)


# The pages.


def to_html(page: Page, pictures: Mapping[str, bytes]) -> str:
    """The text of report.html; `pictures` are the PNG files of the figures by name."""
    return _templates().get_template("page.html.j2").render(page=page, pictures=pictures)


def to_markdown(page: Page) -> str:
    """The text of report.md."""
    return _templates().get_template("page.md.j2").render(page=page)


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("loopformer.analysis", "report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "code": lambda text: Markup("").join(_with_code(text, escape, Markup("<code>{}</code>").format)),
        "markdown": lambda text: "".join(_with_code(text, _escape_markdown, "`{}`".format)),
        "base64": lambda picture: b64encode(picture).decode(),
        "width": lambda picture: f"{int.from_bytes(picture[16:20]) / _DOTS:.1f}",  # rem, from the PNG's header
    }
    return templates


def _with_code(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> list[str]:
    """Text whose parts between backticks are code; a lone backtick is none of ours."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [plain(text)]
    return [code(part) if place % 2 else plain(part) for place, part in enumerate(parts)]


def _escape_markdown(text: str) -> str:
    text = re.sub(r"([\\`*<>|\[\]~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside a word it is a letter


# The figures.


def draw_figures(results: ReportResults) -> dict[str, Figure]:
    """Every figure there are numbers for, by name."""
    figures = {}
    if results.texts:
        figures["perplexity"] = perplexity_figure(results)
    if any(entry.average is not None for entry in entries(results)):
        figures["accuracy"] = accuracy_figure(results)
    if results.dynamics:
        figures |= state_figures(results.dynamics)
    for number, model in enumerate(results.models, 1):
        if model.search:
            figures[schedule_name(number, model.name)] = search_figure(model.search)
    return figures


def perplexity_figure(results: ReportResults) -> Figure:
    """Perplexity against FLOPs per token, one panel for each text and one line for each model."""
    rows, panels = entries(results), []
    for text in results.texts:
        values = [entry.perplexity.get(text) for entry in rows]
        panels.append(
            Panel(
                _lines_over_compute(rows, values),
                title=text,
                xlabel=_unit(rows)[0],
                ylabel="perplexity (lower is better)",
                log_x=wide(entry.flops_per_token for entry in rows),
                log_y=wide(values),
                falling=True,
            )
        )
    return line_figure(panels, height=3.05)


def accuracy_figure(results: ReportResults) -> Figure:
    """The average score against FLOPs per token, with its standard error, and what guessing scores."""
    rows = entries(results)
    values = [None if entry.average is None else 100 * entry.average for entry in rows]
    errors = [100 * (entry.average_error or 0.0) for entry in rows]
    panel = Panel(
        _lines_over_compute(rows, values, errors),
        xlabel=_unit(rows)[0],
        ylabel=f"average accuracy on {'ten' if results.is_paper else 'all'} benchmarks (%)",
        log_x=wide(entry.flops_per_token for entry in rows),
        level=("guessing", 100 * CHANCE_AVERAGE) if results.is_paper else None,
    )
    return line_figure([panel], height=3.2, legend="bands: 1 standard error")


def _lines_over_compute(
    rows: Sequence[Entry], values: Sequence[float | None], errors: Sequence[float] | None = None
) -> list[Line]:
    """One line for each model that has a value; the budgets beside the points where there is room."""
    models = list(dict.fromkeys(entry.model for entry in rows))
    lines = []
    for number, model in enumerate(models):
        places = [place for place, entry in enumerate(rows) if entry.model == model and values[place] is not None]
        if places:
            line = Line(
                rows[places[0]].label,
                [rows[place].flops_per_token / _unit(rows)[1] for place in places],
                [values[place] for place in places],
                errors=[errors[place] for place in places] if errors else (),
                names=[f"M={rows[place].budget}" for place in places] if len(models) <= _MOST_LABELLED else (),
                colour=number,
                marker=number,
            )
            lines.append(line)
    return lines


def _unit(rows: Sequence[Entry]) -> tuple[str, float]:
    """The label and the size of the unit of compute."""
    name, size = ("GFLOP", 1e9) if max(entry.flops_per_token for entry in rows) >= 1e9 else ("MFLOP", 1e6)
    return f"{name} per token, forward", size
