"""Every picture of the package, in one style: lines, heat maps, schedules as bars.

    figure = line_figure([Panel([Line("full depth", steps, losses)], xlabel="step", ylabel="loss")])
    save(figure, "curves.png")                   # the ending chooses the format: .png, .pdf, .svg
    map_figure([HeatMap("mine", matrix)], label="linear CKA")
    grid_figure({"M = 1": [1.0, 0.4]}, label="accuracy")
    schedule_figure("All schedules", bars, unit=8, marks={"best": 0, "uniform": 3})

Made for print at full text width (7 in): text of 8 pt, the Okabe-Ito colours, which every kind of colour vision
tells apart, and a marker of its own for every line. It knows numbers and labels only; what they mean is the
caller's. Matplotlib is loaded by the first picture, so the package works without it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.errors import LoopformerError
from loopformer.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

WIDTH = 7.0  # inches
DPI = 200
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

_ENDINGS = (".png", ".pdf", ".svg")
_MISSING = "Figures need matplotlib; pip install 'loopformer[plot]'."
_CHARACTER = 0.065  # inches of a letter of 8 pt
_LEGEND_ROW = 0.17  # inches
_ALONE = 4.6  # inches of a figure with one panel
_IN_ROW = 3  # panels or maps
_MOST_MARKED = 40  # points of a line; the markers of more cover it
_WIDE = 4.0  # the ratio of two values from which on an axis is better logarithmic
_SMALLEST_LARGE, _SMALLEST_LABELLED = 0.27, 0.17  # inches of a cell that holds a number of 8 pt, and of 6 pt
_MOST_NAMED = 60  # schedules that still have room for their names
_MARKS = (("o", "#0072B2", 9), ("D", "#D55E00", 6), ("s", "#000000", 6))  # the first is seen below the second


@dataclass(frozen=True)
class Line:
    """Points that belong together; a point without a y, or without a place on a log axis, is left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    errors: Sequence[float | None] = ()  # half the height of a band around the line
    names: Sequence[str] = ()  # written beside the points
    colour: int | None = None  # which of COLOURS; None: the place among the lines of its panel
    marker: int | None = None  # which of MARKERS; None: that place, too
    dash: int = 0  # which of DASHES


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    lines: Sequence[Line]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log_x: bool = False
    log_y: bool = False
    falling: bool = False  # the lines go down to the right: where names of points find room
    level: tuple[str, float] | None = None  # a dashed line across, with its name
    note: str = ""  # in the upper right corner
    ticks: Mapping[str, float] | None = None  # along x, by label


@dataclass(frozen=True)
class HeatMap:
    """A square of values of at most 1."""

    label: str
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class ScheduleBar:
    """A schedule: its steps, which sum to 1, and what it achieves by each measure."""

    name: str
    steps: Sequence[float]
    scores: Mapping[str, float | None]


def line_figure(
    panels: Sequence[Panel],
    *,
    height: float = 2.75,
    xlabel: str = "",
    legend: str | None = "",
) -> Figure:
    """Panels side by side, up to three in a row; those in which nothing would be seen are left out.

    height  of a row, in inches
    xlabel  said once for all panels
    legend  the title of the one above all panels; None gives every panel a legend of its own
    """
    panels = [panel for panel in panels if any(_points(line, panel.log_y) for line in panel.lines)] or panels[:1]
    columns = min(_IN_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = WIDTH if columns > 1 else _ALONE
    with house_style():
        figure = new_figure(width, rows * height)
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            _draw_panel(axis, panel)
        if xlabel:
            figure.supxlabel(xlabel, fontsize=8)
        if legend is not None:
            _shared_legend(figure, axes.flat, legend)
        else:
            for axis in axes.flat:
                if axis.get_lines():
                    axis.legend(frameon=False)
        if any(line.names for panel in panels for line in panel.lines):
            figure.draw_without_rendering()  # from here on the places of all words are known
            for axis in axes.flat:
                _keep_names_apart(axis)
    return figure


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.level:
        name, value = panel.level
        axis.axhline(value, color="#606060", linestyle=(0, (2, 2)), linewidth=1)
        place = axis.get_yaxis_transform()  # along the axis in shares of it, upwards in values
        axis.text(0.99, value, name, transform=place, ha="right", va="bottom")
    for number, line in enumerate(panel.lines):
        _draw_line(axis, line, number, panel.log_y)
    _name_points(axis, panel)
    if panel.log_x or any(line.names for line in panel.lines):
        axis.margins(x=0.26, y=0.14)  # room for the names, and for a second tick on a log axis
    if panel.ticks:
        axis.set_xticks(list(panel.ticks.values()), list(panel.ticks))
        low, high = min(panel.ticks.values()), max(panel.ticks.values())
        axis.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    elif not panel.log_x and all(isinstance(x, int) for line in panel.lines for x in line.x):
        axis.locator_params(axis="x", integer=True)
    if panel.note:
        axis.text(0.98, 0.98, panel.note, transform=axis.transAxes, ha="right", va="top")
    if axis.get_lines():
        if panel.log_x:
            axis.set_xscale("log")
            _plain_ticks(axis.xaxis, *axis.get_xlim())
        if panel.log_y:
            axis.set_yscale("log")
            _plain_ticks(axis.yaxis, *axis.get_ylim())


def _points(line: Line, log: bool) -> list[tuple[float, float, float]]:
    """Those that have a place: x, y and half the height of the band."""
    errors = line.errors or [None] * len(line.y)
    return [
        (x, y, error or 0.0)
        for x, y, error in zip(line.x, line.y, errors, strict=True)
        if y is not None and not (log and y <= 0)
    ]


def _draw_line(axis: Axes, line: Line, number: int, log: bool) -> None:
    points = _points(line, log)
    if not points:
        return
    x, y, heights = zip(*points, strict=True)
    colour, marker = _colour(line, number), number if line.marker is None else line.marker
    axis.plot(
        x,
        y,
        color=colour,
        linestyle=DASHES[line.dash % len(DASHES)],
        marker=MARKERS[marker % len(MARKERS)] if len(points) <= _MOST_MARKED else "",
        label=line.label,
    )
    if any(line.errors):
        low = [
            max(value - half, value / 10) if log else value - half for value, half in zip(y, heights, strict=True)
        ]
        high = [value + half for value, half in zip(y, heights, strict=True)]
        axis.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def _colour(line: Line, number: int) -> str:
    return COLOURS[(number if line.colour is None else line.colour) % len(COLOURS)]


def _name_points(axis: Axes, panel: Panel) -> None:
    """Names beside the points: above the highest of about the same x, below the others, where no line goes."""
    points = [
        (x, y, name, _colour(line, number))
        for number, line in enumerate(panel.lines)
        for x, y, name in zip(line.x, line.y, line.names, strict=bool(line.names))
        if y is not None
    ]
    for x, y, name, colour in points:
        above = y == max(other for place, other, _, _ in points if math.isclose(place, x, rel_tol=0.05))
        right = above == panel.falling
        axis.annotate(
            name,
            (x, y),
            xytext=(2 if right else -2, 4 if above else -4),
            textcoords="offset points",
            va="bottom" if above else "top",
            ha="left" if right else "right",
            color=colour,
        )


def _keep_names_apart(axis: Axes) -> None:
    """Names that would cross the frame stand on the other side of their points; of two that touch the later is left
    out, but the first and the last of a line come before those between."""
    from matplotlib.text import Annotation

    names = [text for text in axis.texts if isinstance(text, Annotation)]
    frame = axis.get_window_extent()
    kept: list[Bbox] = []
    for name in sorted(names, key=lambda text: text not in (names[0], names[-1])):
        box = name.get_window_extent()
        if box.x1 > frame.x1 or box.x0 < frame.x0:
            right, (x, y) = box.x0 < frame.x0, name.xyann
            name.set(ha="left" if right else "right")
            name.xyann = (abs(x) if right else -abs(x), y)
            box = name.get_window_extent()
        if any(box.overlaps(other) for other in kept):
            name.set_visible(False)
        else:
            kept.append(box)


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers at powers of ten of a log axis; at 1, 2 and 5 where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _shared_legend(figure: Figure, axes: Iterable[Axes], title: str) -> None:
    """Above all panels, in as many columns as fit; the figure grows by its rows."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width = figure.get_figwidth() / (0.6 + _CHARACTER * max(map(len, handles), default=1))
    columns = min(len(handles), max(1, int(width)))
    if columns:
        figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * math.ceil(len(handles) / columns))
        figure.legend(
            handles.values(),
            handles.keys(),
            title=title or None,
            loc="outside upper center",
            ncols=columns,
            frameon=False,
        )


def wide(values: Iterable[float | None]) -> bool:
    """Whether an axis of these values is better logarithmic."""
    known = [value for value in values if value]
    return bool(known) and min(known) > 0 and max(known) / min(known) > _WIDE


def map_figure(
    maps: Sequence[HeatMap], *, label: str, xlabel: str = "", ylabel: str = "", title: Sequence[str] = ()
) -> Figure:
    """Heat maps, up to three in a row, on one scale that begins where their values do and ends at 1; the parts of
    the title share a line if they fit."""
    columns = min(_IN_ROW, len(maps))
    rows = math.ceil(len(maps) / columns)
    width = WIDTH if columns > 1 else WIDTH / 2
    side = (width - 0.9) / columns - 0.35  # inches of a map, beside the colour bar and its own tick labels
    values = [value for heat_map in maps for row in heat_map.values for value in row if value is not None]
    lowest = min(0.9, max(0.0, math.floor(10 * min(values, default=0.0)) / 10))
    with house_style():
        figure = new_figure(width, 0.65 + rows * (side + 0.55))
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(maps) :]:
            axis.set_visible(False)
        for axis, heat_map in zip(axes.flat, maps, strict=False):
            image = _draw_map(axis, heat_map, side, lowest)
        figure.supxlabel(xlabel, fontsize=8)
        figure.supylabel(ylabel, fontsize=8)
        figure.suptitle(("\n" if columns == 1 else ", ").join(title), fontsize=8)
        figure.colorbar(image, ax=axes, label=label, pad=0.02, fraction=0.05)
    return figure


def _draw_map(axis: Axes, heat_map: HeatMap, side: float, lowest: float) -> Any:
    values = [[math.nan if value is None else value for value in row] for row in heat_map.values]
    image = axis.imshow(values, vmin=lowest, vmax=1, cmap="viridis", origin="lower")
    size = len(values)
    step = math.ceil(size / 9)
    axis.set(xticks=range(0, size, step), yticks=range(0, size, step))
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    _write_values(axis, values, side / size, lowest)
    most = int((side + 0.2) / _CHARACTER * 0.85)  # characters of a title, which are larger
    label = heat_map.label
    if len(label) > most:  # on two lines; a name that is still too long keeps its end
        name, _, rest = label.partition(" (")
        label = (name if len(name) <= most else "…" + name[1 - most :]) + f"\n({rest}"
    axis.set_title(label)
    return image


def _write_values(axis: Axes, values: Sequence[Sequence[float]], cell: float, lowest: float) -> None:
    """Two digits into every cell of so many inches, where there is room."""
    if cell < _SMALLEST_LABELLED:
        return
    size = 8 if cell >= _SMALLEST_LARGE else 6
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = f"{value:.2f}" if size == 8 or value >= 0.995 else f"{value:.2f}".removeprefix("0")
            colour = "black" if value - lowest > 0.6 * (1 - lowest) else "white"
            axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=size)


def grid_figure(rows: Mapping[str, Sequence[float]], *, label: str, xlabel: str = "", title: str = "") -> Figure:
    """A heat map of named rows, the first at the bottom, on a scale of 0 to 1; columns are counted from 1."""
    values = list(rows.values())
    columns = len(values[0])
    cell = (WIDTH - 1.9) / columns  # inches, beside the names and the colour bar
    height = 0.22 if len(rows) > 1 else 0.4
    with house_style():
        figure = new_figure(WIDTH, 1.0 + max(height * len(rows), 0.8))
        axis = figure.subplots()
        image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
        step = math.ceil(columns / 16)
        places = range(0, columns, step)
        axis.set_xticks(places, [str(place + 1) for place in places])
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set(xlabel=xlabel, title=title)
        axis.grid(False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        _write_values(axis, values, min(cell, height), 0.0)
        figure.colorbar(image, ax=axis, label=label, ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.02, fraction=0.05)
    return figure


def schedule_figure(title: str, bars: Sequence[ScheduleBar], *, unit: int, marks: Mapping[str, int]) -> Figure:
    """Every schedule as a bar from time 0 to 1, a block for each step, in the order they are given.

    unit   the steps are coloured and counted in units of 1/unit
    marks  the places of the bars that are marked, by name: the best, the uniform and the worst one

    Beside the bars stands what each schedule achieves, in a panel for each of its scores.
    """
    named = len(bars) <= _MOST_NAMED
    measures = [name for name, value in bars[0].scores.items() if value is not None]
    widths = [2.2, *[1.0] * len(measures)]
    with house_style():
        height = 1.7 + 0.17 * max(len(bars), 6) if named else 7.0
        figure = new_figure(4.2 + 2.2 * len(measures), height)
        axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        _draw_bars(figure, axes, bars, unit, named)
        for axis, measure in zip(axes[1:], measures, strict=True):
            _draw_scores(axis, bars, measure, marks)
        figure.suptitle(title, fontsize=9)
    return figure


def _draw_bars(figure: Figure, axes: Any, bars: Sequence[ScheduleBar], unit: int, named: bool) -> None:
    """One bar per schedule, the first on top, coloured by step size: the darker the smaller."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    axis, places = axes[0], range(len(bars))
    largest = max(1, round(max(max(bar.steps) for bar in bars) * unit))
    norm = BoundaryNorm([0.5 + i for i in range(largest + 1)], 256)
    colours = colormaps["cividis"]  # the same order of lightness for every eye and in grey
    height = 0.78 if named else 1.0
    for number in range(len(bars[0].steps)):
        starts = [sum(bar.steps[:number]) for bar in bars]
        widths = [bar.steps[number] for bar in bars]
        axis.barh(
            places, widths, left=starts, height=height, color=[colours(norm(width * unit)) for width in widths]
        )
        if number:
            low, high = ([place + side * height / 2 for place in places] for side in (-1, 1))
            axis.vlines(starts, low, high, color="white", linewidth=1.0 if named else 0.6)
    axis.set(xlim=(0, 1), ylim=(len(bars) - 0.5, -0.5))
    axis.set(xlabel="time t, one block per step", ylabel="schedule, best on top")
    axis.grid(False)
    if named:
        axis.set_yticks(places, [bar.name for bar in bars])
    else:
        ranks = [1, *range(100, len(bars), 100)]
        axis.set_yticks([rank - 1 for rank in ranks], ranks)
    ticks = range(1, largest + 1, 1 + largest // 10)
    colour_bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=list(axes), ticks=ticks, location="right", aspect=30, shrink=0.8, pad=0.02
    )
    colour_bar.set_label(f"step size, in units of 1/{unit}")


def _draw_scores(axis: Axes, bars: Sequence[ScheduleBar], measure: str, marks: Mapping[str, int]) -> None:
    """What each schedule achieves, on the row of its bar."""
    points = [(value, place) for place, bar in enumerate(bars) if (value := bar.scores.get(measure)) is not None]
    axis.plot(*zip(*points, strict=True), ".", color="#707070", markersize=4, zorder=2)
    for (name, place), (marker, colour, size) in zip(marks.items(), _MARKS, strict=False):
        value = bars[place].scores.get(measure)
        if value is not None:
            label = f"{name} {value:.4g}"
            axis.plot(value, place, marker, label=label, color=colour, markersize=size, clip_on=False, zorder=3)
    axis.margins(x=0.12)
    axis.set_xlabel(measure)
    axis.locator_params(axis="x", nbins=3)  # numbers of many digits need room
    axis.ticklabel_format(axis="x", useOffset=False)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.0, frameon=False, borderaxespad=0.6)


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_drawing(path: str | Path) -> None:
    """Refuse a picture that cannot be drawn; to be asked before the work that it is to show."""
    if Path(path).suffix.lower() not in _ENDINGS:
        known = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
        raise LoopformerError(f"No picture can be drawn as {path}; end the name with {known}.")
    if not available():
        raise LoopformerError(_MISSING)


def house_style() -> AbstractContextManager[None]:
    """The style that everything is drawn and saved in."""
    try:
        import matplotlib
    except ImportError as error:
        raise LoopformerError(_MISSING) from error
    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of its own, not one of pyplot's: nothing to close, no display needed."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.05))


def rendered(figure: Figure, ending: str, dpi: int = DPI) -> bytes:
    """The content of a .png, .pdf or .svg file; the same figure gives the same bytes."""
    drawn = io.BytesIO()
    with house_style():
        if ending == ".png":
            figure.savefig(drawn, format="png", dpi=dpi)
            return _with_palette(drawn)
        date = {".svg": "Date", ".pdf": "CreationDate"}[ending]
        figure.savefig(drawn, format=ending[1:], metadata={date: None})
        return drawn.getvalue()


def _with_palette(drawn: io.BytesIO) -> bytes:
    """256 colours take a third of the room and show no difference; pages embed these files."""
    from PIL import Image

    small = io.BytesIO()
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture, whole or not at all; the ending chooses the format."""
    check_drawing(path)
    path = Path(path)
    content = rendered(figure, path.suffix.lower())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path
