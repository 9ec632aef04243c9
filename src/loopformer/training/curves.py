"""The picture of a run: training losses and validation perplexity by budget, `curves.png`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from loopformer.training.reporting import read_metrics

FILE = "curves.png"


def draw_curves(run: Path) -> str | None:
    """Draw `curves.png` from metrics.jsonl and return its path; None without matplotlib or records."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    records = read_metrics(run)
    train = [record for record in records if record["kind"] == "train"]
    tested = [record for record in records if record["kind"] == "validation"]
    if not train:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    steps = [record["step"] for record in train]
    left.plot(steps, [record["loss_full"] for record in train], label="full route")
    if any(record["loss_short"] for record in train):
        left.plot(steps, [record["loss_short"] for record in train], label="short routes", alpha=0.7)
    left.set(xlabel="optimizer step", ylabel="cross-entropy", title="training")
    left.legend()
    for name in _budgets(tested):
        perplexity = [math.nan if record[name] is None else math.exp(min(record[name], 30)) for record in tested]
        right.plot(
            [r["step"] for r in tested], perplexity, marker="o", label=f"M = {name.removeprefix('loss_at_')}"
        )
    if tested:
        right.set(xlabel="optimizer step", ylabel="perplexity", title="validation", yscale="log")
        right.legend()
    figure.savefig(run / FILE, dpi=120)
    plt.close(figure)
    return str(run / FILE)


def _budgets(tested: list[dict[str, Any]]) -> list[str]:
    return [name for name in tested[0] if name.startswith("loss_at_")] if tested else []
