"""Thresholds for a wanted mean budget, picked on one half of a text and reported on the other.

    found = calibrate(model, rows, Wanted(mean_budget=2.5))
    found.policy, found.picked.perplexity, found.verdicts["passes"].sentence

Every list of two or three depths is tried, with thresholds at quantiles of the doubts; the policy with the lowest
loss at or under the wanted mean is taken. What any of them would do follows from plain forward passes
(simulate.py), except with `fill=copy`: there the best of the simulated ones are really run, on fewer tokens.

Fixed budgets stand beside it: at each budget the better of the uniform trajectory and the ladder's rung; between
two budgets the line from one to the other, which is what serving some requests at each gives.

A calibration on disk: `calibration.json`, which generation reads its policy from, and a picture beside it.

    save(found, "runs/mine/adaptive", told={"weights": weights_hash(model)})
    policy = read_policy("runs/mine/adaptive", model)

A policy belongs to the weights that it was picked for; others are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.evaluation.simulate import (
    CopiedText,
    Outcome,
    PromptText,
    Routes,
    SimulatedText,
    Thresholds,
    TokenText,
    read,
)
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.text import Ids, ReportProgress
from loopformer.files import write_atomic
from loopformer.inference.adaptive.ladder import Ladder, check_fill, rung
from loopformer.inference.adaptive.policy import Policy, check_measure, policy_from
from loopformer.model import LoopedLM
from loopformer.plots import Line, Panel, available, line_figure
from loopformer.plots import save as save_picture
from loopformer.trajectory import Trajectory

MODES = ("token", "prompt")


COUNTS = {"passes": "passes one after another", "compute": "loops' worth of FLOPs, everything counted"}


_EVERY = 8  # up to so many loops every depth may be chosen; above, powers of two and the last


_CURVE = 12  # policies on the curve


_RUN = 5  # of them, where they have to be run


_MARGIN = 0.95  # one more of these is a little cheaper than wanted, in case all cost more than simulated


@dataclass(frozen=True)
class Wanted:
    """What to calibrate for."""

    mean_budget: float
    mode: str = "token"
    measure: str = "entropy"
    fill: str = "exact"
    count: str = "passes"  # what the mean is of; see COUNTS
    choices: tuple[int, ...] | None = None  # rungs to try, or budgets to choose among; None finds them
    copy_tokens: int = 1024  # of each half, where policies have to be run

    def __post_init__(self) -> None:
        for name, given, known in (("mode", self.mode, MODES), ("count", self.count, COUNTS)):
            require(given in known, f"Unknown {name} {given!r}; {nearest(given, list(known))}")
        check_measure(self.measure)
        check_fill(self.fill)
        require(
            self.mode == "token" or self.fill == "exact", "fill copy is for mode token; a prompt needs no fill."
        )
        require(self.copy_tokens >= 1, f"copy_tokens must be 1 or more, got {self.copy_tokens}.")


@dataclass(frozen=True)
class Comparison:
    """A policy against fixed budgets of equal cost, on the same tokens."""

    count: str
    cost: float
    perplexity: float
    fixed: float  # perplexity
    gain: float  # nats per token; above 0 the policy is better
    error: float  # standard error of the gain, over windows

    @property
    def word(self) -> str:
        """better, worse, or equal: within two standard errors."""
        return "equal" if abs(self.gain) <= 2 * self.error else "better" if self.gain > 0 else "worse"

    @property
    def sentence(self) -> str:
        said = {"equal": "no clear difference", "better": "it beats them", "worse": "it does not beat them"}
        return (
            f"At {self.cost:.2f} {COUNTS[self.count]}, per token: perplexity {self.perplexity:.2f} against "
            f"{self.fixed:.2f} at fixed budgets; {said[self.word]} "
            f"({math.expm1(-self.gain):+.1%}, ± {2 * self.error:.1%})."
        )


@dataclass(frozen=True)
class Calibrated:
    """A policy, and what it and others came to on the half of the text that it was not picked on."""

    policy: Policy
    expected: float  # its mean budget on the half that it was picked on
    picked: Outcome
    verdicts: dict[str, Comparison]
    curve: list[tuple[Policy, Outcome]]
    fixed: dict[str, list[Outcome]]  # by family, budgets 1…L
    tokens: int  # that the outcomes are of


@dataclass(frozen=True, eq=False)
class _Tried:
    """A policy and what it came to."""

    routes: Routes
    thresholds: Thresholds
    outcome: Outcome
    cost: float  # its mean budget, by the count that is wanted

    @property
    def loss(self) -> float:
        return self.outcome.loss


def calibrate(model: LoopedLM, rows: Ids, wanted: Wanted, report: ReportProgress | None = None) -> Calibrated:
    """Pick the policy for rows [W, T + 1] of text."""
    loops, half = model.config.loops, len(rows) // 2
    lists = _lists(loops, wanted)
    families = {"uniform": [Trajectory.uniform(number) for number in range(1, loops + 1)]}
    if wanted.mode == "token":
        Ladder(model)  # refuses a model that cannot jump
        families["ladder"] = [rung(loops, number) for number in range(1, loops + 1)]
    routes = families["ladder" if wanted.mode == "token" else "uniform"]
    asked = [routes[number - 1] for number in sorted({number for one in lists for number in one})]
    everything = [route for family in families.values() for route in family]
    readings = read(model, rows, asked, everything, wanted.measure, report)

    def text(start: int, stop: int, run: bool = False) -> SimulatedText:
        part = readings.rows(slice(start, stop))
        if wanted.mode == "prompt":
            return PromptText(part, model.cost)
        return CopiedText(part, model, rows[start:stop]) if run else TokenText(part, model.cost, wanted.fill)

    picking, reporting = text(0, half), text(half, 2 * half)
    options = [
        (which, thresholds)
        for which in (tuple(routes[number - 1] for number in one) for one in lists)
        for thresholds in picking.thresholds(which)
    ]
    tried = _try(picking, options, wanted.count, "trying policies", report)
    best = _best(tried, wanted)
    curve = _spread(tried, [best], _CURVE)
    if wanted.fill == "copy":
        under = [one for one in tried if one.cost <= _MARGIN * best.cost] or [best]
        curve = _spread(tried, [best, min(under, key=lambda one: one.loss)], _RUN)
        few = max(2, min(half, math.ceil(wanted.copy_tokens / picking.length)))
        picking, reporting = text(0, few, run=True), text(half, half + few, run=True)
        options = [(one.routes, one.thresholds) for one in curve]
        curve = _try(picking, options, wanted.count, "running policies where they are picked", report)
        best = _best(curve, wanted)
    options = [(one.routes, one.thresholds) for one in curve]
    outcomes = [one.outcome for one in _try(reporting, options, wanted.count, "running policies held out", report)]
    policies = [reporting.policy(*one) for one in options]
    fixed = {name: [reporting.fixed(route) for route in family] for name, family in families.items()}
    place = curve.index(best)
    return Calibrated(
        policy=policies[place],
        expected=best.cost,
        picked=outcomes[place],
        verdicts={count: verdict(outcomes[place], list(fixed.values()), count) for count in COUNTS},
        curve=list(zip(policies, outcomes, strict=True)),
        fixed=fixed,
        tokens=reporting.windows * reporting.scored,
    )


def verdict(outcome: Outcome, fixed: Sequence[Sequence[Outcome]], count: str) -> Comparison:
    """Compare with fixed budgets, by families, at an equal number of passes or FLOPs."""
    best = np.stack([min(each, key=lambda one: one.loss).losses for each in zip(*fixed, strict=True)])  # [L, W]
    cost = cost_of(outcome, count)
    place = min(max(cost, 1.0), float(len(best))) - 1  # beyond L the full budget is as good as it gets
    low = min(int(place), len(best) - 2)
    against = best[low] + (place - low) * (best[low + 1] - best[low])
    gains = against - outcome.losses
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    fixed_perplexity = math.exp(float(against.mean()))
    return Comparison(count, cost, outcome.perplexity, fixed_perplexity, float(gains.mean()), error)


def cost_of(outcome: Outcome, count: str) -> float:
    """The mean budget by either count."""
    return outcome.passes if count == "passes" else outcome.compute


def _lists(loops: int, wanted: Wanted) -> list[tuple[int, ...]]:
    """The lists of depths to try, each in rising order."""
    least = 3 if wanted.measure == "kl" and wanted.mode == "token" else 2
    require(loops >= least, f"A model of {loops} loops leaves nothing to choose by {wanted.measure}.")
    inside = 1 <= wanted.mean_budget <= loops  # False for NaN
    require(
        inside, f"The wanted mean budget must lie in 1 to {loops}, the model's loops; got {wanted.mean_budget}."
    )
    if wanted.choices is not None:
        given = sorted(set(wanted.choices))
        fitting = len(given) >= least and given[0] >= 1 and given[-1] <= loops
        require(fitting, f"Choices must be {least} or more depths in 1 to {loops}, got {list(wanted.choices)}.")
        return [tuple(given)]
    every = range(1, loops + 1) if loops <= _EVERY else sorted({*(2**n for n in range(loops.bit_length())), loops})
    return [one for size in range(least, 4) for one in combinations(every, size)]


def _try(
    text: SimulatedText,
    options: Sequence[tuple[Routes, Thresholds]],
    count: str,
    doing: str,
    report: ReportProgress | None,
) -> list[_Tried]:
    """What each policy comes to on a text."""
    tried, tokens = list[_Tried](), text.windows * text.length
    for routes, thresholds in options:
        outcome = text.outcome(routes, thresholds)
        tried.append(_Tried(routes, thresholds, outcome, cost_of(outcome, count)))
        if report:
            report(doing, len(tried) * tokens, len(options) * tokens)
    return tried


def _best(tried: Sequence[_Tried], wanted: Wanted) -> _Tried:
    """The lowest loss at or under the wanted mean budget."""
    fitting = [one for one in tried if one.cost <= wanted.mean_budget]
    cheapest = min(one.cost for one in tried)
    require(
        bool(fitting),
        f"No policy by {wanted.measure} that was tried has a mean budget of {wanted.mean_budget:g} or less; the "
        f"cheapest has {cheapest:.2f} in {wanted.count}; ask for more, or change the measure, count or choices.",
    )
    return min(fitting, key=lambda one: one.loss)


def _spread(tried: Sequence[_Tried], always: Sequence[_Tried], most: int) -> list[_Tried]:
    """Policies that no cheaper one is as good as, at most so many, evenly by cost, and some always."""
    frontier: list[_Tried] = []
    for one in sorted(tried, key=lambda one: (one.cost, one.loss)):
        if not frontier or one.loss < frontier[-1].loss:
            frontier.append(one)
    places = np.linspace(frontier[0].cost, frontier[-1].cost, most)
    near = {min(frontier, key=lambda one: abs(one.cost - place)) for place in places}
    return sorted({*near, *always}, key=lambda one: one.cost)


FILE, PICTURE = "calibration.json", "calibration.png"


FORMAT, VERSION = "loopformer-calibration", 1


def plain(found: Calibrated, wanted: Wanted, told: dict[str, Any]) -> dict[str, Any]:
    """Everything that was found, as JSON holds it; `told` says of what model and text."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **told,
        "policy": found.policy.plain(),
        "lossy": wanted.fill == "copy",
        "wanted": {"mean_budget": wanted.mean_budget, "count": wanted.count},
        "mean_budget_where_picked": found.expected,
        "reported_on_tokens": found.tokens,
        "picked": _plain(found.picked),
        "against_fixed": {
            count: {
                "cost": one.cost,
                "perplexity": one.perplexity,
                "fixed_perplexity": one.fixed,
                "gain_nats": one.gain,
                "standard_error": one.error,
                "outcome": one.word,
                "sentence": one.sentence,
            }
            for count, one in found.verdicts.items()
        },
        "curve": [{"policy": policy.plain(), **_plain(outcome)} for policy, outcome in found.curve],
        "fixed": {name: [_plain(one) for one in family] for name, family in found.fixed.items()},
    }


def save(found: dict[str, Any], folder: str | Path) -> Path:
    """Write `calibration.json`, whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE, (json.dumps(found, indent=1) + "\n").encode())
    return folder / FILE


def read_policy(path: str | Path, model: LoopedLM) -> Policy:
    """The policy of a calibration file, or of the folder that holds one, made for this model."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileProblem(f"There is no calibration at {path}; make one with loopformer calibrate.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileProblem(f"{path} is no whole JSON file; make it again with loopformer calibrate.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise FileProblem(
            f"{path} is no calibration that this loopformer reads; make one with loopformer calibrate."
        )
    if content.get("weights") != weights_hash(model):
        raise FileProblem(
            f"{path} was made for other weights, and its thresholds fit no others; run loopformer calibrate again."
        )
    try:
        return policy_from(content.get("policy"))
    except LoopformerError as error:
        raise FileProblem(f"{path} is damaged: {error}") from error


def draw(found: dict[str, Any], folder: str | Path) -> Path | None:
    """Quality against mean compute beside the fixed budgets, by both counts; None without matplotlib."""
    if not available():
        return None
    policy, picked = found["policy"], found["picked"]
    fill = f", fill {policy['fill']}" if "fill" in policy else ""
    labels = {"uniform": "fixed, uniform", "ladder": "fixed, rungs of the ladder"}
    counts = {"passes": "passes per token, one after another", "compute": "FLOPs per token, as loops"}

    def line(label: str, rows: list[dict[str, Any]], count: str, dash: int | None) -> Line:
        return Line(label, [row[count] for row in rows], [row["perplexity"] for row in rows], dash=dash)

    panels: list[Panel] = []
    for count, xlabel in counts.items():
        lines = [line(labels[family], rows, count, 0) for family, rows in found["fixed"].items()]
        curve = sorted(found["curve"], key=lambda row: float(row[count]))
        dash = 1 if count == found["wanted"]["count"] else None  # by the other count they are in no order
        lines.append(line(f"adaptive per {policy['mode']}, {policy['measure']}{fill}", curve, count, dash))
        lines.append(Line("picked", [picked[count]], [picked["perplexity"]], star=True))
        panels.append(Panel(lines, xlabel=xlabel, ylabel="" if panels else "perplexity"))
    return save_picture(line_figure(panels, share_y=True), Path(folder) / PICTURE)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "perplexity": outcome.perplexity,
        "passes": outcome.passes,
        "compute": outcome.compute,
        "mflops": outcome.flops / 1e6,
        "chosen": outcome.chosen,
    }
