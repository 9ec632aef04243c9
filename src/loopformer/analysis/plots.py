"""Figures of representation dynamics: metrics over depth and CKA maps, several models side by side.

    save_figures(results, Path("analysis"))        # representations, changes and cka, each as .png and .svg

Made for print at full text width (7 in): text of 8 pt and more, the Okabe-Ito colours, which every kind of colour
vision tells apart, and a marker of its own for every line.

The figures of a report: perplexity and accuracy against compute, and those of analysis and search.

    drawn = draw_all(found, Path("report/figures"))       # the names of what was drawn, each as .png and .svg

In the style of analysis/plots.py: for print at full text width, colours that every eye tells apart, a marker of
its own for every model.

The picture of a schedule search: every schedule as a bar with its steps drawn, sorted by quality.

    draw_schedules(found, "schedules.png")       # found: what schedules.search returned

Time runs from 0 to 1 along a bar; each step is a block, the darker the smaller. Beside it stands what the schedule
achieves. The best, the uniform and the worst schedule are marked.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopformer.analysis.dynamics import Dynamics, Number
from loopformer.analysis.report.tables import CHANCE_AVERAGE, entries, is_paper, texts
from loopformer.errors import LoopformerError, require
from loopformer.evaluation.store import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 7.0  # inches


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1, 1, 1)), (0, (8, 2)))


STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.handlelength": 3.0,  # shows a whole dash pattern
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "svg.hashsalt": "loopformer",  # the same figure is the same file
}


_CHARACTER = 0.065  # inches of a letter of 8 pt


_MAPS_IN_ROW = 3


_SMALLEST_LABELLED = 0.27  # inches of a cell that holds a number of 8 pt


_MOST_BANDS = 4  # lines; the bands of more hide one another


class Panel(NamedTuple):
    """One metric on one pair of axes."""

    metric: str
    title: str
    label: str
    log: bool = False


REPRESENTATIONS = (
    Panel("curvature", "Curvature", "mean turning angle (rad)"),
    Panel("anisotropy", "Anisotropy", "mean cosine of two tokens"),
    Panel("prompt_entropy", "Prompt entropy", "entropy / log min(T, D)"),
)


CHANGES = (
    Panel("movement", "Movement per loop", "|h$_i$ − h$_{i-1}$| / |h$_{i-1}$|", log=True),
    Panel("lens_divergence", "Logit lens: distance", "KL(final ‖ after loop i) (nats)", log=True),
    Panel("lens_agreement", "Logit lens: agreement", "same top token as final (%)"),
)


def save_figures(results: Sequence[Dynamics], folder: Path, debiased: bool = False) -> list[Path]:
    """Draw everything into a folder and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "representations": draw_panels(results, REPRESENTATIONS),
        "changes": draw_panels(results, CHANGES),
        "cka": draw_cka(results, debiased),
    }
    files = []
    with house_style():
        for name, figure in drawn.items():
            files += [folder / f"{name}.png", folder / f"{name}.svg"]
            figure.savefig(files[-2], dpi=200)
            figure.savefig(files[-1], metadata={"Date": None})
    return files


def draw_panels(results: Sequence[Dynamics], panels: Sequence[Panel]) -> "Figure":
    """Every result as a line over normalised depth, one panel per metric; bands are 2 standard errors."""
    labels = line_labels(results)
    bands = len(results) <= _MOST_BANDS
    with house_style():
        columns = min(len(labels), max(1, int(WIDTH / (0.6 + _CHARACTER * max(map(len, labels))))))
        height = 2.45 + 0.17 * math.ceil(len(labels) / columns)
        figure = new_figure(WIDTH, height)
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            for result, style in zip(results, _styles(results), strict=True):
                _line(axis, result, panel, style, bands)
            axis.set(title=panel.title, ylabel=panel.label, xlim=(-0.04, 1.04), xticks=[0, 0.25, 0.5, 0.75, 1])
            axis.set_xticklabels(["0", "¼", "½", "¾", "1"])
            if panel.log and any(len(line.get_xdata()) for line in axis.get_lines()):
                log_scale(axis)
            if panel.metric == "lens_divergence":
                axis.text(0.98, 0.98, "0 at i = M", transform=axis.transAxes, ha="right", va="top")
        figure.supxlabel("normalised depth i / M: 0 is the embedding, 1 the state after the last loop", fontsize=8)
        figure.legend(
            axes[0][0].get_lines(),
            labels,
            title=_caption(results) + ("; bands: 2 standard errors" if bands else ""),
            loc="outside upper center",
            ncols=columns,
            frameon=False,
        )
    return figure


def draw_cka(results: Sequence[Dynamics], debiased: bool = False) -> "Figure":
    """A map of CKA between all states per result, all on the same scale of 0 to 1."""
    columns = min(_MAPS_IN_ROW, len(results))
    rows = math.ceil(len(results) / columns)
    width = WIDTH if columns > 1 else WIDTH / 2
    side = (width - 0.9) / columns - 0.35  # inches of a map, beside the colour bar and its own tick labels
    with house_style():
        figure = new_figure(width, 0.65 + rows * (side + 0.55))
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(results) :]:
            axis.set_visible(False)
        for axis, result, label in zip(axes.flat, results, line_labels(results), strict=False):
            image = _map(axis, result.cka_debiased if debiased else result.cka, side)
            axis.set_title(_fitted(label, side + 0.2))
        figure.supxlabel("state after loop (0: embedding)", fontsize=8)
        figure.supylabel("state after loop", fontsize=8)
        figure.suptitle(_caption(results, separator="\n" if columns == 1 else ", "), fontsize=8)
        name = "linear CKA, debiased" if debiased else "linear CKA"
        figure.colorbar(image, ax=axes, label=name, ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.02, fraction=0.05)
    return figure


def line_labels(results: Sequence[Dynamics]) -> list[str]:
    """A name for each line: the model, and its trajectory where one model has several."""
    several = len({result.trajectory for result in results}) > 1
    return [f"{one.model} ({one.shape}{', ' + one.trajectory_name if several else ''})" for one in results]


def _fitted(label: str, width: float) -> str:
    """A label of a map on one line, or on two; a name that is still too long keeps its end."""
    most = int(width / _CHARACTER * 0.85)  # titles are larger
    if len(label) <= most:
        return label
    name, _, rest = label.partition(" (")
    return (name if len(name) <= most else "…" + name[1 - most :]) + f"\n({rest}"


def _caption(results: Sequence[Dynamics], separator: str = ", ") -> str:
    """What was measured on what; several texts are told apart in the table, not here."""
    texts = {(result.prompts, result.length) for result in results}
    ((prompts, length),) = texts if len(texts) == 1 else (("several", "several"),)
    states = " and ".join(sorted({result.states for result in results}, reverse=True))
    return f"{prompts} prompts of {length} tokens{separator}states {states} the final norm"


def _line(axis: "Axes", result: Dynamics, panel: Panel, style: dict[str, Any], band: bool) -> None:
    """Points that have a value; on a log scale a value of 0 has no place."""
    series = result.metrics[panel.metric]
    factor = 100 if panel.label.endswith("(%)") else 1
    points = [
        (depth, factor * mean, 2 * factor * (std or 0.0) / math.sqrt(result.prompts))
        for depth, mean, std in zip(result.depth, series.mean, series.std, strict=True)
        if mean is not None and not (panel.log and mean <= 0)
    ]
    depths, means, errors = zip(*points, strict=True) if points else ((), (), ())
    axis.plot(depths, means, **style)
    if band:
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        if panel.log:
            low = [max(one, mean / 10) for one, mean in zip(low, means, strict=True)]
        axis.fill_between(depths, low, high, color=style["color"], alpha=0.18, linewidth=0)


def log_scale(axis: "Axes") -> None:
    """Plain numbers at powers of ten; at 1, 2 and 5 where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _map(axis: "Axes", matrix: list[list[Number]], side: float) -> Any:
    values = [[math.nan if value is None else value for value in row] for row in matrix]
    image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", origin="lower")
    size = len(values)
    step = math.ceil(size / 9)
    axis.set(xticks=range(0, size, step), yticks=range(0, size, step))
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    if side / size >= _SMALLEST_LABELLED:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                colour = "black" if value > 0.6 else "white"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour)
    return image


def _styles(results: Sequence[Dynamics]) -> list[dict[str, Any]]:
    """Colours tell models apart and dashes their trajectories; for one model colours tell trajectories apart."""
    models = list(dict.fromkeys(result.model for result in results))
    trajectories = list(dict.fromkeys(result.trajectory for result in results))
    styles = []
    for number, result in enumerate(results):
        model, trajectory = models.index(result.model), trajectories.index(result.trajectory)
        colour = model if len(models) > 1 else trajectory
        styles.append(
            {
                "color": COLOURS[colour % len(COLOURS)],
                "linestyle": DASHES[trajectory % len(DASHES)],
                "marker": MARKERS[number % len(MARKERS)],
            }
        )
    return styles


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of its own, not one of pyplot's: nothing to close, no display needed."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.05))


def house_style() -> AbstractContextManager[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise LoopformerError("Figures need matplotlib; pip install 'loopformer[plot]'.") from error
    return matplotlib.rc_context(STYLE)


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


_ENDINGS = (".png", ".pdf", ".svg")


_MOST_NAMED = 60  # rows that still have room for their names


_AXES = {"perplexity": "perplexity (lower is better)", "accuracy": "accuracy (higher is better)"}


_MARKS = (("best", "o", "#0072B2"), ("uniform", "D", "#D55E00"), ("worst", "s", "#000000"))  # Okabe and Ito's


def draw_schedules(found: dict[str, Any], path: str | Path) -> Path:
    """Draw the result of a search into a file; its ending chooses the format (.png, .pdf, .svg)."""
    check_drawing(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    schedules_figure(found).savefig(path, dpi=200)
    return Path(path)


def check_drawing(path: str | Path) -> None:
    """Refuse a file that cannot be drawn; to be asked before the search, which may take long."""
    require(
        Path(path).suffix.lower() in _ENDINGS,
        f"No picture can be drawn as {path}; end the name with {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}.",
    )
    if find_spec("matplotlib") is None:
        raise LoopformerError("Figures need matplotlib; pip install 'loopformer[plot]'.")


def schedules_figure(found: dict[str, Any]) -> Any:
    """The matplotlib figure of a search."""
    from matplotlib.figure import Figure

    rows = found["schedules"]
    named = len(rows) <= _MOST_NAMED
    measures = [name for name in _AXES if rows[0].get(name) is not None]
    height = 1.5 + 0.17 * max(len(rows), 6) if named else 7.0
    figure = Figure(figsize=(4.2 + 2.2 * len(measures), height), layout="constrained")
    widths = [2.2, *[1.0] * len(measures)]
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    _bars(figure, axes, found, named)
    for axis, name in zip(axes[1:], measures, strict=True):
        _dots(axis, found, name)
    count = f"all {found['measured']}" if found["method"] == "all" else f"{found['measured']} (beam search)"
    title = f"Schedules of M = {found['budget']} steps, L = {found['loops']}: {count}, ranked by {found['by']}"
    figure.suptitle(title, fontsize=10)
    return figure


def _bars(figure: Any, axes: Any, found: dict[str, Any], named: bool) -> None:
    """One bar per schedule, best on top, coloured by step size."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    rows, loops, axis = found["schedules"], found["loops"], axes[0]
    largest = max(1, round(max(max(row["steps"]) for row in rows) * loops))
    norm = BoundaryNorm([0.5 + i for i in range(largest + 1)], 256)
    colours = colormaps["cividis"]  # the same order of lightness for every eye and in grey
    height = 0.78 if named else 1.0
    for number in range(found["budget"]):
        starts = [sum(row["steps"][:number]) for row in rows]
        widths = [row["steps"][number] for row in rows]
        filled = [colours(norm(width * loops)) for width in widths]
        axis.barh(range(len(rows)), widths, left=starts, height=height, color=filled)
        if number:
            low, high = ([i + side * height / 2 for i in range(len(rows))] for side in (-1, 1))
            axis.vlines(starts, low, high, color="white", linewidth=1.0 if named else 0.6)
    axis.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axis.set_xlabel("time t, one block per step", fontsize=8)
    axis.set_ylabel("schedule, best on top", fontsize=8)
    if named:
        axis.set_yticks(range(len(rows)), [row["schedule"] for row in rows])
    else:
        places = [1, *range(100, len(rows), 100)]
        axis.set_yticks([place - 1 for place in places], places)
    axis.tick_params(labelsize=7)
    ticks = range(1, largest + 1, 1 + largest // 10)
    mappable = ScalarMappable(norm, colours)
    bar = figure.colorbar(mappable, ax=list(axes), ticks=ticks, location="right", aspect=30, shrink=0.8, pad=0.02)
    bar.set_label(f"step size, in units of 1/{loops}", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _dots(axis: Any, found: dict[str, Any], name: str) -> None:
    """What each schedule achieves, on the row of its bar."""
    rows = found["schedules"]
    places = [(row[name], number) for number, row in enumerate(rows) if row.get(name) is not None]
    axis.plot(*zip(*places, strict=True), ".", color="#707070", markersize=4, zorder=2)
    for what, marker, colour in _MARKS:
        row = found[what]
        if row.get(name) is not None:
            label = f"{what} {row[name]:.4g}"
            size = 9 if what == "best" else 6  # seen also where the uniform schedule is the best
            look = {"color": colour, "markersize": size, "clip_on": False, "zorder": 3}
            axis.plot(row[name], row["rank"] - 1, marker, label=label, **look)
    axis.margins(x=0.12)
    axis.set_xlabel(_AXES[name], fontsize=8)
    axis.locator_params(axis="x", nbins=4)  # numbers of four digits and more need room
    axis.ticklabel_format(axis="x", useOffset=False)
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=7, frameon=False, borderaxespad=0.6)
