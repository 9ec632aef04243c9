"""What generation with a chosen depth cost, counted as it ran: passes one after another, and FLOPs.

tally = Tally(model.cost)
tally.passed(first=0, end=9, new=9)    # one pass over nine earlier tokens
tally.report()

Everything is counted: passes that were thrown away, passes that continued earlier tokens, and every use of the
head. The modulation table is not, as in model/cost.py: it is computed once.

A ladder of trajectories that share their first steps and end in one jump, and its cache.

    rung 1: (1) · rung 2: (1/L, 1 - 1/L) · rung 3: (1/L, 1/L, 1 - 2/L) · … · rung L: L equal steps

    cache = LadderCache(Ladder(model), "exact", capacity=64, tally=Tally(model.cost))
    cache.feed(prompt)                 # new tokens
    hidden = cache.climb(1)            # [D], the last token's, had all of the text followed rung 1
    hidden = cache.climb(3)            # unsure: go on from the states that were kept
    cache.settle(3)                    # the token stays there

A jump that is not kept is thrown away; small steps are not. Keys and values live per pass (a small step or a jump)
and block. Earlier tokens have none at passes they did not take: `exact` runs them there now, all in one parallel
pass from their kept states, so that the result is that of a fixed run along the rung; `copy` takes those of the
token's last pass instead, which costs nothing and is lossy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from loopformer.errors import nearest, require
from loopformer.model import LoopedLM
from loopformer.model.cache import Place
from loopformer.model.conditioning import Condition
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory


def pass_flops(cost: Cost, first: int, end: int) -> float:
    """One pass of the stack over the positions first…end-1, each looking at all up to its own."""
    return (end - first) * cost.loop_flops(first + end + 1)  # half of it is the mean number of keys


def head_flops(cost: Cost) -> int:
    """The logits of one token."""
    return 2 * cost.head_products


@dataclass
class Tally:
    """Counts of one or more requests."""

    cost: Cost
    tokens: int = 0  # new ones
    passes: int = 0  # of the stack, one after another: what a reader waits for
    heads: int = 0  # tokens whose logits were computed
    flops: float = 0.0  # of all passes and heads
    fill_flops: float = 0.0  # of these, for earlier tokens at depths they had not reached
    one_loop: float = 0.0  # FLOPs of one pass over all tokens: the unit of `mean_budget`
    chosen: Counter[Trajectory] = field(default_factory=Counter)  # per token, or per prompt
    lossy: bool = False  # keys and values were copied, so no fixed run gives these distributions

    def passed(self, first: int, end: int, new: int) -> None:
        """One pass over the positions first…end-1, of which those from `new` on are being decided."""
        self.passes += 1
        self.flops += pass_flops(self.cost, first, end)
        self.fill_flops += pass_flops(self.cost, first, new) if first < new else 0.0

    def looked(self, tokens: int = 1) -> None:
        """Logits of so many tokens."""
        self.heads += tokens
        self.flops += tokens * head_flops(self.cost)

    def finished(self, prompt: int, new: int) -> None:
        """A request of so many prompt tokens got so many new ones."""
        self.tokens += new
        self.one_loop += pass_flops(self.cost, 0, prompt + new - 1)  # the last new token is never run

    @property
    def mean_budget(self) -> float:
        """The fixed budget, in loops, that would have cost the same FLOPs."""
        return (self.flops - self.tokens * head_flops(self.cost)) / max(1.0, self.one_loop)

    @property
    def passes_per_token(self) -> float:
        """At a fixed budget M this is M."""
        return self.passes / max(1, self.tokens)

    @property
    def mean_chosen(self) -> float:
        """The mean length of the trajectories that were kept."""
        return sum(route.budget * count for route, count in self.chosen.items()) / max(1, self.chosen.total())

    def report(self) -> dict[str, Any]:
        """Everything as plain data."""
        tokens, full = max(1, self.tokens), self.cost.config.loops
        return {
            "tokens": self.tokens,
            "mean_chosen": self.mean_chosen,
            "chosen": {str(route): self.chosen[route] for route in sorted(self.chosen, key=len)},
            "passes_per_token": self.passes_per_token,
            "mean_budget": self.mean_budget,
            "flops_per_token": self.flops / tokens,
            "fill_flops_per_token": self.fill_flops / tokens,
            "full_flops_per_token": full * self.one_loop / tokens + head_flops(self.cost),
            "lossy": self.lossy,
        }


Fill = Literal["exact", "copy"]


FILLS: tuple[str, ...] = get_args(Fill)


def rung(loops: int, number: int) -> Trajectory:
    """Rung 1…L of the ladder: number - 1 small steps of 1/L, then one jump to the end."""
    require(1 <= number <= loops, f"A ladder of {loops} loops has the rungs 1 to {loops}, not {number}.")
    return Trajectory.from_weights([*[1] * (number - 1), loops - number + 1])


def check_fill(fill: str) -> None:
    """Refuse a way to fill that does not exist."""
    require(fill in FILLS, f"Unknown way to fill missing keys {fill!r}; {nearest(fill, list(FILLS))}")


class Ladder:
    """What each pass of a model's ladder is told; computed once, for any number of caches."""

    def __init__(self, model: LoopedLM) -> None:
        kind = model.config.conditioning
        require(
            kind not in ("none", "index"),
            f"A model with conditioning {kind!r} is not told its steps, so it cannot jump from a rung of a ladder; "
            "choose a budget per prompt instead.",
        )
        require(
            model.config.prelude == model.config.coda == 0,
            "A ladder has no prelude and no coda; choose a budget per prompt instead.",
        )
        self.model, self.loops = model, model.config.loops
        with torch.no_grad():
            told = [model.passes(rung(self.loops, number), 1).conditions for number in range(1, self.loops + 1)]
        self._jumps, self._small = [rows[-1] for rows in told], told[-1]

    def told(self, depth: int, jump: bool) -> Condition:
        """What the small step, or the jump, that starts after `depth` small steps is told; for 1 row."""
        return self._jumps[depth] if jump else self._small[depth]


@dataclass
class _Level:
    """Keys and values of one pass, per block [1, H, capacity, D/H], for the first `length` tokens."""

    kept: list[tuple[Tensor, Tensor]]
    length: int = 0


class LadderCache:
    """One text on a ladder: states after each small step, keys and values of each pass that was taken."""

    def __init__(self, ladder: Ladder, fill: str, capacity: int, tally: Tally) -> None:
        check_fill(fill)
        config, weight = ladder.model.config, ladder.model.tokens.weight
        require(
            1 <= capacity <= config.context,
            f"A cache holds 1 to {config.context} tokens (the context), not {capacity}.",
        )
        self._ladder, self._model, self._fill, self._capacity = ladder, ladder.model, fill, capacity
        self._tally = tally
        tally.lossy = fill == "copy"
        self._levels: dict[tuple[int, bool], _Level] = {}
        self._states = weight.new_zeros(ladder.loops, capacity, config.width)  # after 0, 1, …, L-1 small steps
        self._embedded = weight.new_zeros(1, capacity, config.width)
        places = torch.arange(capacity, device=weight.device)[None]
        _, self._rotary = self._model.place(self._states[:1], places)
        self.rungs: list[int] = []  # where each settled token stopped
        self._start = self._end = 0  # the new tokens
        self._depth = 0  # small steps that the new tokens have taken

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> None:
        """New tokens after those that are settled. They climb together; a prompt is one such group."""
        self._start, self._end, self._depth = self._end, self._end + len(ids), 0
        require(self._end <= self._capacity, f"{self._end} tokens do not fit the cache of {self._capacity}.")
        device = self._states.device
        places = torch.arange(self._start, self._end, device=device)[None]
        new = torch.tensor([list(ids)], device=device)
        self._model.check(new)
        x, _ = self._model.place(self._model.tokens(new), places)
        start = self._model.random_start(places)
        self._embedded[:, self._start : self._end] = x
        self._states[0, self._start : self._end] = x[0] if start is None else start[0]

    @torch.no_grad()
    def climb(self, number: int) -> Tensor:
        """Take the new tokens to a rung above the last one tried: the last one's hidden state [D], normed."""
        for depth in range(self._depth, number - 1):
            x = self._pass(depth, jump=False)
            self._states[depth + 1, self._end - len(x) : self._end] = x
        self._depth = number - 1
        last = self._pass(number - 1, jump=True)[None, -1:]
        return self._model.finish(last, self._ladder.told(number - 1, jump=True).gain)[0, 0]

    def settle(self, number: int) -> None:
        """The new tokens stay at a rung that they have climbed to."""
        self.rungs += [number] * (self._end - self._start)
        self._tally.chosen[rung(self._ladder.loops, number)] += 1

    def _pass(self, depth: int, jump: bool) -> Tensor:
        """One pass from a depth, of tokens that have to be filled and the new ones: their states then [T, D]."""
        level = self._level(depth, jump)
        if self._fill == "copy":
            self._copy(level)
        first, end = level.length, self._end
        positions = torch.arange(first, end, device=self._states.device)[None]
        plain = first == 0 or end - first == 1
        looked_at = torch.arange(end, device=positions.device)
        mask = None if plain else looked_at <= positions[:, None, :, None]  # [1, 1, T, end]
        rotary = None
        if self._rotary is not None:
            cos, sin = self._rotary
            rotary = cos[:, :, first:end], sin[:, :, first:end]
        slots = [Place(keys, values, positions, first, end) for keys, values in level.kept]
        embedded, x = self._embedded[:, first:end], self._states[depth, first:end][None]
        condition = self._ladder.told(depth, jump)
        x = self._model.inject(x, embedded, condition, depth)
        out: Tensor = self._model.stack(x, condition.modulation, rotary, mask, slots)[0]
        level.length = end
        self._tally.passed(first, end, self._start)
        return out

    def _level(self, depth: int, jump: bool) -> _Level:
        """The keys and values of a pass; memory is taken when it is first needed."""
        if (depth, jump) not in self._levels:
            config = self._model.config
            shape = (2, 1, config.heads, self._capacity, config.head_width)
            pairs = [self._states.new_zeros(shape).unbind(0) for _ in range(config.blocks)]
            self._levels[depth, jump] = _Level([(keys, values) for keys, values in pairs])
        return self._levels[depth, jump]

    def _copy(self, level: _Level) -> None:
        """Give earlier tokens that did not take a pass the keys and values of their last one, the jump they kept.

        It started from the deepest state they have, so it is the nearest there is to what is missing.
        """
        missing = range(level.length, self._start)
        for number in {self.rungs[place] for place in missing}:
            places = [place for place in missing if self.rungs[place] == number]
            for mine, last in zip(level.kept, self._level(number - 1, True).kept, strict=True):
                for kept, other in zip(mine, last, strict=True):
                    kept[:, :, places] = other[:, :, places]
        level.length = self._start
