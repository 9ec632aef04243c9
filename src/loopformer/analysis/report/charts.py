"""The figures of a report: perplexity and accuracy against compute, and those of analysis and search.

    drawn = draw_all(found, Path("report/figures"))       # the names of what was drawn, each as .png and .svg

In the style of analysis/figures.py: for print at full text width, colours that every eye tells apart, a marker of
its own for every model.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.analysis.dynamics import Dynamics
from loopformer.analysis.figures import (
    CHANGES,
    COLOURS,
    MARKERS,
    REPRESENTATIONS,
    WIDTH,
    draw_cka,
    draw_panels,
    house_style,
    log_scale,
    new_figure,
)
from loopformer.analysis.report.numbers import CHANCE_AVERAGE, entries, is_paper, texts
from loopformer.evaluation.schedule_figure import schedules_figure
from loopformer.evaluation.store import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 170
_PANELS_IN_ROW = 3
_MOST_LABELLED = 3  # lines; the labels of more cover one another
_WIDE = 4.0  # the ratio of two values from which on an axis is better logarithmic

Row = dict[str, Any]


def draw_all(found: Piece, folder: Path) -> list[str]:
    """Draw every figure there are numbers for; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in _figures(found):
        with house_style():
            _save_png(figure, folder / f"{name}.png")
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        drawn.append(name)
    return drawn


def _save_png(figure: "Figure", path: Path) -> None:
    """With a palette, which takes a third of the room and shows no difference; pages embed these files."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def schedule_name(number: int, model: str) -> str:
    """The name of the figure of a model's schedules."""
    return f"schedules-{number}-" + re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.")


def draw_perplexity(found: Piece) -> "Figure":
    """Perplexity against FLOPs per token, one panel for each text and one line for each model."""
    rows, names = entries(found), texts(found)
    columns = min(_PANELS_IN_ROW, len(names))
    height = 2.9 * -(-len(names) // columns)
    with house_style():
        figure = new_figure(WIDTH if columns > 1 else 4.6, height + 0.15)
        axes = figure.subplots(-(-len(names) // columns), columns, squeeze=False)
        for axis in axes.flat[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, names, strict=False):
            _lines(axis, rows, f"ppl:{name}")
            axis.set(title=name, xlabel=_unit(rows)[0], ylabel="perplexity (lower is better)")
            _scales(axis, rows, f"ppl:{name}")
        _legend(figure, axes.flat[0])
    return figure


def draw_accuracy(found: Piece) -> "Figure":
    """The average score against FLOPs per token, with its standard error, and what guessing scores."""
    rows = entries(found)
    with house_style():
        figure = new_figure(4.6, 3.2)
        axis = figure.subplots()
        if is_paper(found):
            axis.axhline(100 * CHANCE_AVERAGE, color="#606060", linestyle=(0, (2, 2)), linewidth=1)
            place = axis.get_yaxis_transform()  # along the axis in shares of it, upwards in percent
            axis.text(0.99, 100 * CHANCE_AVERAGE, "guessing", transform=place, ha="right", va="bottom")
        _lines(axis, rows, "average", factor=100, error="average_error")
        count = "ten benchmarks" if is_paper(found) else "all benchmarks"
        axis.set(xlabel=_unit(rows)[0], ylabel=f"average accuracy on {count} (%)")
        _scales(axis, rows)
        _legend(figure, axis, "bands: 1 standard error")
    return figure


def _figures(found: Piece) -> Iterator[tuple[str, Any]]:
    rows = entries(found)
    if texts(found):
        yield "perplexity", draw_perplexity(found)
    if any(row.get("average") is not None for row in rows):
        yield "accuracy", draw_accuracy(found)
    results = [Dynamics.from_json(model["analysis"]) for model in found["models"] if model["analysis"]]
    if results:
        yield "representations", draw_panels(results, REPRESENTATIONS)
        yield "changes", draw_panels(results, CHANGES)
        yield "cka", draw_cka(results)
    for number, model in enumerate(found["models"], 1):
        if model["search"]:
            yield schedule_name(number, model["name"]), schedules_figure(model["search"])


def _lines(axis: "Axes", rows: Sequence[Row], key: str, factor: float = 1.0, error: str | None = None) -> None:
    """One line for each model that has the value; the budgets beside the points where there is room."""
    models = {row["model"]: row["shape"] for row in rows}
    _, size = _unit(rows)
    for number, (model, shape) in enumerate(models.items()):
        own = [row for row in rows if row["model"] == model and row.get(key) is not None]
        if not own:
            continue
        x, y = [row["flops_per_token"] / size for row in own], [factor * row[key] for row in own]
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(x, y, color=colour, marker=MARKERS[number % len(MARKERS)], label=f"{model} ({shape})")
        if error:
            errors = [factor * (row.get(error) or 0.0) for row in own]
            low, high = ([m + sign * e for m, e in zip(y, errors, strict=True)] for sign in (-1, 1))
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if len(models) <= _MOST_LABELLED:
        _name_budgets(axis, rows, key, factor)


def _name_budgets(axis: "Axes", rows: Sequence[Row], key: str, factor: float) -> None:
    """M beside each point, above the highest of the same compute and below the others, where no line goes."""
    models, (_, size) = list(dict.fromkeys(row["model"] for row in rows)), _unit(rows)
    known = [row for row in rows if row.get(key) is not None]
    falling = key.startswith("ppl:")
    for row in known:
        near = [
            one[key] for one in known if math.isclose(one["flops_per_token"], row["flops_per_token"], rel_tol=0.05)
        ]
        above = row[key] == max(near)
        right = above == falling
        axis.annotate(
            f"M={row['budget']}",
            (row["flops_per_token"] / size, factor * row[key]),
            xytext=(2 if right else -2, 4 if above else -4),
            textcoords="offset points",
            va="bottom" if above else "top",
            ha="left" if right else "right",
            color=COLOURS[models.index(row["model"]) % len(COLOURS)],
        )


def _scales(axis: "Axes", rows: Sequence[Row], key: str | None = None) -> None:
    """Room for the labels; logarithmic axes where values differ much."""
    axis.margins(x=0.26, y=0.14)
    flops = [row["flops_per_token"] for row in rows]
    if max(flops) / min(flops) > _WIDE:
        axis.set_xscale("log")
        _plain_ticks(axis)
    values = [row[key] for row in rows if key and row.get(key)]
    if values and max(values) / min(values) > _WIDE:
        log_scale(axis)


def _plain_ticks(axis: "Axes") -> None:
    """Plain numbers along a logarithmic compute axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: "Figure", axis: "Axes", title: str | None = None) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(figure.get_figwidth() / (0.7 + 0.07 * max(map(len, labels), default=1)))))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(labels) // columns))
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=columns, frameon=False)


def _unit(rows: Sequence[Row]) -> tuple[str, float]:
    """The label and the size of the unit of compute."""
    name, size = ("GFLOP", 1e9) if max(row["flops_per_token"] for row in rows) >= 1e9 else ("MFLOP", 1e6)
    return f"{name} per token, forward", size
