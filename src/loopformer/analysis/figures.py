"""The figures of an analysis, a search and a report, drawn in the style of plots.py.

state_figures(results)["cka"]            # results: list[Dynamics]; also "representations" and "changes"
search_figure(found)                     # found: what evaluation.schedules.search returned
perplexity_figure(rows, ["news"])        # rows: a dict per model and budget, as report.py makes them
accuracy_figure(rows, chance=0.31)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loopformer.analysis.dynamics import Dynamics, Row
from loopformer.plots import HeatMap, Line, Panel, house_style, line_figure, map_figure, needs_log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_BANDS = 4  # lines with error bands; the bands of more hide one another
_MAX_NAMED_MODELS = 3  # models with budgets beside their points; the labels of more overlap
_DEPTH = {"0": 0.0, "¼": 0.25, "½": 0.5, "¾": 0.75, "1": 1.0}
_MAX_NAMED_SCHEDULES = 60  # schedules that still have room for their names
_MARKS = {  # marker, colour and size; the first is visible below the second
    "best": ("o", "#0072B2", 9),
    "uniform": ("D", "#D55E00", 6),
    "worst": ("s", "#000000", 6),
}
_MEASURES = {"perplexity": "perplexity (lower is better)", "accuracy": "accuracy (higher is better)"}


# One panel for each metric; the lines come from the results.
REPRESENTATIONS = {
    "curvature": Panel([], "Curvature", ylabel="mean turning angle (rad)"),
    "anisotropy": Panel([], "Anisotropy", ylabel="mean cosine of two tokens"),
    "prompt_entropy": Panel([], "Prompt entropy", ylabel="entropy / log min(T, D)"),
}
CHANGES = {
    "movement": Panel([], "Movement per loop", ylabel="|h$_i$ − h$_{i-1}$| / |h$_{i-1}$|", log_y=True),
    "lens_divergence": Panel(
        [], "Logit lens: distance", ylabel="KL(final ‖ after loop i) (nats)", log_y=True, note="0 at i = M"
    ),
    "lens_agreement": Panel([], "Logit lens: agreement", ylabel="same top token as final (%)"),
}


def state_figures(results: Sequence[Dynamics], debiased: bool = False) -> dict[str, Figure]:
    """All figures of representation dynamics by name, several models and trajectories side by side."""
    return {
        "representations": metrics_figure(results, REPRESENTATIONS),
        "changes": metrics_figure(results, CHANGES),
        "cka": cka_figure(results, debiased),
    }


def metrics_figure(results: Sequence[Dynamics], panels: Mapping[str, Panel]) -> Figure:
    """Every result as a line over normalised depth, one panel per metric; bands are 2 standard errors."""
    with_bands = len(results) <= _MAX_BANDS
    return line_figure(
        [
            replace(panel, lines=_state_lines(results, metric, with_bands), ticks=_DEPTH)
            for metric, panel in panels.items()
        ],
        height=2.45,
        xlabel="normalised depth i / M: 0 is the embedding, 1 the state after the last loop",
        legend=", ".join(_measured_on(results)) + ("; bands: 2 standard errors" if with_bands else ""),
    )


def cka_figure(results: Sequence[Dynamics], debiased: bool = False) -> Figure:
    """A map of CKA between all states per result."""
    values = [result.cka_debiased if debiased else result.cka for result in results]
    return map_figure(
        [HeatMap(label, matrix) for label, matrix in zip(line_labels(results), values, strict=True)],
        label="linear CKA, debiased" if debiased else "linear CKA",
        xlabel="state after loop (0: embedding)",
        ylabel="state after loop",
        title=_measured_on(results),
    )


def search_figure(search: Mapping[str, Any]) -> Figure:
    """Every schedule of a search as a bar from time 0 to 1, a block for each step, the best on top.

    Beside the bars each measure has a panel in which the best, the uniform and the worst schedule are marked.
    """
    schedules, loops = search["schedules"], search["loops"]
    count = (
        f"all {search['measured']}" if search["method"] == "all" else f"{search['measured']} ({search['method']})"
    )
    measures = [name for name in _MEASURES if schedules[0].get(name) is not None]
    is_named = len(schedules) <= _MAX_NAMED_SCHEDULES
    with house_style():
        height = 1.7 + 0.17 * max(len(schedules), 6) if is_named else 7.0
        figure = new_figure(4.2 + 2.2 * len(measures), height)
        widths = [2.2, *[1.0] * len(measures)]
        axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        _draw_schedules(axes[0], schedules, loops, is_named)
        for axis, measure in zip(axes[1:], measures, strict=True):
            _draw_measure(axis, search, measure)
        figure.suptitle(
            f"Schedules of M = {search['budget']} steps, L = {loops}: {count}, ranked by {search['by']}", fontsize=9
        )
    return figure


def _draw_schedules(axis: Axes, schedules: Sequence[Row], loops: int, is_named: bool) -> None:
    """One bar per schedule, coloured by step size: the darker the smaller."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    rows, height = range(len(schedules)), 0.78 if is_named else 1.0
    largest = max(1, round(max(max(schedule["steps"]) for schedule in schedules) * loops))
    norm = BoundaryNorm([0.5 + i for i in range(largest + 1)], 256)
    colours = colormaps["cividis"]  # the same order of lightness for every eye and in grey
    for number in range(len(schedules[0]["steps"])):
        starts = [sum(schedule["steps"][:number]) for schedule in schedules]
        steps = [schedule["steps"][number] for schedule in schedules]
        axis.barh(rows, steps, left=starts, height=height, color=[colours(norm(step * loops)) for step in steps])
        if number:  # a white line between two steps
            low, high = ([row + side * height / 2 for row in rows] for side in (-1, 1))
            axis.vlines(starts, low, high, color="white", linewidth=1.0 if is_named else 0.6)
    axis.set(xlim=(0, 1), ylim=(len(schedules) - 0.5, -0.5))
    axis.set(xlabel="time t, one block per step", ylabel="schedule, best on top")
    axis.grid(False)
    if is_named:
        axis.set_yticks(rows, [schedule["schedule"] for schedule in schedules])
    else:
        ranks = [1, *range(100, len(schedules), 100)]
        axis.set_yticks([rank - 1 for rank in ranks], ranks)
    colour_bar = axis.figure.colorbar(
        ScalarMappable(norm, colours),
        ax=list(axis.figure.axes),
        ticks=range(1, largest + 1, 1 + largest // 10),
        location="right",
        aspect=30,
        shrink=0.8,
        pad=0.02,
    )
    colour_bar.set_label(f"step size, in units of 1/{loops}")


def _draw_measure(axis: Axes, search: Mapping[str, Any], measure: str) -> None:
    """The value of each schedule on the row of its bar."""
    values = [schedule.get(measure) for schedule in search["schedules"]]
    points = [(value, row) for row, value in enumerate(values) if value is not None]
    axis.plot(*zip(*points, strict=True), ".", color="#707070", markersize=4, zorder=2)
    for name, (marker, colour, size) in _MARKS.items():
        row = search[name]["rank"] - 1
        value = values[row]
        if value is not None:
            label = f"{name} {value:.4g}"
            axis.plot(value, row, marker, label=label, color=colour, markersize=size, clip_on=False, zorder=3)
    axis.margins(x=0.12)
    axis.set_xlabel(_MEASURES[measure])
    axis.locator_params(axis="x", nbins=3)  # numbers of many digits need room
    axis.ticklabel_format(axis="x", useOffset=False)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.0, frameon=False, borderaxespad=0.6)


def perplexity_figure(rows: Sequence[Row], texts: Sequence[str]) -> Figure:
    """Perplexity against FLOPs per token: a panel for each text, a line for each model."""
    panels = [
        _compute_panel(
            rows,
            [row.get(f"ppl:{text}") for row in rows],
            title=text,
            ylabel="perplexity (lower is better)",
            log_y=needs_log_axis(row.get(f"ppl:{text}") for row in rows),
            lines_fall=True,
        )
        for text in texts
    ]
    return line_figure(panels, height=3.05)


def accuracy_figure(rows: Sequence[Row], chance: float | None = None) -> Figure:
    """Average accuracy against FLOPs per token, with its standard error, and the score of guessing.

    chance  the share that guessing gets right; None where the scores are not those of the paper's ten benchmarks
    """
    panel = _compute_panel(
        rows,
        [None if row["average"] is None else 100 * row["average"] for row in rows],
        errors=[100 * (row["average_error"] or 0.0) for row in rows],
        ylabel=f"average accuracy on {'all' if chance is None else 'ten'} benchmarks (%)",
        level=None if chance is None else ("guessing", 100 * chance),
    )
    return line_figure([panel], height=3.2, legend="bands: 1 standard error")


def _compute_panel(
    rows: Sequence[Row], values: Sequence[float | None], errors: Sequence[float] | None = None, **options: Any
) -> Panel:
    """Values against FLOPs per token, with a line for each model that has any; few models have named budgets."""
    flops = [row["flops_per_token"] for row in rows]
    unit, size = ("GFLOP", 1e9) if max(flops) >= 1e9 else ("MFLOP", 1e6)
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for number, model in enumerate(models):
        own = [i for i, row in enumerate(rows) if row["model"] == model and values[i] is not None]
        if own:
            line = Line(
                rows[own[0]]["label"],
                [flops[i] / size for i in own],
                [values[i] for i in own],
                errors=[errors[i] for i in own] if errors else (),
                names=[f"M={rows[i]['budget']}" for i in own] if len(models) <= _MAX_NAMED_MODELS else (),
                colour=number,
                marker=number,
            )
            lines.append(line)
    return Panel(lines, xlabel=f"{unit} per token, forward", log_x=needs_log_axis(flops), **options)


def line_labels(results: Sequence[Dynamics]) -> list[str]:
    """A name for each line: the model, and its trajectory unless all lines are of full budgets."""
    full = all(result.shape.endswith(f"⊗{result.trajectory}") for result in results)
    return [f"{result.model} ({result.shape}{'' if full else ', ' + result.trajectory_name})" for result in results]


def _state_lines(results: Sequence[Dynamics], metric: str, with_bands: bool) -> list[Line]:
    """Colours tell models apart and dashes their trajectories; for one model colours tell trajectories apart."""
    models = list(dict.fromkeys(result.model for result in results))
    trajectories = list(dict.fromkeys(result.trajectory for result in results))
    factor = 100 if metric == "lens_agreement" else 1  # percent
    lines = []
    for label, result in zip(line_labels(results), results, strict=True):
        series = result.metrics[metric]
        model, trajectory = models.index(result.model), trajectories.index(result.trajectory)
        errors = [2 * factor * (std or 0.0) / math.sqrt(result.prompts) for std in series.std]
        lines.append(
            Line(
                label,
                result.depth,
                [None if mean is None else factor * mean for mean in series.mean],
                errors=errors if with_bands else (),
                colour=model if len(models) > 1 else trajectory,
                dash=trajectory,
            )
        )
    return lines


def _measured_on(results: Sequence[Dynamics]) -> tuple[str, str]:
    """The size of the prompts and the kind of states; the text is named in the table."""
    sizes = {(result.prompts, result.length) for result in results}
    ((prompts, length),) = sizes if len(sizes) == 1 else (("several", "several"),)
    states = " and ".join(sorted({result.states for result in results}, reverse=True))
    return f"{prompts} prompts of {length} tokens", f"states {states} the final norm"
