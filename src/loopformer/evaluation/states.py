"""State tracking: how many elements of a word a model can multiply at each budget, and how deep each place must go.

    found = track_states(loaded.model, Group.named("S3"), [Trajectory.uniform(m) for m in range(1, 6)])
    found["trajectories"][0]["accuracy"]             # at each place along the first trajectory
    found["certainty"]["exit"]                       # depth by certainty, beside fixed depths
    by_certainty(right, certainty, passes=[1, 2, 3], thresholds=[0.9])

The words are drawn afresh from a stream of their own (data/states.py); the answer at a place is the most likely
element. Every number of right answers is given by place, so that any mean and its standard error can be had.

Depth by certainty gives each place the first depth at which the best element's probability exceeds a threshold,
else the last depth. Depths are of two kinds:

- `escalation`: budgets 1, 2, …, each a trajectory of its own from the start, since its steps differ. A place that
  is answered at budget 3 has run 1 + 2 + 3 passes.
- `exit`: the passes of the longest trajectory, left early. A place that is answered after pass 3 has run 3.

`mean_depth` counts the passes of the trajectory that answered, as if it had been known beforehand; `mean_passes`
all that were run at that place on the way; `mean_passes_filled` also those that earlier places must run for it,
because attention reads them at the same depth: a pass is run for all places up to the last that takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loopformer.config import load_run
from loopformer.data.states import TEST, Group, StateWindows, word_length
from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.evaluation.text import ReportProgress
from loopformer.inference.score import BATCH_TOKENS, TrajectoryTree
from loopformer.loading.folder import SETTINGS, run_of
from loopformer.model import LoopedLM
from loopformer.plots import grid_figure
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Right = npt.NDArray[np.bool_]
Certainty = npt.NDArray[np.float32]

SEQUENCES = 4096
SURE = 0.95  # the accuracy that every place of a tracked prefix has
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)


def own_group(model: str | Path) -> str | None:
    """The group whose states a run, or a checkpoint of one, was trained to track; None for any other model."""
    settings = (run_of(model) or Path(model)) / SETTINGS
    return load_run(settings)[0].data.states if settings.is_file() else None


@torch.no_grad()
def track_states(
    model: LoopedLM,
    group: Group,
    trajectories: Sequence[Trajectory],
    sequences: int = SEQUENCES,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
) -> dict[str, Any]:
    """Accuracy by place along each trajectory and at each exit of the longest one, and depth by certainty."""
    config, device = model.config, model.tokens.weight.device
    require(sequences >= 1, f"--sequences must be 1 or more, got {sequences}.")
    require(seed >= 0, f"--seed must be 0 or more, got {seed}.")
    if config.vocab < group.vocab_size:
        raise LoopformerError(
            f"The model knows {config.vocab} tokens, {group.name} has {len(group)} elements and the end token."
        )
    uniform = sorted((one for one in trajectories if one.is_uniform and one.budget <= config.loops), key=len)
    tree, full = TrajectoryTree(model, trajectories), Trajectory.uniform(config.loops)
    conditions = model.passes(full, 1).conditions
    shape = (sequences, word_length(config.context))
    answers = {one: _Answers(shape) for one in tree.trajectories}
    exits = [_Answers(shape) for _ in range(config.loops)]
    windows = StateWindows(group, config.context, sequences, seed, TEST)
    rows = max(1, batch_tokens // config.context)
    for start in range(0, sequences, rows):
        batch = windows.batch(start, start + rows)
        ids, labels = batch.inputs.to(device), batch.targets[:, 1:].to(device)  # the end token has none
        part = slice(start, start + len(ids))
        for trajectory, hidden in tree.run(ids):
            answers[trajectory].add(part, model, group, hidden[:, 1:], labels)
        states = model(ids, full, logits=False, states=True).states
        for leaving, state, condition in zip(exits, states, conditions, strict=True):
            leaving.add(part, model, group, model.finish(state, condition.gain)[:, 1:], labels)
        if report:
            report(f"words over {group.name}", part.stop, sequences)
    passes = [one.budget for one in uniform]
    return {
        "group": group.name,
        "elements": len(group),
        "chance": 1 / len(group),
        "places": shape[1],
        "sequences": sequences,
        "seed": seed,
        "dtype": model.dtype_name,
        "device": device.type,
        "trajectories": [
            {
                "budget": one.budget,
                "trajectory": str(one),
                "flops_per_token": model.cost.forward_flops(one.budget, config.context),
                **_summary(answers[one].right),
            }
            for one in trajectories
        ],
        "exits": [{"after": after, **_summary(one.right)} for after, one in enumerate(exits, 1)],
        "certainty": {
            "escalation": _certainty([answers[one] for one in uniform], passes, list(accumulate(passes)))
            if uniform
            else None,
            "exit": _certainty(exits, list(range(1, config.loops + 1))),
        },
    }


class _Answers:
    """Of each word and place: whether the answer is right, and the probability that the model gave it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.right = np.zeros(shape, bool)
        self.certainty = np.zeros(shape, np.float32)

    def add(self, rows: slice, model: LoopedLM, group: Group, hidden: Tensor, labels: Tensor) -> None:
        """hidden [B, T, D] after the final norm; logits of other tokens than elements are left out."""
        best = model.head(hidden)[..., : len(group)].float().softmax(-1).max(-1)
        if not bool(best.values.isfinite().all()):
            raise RunFailed("The model's output is not a number; check its weights and dtype.")
        self.right[rows] = (best.indices == labels).cpu().numpy()
        self.certainty[rows] = best.values.cpu().numpy()


def _summary(right: Right) -> dict[str, Any]:
    """Right answers [S, T] by place; the longest prefix every place of which is at least 95 % right."""
    accuracy = right.mean(0)
    return {
        "right": right.sum(0).tolist(),
        "accuracy": accuracy.tolist(),
        "mean_accuracy": float(right.mean()),
        "tracked": int(np.append(accuracy >= SURE, False).argmin()),
    }


def _certainty(answers: Sequence[_Answers], depths: Sequence[int], passes: Sequence[int] = ()) -> dict[str, Any]:
    right, certainty = (np.stack([getattr(one, name) for one in answers]) for name in ("right", "certainty"))
    fixed = [
        {"depth": depth, "accuracy": float(one.mean()), "accuracy_by_place": one.mean(0).tolist()}
        for depth, one in zip(depths, right, strict=True)
    ]
    return {"fixed": fixed, "by_certainty": by_certainty(right, certainty, depths, passes or depths, THRESHOLDS)}


def by_certainty(
    right: Right, certainty: Certainty, depths: Sequence[int], passes: Sequence[int], thresholds: Sequence[float]
) -> list[dict[str, Any]]:
    """What comes of the first depth that is certain enough, for each threshold.

    right, certainty  [depths, S, T]: whether the answer is right, and its probability
    depths            the passes of the answer itself at each depth, rising
    passes            all that were run up to it, tries before it with them
    """
    rows = []
    for threshold in thresholds:
        sure = certainty > threshold
        sure[-1] = True  # there is nothing deeper to ask
        chosen = sure.argmax(0)  # [S, T]
        filled = np.maximum.accumulate(chosen[:, ::-1], axis=1)[:, ::-1]  # the deepest of this and all later places
        answered = np.take_along_axis(right, chosen[None], 0)[0]
        rows.append(
            {
                "threshold": threshold,
                "accuracy": float(answered.mean()),
                "mean_depth": float(np.take(depths, chosen).mean()),
                "mean_passes": float(np.take(passes, chosen).mean()),
                "mean_passes_filled": float(np.take(passes, filled).mean()),
                "chosen": np.bincount(chosen.ravel(), minlength=len(depths)).tolist(),
                "accuracy_by_place": answered.mean(0).tolist(),
                "depth_by_place": np.take(depths, chosen).mean(0).tolist(),
            }
        )
    return rows


def state_figure(found: dict[str, Any]) -> Figure:
    """Accuracy by place, a row for each trajectory."""
    rows = {
        f"M = {one['budget']}" if one["trajectory"] == str(one["budget"]) else one["trajectory"]: one["accuracy"]
        for one in found["trajectories"]
    }
    title = f"Products over {found['group']}, {found['sequences']:,} words, chance {found['chance']:.3f}"
    return grid_figure(rows, label="accuracy", xlabel="place in the word", title=title)
