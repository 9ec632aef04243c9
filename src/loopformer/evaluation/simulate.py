"""What each depth says at every token of a text: its loss, and how unsure it is.

    rows = cut(text, context=128, limit=256)                        # [W, T + 1] tokens
    readings = read(model, rows, asked=ladder, others=uniform, measure="entropy")
    readings.losses[route]                                          # [W, T], nats of each next token
    readings.doubt(before, route)                                   # [W, T]

A token that stops at a rung of a ladder with `fill=exact` has the distribution of a fixed run along that rung, so
these plain forward passes hold all that any adaptive policy could come to on the text.

What an adaptive policy comes to on a text: its loss and all it costs, from readings, without running it.

    text = TokenText(readings, model.cost, fill="exact")
    outcome = text.outcome((rung(4, 1), rung(4, 4)), thresholds=(1.5,))
    outcome.perplexity, outcome.passes, outcome.budget
    text.fixed(Trajectory.uniform(2))                      # the same of a fixed budget

Tests compare it with the real thing: losses, passes and FLOPs are equal.

Windows of text that a ladder with `fill=copy` is really run on, token by token.

    text = CopiedText(readings, model, rows)
    text.outcome(routes, thresholds)

What a token says then depends on where those before it stopped, so it cannot be simulated from fixed runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.errors import require
from loopformer.evaluation.text import Ids, ReportProgress, Text
from loopformer.inference.adaptive.ladder import Ladder, LadderCache, Tally, head_flops, pass_flops
from loopformer.inference.adaptive.policy import LOOK_BACK, Policy, PromptPolicy, TokenPolicy, climb, doubt
from loopformer.inference.score import Span, TrajectoryTree, head_chunks
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory

Numbers = npt.NDArray[np.float64]


LEAST = 4  # windows: two to pick thresholds on, two to report on


_ROWS = 8  # windows run at a time


_LOGITS = 1 << 25  # logits held at a time


def cut(text: Text, context: int, limit: int) -> Ids:
    """The first `limit` windows of a text [W, T + 1], documents joined by end tokens as in training."""
    stream = [token for ids in text.documents for token in (*ids.tolist(), text.tokenizer.eot)]
    windows = Span(tuple(stream), len(stream) - 1).windows(context)
    whole = [window.tokens for window in windows if window.scored == context]
    count = min(len(whole), limit)
    require(
        count >= LEAST,
        f"{text.name} gives {count} windows of {context} tokens, but {LEAST} are needed: half of them to pick "
        "on, half to report on; give more text or a larger --windows.",
    )
    return np.array(whole[:count])


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
    report: ReportProgress | None = None,
) -> Readings:
    """Run rows [W, T + 1] along all trajectories; doubts only of those `asked`."""
    tree = TrajectoryTree(model, [*asked, *others])
    pairs = list(combinations(asked, 2)) if measure == "kl" else [(route, route) for route in asked]
    losses: dict[Trajectory, list[Tensor]] = {route: [] for route in tree.trajectories}
    doubts: dict[tuple[Trajectory, Trajectory], list[Tensor]] = {pair: [] for pair in pairs}
    # tokens whose logits exist at once
    step = max(1, _LOGITS // (model.config.vocab_rows * len(tree.trajectories)))
    for start in range(0, len(rows), _ROWS):
        ids = torch.from_numpy(rows[start : start + _ROWS]).to(model.tokens.weight.device)
        model.check(ids[:, :-1])
        hidden = {route: state.flatten(0, 1) for route, state in tree.run(ids[:, :-1])}  # each [B · T, D]
        targets = ids[:, 1:].flatten()
        for chunks in zip(*(head_chunks(model, state, step) for state in hidden.values()), strict=True):
            logits = {route: values for route, (_, values) in zip(hidden, chunks, strict=True)}
            for route, (part, values) in zip(hidden, chunks, strict=True):
                losses[route].append(F.cross_entropy(values, targets[part], reduction="none"))
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


Routes = tuple[Trajectory, ...]


Thresholds = tuple[float, ...]


LEVELS = 15  # quantiles tried for a threshold, fewer where there are several thresholds


_MOST = 100  # thresholds tried for one list of trajectories


@dataclass(frozen=True)
class Outcome:
    """What decoding some windows came to."""

    losses: Numbers  # [W], mean nats per token of each window; windows have equally many tokens
    passes: float  # per token, one after another: what a reader waits for
    flops: float  # per token
    compute: float  # the fixed budget, in loops, of the same FLOPs
    chosen: dict[str, int]  # how often each trajectory was kept

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class SimulatedText(ABC):
    """Windows of T tokens whose last `scored` next tokens are decoded."""

    def __init__(self, readings: Readings, cost: Cost, scored: int) -> None:
        self.readings, self.scored, self.head = readings, scored, head_flops(cost)
        self.windows, self.length = next(iter(readings.losses.values())).shape
        # FLOPs of one pass over the first n tokens, n = 0…T; their differences are those of single tokens.
        self.first = np.array([pass_flops(cost, 0, end) for end in range(self.length + 1)])

    @abstractmethod
    def thresholds(self, routes: Routes) -> Iterator[Thresholds]:
        """Thresholds worth trying: at quantiles of the doubts they decide about, so that each does decide."""

    @abstractmethod
    def outcome(self, routes: Routes, thresholds: Thresholds) -> Outcome:
        """What the policy of these trajectories and thresholds comes to."""

    @abstractmethod
    def policy(self, routes: Routes, thresholds: Thresholds) -> Policy:
        """The policy that `outcome` is of."""

    def fixed(self, route: Trajectory) -> Outcome:
        """What one trajectory for all tokens comes to."""
        flops = route.budget * self.first[-1] + self.scored * self.head
        counts = {str(route): self.windows * self.scored}
        return self.result(self.readings.losses[route], route.budget, self.windows * flops, counts)

    def result(self, losses: Numbers, passes: float, flops: float, chosen: dict[str, int]) -> Outcome:
        """From losses [W, T], passes per token, and the FLOPs of all windows."""
        compute = (flops / self.windows - self.scored * self.head) / self.first[-1]
        scored = losses[:, -self.scored :].mean(1)
        return Outcome(scored, float(passes), float(flops / self.windows / self.scored), float(compute), chosen)


class TokenText(SimulatedText):
    """Each token is decided on its own: it climbs the rungs `routes` of a ladder."""

    def __init__(self, readings: Readings, cost: Cost, fill: str) -> None:
        super().__init__(readings, cost, next(iter(readings.losses.values())).shape[1])
        self.fill = fill

    def policy(self, routes: Routes, thresholds: Thresholds) -> Policy:
        rungs = tuple(route.budget for route in routes)
        return TokenPolicy(rungs, thresholds, self.readings.measure, self.fill)

    def thresholds(self, routes: Routes) -> Iterator[Thresholds]:
        doubts = self._doubts(routes)
        levels = min(LEVELS, int(_MOST ** (1 / len(doubts))))
        return product(*(_quantiles(values, levels) for values in doubts))

    def outcome(self, routes: Routes, thresholds: Thresholds) -> Outcome:
        place = np.full((self.windows, self.length), len(routes) - 1)  # the rung that each token stops at
        first = len(routes) - 1 - len(thresholds)  # the first rung that may keep a token
        for number in reversed(range(len(thresholds))):
            place[self._doubts(routes)[number] <= thresholds[number]] = first + number
        budgets = np.array([route.budget for route in routes])
        passes = (budgets + np.arange(len(routes)))[place]  # every try but the last wasted one jump
        if self.fill == "exact":
            added = np.diff(budgets, prepend=0) + (np.arange(len(routes)) > 0)  # passes from one try to the next
            flops = sum(count * self._filled(place >= number) for number, count in enumerate(added))
        else:
            flops = float((passes * np.diff(self.first)).sum())
        losses = np.choose(place, [self.readings.losses[route] for route in routes])
        heads = self.head * int((place + 1).sum())
        return self.result(losses, float(passes.mean()), flops + heads, _counts(place, routes))

    def _doubts(self, routes: Routes) -> list[Numbers]:
        """What each threshold is compared with [W, T]; under kl the first rung has nothing to compare with."""
        each = [self.readings.doubt(before, route) for before, route in pairwise(routes[:-1])]
        return each if self.readings.measure == "kl" else [self.readings.doubt(routes[0], routes[0]), *each]

    def _filled(self, there: npt.NDArray[np.bool_]) -> float:
        """FLOPs of a pass that some tokens take [W, T]: it is run for all up to the last of them in a window."""
        ends = np.where(there.any(1), self.length - there[:, ::-1].argmax(1), 0)
        return float(self.first[ends].sum())


class PromptText(SimulatedText):
    """The first half of a window is a prompt, which chooses among `routes`; the rest follows its choice."""

    def __init__(self, readings: Readings, cost: Cost) -> None:
        length = next(iter(readings.losses.values())).shape[1]
        self.prompt = length // 2
        super().__init__(readings, cost, length - self.prompt + 1)  # the prompt's last token predicts one too
        self.back = min(LOOK_BACK, self.prompt)
        self.looks = 2 if readings.measure == "kl" else 1

    def policy(self, routes: Routes, thresholds: Thresholds) -> Policy:
        return PromptPolicy(routes, thresholds, self.readings.measure)

    def thresholds(self, routes: Routes) -> Iterator[Thresholds]:
        return combinations(_quantiles(self._doubts(routes), LEVELS), len(routes) - 1)

    def outcome(self, routes: Routes, thresholds: Thresholds) -> Outcome:
        place = (self._doubts(routes)[:, None] > np.array(thresholds)).sum(1)  # [W]
        budgets = np.array([route.budget for route in routes])
        kept, again = budgets[place], place >= self.looks
        prefills = budgets[: self.looks].sum() + kept * again
        passes = prefills + kept * (self.scored - 1)
        flops = prefills * self.first[self.prompt] + kept * (self.first[-1] - self.first[self.prompt])
        heads = self.head * (self.looks * self.back + again + self.scored - 1)
        losses = np.stack([self.readings.losses[route] for route in routes])[place, np.arange(self.windows)]
        mean = float(passes.mean()) / self.scored
        return self.result(losses, mean, float((flops + heads).sum()), _counts(place, routes))

    def _doubts(self, routes: Routes) -> Numbers:
        """The mean doubt over the end of each prompt [W]."""
        values = self.readings.doubt(routes[0], routes[self.looks - 1])
        mean: Numbers = values[:, self.prompt - self.back : self.prompt].mean(1)
        return mean


def _quantiles(values: Numbers, levels: int) -> list[float]:
    inner = np.linspace(0, 1, levels + 2)[1:-1]
    return sorted({float(one) for one in np.quantile(values, inner)})


def _counts(place: npt.NDArray[np.int64], routes: Routes) -> dict[str, int]:
    counts = np.bincount(place.ravel(), minlength=len(routes)).tolist()
    return {str(route): count for route, count in zip(routes, counts, strict=True)}


class CopiedText(TokenText):
    """Rows [W, T + 1] and the readings of the same rows."""

    def __init__(self, readings: Readings, model: LoopedLM, rows: Ids) -> None:
        super().__init__(readings, model.cost, "copy")
        self.ladder, self.rows = Ladder(model), rows

    @torch.no_grad()
    def outcome(self, routes: Routes, thresholds: Thresholds) -> Outcome:
        policy = self.policy(routes, thresholds)
        assert isinstance(policy, TokenPolicy)
        model, tally = self.ladder.model, Tally(self.ladder.model.cost)
        losses = np.empty((self.windows, self.length))
        for number, row in enumerate(self.rows.tolist()):
            cache = LadderCache(self.ladder, self.fill, self.length, tally)
            for place, (token, following) in enumerate(pairwise(row)):
                cache.feed([token])
                logits = climb(model, cache, policy, tally).float()
                losses[number, place] = F.cross_entropy(logits, torch.tensor(following, device=logits.device))
        chosen = {str(route): tally.chosen[route] for route in routes}
        return self.result(losses, tally.passes / losses.size, tally.flops, chosen)
