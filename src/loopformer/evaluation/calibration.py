"""A calibration on disk: `calibration.json`, which generation reads its policy from, and a picture beside it.

    save(found, "runs/mine/adaptive", told={"weights": weights_hash(model)})
    policy = read_policy("runs/mine/adaptive", model)

A policy belongs to the weights that it was picked for; others are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.calibrate import Calibrated, Wanted
from loopformer.evaluation.simulate import Outcome
from loopformer.evaluation.store import weights_hash
from loopformer.files import write_atomic
from loopformer.inference.adaptive import Policy, policy_from
from loopformer.model import LoopedLM

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
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    policy = found["policy"]
    name = f"adaptive per {policy['mode']}, {policy['measure']}" + (
        f", fill {policy['fill']}" if "fill" in policy else ""
    )
    labels = {"uniform": "fixed, uniform", "ladder": "fixed, rungs of the ladder"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    counts = {"passes": "passes per token, one after another", "compute": "FLOPs per token, as loops"}
    for axis, (count, what) in zip(axes, counts.items(), strict=True):
        for family, rows in found["fixed"].items():
            axis.plot([one[count] for one in rows], [one["perplexity"] for one in rows], "o-", label=labels[family])
        curve = sorted(found["curve"], key=lambda one: float(one[count]))
        line = "--" if count == found["wanted"]["count"] else ""  # by the other count they are in no order
        axis.plot([one[count] for one in curve], [one["perplexity"] for one in curve], f"s{line}", label=name)
        picked = found["picked"]
        axis.plot(picked[count], picked["perplexity"], "*", markersize=14, color="black", label="picked")
        axis.set(xlabel=what)
    axes[0].set(ylabel="perplexity")
    axes[0].legend()
    path = Path(folder) / PICTURE
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "perplexity": outcome.perplexity,
        "passes": outcome.passes,
        "compute": outcome.compute,
        "mflops": outcome.flops / 1e6,
        "chosen": outcome.chosen,
    }
