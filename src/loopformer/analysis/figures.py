"""The figures of an analysis, a search and a report, drawn in the style of plots.py.

state_figures(results)["cka"]            # results: list[Dynamics]; also "representations" and "changes"
search_figure(found)                     # found: what evaluation.schedules.search returned
perplexity_figure(rows, ["news"])        # rows: a dict per model and budget, as report.py makes them
accuracy_figure(rows, chance=0.31)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loopformer.analysis.dynamics import Dynamics, Row
from loopformer.plots import HeatMap, Line, Panel, ScheduleBar, line_figure, map_figure, schedule_figure, wide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_BANDS = 4  # lines with error bands; the bands of more hide one another
_MAX_NAMED_MODELS = 3  # models with budgets beside their points; the labels of more overlap
_DEPTH = {"0": 0.0, "¼": 0.25, "½": 0.5, "¾": 0.75, "1": 1.0}
_MEASURES = {"perplexity": "perplexity (lower is better)", "accuracy": "accuracy (higher is better)"}


class MetricPanel(NamedTuple):
    """How one metric is drawn over depth."""

    metric: str
    title: str
    label: str
    log: bool = False
    percent: bool = False
    note: str = ""


REPRESENTATIONS = (
    MetricPanel("curvature", "Curvature", "mean turning angle (rad)"),
    MetricPanel("anisotropy", "Anisotropy", "mean cosine of two tokens"),
    MetricPanel("prompt_entropy", "Prompt entropy", "entropy / log min(T, D)"),
)
CHANGES = (
    MetricPanel("movement", "Movement per loop", "|h$_i$ − h$_{i-1}$| / |h$_{i-1}$|", log=True),
    MetricPanel(
        "lens_divergence", "Logit lens: distance", "KL(final ‖ after loop i) (nats)", log=True, note="0 at i = M"
    ),
    MetricPanel("lens_agreement", "Logit lens: agreement", "same top token as final (%)", percent=True),
)


def state_figures(results: Sequence[Dynamics], debiased: bool = False) -> dict[str, Figure]:
    """All figures of representation dynamics by name, several models and trajectories side by side."""
    return {
        "representations": metrics_figure(results, REPRESENTATIONS),
        "changes": metrics_figure(results, CHANGES),
        "cka": cka_figure(results, debiased),
    }


def metrics_figure(results: Sequence[Dynamics], metrics: Sequence[MetricPanel]) -> Figure:
    """Every result as a line over normalised depth, one panel per metric; bands are 2 standard errors."""
    bands = len(results) <= _MAX_BANDS
    panels = [
        Panel(
            _state_lines(results, metric, bands),
            title=metric.title,
            ylabel=metric.label,
            log_y=metric.log,
            note=metric.note,
            ticks=_DEPTH,
        )
        for metric in metrics
    ]
    return line_figure(
        panels,
        height=2.45,
        xlabel="normalised depth i / M: 0 is the embedding, 1 the state after the last loop",
        legend=", ".join(_measured_on(results)) + ("; bands: 2 standard errors" if bands else ""),
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
    """Every schedule of a search as a bar with its steps, the best on top; best, uniform and worst are marked."""
    count = f"all {search['measured']}" if search["method"] == "all" else f"{search['measured']} (beam search)"
    bars = [
        ScheduleBar(row["schedule"], row["steps"], {label: row.get(name) for name, label in _MEASURES.items()})
        for row in search["schedules"]
    ]
    return schedule_figure(
        f"Schedules of M = {search['budget']} steps, L = {search['loops']}: {count}, ranked by {search['by']}",
        bars,
        unit=search["loops"],
        marks={name: search[name]["rank"] - 1 for name in ("best", "uniform", "worst")},
    )


def perplexity_figure(rows: Sequence[Row], texts: Sequence[str]) -> Figure:
    """Perplexity against FLOPs per token: a panel for each text, a line for each model."""
    panels = [
        _compute_panel(
            rows,
            [row.get(f"ppl:{text}") for row in rows],
            title=text,
            ylabel="perplexity (lower is better)",
            log_y=wide(row.get(f"ppl:{text}") for row in rows),
            falling=True,
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
    return Panel(lines, xlabel=f"{unit} per token, forward", log_x=wide(flops), **options)


def line_labels(results: Sequence[Dynamics]) -> list[str]:
    """A name for each line: the model, and its trajectory unless all lines are of full budgets."""
    full = all(result.shape.endswith(f"⊗{result.trajectory}") for result in results)
    return [f"{result.model} ({result.shape}{'' if full else ', ' + result.trajectory_name})" for result in results]


def _state_lines(results: Sequence[Dynamics], metric: MetricPanel, bands: bool) -> list[Line]:
    """Colours tell models apart and dashes their trajectories; for one model colours tell trajectories apart."""
    models = list(dict.fromkeys(result.model for result in results))
    trajectories = list(dict.fromkeys(result.trajectory for result in results))
    factor = 100 if metric.percent else 1
    lines = []
    for label, result in zip(line_labels(results), results, strict=True):
        series = result.metrics[metric.metric]
        model, trajectory = models.index(result.model), trajectories.index(result.trajectory)
        errors = [2 * factor * (std or 0.0) / math.sqrt(result.prompts) for std in series.std]
        lines.append(
            Line(
                label,
                result.depth,
                [None if mean is None else factor * mean for mean in series.mean],
                errors=errors if bands else (),
                colour=model if len(models) > 1 else trajectory,
                dash=trajectory,
            )
        )
    return lines


def _measured_on(results: Sequence[Dynamics]) -> tuple[str, str]:
    """What was measured on what; several texts are told apart in the table, not here."""
    sizes = {(result.prompts, result.length) for result in results}
    ((prompts, length),) = sizes if len(sizes) == 1 else (("several", "several"),)
    states = " and ".join(sorted({result.states for result in results}, reverse=True))
    return f"{prompts} prompts of {length} tokens", f"states {states} the final norm"
