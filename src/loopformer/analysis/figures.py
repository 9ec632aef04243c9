"""The figures of an analysis, a search and a report, drawn in the style of plots.py.

state_figures(results)["cka"]            # also "representations" and "changes"; results of dynamics.analyze
search_figure(search)                    # search: what evaluation.schedules.search returned
perplexity_figure(rows, ["news"])        # rows: a dict per model and budget, as report.py makes them
accuracy_figure(rows, chance=0.31)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loopformer.plots import COLOURS, Line, Panel, house_style, line_figure, map_figure, needs_log_axis, new_figure
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from loopformer.analysis.dynamics import Row
    from loopformer.evaluation.store import JsonDict

_MAX_BANDS = 4  # more lines get no error bands, which would hide one another
_MAX_NAMED_MODELS = 3  # the points of more models get no budgets beside them, which would overlap
_MAX_NAMED_SCHEDULES = 60  # more schedules leave no room for their names
_MARKS = {  # marker, colour and size, in drawing order; best is larger, so it shows behind uniform
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
    "lens_divergence": Panel([], "Logit lens: distance", ylabel="KL(final ‖ after loop i) (nats)", log_y=True),
    "lens_agreement": Panel([], "Logit lens: agreement", ylabel="same top token as final (%)"),
}


def state_figures(results: Sequence[JsonDict], debiased: bool = False) -> dict[str, Figure]:
    """All figures of representation dynamics by name, several models and trajectories side by side."""
    return {
        "representations": metrics_figure(results, REPRESENTATIONS),
        "changes": metrics_figure(results, CHANGES),
        "cka": cka_figure(results, debiased),
    }


def metrics_figure(results: Sequence[JsonDict], panels: Mapping[str, Panel]) -> Figure:
    """Every result as a line over normalised depth, one panel per metric; bands are 2 standard errors.

    Each model has a colour, each trajectory a dash pattern. With only one model, each trajectory has a colour, too.
    """
    models = list(dict.fromkeys(result["model"] for result in results))
    trajectories = list(dict.fromkeys(result["trajectory"] for result in results))
    with_bands = len(results) <= _MAX_BANDS
    lines: dict[str, list[Line]] = {metric: [] for metric in panels}
    for label, result in zip(line_labels(results), results, strict=True):
        dash = trajectories.index(result["trajectory"])
        for metric in panels:
            factor = 100 if metric == "lens_agreement" else 1  # percent
            series = result["metrics"][metric]
            errors = [2 * factor * (std or 0.0) / math.sqrt(result["prompts"]) for std in series["std"]]
            line = Line(
                label,
                result["depth"],
                [None if mean is None else factor * mean for mean in series["mean"]],
                errors=errors if with_bands else (),
                colour=models.index(result["model"]) if len(models) > 1 else dash,
                dash=dash,
            )
            lines[metric].append(line)
    return line_figure(
        [replace(panel, lines=lines[metric]) for metric, panel in panels.items()],
        height=2.45,
        xlabel="normalised depth i / M: 0 is the embedding, 1 the state after the last loop",
        legend=_measured_on(results) + ("; bands: 2 standard errors" if with_bands else ""),
    )


def cka_figure(results: Sequence[JsonDict], debiased: bool = False) -> Figure:
    """A heat map for each result: the CKA between any two of its states."""
    matrices = [result["cka_debiased" if debiased else "cka"] for result in results]
    return map_figure(
        list(zip(line_labels(results), matrices, strict=True)),
        label="linear CKA, debiased" if debiased else "linear CKA",
        xlabel="state after loop (0: embedding)",
        ylabel="state after loop",
        title=_measured_on(results).replace(", ", "\n" if len(results) == 1 else ", "),
    )


def line_labels(results: Sequence[JsonDict]) -> list[str]:
    """A name for each line: the model, and its trajectory unless all lines are of full budgets."""
    # A full trajectory is written as its budget L, with which the shape k⊗L ends.
    all_full = all(result["shape"].endswith(f"⊗{result['trajectory']}") for result in results)
    names = ["" if all_full else f", {trajectory_name(result['trajectory'])}" for result in results]
    return [f"{result['model']} ({result['shape']}{name})" for result, name in zip(results, names, strict=True)]


def trajectory_name(trajectory: str) -> str:
    """A short name: M = 4, 2-1-1, or rounded steps if there is no short form."""
    steps = Trajectory.parse(trajectory).steps
    if trajectory.isdigit():  # uniform
        return f"M = {trajectory}"
    return trajectory if len(trajectory) <= 3 * len(steps) else " ".join(f"{float(step):.2f}" for step in steps)


def _measured_on(results: Sequence[JsonDict]) -> str:
    """The size of the prompts and the kind of states, which all results share."""
    first = results[0]
    return f"{first['prompts']} prompts of {first['length']} tokens, states {first['states']} the final norm"


def search_figure(search: Mapping[str, Any]) -> Figure:
    """Every schedule of a search as a bar from time 0 to 1, a block for each step, the best on top.

    Beside the bars each measure has a panel in which the best, the uniform and the worst schedule are marked.
    """
    schedules, loops = search["schedules"], search["loops"]
    count = (
        f"all {search['measured']}" if search["method"] == "all" else f"{search['measured']} ({search['method']})"
    )
    measures = [name for name in _MEASURES if schedules[0].get(name) is not None]
    has_names = len(schedules) <= _MAX_NAMED_SCHEDULES
    with house_style():
        height = 1.7 + 0.17 * max(len(schedules), 6) if has_names else 7.0
        figure = new_figure(4.2 + 2.2 * len(measures), height)
        widths = [2.2, *[1.0] * len(measures)]
        axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        _draw_schedules(axes[0], schedules, has_names)
        for axis, measure in zip(axes[1:], measures, strict=True):
            _draw_measure(axis, search, measure)
        figure.suptitle(
            f"Schedules of M = {search['budget']} steps, L = {loops}: {count}, ranked by {search['by']}"
        )
    return figure


def _draw_schedules(axis: Axes, schedules: Sequence[Row], has_names: bool) -> None:
    """One bar per schedule with a block for each step; smaller steps are darker."""
    from matplotlib import colormaps

    rows, largest = range(len(schedules)), max(max(schedule["steps"]) for schedule in schedules)
    for index in range(len(schedules[0]["steps"])):
        starts = [sum(schedule["steps"][:index]) for schedule in schedules]
        steps = [schedule["steps"][index] for schedule in schedules]
        # The lightness of cividis keeps its order in greyscale and for colour-blind readers.
        colours = [colormaps["cividis"](step / largest) for step in steps]
        axis.barh(rows, steps, left=starts, height=0.78, color=colours, edgecolor="white", linewidth=0.6)
    axis.set(xlim=(0, 1), ylim=(len(schedules) - 0.5, -0.5))
    axis.set(xlabel="time t, one block per step", ylabel="schedule, best on top")
    axis.grid(False)
    axis.set_yticks(rows if has_names else [], [row["schedule"] for row in schedules] if has_names else [])


def _draw_measure(axis: Axes, search: Mapping[str, Any], measure: str) -> None:
    """A point for each schedule, in line with its bar."""
    values = [schedule.get(measure) for schedule in search["schedules"]]
    points = [(value, row) for row, value in enumerate(values) if value is not None]
    axis.plot(*zip(*points, strict=True), ".", color="#707070", markersize=4, zorder=2)
    for name, (marker, colour, size) in _MARKS.items():
        row = search[name]["rank"] - 1
        if values[row] is not None:
            label = f"{name} {values[row]:.4g}"
            axis.plot(values[row], row, marker, label=label, color=colour, markersize=size, zorder=3)
    axis.margins(x=0.12)
    axis.set_xlabel(_MEASURES[measure])
    axis.locator_params(axis="x", nbins=3)  # numbers of many digits need room
    axis.ticklabel_format(axis="x", useOffset=False)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.0, borderaxespad=0.6)


def perplexity_figure(rows: Sequence[Row], texts: Sequence[str]) -> Figure:
    """Perplexity against FLOPs per token: a panel for each text, a line for each model."""
    panels = []
    for text in texts:
        values = [row.get(f"ppl:{text}") for row in rows]
        panels.append(
            _panel_over_flops(
                rows, values, title=text, ylabel="perplexity (lower is better)", log_y=needs_log_axis(values)
            )
        )
    return line_figure(panels, height=3.05)


def accuracy_figure(rows: Sequence[Row], chance: float | None = None) -> Figure:
    """Average accuracy against FLOPs per token, with its standard error, and the score of guessing.

    chance  the accuracy of guessing; None if the scores are not of the paper's ten tasks
    """
    scored = [row for row in rows if row["average"] is not None]
    panel = _panel_over_flops(
        scored,
        [100 * row["average"] for row in scored],
        errors=[100 * (row["average_error"] or 0.0) for row in scored],
        ylabel=f"average accuracy on {'all' if chance is None else 'ten'} tasks (%)",
    )
    if chance is not None:
        x = sorted({x for line in panel.lines for x in line.x})
        guessing = Line("guessing", x, [100 * chance] * len(x), colour=len(COLOURS) - 1, dash=1)
        panel = replace(panel, lines=[*panel.lines, guessing])
    return line_figure([panel], height=3.2, legend="bands: 1 standard error")


def _panel_over_flops(
    rows: Sequence[Row], values: Sequence[float | None], errors: Sequence[float] | None = None, **options: Any
) -> Panel:
    """Values against FLOPs per token: a line for each model that has values, with its budgets if models are few."""
    mflops = [row["flops_per_token"] / 1e6 for row in rows]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for number, model in enumerate(models):
        points = [i for i, row in enumerate(rows) if row["model"] == model and values[i] is not None]
        if points:
            line = Line(
                rows[points[0]]["label"],
                [mflops[i] for i in points],
                [values[i] for i in points],
                errors=[errors[i] for i in points] if errors else (),
                names=[f"M={rows[i]['budget']}" for i in points] if len(models) <= _MAX_NAMED_MODELS else (),
                colour=number,
            )
            lines.append(line)
    return Panel(lines, xlabel="MFLOP per token, forward", log_x=needs_log_axis(mflops), **options)
