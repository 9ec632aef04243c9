"""The best schedule of a budget, from measuring all its schedules, or a random sample if there are too many.

    ranking = search(model, budget=4, text=text)                     # 35 schedules for L = 8
    ranking["best"]["trajectory"], ranking["spread"]["perplexity"], ranking["gain"]["is_significant"]
    ranking["chosen"]["trajectory"]                                  # the best one, or equal steps if it is noise
    search(model, 4, text=text, accuracy=score, by="both")           # score: trajectories → accuracies
    save_best("runs/mine", ranking)                                  # the chosen one, into schedules.json

Schedules lie on the training grid: their steps are multiples of 1/L. The uniform schedule is measured in any case.
Schedules with the same first steps run together (scoring.py), and each such group is stored when it is complete.

**Noise.** The best of many schedules looks better than it is. So `gain` tests whether it beats equal steps:
1. Cut the text into up to 100 blocks of consecutive windows. Neighbouring windows depend on each other.
2. In each block, the gain of a schedule is the loss of equal steps less its own.
3. Over the blocks, each schedule has a mean gain per token and a standard error.
4. Simulate the largest gain, in standard errors, of all schedules if none had an effect (a multiplier bootstrap of
   the maximum t, which keeps their correlations). The best schedule must exceed its 95 % quantile.

Otherwise equal steps are chosen. Rankings by accuracy or both, and those that reuse results of earlier versions,
choose the best schedule without this test.

An entry of schedules.json names the weights it was measured with, and is refused for others (store.py):
    {"4": {"trajectory": "2-1-2-3", "perplexity": 20.1, "by": "perplexity", "text": …, "weights": …}, …}
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from loopformer.evaluation.text import CutText, Likelihood, Protocol, Text, cut_text, sum_likelihoods
from loopformer.files import write_json
from loopformer.model import LoopedLM
from loopformer.scoring import BATCH_TOKENS, count_loops, score_spans
from loopformer.trajectory import Trajectory

RANKINGS = ("perplexity", "accuracy", "both")
MAX_SCHEDULES = 500  # if a budget has more, a random sample of this size is measured

MAX_BLOCKS = 100  # blocks behind the standard error of a gain
ERROR_RATE = 0.05  # of all searches without an effect, how many report a gain
_DRAWS = 4000  # of the simulation; the quantile of a maximum then varies by about 1 %

Accuracies = Callable[[Sequence[Trajectory]], Mapping[Trajectory, float]]
MeasuredSchedules = Mapping[Trajectory, Mapping[str, Any]]


def search(
    model: LoopedLM,
    budget: int,
    *,
    text: Text | None = None,
    accuracy: Accuracies | None = None,
    tasks: Mapping[str, Any] | None = None,
    by: str = "perplexity",
    limit: int = MAX_SCHEDULES,
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
    uniform, grid_size = model.resolve(budget), count_schedules(loops, budget)
    if by not in RANKINGS:
        raise LoopformerError(f"Schedules cannot be ranked by {by!r}; {nearest(by, list(RANKINGS))}")
    require(by == "accuracy" or text is not None, f"Ranking by {by} needs a text; give --text.")
    require(by == "perplexity" or accuracy is not None, f"Ranking by {by} needs tasks; give --tasks.")
    require(limit >= 1, f"--limit must be 1 or more, got {limit}.")
    require(
        conditioning not in ("none", "index") or grid_size == 1,
        f"A model with conditioning {conditioning!r} does not depend on its steps, so all its schedules of a "
        "budget are the same; there is nothing to search.",
    )
    weights, store = weights or weights_hash(model), store or Store(None)
    cut = None if text is None else cut_text(text, protocol or Protocol(), model.config.context)
    gain: JsonDict | None = None

    started = time.perf_counter()
    is_exhaustive = grid_size <= limit
    if is_exhaustive:
        trajectories = list(dict.fromkeys([*Trajectory.enumerate(loops, budget), uniform]))
    else:
        sample, rng = {uniform}, random.Random(0)
        while len(sample) < limit:
            sample.add(Trajectory.sample(loops, rng, budget))
        trajectories = sorted(sample, key=lambda each: each.steps)
    measured: dict[Trajectory, JsonDict] = {trajectory: {} for trajectory in trajectories}
    if cut is not None:
        keys = {each: cut.key("schedule", model, weights, each) for each in trajectories}
        found = {each: store.get(keys[each]) for each in trajectories}
        done = {each: stored for each, stored in found.items() if stored is not None}
        missing = sorted((each for each in trajectories if each not in done), key=lambda each: each.steps)
        # Schedules with the same first step run together, and each group is stored when it is done.
        for _, schedules in itertools.groupby(missing, key=lambda each: each.steps[0]):
            group = list(schedules)
            first, last = len(done) + 1, len(done) + len(group)
            numbers = f"schedule {first}" if first == last else f"schedules {first}-{last}"
            status = f"{numbers} of {len(trajectories)}"
            batches = score_spans(model, cut.windows, group, batch_tokens, share=False)
            sums = sum_likelihoods(batches, cut, report, status)
            for each in group:
                blocks = _block_nats(sums[each], cut)
                done[each] = store.put(keys[each], {**sums[each].summarize(cut), "blocks": blocks})
        # Earlier versions stored no blocks, so their results are ranked without the test.
        if by == "perplexity" and all("blocks" in stored for stored in done.values()):
            gain = best_gain({each: stored["blocks"] for each, stored in done.items()}, uniform, _block_tokens(cut))
        for each, stored in done.items():
            measured[each] = {name: value for name, value in stored.items() if name != "blocks"}
    if accuracy is not None:
        for trajectory, value in accuracy(trajectories).items():
            measured[trajectory]["accuracy"] = value
    ranking = describe(measured, uniform, by, loops)
    is_noise = gain is not None and not gain["is_significant"]
    if by != "accuracy" and ranking["best"]["perplexity"] is None:
        raise RunFailed("No schedule gives a number; the model's weights are damaged or its training diverged.")
    # With common first steps shared, and without.
    loops_per_batch = {"shared": count_loops(measured), "separate": budget * len(measured)}
    return {
        "weights": weights,
        "loops": loops,
        "budget": budget,
        "by": by,
        "method": "all" if is_exhaustive else "sample",
        "on_grid": grid_size,  # without the uniform schedule if that is off the grid
        "text": cut and cut.facts,
        "tasks": tasks,
        "passes": loops_per_batch if is_exhaustive else None,
        "seconds": time.perf_counter() - started,
        **ranking,
        "gain": gain,
        "chosen": ranking["uniform" if is_noise else "best"],
    }


def _block_nats(likelihood: Likelihood, cut: CutText) -> list[float | None]:
    """The nats of each block of consecutive windows; None where the model's output is not a number."""
    sums = [math.fsum(likelihood.windows[window] for window in block) for block in _blocks(cut)]
    return [value if math.isfinite(value) else None for value in sums]


def _block_tokens(cut: CutText) -> list[int]:
    """The scored tokens of each block."""
    return [sum(cut.windows[window].scored for window in block) for block in _blocks(cut)]


def _blocks(cut: CutText) -> list[range]:
    """The windows of each block: consecutive ones, and up to one more in some blocks than in others."""
    count, windows = min(MAX_BLOCKS, len(cut.windows)), len(cut.windows)
    return [range(block * windows // count, (block + 1) * windows // count) for block in range(count)]


def best_gain(
    nats: Mapping[Trajectory, Sequence[float | None]], uniform: Trajectory, tokens: Sequence[int]
) -> JsonDict | None:
    """How much less loss the best schedule has than the uniform one, and whether that is more than noise.

    `nats` holds the loss of each schedule and `tokens` the number of tokens, block by block. None if no schedule is
    better, or if the losses cannot be compared because some are not numbers.
    """
    others = [each for each in nats if each != uniform]
    if not others or any(value is None for values in nats.values() for value in values):
        return None
    table = {each: np.array(values, dtype=np.float64) for each, values in nats.items()}
    counts = np.array(tokens, dtype=np.float64)  # [B]
    gains = np.stack([table[uniform] - table[each] for each in others])  # [K, B]; above 0: better than uniform
    means = gains.sum(1) / counts.sum()  # [K]
    if means.max() <= 0:
        return None
    residuals = gains - means[:, None] * counts  # [K, B]
    spread = np.sqrt((residuals**2).sum(1, keepdims=True))  # [K, 1]
    blocks, best = len(counts), int(means.argmax())
    if blocks == 1 or spread[best, 0] == 0:
        return {"nats_per_token": float(means[best]), "stderr": None, "needed": None, "is_significant": False}
    errors = spread[:, 0] * math.sqrt(blocks / (blocks - 1)) / counts.sum()  # [K]
    # Each draw reweights the blocks. It is divided by a chi to get t, as errors come from few blocks.
    rng = np.random.default_rng(0)
    draws = residuals / np.maximum(spread, np.finfo(float).tiny) @ rng.standard_normal((blocks, _DRAWS))
    draws *= np.sqrt((blocks - 1) / rng.chisquare(blocks - 1, _DRAWS))  # [K, draws]
    needed = float(np.quantile(draws.max(0), 1 - ERROR_RATE))
    return {
        "nats_per_token": float(means[best]),
        "stderr": float(errors[best]),
        "needed": needed,  # standard errors
        "is_significant": bool(means[best] > needed * errors[best]),
    }


def rank(measured: MeasuredSchedules, by: str) -> list[Trajectory]:
    """The schedules, best first. `both` ranks by the mean of the two ranks. NaN comes last."""
    costs = [_column_to_minimise(measured, name) for name in ("perplexity", "accuracy") if by in (name, "both")]
    ranks = [_ranks(column) for column in costs]
    mean_rank = {each: statistics.fmean(column[i] for column in ranks) for i, each in enumerate(measured)}
    return sorted(measured, key=lambda trajectory: (mean_rank[trajectory], trajectory.steps))


def describe(measured: MeasuredSchedules, uniform: Trajectory, by: str, loops: int) -> JsonDict:
    """The ranking as plain data: best, worst, uniform, spread, mean steps, agreement of perplexity and accuracy."""
    order = rank(measured, by)
    rows = [
        {
            "rank": number,
            "schedule": _format_grid_steps(each, loops),
            "trajectory": str(each),
            "steps": [float(step) for step in each.steps],
            **measured[each],
        }
        for number, each in enumerate(order, 1)
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
        "mean_steps": {  # the mean first step, second step and so on
            name: [float(sum(steps) / len(group)) for steps in zip(*(each.steps for each in group), strict=True)]
            for name, group in groups.items()
        },
        # 1 means that a lower perplexity always goes with a higher accuracy.
        "rank_correlation": spearman(
            _column_to_minimise(measured, "perplexity"), _column_to_minimise(measured, "accuracy")
        ),
        "schedules": rows,
    }


def _format_grid_steps(trajectory: Trajectory, loops: int) -> str:
    """The steps in units of 1/L, such as 2-1-2-3. A schedule off the grid keeps its usual name."""
    units = [step * loops for step in trajectory.steps]
    if any(unit.denominator != 1 for unit in units):
        return "uniform" if trajectory.is_uniform else str(trajectory)
    return "-".join(map(str, units))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation, where ties share their mean rank; None where one side is constant."""
    ranks = _ranks(first), _ranks(second)
    return None if min(len(set(column)) for column in ranks) < 2 else statistics.correlation(*ranks)


def _column_to_minimise(measured: Mapping[Any, Mapping[str, Any]], name: str) -> list[float]:
    """One column of measurements; lower is better, so accuracy is negated. NaN and missing become infinity."""
    values = [row.get(name) for row in measured.values()]
    sign = -1.0 if name == "accuracy" else 1.0
    return [math.inf if value is None or math.isnan(value) else sign * value for value in values]


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 for the lowest value; ties share their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in values]


def save_best(source: str | Path, ranking: JsonDict) -> Path | None:
    """Save the chosen schedule of a search in the model's folder; None if that folder is not writable.

    It replaces an earlier schedule of the same budget. Entries of other budgets stay.
    """
    if not (Path(source).is_dir() and os.access(source, os.W_OK)):
        return None
    chosen, text = ranking["chosen"], ranking["text"]
    entry = {
        "trajectory": chosen["trajectory"],
        **{name: chosen[name] for name in ("perplexity", "accuracy") if name in chosen},
        **{name: ranking[name] for name in ("by", "method", "measured", "weights")},
        "text": text and {name: text[name] for name in ("text", "sha256", "tokens")},
        "tasks": ranking["tasks"] and ranking["tasks"]["names"],
    }
    path = Path(source) / SCHEDULES_FILE
    saved = {**saved_schedules(source), str(ranking["budget"]): entry}
    write_json(path, dict(sorted(saved.items(), key=lambda pair: int(pair[0]))))
    return path
