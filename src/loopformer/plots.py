"""Figures in one style: lines, heat maps and grids of numbers, and their files.

    figure = line_figure([Panel([Line("full depth", steps, losses)], xlabel="step", ylabel="loss")])
    save(figure, "curves.png")                   # the suffix chooses the format: .png, .pdf, .svg
    map_figure([HeatMap("mine", matrix)], label="linear CKA")
    grid_figure({"M = 1": [1.0, 0.4]}, label="accuracy")

Made for print at full text width (7 in): text of 8 pt, the Okabe-Ito colours, which every kind of colour vision
tells apart, and a marker for each line. This module knows numbers and labels only, not what they mean. It loads
matplotlib with the first figure, so the package works without it.
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

_SUFFIXES = (".png", ".pdf", ".svg")
_NO_MATPLOTLIB = "Figures need matplotlib; pip install 'loopformer[plot]'."
_CHARACTER_WIDTH = 0.065  # inches of a letter of 8 pt
_LEGEND_ROW_HEIGHT = 0.17  # inches
_SINGLE_PANEL_WIDTH = 4.6  # inches
_MAX_COLUMNS = 3  # panels or maps side by side
_MAX_MARKED = 40  # points of a line; the markers of more points would cover it
_LOG_RATIO = 4.0  # ratio of two values above which an axis is better logarithmic
_LARGE_CELL, _SMALL_CELL = 0.27, 0.17  # inches of a cell that holds a number of 8 pt, and of 6 pt


@dataclass(frozen=True)
class Line:
    """A labelled curve; a point without a y, or with y <= 0 on a log axis, is left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    errors: Sequence[float | None] = ()  # half the height of a band around the line
    names: Sequence[str] = ()  # written beside the points
    colour: int | None = None  # index into COLOURS; None: the index among the lines of its panel
    marker: int | None = None  # index into MARKERS; None: as for colours
    dash: int = 0  # index into DASHES


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    lines: Sequence[Line]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log_x: bool = False
    log_y: bool = False
    lines_fall: bool = False  # lines go down to the right, which decides where names of points find room
    level: tuple[str, float] | None = None  # a dashed line across, with its name
    note: str = ""  # in the upper right corner
    ticks: Mapping[str, float] | None = None  # along x, by label


@dataclass(frozen=True)
class HeatMap:
    """A square of values of at most 1."""

    label: str
    values: Sequence[Sequence[float | None]]


def line_figure(
    panels: Sequence[Panel],
    *,
    height: float = 2.75,
    xlabel: str = "",
    legend: str | None = "",
) -> Figure:
    """Panels side by side, up to three in a row; panels without a visible point are left out.

    height  of a row, in inches
    xlabel  one label for all panels
    legend  the title of one legend above all panels; None gives every panel its own legend
    """
    panels = [panel for panel in panels if any(_points(line, panel.log_y) for line in panel.lines)] or panels[:1]
    rows = math.ceil(len(panels) / _MAX_COLUMNS)
    with house_style():
        figure = new_figure(WIDTH if len(panels) > 1 else _SINGLE_PANEL_WIDTH, rows * height)
        axes = _axes(figure, len(panels))
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
        if xlabel:
            figure.supxlabel(xlabel, fontsize=8)
        if legend is not None:
            _draw_shared_legend(figure, axes, legend)
        else:
            for axis in axes:
                if axis.get_lines():
                    axis.legend(frameon=False)
        if any(line.names for panel in panels for line in panel.lines):
            # The layout decides where texts are. Without it their boxes could not be compared.
            figure.draw_without_rendering()
            for axis in axes:
                _separate_names(axis)
    return figure


def _axes(figure: Figure, count: int) -> list[Axes]:
    """Up to three axes in a row; the rest of the last row is invisible."""
    columns = min(_MAX_COLUMNS, count)
    axes = list(figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.level:
        name, value = panel.level
        axis.axhline(value, color="#606060", linestyle=(0, (2, 2)), linewidth=1)
        # This transform takes x as a share of the axis and y as a value.
        axis.text(0.99, value, name, transform=axis.get_yaxis_transform(), ha="right", va="bottom")
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
    """The visible points: x, y and half the height of the band."""
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
    marker = MARKERS[(number if line.marker is None else line.marker) % len(MARKERS)]
    colour = _colour(line, number)
    axis.plot(
        x,
        y,
        color=colour,
        linestyle=DASHES[line.dash % len(DASHES)],
        marker=marker if len(points) <= _MAX_MARKED else "",
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
        above = y == max(other for other_x, other, _, _ in points if math.isclose(other_x, x, rel_tol=0.05))
        right = above == panel.lines_fall
        axis.annotate(
            name,
            (x, y),
            xytext=(2 if right else -2, 4 if above else -4),
            textcoords="offset points",
            va="bottom" if above else "top",
            ha="left" if right else "right",
            color=colour,
        )


def _separate_names(axis: Axes) -> None:
    """Move names that cross the frame to the other side of their points, and hide names that touch others.

    The first and the last name of a line come before those between, so that these two stay visible.
    """
    from matplotlib.text import Annotation

    names = [text for text in axis.texts if isinstance(text, Annotation)]
    frame = axis.get_window_extent()
    boxes: list[Bbox] = []
    for name in sorted(names, key=lambda text: text not in (names[0], names[-1])):
        box = name.get_window_extent()
        if box.x1 > frame.x1 or box.x0 < frame.x0:
            right, (x, y) = box.x0 < frame.x0, name.xyann
            name.set(ha="left" if right else "right")
            name.xyann = (abs(x) if right else -abs(x), y)
            box = name.get_window_extent()
        if any(box.overlaps(other) for other in boxes):
            name.set_visible(False)
        else:
            boxes.append(box)


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers at powers of ten of a log axis; at 1, 2 and 5 where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_shared_legend(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    """A legend above all panels, in as many columns as fit; the figure grows by its rows."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    width = 0.6 + _CHARACTER_WIDTH * max(map(len, handles))  # inches of the longest entry
    columns = min(len(handles), max(1, int(figure.get_figwidth() / width)))
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_HEIGHT * math.ceil(len(handles) / columns))
    figure.legend(
        handles.values(),
        handles.keys(),
        title=title or None,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
    )


def needs_log_axis(values: Iterable[float | None]) -> bool:
    """Whether an axis of these values is better logarithmic."""
    known = [value for value in values if value]
    return bool(known) and min(known) > 0 and max(known) / min(known) > _LOG_RATIO


def map_figure(
    maps: Sequence[HeatMap], *, label: str, xlabel: str = "", ylabel: str = "", title: Sequence[str] = ()
) -> Figure:
    """Heat maps, up to three in a row, on one scale that begins where their values do and ends at 1.

    title  its parts are on one line if there are several maps, on a line each otherwise
    """
    columns = min(_MAX_COLUMNS, len(maps))
    width = WIDTH if columns > 1 else WIDTH / 2
    side = (width - 0.9) / columns - 0.35  # inches of a map, without the colour bar and tick labels
    values = [value for heat_map in maps for row in heat_map.values for value in row if value is not None]
    lowest = min(0.9, max(0.0, math.floor(10 * min(values, default=0.0)) / 10))
    with house_style():
        figure = new_figure(width, 0.65 + math.ceil(len(maps) / columns) * (side + 0.55))
        axes = _axes(figure, len(maps))
        for axis, heat_map in zip(axes, maps, strict=True):
            image = _draw_map(axis, heat_map, side, lowest)
        figure.supxlabel(xlabel, fontsize=8)
        figure.supylabel(ylabel, fontsize=8)
        figure.suptitle(("\n" if columns == 1 else ", ").join(title), fontsize=8)
        figure.colorbar(image, ax=figure.axes, label=label, pad=0.02, fraction=0.05)
    return figure


def _draw_map(axis: Axes, heat_map: HeatMap, side: float, lowest: float) -> Any:
    values = [[math.nan if value is None else value for value in row] for row in heat_map.values]
    image = axis.imshow(values, vmin=lowest, vmax=1, cmap="viridis", origin="lower")
    size = len(values)
    ticks = range(0, size, math.ceil(size / 9))
    axis.set(xticks=ticks, yticks=ticks)
    _write_values(axis, values, side / size, lowest)
    max_length = int((side + 0.2) / _CHARACTER_WIDTH * 0.85)  # of a title, whose letters are larger
    title = heat_map.label
    if len(title) > max_length:  # two lines; a name that is still too long keeps its end
        name, _, rest = title.partition(" (")
        title = (name if len(name) <= max_length else "…" + name[1 - max_length :]) + f"\n({rest}"
    axis.set_title(title)
    return image


def _write_values(axis: Axes, values: Sequence[Sequence[float]], cell: float, lowest: float) -> None:
    """Two digits in every cell if cells of so many inches have room, on axes without grid and frame."""
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    if cell < _SMALL_CELL:
        return
    size = 8 if cell >= _LARGE_CELL else 6
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = f"{value:.2f}" if size == 8 or value >= 0.995 else f"{value:.2f}".removeprefix("0")
            colour = "black" if value - lowest > 0.6 * (1 - lowest) else "white"
            axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=size)


def grid_figure(rows: Mapping[str, Sequence[float]], *, label: str, xlabel: str = "", title: str = "") -> Figure:
    """A heat map of named rows, the first at the bottom, on a scale of 0 to 1; columns are counted from 1."""
    values = list(rows.values())
    columns = len(values[0])
    cell = (WIDTH - 1.9) / columns  # inches, without the names and the colour bar
    height = 0.22 if len(rows) > 1 else 0.4
    with house_style():
        figure = new_figure(WIDTH, 1.0 + max(height * len(rows), 0.8))
        axis = figure.subplots()
        image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
        ticks = range(0, columns, math.ceil(columns / 16))
        axis.set_xticks(ticks, [str(tick + 1) for tick in ticks])
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set(xlabel=xlabel, title=title)
        _write_values(axis, values, min(cell, height), 0.0)
        figure.colorbar(image, ax=axis, label=label, ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.02, fraction=0.05)
    return figure


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_drawing(path: str | Path) -> None:
    """Refuse a figure that cannot be drawn; call it before the work that the figure shows."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise LoopformerError(f"No picture can be drawn as {path}; end the name with .png, .pdf or .svg.")
    if not has_matplotlib():
        raise LoopformerError(_NO_MATPLOTLIB)


def house_style() -> AbstractContextManager[None]:
    """The style to draw and save figures in."""
    try:
        import matplotlib
    except ImportError as error:
        raise LoopformerError(_NO_MATPLOTLIB) from error
    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure without pyplot, so there is nothing to close and no display is needed."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.05))


def rendered(figure: Figure, suffix: str, dpi: int = DPI) -> bytes:
    """The content of a .png, .pdf or .svg file; the same figure gives the same bytes."""
    drawn = io.BytesIO()
    with house_style():
        if suffix != ".png":
            date = {".svg": "Date", ".pdf": "CreationDate"}[suffix]
            figure.savefig(drawn, format=suffix[1:], metadata={date: None})
            return drawn.getvalue()
        figure.savefig(drawn, format="png", dpi=dpi)
    # 256 colours look the same in a third of the size, and pages embed these files.
    from PIL import Image

    small = io.BytesIO()
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure atomically; the suffix chooses the format."""
    check_drawing(path)
    path = Path(path)
    content = rendered(figure, path.suffix.lower())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path
