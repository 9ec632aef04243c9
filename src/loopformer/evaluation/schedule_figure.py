"""The picture of a schedule search: every schedule as a bar with its steps drawn, sorted by quality.

    draw_schedules(found, "schedules.png")       # found: what schedules.search returned

Time runs from 0 to 1 along a bar; each step is a block, the darker the smaller. Beside it stands what the schedule
achieves. The best, the uniform and the worst schedule are marked.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loopformer.errors import LoopformerError, require

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
