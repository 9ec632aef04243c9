"""State tracking: how many elements of a group a model can multiply at each budget.

    tracking = track_states(loaded.model, Group.named("S3"), [Trajectory.uniform(m) for m in range(1, 6)])
    tracking["trajectories"][0]["accuracy"]          # at each position along the first trajectory
    tracking["certainty"][0]["mean_passes"]          # loops per position with early exit

A word is a sequence of elements, and its answer at a position is the product up to there. Test words come from a
random stream that training never sees (data/states.py). The model's answer is its most likely element. Correct
answers are counted by position, so that any mean and its standard error can be computed later.

Early exit (early_exit.py) is measured along the full trajectory, and along the longest one if that is longer.
A position leaves the loop once the probability of its top token exceeds a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loopformer.config import DataConfig, load_run
from loopformer.data.states import TEST, Group, StateWindows, word_length
from loopformer.errors import RunFailed, require
from loopformer.evaluation.early_exit import early_exit
from loopformer.evaluation.store import ReportProgress, device_and_dtype
from loopformer.loading.folder import SETTINGS, resolve_model_path, run_folder_of
from loopformer.model import LoopedLM
from loopformer.plots import grid_figure
from loopformer.scoring import BATCH_TOKENS, TrajectoryTree
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BoolArray = npt.NDArray[np.bool_]

SEQUENCES = 4096
MIN_TRACKED_ACCURACY = 0.95  # a prefix is tracked if every position in it reaches this accuracy
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)


def trained_on(model: str | Path) -> DataConfig | None:
    """The data settings of a run, or of a checkpoint of one; None for any other model."""
    settings = (run_folder_of(model) or resolve_model_path(model)) / SETTINGS
    return load_run(settings)[0].data if settings.is_file() else None


def trained_group(model: str | Path) -> str | None:
    """The group whose states a run, or a checkpoint of one, was trained to track; None for any other model."""
    data = trained_on(model)
    return None if data is None else data.states


@torch.no_grad()
def track_states(
    model: LoopedLM,
    group: Group,
    trajectories: Sequence[Trajectory],
    sequences: int = SEQUENCES,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> dict[str, Any]:
    """Accuracy by position along each trajectory, and with early exit at each threshold."""
    config, device = model.config, model.device
    require(sequences >= 1, f"--sequences must be 1 or more, got {sequences}.")
    require(seed >= 0, f"--seed must be 0 or more, got {seed}.")
    tree = TrajectoryTree(model, trajectories)
    longest = max(config.loops, *(trajectory.budget for trajectory in trajectories))
    shape = (sequences, word_length(config.context))
    correct = {trajectory: np.zeros(shape, bool) for trajectory in tree.trajectories}
    exits = {  # with early exit: whether each answer is correct, and how many loops it took
        (Trajectory.uniform(budget), threshold): (np.zeros(shape, bool), np.zeros(shape, np.int64))
        for budget in sorted({config.loops, longest})
        for threshold in thresholds
    }
    windows = StateWindows(group, config.context, sequences, seed, TEST)
    rows = max(1, batch_tokens // config.context)
    for start in range(0, sequences, rows):
        batch = windows.batch(start, start + rows)
        ids, labels = batch.inputs.to(device), batch.targets[:, 1:].to(device)  # the leading end token has no label
        part = slice(start, start + len(ids))
        for trajectory, hidden in tree.run(ids):
            correct[trajectory][part] = _is_correct(model, group, hidden[:, 1:], labels)
        for (trajectory, threshold), (exit_correct, loops) in exits.items():
            out = early_exit(model, ids, threshold, trajectory, beyond=True)
            exit_correct[part] = _is_correct(model, group, out.hidden[:, 1:], labels)
            loops[part] = out.loops[:, 1:].cpu().numpy()
        if report:
            report(f"words over {group.name}", part.stop, sequences)
    return {
        "group": group.name,
        "elements": len(group),
        "chance": 1 / len(group),
        "places": shape[1],
        "sequences": sequences,
        "seed": seed,
        **device_and_dtype(model),
        "trajectories": [
            {
                "budget": trajectory.budget,
                "trajectory": str(trajectory),
                "flops_per_token": model.cost.forward_flops(trajectory.budget, config.context),
                **summarize_answers(correct[trajectory]),
            }
            for trajectory in trajectories
        ],
        "certainty": [
            {
                "trajectory": str(trajectory),
                "threshold": threshold,
                "mean_passes": float(loops.mean()),
                "passes": loops.mean(0).tolist(),
                **summarize_answers(exit_correct),
            }
            for (trajectory, threshold), (exit_correct, loops) in exits.items()
        ],
    }


def _is_correct(model: LoopedLM, group: Group, hidden: Tensor, labels: Tensor) -> BoolArray:
    """Whether the most likely element is the label [B, T], from hidden [B, T, D] after the final norm."""
    logits = model.head(hidden)[..., : len(group)]  # only elements can be answers; the end token cannot
    return is_most_likely(logits, labels)


def is_most_likely(logits: Tensor, labels: Tensor) -> BoolArray:
    """Whether each label is the most likely of its logits [..., V]."""
    if not bool(logits.isfinite().all()):
        raise RunFailed("The model's output is not a number; check its weights and dtype.")
    return (logits.argmax(-1) == labels).cpu().numpy()


def summarize_answers(correct: BoolArray) -> dict[str, Any]:
    """The accuracy by position of answers [S, T], and the longest prefix with 95 % or more at every position."""
    accuracy = correct.mean(0)
    return {
        "right": correct.sum(0).tolist(),
        "accuracy": accuracy.tolist(),
        "mean_accuracy": float(correct.mean()),
        "tracked": int(np.append(accuracy >= MIN_TRACKED_ACCURACY, False).argmin()),
    }


def trajectory_label(row: dict[str, Any]) -> str:
    """The name of a result's trajectory in figures: `M = 2` if its steps are equal."""
    return f"M = {row['budget']}" if row["trajectory"] == str(row["budget"]) else str(row["trajectory"])


def state_figure(tracking: dict[str, Any]) -> Figure:
    """Accuracy by position, a row for each trajectory."""
    rows = {trajectory_label(row): row["accuracy"] for row in tracking["trajectories"]}
    title = f"Products over {tracking['group']}, {tracking['sequences']:,} words, chance {tracking['chance']:.3f}"
    return grid_figure(rows, label="accuracy", xlabel="position in the word", title=title)
