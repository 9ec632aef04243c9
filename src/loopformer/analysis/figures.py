"""Figures of representation dynamics: metrics over depth and CKA maps, several models side by side.

    save_figures(results, Path("analysis"))        # representations, changes and cka, each as .png and .svg

Made for print at full text width (7 in): text of 8 pt and more, the Okabe-Ito colours, which every kind of colour
vision tells apart, and a marker of its own for every line.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopformer.analysis.dynamics import Dynamics, Number
from loopformer.errors import LoopformerError

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
    return [f"{one.model} ({one.shape}{', ' + one.route if several else ''})" for one in results]


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
    routes = list(dict.fromkeys(result.trajectory for result in results))
    styles = []
    for number, result in enumerate(results):
        model, route = models.index(result.model), routes.index(result.trajectory)
        colour = model if len(models) > 1 else route
        styles.append(
            {
                "color": COLOURS[colour % len(COLOURS)],
                "linestyle": DASHES[route % len(DASHES)],
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
