"""Which pictures are drawn of the numbers: states over depth, CKA maps, the schedules of a search.

state_figures(results)["cka"]            # results: list[Dynamics]; also "representations" and "changes"
search_figure(SearchResults.from_json(found))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from loopformer.analysis.results import Dynamics, SearchResults
from loopformer.plots import HeatMap, Line, Panel, ScheduleBar, line_figure, map_figure, schedule_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BANDS = 4  # lines; the bands of more hide one another
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
    bands = len(results) <= _MOST_BANDS
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


def search_figure(search: SearchResults) -> Figure:
    """Every schedule of a search as a bar with its steps, the best on top; best, uniform and worst are marked."""
    count = f"all {search.measured}" if search.method == "all" else f"{search.measured} (beam search)"
    bars = [
        ScheduleBar(row.schedule, row.steps, {label: getattr(row, name) for name, label in _MEASURES.items()})
        for row in search.schedules
    ]
    return schedule_figure(
        f"Schedules of M = {search.budget} steps, L = {search.loops}: {count}, ranked by {search.by}",
        bars,
        unit=search.loops,
        marks={name: getattr(search, name).rank - 1 for name in ("best", "uniform", "worst")},
    )


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
