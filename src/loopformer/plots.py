"""Figures in one style (plots.mplstyle): lines, heat maps and grids of numbers, and their files.

    figure = line_figure([Panel([Line("full depth", steps, losses)], xlabel="step", ylabel="loss")])
    save(figure, "curves.png")                   # the suffix chooses the format: .png, .pdf, .svg
    map_figure([("runs/elastic", matrix)], label="linear CKA")
    grid_figure({"M = 1": [1.0, 0.4]}, label="accuracy")

Made for print at full text width (7 in): text of 8 pt, the Okabe-Ito colours, which every kind of colour vision
tells apart, and a marker for each colour. This module knows numbers and labels only, not what they mean. It loads
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

import numpy as np
import numpy.typing as npt

from loopformer.errors import LoopformerError, require
from loopformer.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches
DPI = 200
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one for each colour
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1, 1, 1)), (0, (8, 2)))
_FILE_METADATA: dict[str, dict[str, Any]] = {  # without a date, so that equal figures are equal files
    ".png": {},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}
_NO_MATPLOTLIB = "Figures need matplotlib; pip install 'loopformer[plot]'."
_CHARACTER_WIDTH = 0.065  # inches, for text of 8 pt
_LEGEND_ROW_HEIGHT = 0.17  # inches
_SINGLE_PANEL_WIDTH = 4.6  # inches
_MAX_COLUMNS = 3  # panels or maps side by side
_MAX_MARKED = 40  # points; a line with more has no markers, which would cover it
_LOG_RATIO = 4.0  # an axis is logarithmic if its largest value exceeds its smallest by more than this factor
_LARGE_CELL, _SMALL_CELL = 0.27, 0.17  # inches; the smallest cells with numbers of 8 pt and of 6 pt


@dataclass(frozen=True)
class Line:
    """A labelled curve; a point without a y, or with y <= 0 on a log axis, is left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    errors: Sequence[float] = ()  # half the height of a band around the line
    names: Sequence[str] = ()  # written beside the points
    colour: int | None = None  # index into COLOURS and MARKERS; None: the index among the lines of its panel
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


def line_figure(
    panels: Sequence[Panel], *, height: float = 2.75, xlabel: str = "", legend: str | None = ""
) -> Figure:
    """Panels side by side, up to three in a row; panels without a visible point are left out.

    height  of a row, in inches
    xlabel  one label for all panels
    legend  the title of one legend above all panels; None gives every panel its own legend
    """
    visible = [panel for panel in panels if any(_points(line, panel.log_y).size for line in panel.lines)]
    panels = visible or panels[:1]
    with house_style():
        figure = new_figure(
            WIDTH if len(panels) > 1 else _SINGLE_PANEL_WIDTH, math.ceil(len(panels) / _MAX_COLUMNS) * height
        )
        axes = _make_axes(figure, len(panels))
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
            if legend is None and axis.get_lines():
                axis.legend()
        figure.supxlabel(xlabel)
        if legend is not None and visible:
            _draw_shared_legend(figure, axes, legend)
    return figure


def _make_axes(figure: Figure, count: int) -> list[Axes]:
    """`count` axes, up to three in a row; the unused ones in the last row are hidden."""
    columns = min(_MAX_COLUMNS, count)
    axes = list(figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def _draw_panel(axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    for number, line in enumerate(panel.lines):
        x, y, heights = _points(line, panel.log_y)
        if not x.size:
            continue
        index = number if line.colour is None else line.colour
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axis.plot(
            x,
            y,
            color=colour,
            linestyle=DASHES[line.dash % len(DASHES)],
            marker=marker if len(x) <= _MAX_MARKED else "",
            label=line.label,
        )
        if line.errors:
            # A band that reaches 0 or less has no lower end on a log axis.
            low = np.maximum(y - heights, y / 10) if panel.log_y else y - heights
            axis.fill_between(x, low, y + heights, color=colour, alpha=0.16, linewidth=0)
        for name, point in zip(line.names, zip(line.x, line.y, strict=True), strict=False):
            axis.annotate(name, point, (3, 3), textcoords="offset points", color=colour)
    if panel.log_x or any(line.names for line in panel.lines):
        axis.margins(x=0.2, y=0.14)  # room for the names, and for a second tick on a log axis
    if not panel.log_x and all(isinstance(x, int) for line in panel.lines for x in line.x):
        axis.locator_params(axis="x", integer=True)
    for name, is_log in (("x", panel.log_x), ("y", panel.log_y)):
        if is_log:
            axis.set(**{f"{name}scale": "log"})
            low, high = axis.get_xlim() if name == "x" else axis.get_ylim()
            ticks = axis.xaxis if name == "x" else axis.yaxis
            # Powers of ten alone would be too few ticks on a short axis.
            ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
            ticks.set_major_formatter("{x:g}")
            ticks.set_minor_formatter("")


def _points(line: Line, is_log: bool) -> npt.NDArray[np.float64]:
    """The visible points [3, n]: x, y and half the height of the band."""
    heights = line.errors or [0.0] * len(line.y)
    points = zip(line.x, line.y, heights, strict=True)
    return np.array([p for p in points if p[1] is not None and not (is_log and p[1] <= 0)]).reshape(-1, 3).T


def _draw_shared_legend(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    """A legend above all panels, in as many columns as fit; the figure grows by its rows."""
    handles = {
        label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    width = 0.6 + _CHARACTER_WIDTH * max(map(len, handles))  # inches of the longest entry
    columns = max(1, int(figure.get_figwidth() / width))
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_HEIGHT * math.ceil(len(handles) / columns))
    figure.legend(handles.values(), handles.keys(), title=title, loc="outside upper center", ncols=columns)


def needs_log_axis(values: Iterable[float | None]) -> bool:
    """Whether an axis of these values is better logarithmic."""
    numbers = [value for value in values if value]
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) > _LOG_RATIO


def map_figure(
    maps: Sequence[tuple[str, Sequence[Sequence[float | None]]]],
    *,
    label: str,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """Square heat maps with their titles, up to three in a row, on one scale from their lowest value to 1."""
    columns = min(_MAX_COLUMNS, len(maps))
    width = WIDTH if columns > 1 else WIDTH / 2
    side = (width - 0.9) / columns - 0.35  # inches of a map, without the colour bar and tick labels
    # The scale starts at the lowest value, rounded down to a tenth and kept within 0 to 0.9.
    matrices = [np.array(values, dtype=float) for _, values in maps]  # None becomes nan
    lowest = min(0.9, max(0.0, math.floor(10 * min(np.nan_to_num(m, nan=1.0).min() for m in matrices)) / 10))
    with house_style():
        figure = new_figure(width, 0.65 + math.ceil(len(maps) / columns) * (side + 0.55))
        for axis, (name, _), matrix in zip(_make_axes(figure, len(maps)), maps, matrices, strict=True):
            image = _draw_cells(axis, matrix, side / len(matrix), lowest)
            ticks = range(0, len(matrix), math.ceil(len(matrix) / 9))
            axis.set(title=name.replace(" (", "\n("), xticks=ticks, yticks=ticks)
        figure.supxlabel(xlabel)
        figure.supylabel(ylabel)
        figure.suptitle(title)
        figure.colorbar(image, ax=figure.axes, label=label, pad=0.02, fraction=0.05)
    return figure


def grid_figure(rows: Mapping[str, Sequence[float]], *, label: str, xlabel: str = "", title: str = "") -> Figure:
    """A heat map of named rows, the first at the bottom, on a scale of 0 to 1; columns are counted from 1."""
    values = np.array(list(rows.values()))
    columns = values.shape[1]
    height = 0.22 if len(rows) > 1 else 0.4  # inches of a row
    with house_style():
        figure = new_figure(WIDTH, 1.0 + max(height * len(rows), 0.8))
        axis = figure.subplots()
        # 1.9 inches are for the names of the rows and the colour bar.
        image = _draw_cells(axis, values, min((WIDTH - 1.9) / columns, height), 0.0)
        ticks = range(0, columns, math.ceil(columns / 16))
        axis.set_xticks(ticks, [str(tick + 1) for tick in ticks])
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set(xlabel=xlabel, title=title, aspect="auto")
        figure.colorbar(image, ax=axis, label=label, pad=0.02, fraction=0.05)
    return figure


def _draw_cells(axis: Axes, values: npt.NDArray[np.float64], cell: float, lowest: float) -> Any:
    """Draw coloured cells of `cell` inches, with two digits in each if they have room."""
    image = axis.imshow(values, vmin=lowest, vmax=1)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    for (y, x), value in np.ndenumerate(values) if cell >= _SMALL_CELL else ():
        colour = "black" if value - lowest > 0.6 * (1 - lowest) else "white"
        size = 8 if cell >= _LARGE_CELL else 6
        axis.text(x, y, f"{value:.2f}".lstrip("0"), ha="center", va="center", color=colour, fontsize=size)
    return image


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_drawing(path: str | Path) -> None:
    """Refuse an unknown format, or every format without matplotlib. Call this before long measurements."""
    if Path(path).suffix.lower() not in _FILE_METADATA:
        raise LoopformerError(f"No picture can be drawn as {path}; end the name with .png, .pdf or .svg.")
    require(has_matplotlib(), _NO_MATPLOTLIB)


def house_style() -> AbstractContextManager[None]:
    """The style to draw and save figures in."""
    require(has_matplotlib(), _NO_MATPLOTLIB)
    import matplotlib

    style = matplotlib.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
    return matplotlib.rc_context(style)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure without pyplot, so there is nothing to close and no display is needed."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.05))


def figure_bytes(figure: Figure, suffix: str, dpi: int = DPI) -> bytes:
    """The bytes of a figure as a .png, .pdf or .svg file; equal figures give equal bytes."""
    drawn = io.BytesIO()
    with house_style():
        figure.savefig(drawn, format=suffix[1:], dpi=dpi, metadata=_FILE_METADATA[suffix])
    if suffix != ".png":
        return drawn.getvalue()
    # 256 colours look the same in a third of the size, and pages embed these files.
    from PIL import Image

    small = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure atomically; the suffix chooses the format."""
    check_drawing(path)
    path = Path(path)
    content = figure_bytes(figure, path.suffix.lower())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path
