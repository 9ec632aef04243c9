"""What each depth says at every token of a text: its loss, and how unsure it is.

    rows = cut(text, context=128, limit=256)                        # [W, T + 1] tokens
    readings = read(model, rows, asked=ladder, others=uniform, measure="entropy")
    readings.losses[route]                                          # [W, T], nats of each next token
    readings.doubt(before, route)                                   # [W, T]

A token that stops at a rung of a ladder with `fill=exact` has the distribution of a fixed run along that rung, so
these plain forward passes hold all that any adaptive policy could come to on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.errors import require
from loopformer.evaluation.text import Ids, Report, Text
from loopformer.evaluation.walk import Walker
from loopformer.inference.certainty import doubt
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Numbers = npt.NDArray[np.float64]

LEAST = 4  # windows: two to pick thresholds on, two to report on
_ROWS = 8  # windows run at a time
_LOGITS = 1 << 25  # logits held at a time


def cut(text: Text, context: int, limit: int) -> Ids:
    """The first `limit` windows of a text [W, T + 1], documents joined by end tokens as in training."""
    end = np.array([text.tokenizer.eot])
    stream = np.concatenate([part for ids in text.documents for part in (ids, end)])
    count = min((len(stream) - 1) // context, limit)
    require(
        count >= LEAST,
        f"{text.name} gives {count} windows of {context} tokens, but {LEAST} are needed: half of them to pick "
        "on, half to report on; give more text or a larger --windows.",
    )
    return np.stack([stream[row * context : (row + 1) * context + 1] for row in range(count)])


@dataclass(frozen=True)
class Readings:
    """Losses of all trajectories, and doubts of those that a policy may choose."""

    measure: str
    losses: dict[Trajectory, Numbers]  # [W, T]
    doubts: dict[tuple[Trajectory, Trajectory], Numbers]  # [W, T], by what it is compared with and what it is of

    def doubt(self, before: Trajectory, route: Trajectory) -> Numbers:
        """How unsure a trajectory is; only kl asks what came `before`."""
        return self.doubts[before if self.measure == "kl" else route, route]

    def rows(self, which: slice) -> Readings:
        """The same of some windows."""
        losses = {route: values[which] for route, values in self.losses.items()}
        return Readings(self.measure, losses, {pair: values[which] for pair, values in self.doubts.items()})


@torch.no_grad()
def read(
    model: LoopedLM,
    rows: Ids,
    asked: Sequence[Trajectory],
    others: Sequence[Trajectory],
    measure: str,
    report: Report | None = None,
) -> Readings:
    """Run rows [W, T + 1] along all trajectories; doubts only of those `asked`."""
    walker = Walker(model, [*asked, *others])
    pairs = list(combinations(asked, 2)) if measure == "kl" else [(route, route) for route in asked]
    losses: dict[Trajectory, list[Tensor]] = {route: [] for route in walker.routes}
    doubts: dict[tuple[Trajectory, Trajectory], list[Tensor]] = {pair: [] for pair in pairs}
    step = max(1, _LOGITS // (model.config.vocab_rows * len(walker.routes)))  # tokens whose logits exist at once
    for start in range(0, len(rows), _ROWS):
        ids = torch.from_numpy(rows[start : start + _ROWS]).to(model.tokens.weight.device)
        model.check(ids[:, :-1])
        hidden = {route: state.flatten(0, 1) for route, state in walker.walk(ids[:, :-1])}  # each [B · T, D]
        targets = ids[:, 1:].flatten()
        for place in range(0, len(targets), step):
            some = slice(place, place + step)
            logits = {route: model.head(state[some])[:, : model.config.vocab] for route, state in hidden.items()}
            for route, values in logits.items():
                losses[route].append(F.cross_entropy(values.float(), targets[some], reduction="none"))
            for before, route in pairs:
                doubts[before, route].append(doubt(measure, logits[route], logits[before]))
        if report:
            report("running the text", (start + len(ids)) * (ids.shape[1] - 1), rows[:, 1:].size)
    shape = (len(rows), rows.shape[1] - 1)
    return Readings(
        measure,
        {route: _joined(values, shape) for route, values in losses.items()},
        {pair: _joined(values, shape) for pair, values in doubts.items()},
    )


def _joined(pieces: list[Tensor], shape: tuple[int, int]) -> Numbers:
    return torch.cat(pieces).cpu().double().numpy().reshape(shape)
