"""The best schedule of a budget, found by measuring all schedules or, where there are too many, by beam search.

    ranking = search(model, budget=4, text=text)                     # 35 schedules for L = 8
    ranking["best"]["trajectory"], ranking["spread"]["perplexity"]
    search(model, 4, text=text, accuracy=score, by="both")           # score: trajectories → accuracies
    save_best("runs/mine", ranking)                                  # into schedules.json in the model's folder

Schedules lie on the training grid: their steps are multiples of 1/L. The uniform schedule is measured in any case.
Schedules with the same first steps run together (scoring.py), and each such group is stored when it is complete.

The beam search starts from a few different schedules. It measures the neighbours of the best ones (1/L moved from
one step to another) until all their neighbours are measured, or `limit` schedules are.

An entry of schedules.json names the weights it was found with, and LoadedModel refuses it for others (store.py):
    {"4": {"trajectory": "4-2-1-1", "perplexity": 20.1, "by": "perplexity", "text": …, "weights": …}, …}
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopformer.errors import LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.store import (
    SCHEDULES_FILE,
    JsonDict,
    ReportProgress,
    Store,
    count_schedules,
    saved_schedules,
    weights_hash,
)
from loopformer.evaluation.text import Protocol, Text, cut_text, sum_likelihoods
from loopformer.files import write_json
from loopformer.model import LoopedLM
from loopformer.scoring import BATCH_TOKENS, count_passes, score_spans
from loopformer.trajectory import Trajectory

RANKINGS = ("perplexity", "accuracy", "both")
MAX_EXHAUSTIVE = 500  # schedules to measure one by one, above which a beam search begins

Accuracies = Callable[[Sequence[Trajectory]], Mapping[Trajectory, float]]
MeasureSchedules = Callable[[Sequence[Trajectory]], dict[Trajectory, JsonDict]]
MeasuredSchedules = Mapping[Trajectory, Mapping[str, Any]]

_BEAM_WIDTH = 2  # a wide beam spends its limit on neighbours before it moves; 2 came closest on test landscapes
_RANDOM_STARTS = 8


def search(
    model: LoopedLM,
    budget: int,
    *,
    text: Text | None = None,
    accuracy: Accuracies | None = None,
    tasks: Mapping[str, Any] | None = None,
    by: str = "perplexity",
    limit: int = MAX_EXHAUSTIVE,
    protocol: Protocol | None = None,
    weights: str | None = None,
    store: Store | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
) -> JsonDict:
    """The schedules of a budget ranked by perplexity on the text, by `accuracy` or by both, as plain data.

    `tasks` describes in plain data what `accuracy` measures.
    """
    loops, conditioning = model.config.loops, model.config.conditioning
    uniform, on_grid = model.resolve(budget), count_schedules(loops, budget)
    if by not in RANKINGS:
        raise LoopformerError(f"Schedules cannot be ranked by {by!r}; {nearest(by, list(RANKINGS))}")
    require(by == "accuracy" or text is not None, f"Ranking by {by} needs a text; give --text.")
    require(by == "perplexity" or accuracy is not None, f"Ranking by {by} needs tasks; give --tasks.")
    require(limit >= 1, f"--limit must be 1 or more, got {limit}.")
    require(
        conditioning not in ("none", "index") or on_grid == 1,
        f"A model with conditioning {conditioning!r} does not depend on its steps, so all its schedules of a "
        "budget are the same; there is nothing to search.",
    )
    weights, store = weights or weights_hash(model), store or Store(None)
    cut = None if text is None else cut_text(text, protocol or Protocol(), model.config.context)

    def measure(trajectories: Sequence[Trajectory]) -> dict[Trajectory, JsonDict]:
        rows: dict[Trajectory, JsonDict] = {trajectory: {} for trajectory in trajectories}
        if cut is not None:
            keys = {each: cut.key("schedule", model, weights, each) for each in trajectories}
            done = {each: piece for each in trajectories if (piece := store.get(keys[each])) is not None}
            missing = sorted((each for each in trajectories if each not in done), key=lambda each: each.steps)
            # Schedules with the same first step run together, and each group is stored when it is done.
            for _, same in itertools.groupby(missing, key=lambda each: each.steps[0]):
                group = list(same)
                doing = f"schedules {len(done) + 1}-{len(done) + len(group)} of {len(trajectories)}"
                batches = score_spans(model, cut.windows, group, batch_tokens, share=False)
                sums = sum_likelihoods(batches, cut, report, doing)
                done |= {each: store.put(keys[each], sums[each].summarize(cut)) for each in group}
            rows |= {each: dict(piece) for each, piece in done.items()}
        if accuracy is not None:
            for trajectory, share in accuracy(trajectories).items():
                rows[trajectory]["accuracy"] = share
        return rows

    started = time.perf_counter()
    measured, method = explore(loops, uniform, measure, by, limit)
    described = describe(measured, uniform, by, loops)
    if by != "accuracy" and described["best"]["perplexity"] is None:
        raise RunFailed("No schedule gives a number; the model's weights are damaged or its training diverged.")
    # Loops through the stack for one batch, with common first steps computed once and without.
    passes = {"shared": count_passes(measured), "separate": budget * len(measured)}
    return {
        "weights": weights,
        "loops": loops,
        "budget": budget,
        "by": by,
        "method": method,
        "on_grid": on_grid,  # the uniform schedule may not be among them
        "text": cut and cut.facts,
        "tasks": tasks,
        "passes": passes if method == "all" else None,
        "seconds": time.perf_counter() - started,
        **described,
    }


def explore(
    loops: int, uniform: Trajectory, measure: MeasureSchedules, by: str, limit: int
) -> tuple[dict[Trajectory, JsonDict], str]:
    """Results of every schedule of the budget, or of those along a beam where there are more than `limit`."""
    budget = uniform.budget
    if count_schedules(loops, budget) <= limit:
        return measure(list(dict.fromkeys([*Trajectory.enumerate(loops, budget), uniform]))), "all"
    measured: dict[Trajectory, JsonDict] = {}
    front = list(dict.fromkeys([uniform, *_starts(loops, budget)]))
    while front := front[: limit - len(measured)]:
        measured |= measure(front)
        best = rank(measured, by)[:_BEAM_WIDTH]
        neighbours = (neighbour for schedule in best for neighbour in _neighbours(schedule, loops))
        front = [neighbour for neighbour in dict.fromkeys(neighbours) if neighbour not in measured]
    return measured, "beam"


def _starts(loops: int, budget: int) -> Iterator[Trajectory]:
    """Schedules to start from: one heavy step at each position, even steps, and random ones of a fixed seed."""
    spare, rng = loops - budget, random.Random(0)
    heavy = ([1 + spare * (i == position) for i in range(budget)] for position in range(budget))
    even = [1 + spare * (i + 1) // budget - spare * i // budget for i in range(budget)]
    yield from map(Trajectory.from_weights, [*heavy, even])
    yield from (Trajectory.sample(loops, rng, budget) for _ in range(_RANDOM_STARTS))


def _grid_steps(trajectory: Trajectory, loops: int) -> list[int] | None:
    """Steps in units of 1/L; None for a schedule that is not on the grid."""
    steps = [step * loops for step in trajectory.steps]
    return None if any(step.denominator != 1 for step in steps) else list(map(int, steps))


def _neighbours(trajectory: Trajectory, loops: int) -> Iterator[Trajectory]:
    """The schedules with 1/L moved from one step to another; none for a schedule that is not on the grid."""
    steps = _grid_steps(trajectory, loops) or []
    for source, target in itertools.permutations(range(len(steps)), 2):
        if steps[source] > 1:
            change = {source: -1, target: 1}
            yield Trajectory.from_weights([step + change.get(i, 0) for i, step in enumerate(steps)])


def rank(measured: MeasuredSchedules, by: str) -> list[Trajectory]:
    """Schedules with the best first. Ranking by both uses the mean of the two ranks. NaN comes last."""
    costs = [_costs(measured, name) for name in ("perplexity", "accuracy") if by in (name, "both")]
    ranks = [_ranks(column) for column in costs]
    mean_rank = {each: statistics.fmean(column[i] for column in ranks) for i, each in enumerate(measured)}
    return sorted(measured, key=lambda trajectory: (mean_rank[trajectory], trajectory.steps))


def describe(measured: MeasuredSchedules, uniform: Trajectory, by: str, loops: int) -> JsonDict:
    """The ranking as plain data: best, worst, uniform, spread, mean steps, agreement of perplexity and accuracy."""
    order = rank(measured, by)
    rows = [
        {
            "rank": number,
            "schedule": "-".join(map(str, grid)) if grid else ("uniform" if each.is_uniform else str(each)),
            "trajectory": str(each),
            "steps": [float(step) for step in each.steps],
            **measured[each],
        }
        for number, each in enumerate(order, 1)
        for grid in [_grid_steps(each, loops)]
    ]
    tenth = math.ceil(len(order) / 10)
    groups = {"best_tenth": order[:tenth], "worst_tenth": order[-tenth:], "all": order}
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in ("perplexity", "accuracy")}
    return {
        "measured": len(rows),
        "best": rows[0],
        "worst": rows[-1],
        "uniform": rows[order.index(uniform)],
        "spread": {name: max(column) - min(column) for name, column in values.items() if column},
        "mean_steps": {  # by position
            name: [float(sum(steps) / len(group)) for steps in zip(*(each.steps for each in group), strict=True)]
            for name, group in groups.items()
        },
        # 1 means that a lower perplexity always goes with a higher accuracy.
        "rank_correlation": spearman(_costs(measured, "perplexity"), _costs(measured, "accuracy")),
        "schedules": rows,
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation, where ties share their mean rank; None where one side is constant."""
    ranks = _ranks(first), _ranks(second)
    return None if min(len(set(column)) for column in ranks) < 2 else statistics.correlation(*ranks)


def _costs(measured: Mapping[Any, Mapping[str, Any]], name: str) -> list[float]:
    """Values for which lower is better; NaN and missing values are worst."""
    values = [row.get(name) for row in measured.values()]
    sign = -1.0 if name == "accuracy" else 1.0
    return [math.inf if value is None or math.isnan(value) else sign * value for value in values]


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 for the lowest value; ties share their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in values]


def save_best(source: str | Path, ranking: JsonDict) -> Path | None:
    """Save the best schedule of a search with the model; None where the model is no folder that can be written to.

    It replaces an earlier schedule of the same budget. Entries of other budgets stay.
    """
    if not (Path(source).is_dir() and os.access(source, os.W_OK)):
        return None
    best, text = ranking["best"], ranking["text"]
    entry = {
        "trajectory": best["trajectory"],
        **{name: best[name] for name in ("perplexity", "accuracy") if name in best},
        **{name: ranking[name] for name in ("by", "method", "measured", "weights")},
        "text": text and {name: text[name] for name in ("text", "sha256", "tokens")},
        "tasks": ranking["tasks"] and ranking["tasks"]["names"],
    }
    path = Path(source) / SCHEDULES_FILE
    saved = {**saved_schedules(source), str(ranking["budget"]): entry}
    write_json(path, dict(sorted(saved.items(), key=lambda pair: int(pair[0]))))
    return path
