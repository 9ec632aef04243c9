"""How unsure a model is of the next token: pure functions of logits […, V].

doubt("entropy", logits)             # 0 is certain; more is less so
doubt("kl", logits, before=shorter)  # how far a deeper route moved the distribution of a shorter one

All are in nats or probability, before any temperature, so a threshold means the same for every request.

Budgets chosen by the model's own certainty: a trajectory for each prompt, or a rung of a ladder for each token.

policy = TokenPolicy(rungs=(1, 2, 4), thresholds=(0.5, 1.5))             # climb while the entropy is above
policy = PromptPolicy((Trajectory.uniform(1), Trajectory.uniform(4)), (2.5,))
results, tally = generate_adaptive(model, tokenizer, requests, policy)
tally.report()                                                           # what was chosen, and all that it cost

Certainty is read from the model's own distribution, before sampling. `loopformer calibrate` picks thresholds for a
wanted mean budget. Requests run one after another; their own trajectory is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, RunFailed, nearest, require
from loopformer.inference.adaptive.ladder import Ladder, LadderCache, Tally, check_fill, rung
from loopformer.inference.request import Event, Request, Result, RowState
from loopformer.inference.sampling import sample
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache
from loopformer.trajectory import Trajectory

Measure = Literal["entropy", "margin", "kl"]


MEASURES: tuple[str, ...] = get_args(Measure)


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the distribution in nats […]."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """The probability of the most likely token less that of the second […]."""
    first, second = logits.float().softmax(-1).topk(2).values.unbind(-1)
    return first - second


def kl(logits: Tensor, before: Tensor) -> Tensor:
    """KL(now ‖ before) in nats […]: what the deeper of two budgets knew that the shallower did not."""
    log_p, log_q = logits.float().log_softmax(-1), before.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def doubt(measure: str, logits: Tensor, before: Tensor | None = None) -> Tensor:
    """One scale for all measures: 0 is certain, and a token goes deeper while its doubt is above a threshold."""
    if measure == "kl":
        assert before is not None, "kl compares two budgets"
        return kl(logits, before)
    return entropy(logits) if measure == "entropy" else 1 - margin(logits)


def check_measure(measure: str) -> None:
    """Refuse a measure that does not exist."""
    require(measure in MEASURES, f"Unknown measure of certainty {measure!r}; {nearest(measure, list(MEASURES))}")


def check_thresholds(thresholds: Sequence[float], expected: int, what: str) -> None:
    """Refuse thresholds that are no numbers, or more or fewer than there are decisions."""
    for one in thresholds:
        number = isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
        require(number, f"A threshold must be a finite number, got {one!r}.")
    require(
        len(thresholds) == expected,
        f"{what} needs {expected} threshold{'s' * (expected != 1)}, got {len(thresholds)}.",
    )


LOOK_BACK = 16  # tokens at the end of a prompt whose mean doubt decides; a single one says too little


@dataclass(frozen=True)
class TokenPolicy:
    """Each token climbs a ladder (ladder.py) until its doubt is at or below the threshold of its rung.

    The last rung needs no threshold; nor does the first under kl, which has nothing to compare with there.
    """

    rungs: tuple[int, ...]  # those that are tried, in rising order; every try but the last costs a jump
    thresholds: tuple[float, ...]
    measure: str = "entropy"
    fill: str = "exact"

    def __post_init__(self) -> None:
        check_measure(self.measure)
        check_fill(self.fill)
        _check_rising(self.rungs, "rungs")
        require(
            self.measure != "kl" or len(self.rungs) >= 3,
            f"kl compares a rung with the one before, so it needs three or more; got {list(self.rungs)}.",
        )
        said = f"A climb over {len(self.rungs)} rungs by {self.measure}"
        check_thresholds(self.thresholds, checks(self.rungs, "token", self.measure), said)

    def settled(self, place: int, logits: Tensor, before: Tensor | None) -> bool:
        """Whether a token stays at the rung of this place in `rungs`: logits [V] there and at the rung before."""
        place -= self.measure == "kl"
        return place >= 0 and float(doubt(self.measure, logits, before)) <= self.thresholds[place]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        shared = {"measure": self.measure, "thresholds": list(self.thresholds)}
        return {"mode": "token", "rungs": list(self.rungs), **shared, "fill": self.fill}


@dataclass(frozen=True)
class PromptPolicy:
    """A trajectory for a whole request, by the mean doubt over the end of its prompt along the first of them.

    As many thresholds as the doubt exceeds, so many trajectories further on in the list. Under kl the prompt is run
    along the first two, and the doubt is how much they differ.
    """

    routes: tuple[Trajectory, ...]
    thresholds: tuple[float, ...]
    measure: str = "entropy"

    def __post_init__(self) -> None:
        check_measure(self.measure)
        _check_rising([route.budget for route in self.routes], "budgets")
        said = f"A choice among {len(self.routes)} trajectories"
        check_thresholds(self.thresholds, checks(self.routes, "prompt", self.measure), said)
        require(list(self.thresholds) == sorted(self.thresholds), "The thresholds must rise from one to the next.")

    @property
    def looks(self) -> int:
        """How many of the trajectories are run to decide."""
        return 2 if self.measure == "kl" else 1

    def chosen(self, unsure: float) -> int:
        """The place of the trajectory for a doubt."""
        return sum(unsure > threshold for threshold in self.thresholds)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        routes = [str(route) for route in self.routes]
        return {"mode": "prompt", "routes": routes, "measure": self.measure, "thresholds": list(self.thresholds)}


Policy = TokenPolicy | PromptPolicy


def checks(choices: Sequence[Any], mode: str, measure: str) -> int:
    """How many thresholds a policy with so many choices has."""
    return max(0, len(choices) - 1 - (measure == "kl" and mode == "token"))


def policy_from(plain: Any) -> Policy:
    """The policy that `plain()` made plain data of."""
    try:
        given: Mapping[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()}
        settings = {key: value for key, value in given.items() if key != "mode"}
        if given["mode"] == "token":
            return TokenPolicy(**settings)
        if given["mode"] == "prompt":
            return PromptPolicy(**{**settings, "routes": tuple(map(Trajectory.parse, settings["routes"]))})
    except (KeyError, TypeError, AttributeError) as error:
        raise LoopformerError(
            f"This is no adaptive policy ({error}); make one with loopformer calibrate."
        ) from error
    raise LoopformerError(f"Unknown mode {given['mode']!r} of an adaptive policy; it is token or prompt.")


def generate_adaptive(
    model: LoopedLM, tokenizer: Tokenizer, requests: Sequence[Request], policy: Policy
) -> tuple[list[Result], Tally]:
    """Run requests to their ends, and say what was chosen and what it cost."""
    tally = Tally(model.cost)
    events = stream_adaptive(model, tokenizer, requests, policy, tally)
    return [event.result for event in events if event.result is not None], tally


@torch.no_grad()
def stream_adaptive(
    model: LoopedLM, tokenizer: Tokenizer, requests: Sequence[Request], policy: Policy, tally: Tally
) -> Iterator[Event]:
    """The same, piece by piece as tokens come; `tally` counts along."""
    follow: Callable[[_Row], Iterator[Tensor]]
    if isinstance(policy, TokenPolicy):
        follow = partial(_climbing, Ladder(model), policy, tally)
    else:
        for route in policy.routes:
            model.resolve(route)
        follow = partial(_chosen, model, policy, tally)
    for number, request in enumerate(requests):
        row = _Row(RowState.start(number, request, tokenizer, model.config))
        for logits in follow(row):
            row.state, event = row.state.take(sample(logits[None], [row.state.draw()]))
            if event.result is not None and event.result.error is not None:
                raise RunFailed(event.result.error)
            yield event
            if event.result is not None:
                tally.finished(len(request.prompt), len(row.state.ids))
                break


@dataclass
class _Row:
    """The request that is being decoded, in its present state."""

    state: RowState

    def follow(self, trajectory: Trajectory) -> None:
        self.state = replace(self.state, request=replace(self.state.request, trajectory=trajectory))


def _climbing(ladder: Ladder, policy: TokenPolicy, tally: Tally, row: _Row) -> Iterator[Tensor]:
    """The logits [V] of each next token, at the rung that it settled on."""
    row.follow(rung(ladder.loops, policy.rungs[-1]))  # the deepest it may go
    capacity = min(ladder.model.config.context, row.state.length + row.state.request.max_tokens)
    cache = LadderCache(ladder, policy.fill, capacity, tally)
    cache.feed(row.state.request.prompt)
    while True:
        yield climb(ladder.model, cache, policy, tally)
        cache.feed(row.state.tail(1))


@torch.no_grad()
def climb(model: LoopedLM, cache: LadderCache, policy: TokenPolicy, tally: Tally) -> Tensor:
    """Take the tokens that were fed last as far up as their doubt asks: the logits [V] of the last one."""
    before: Tensor | None = None
    for place, number in enumerate(policy.rungs):
        logits = model.head(cache.climb(number))[: model.config.vocab]
        tally.looked()
        if number == policy.rungs[-1] or policy.settled(place, logits, before):
            break
        before = logits
    cache.settle(number)
    return logits


def _chosen(model: LoopedLM, policy: PromptPolicy, tally: Tally, row: _Row) -> Iterator[Tensor]:
    """The logits [V] of each next token, along the trajectory that the prompt asked for."""
    prompt = row.state.request.prompt
    looked = [_look(model, route, prompt, LOOK_BACK, tally) for route in policy.routes[: policy.looks]]
    unsure = doubt(policy.measure, looked[-1][1], looked[0][1]).mean()
    place = policy.chosen(float(unsure))
    route = policy.routes[place]
    row.follow(route)
    tally.chosen[route] += 1
    cache, ends = looked[place] if place < policy.looks else _look(model, route, prompt, 1, tally)
    yield ends[-1]
    while True:
        last = torch.tensor([row.state.tail(1)], device=ends.device)
        hidden = model.extend(last, cache, check=False)[0, 0]
        for _ in range(route.budget):
            tally.passed(cache.lengths[0] - 1, cache.lengths[0], cache.lengths[0] - 1)
        tally.looked()
        yield model.head(hidden)[: model.config.vocab]


def _look(
    model: LoopedLM, route: Trajectory, prompt: Sequence[int], back: int, tally: Tally
) -> tuple[Cache, Tensor]:
    """A prompt along a trajectory: its cache, and the logits [≤ back, V] of its last tokens."""
    cache = model.cache(route, 1)
    hidden = model.extend(torch.tensor([list(prompt)], device=model.tokens.weight.device), cache)[0, -back:]
    for _ in range(route.budget):
        tally.passed(0, len(prompt), 0)
    tally.looked(len(hidden))
    return cache, model.head(hidden)[:, : model.config.vocab]


def _check_rising(choices: Sequence[int], what: str) -> None:
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in choices)
    rising = whole and all(before < after for before, after in pairwise(choices))
    require(
        rising and len(choices) >= 2,
        f"An adaptive policy needs two or more {what}, whole numbers in rising order; got {list(choices)}.",
    )
