"""What generation with a chosen depth cost, counted as it ran: passes one after another, and FLOPs.

tally = Tally(model.cost)
tally.passed(first=0, end=9, new=9)    # one pass over nine earlier tokens
tally.report()

Everything is counted: passes that were thrown away, passes that continued earlier tokens, and every use of the
head. The modulation table is not, as in model/cost.py: it is computed once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
