"""Self-speculative decoding: the same weights draft along a short trajectory and verify along the full one.

lm.generate("Once upon", draft=Draft(Trajectory.uniform(1), length=4))

Several drafted tokens are checked in one pass of the full trajectory. A drafted token is kept if it is the one that
the full trajectory chooses there, greedily or with the same noise (sampling.py), so the text is the full model's
own to the letter, sampled or not; only how fast it comes depends on the draft. A short trajectory is not a prefix
of the long one, so a draft has a KV cache of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopformer.errors import LoopformerError
from loopformer.inference.sampling import is_whole
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory

LONGEST = 8  # tokens that an adapted draft has at most
HOPED_RATE = 0.7  # share of the drafted tokens that is accepted, before anything is known
WEIGHT_OF_ONE = 0.05  # of each further token in the share: what was accepted among about the last 20 counts


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted; `length` None adapts it to what is accepted."""

    trajectory: Trajectory
    length: int | None = 4

    def __post_init__(self) -> None:
        if not isinstance(self.trajectory, Trajectory):
            raise LoopformerError(f"A draft follows a Trajectory, not {self.trajectory!r}.")
        if not (self.length is None or (is_whole(self.length) and self.length >= 1)):
            raise LoopformerError(f"A draft needs 1 token or more, a whole number; got {self.length!r}.")

    @property
    def budget(self) -> int:
        return self.trajectory.budget


@dataclass
class DraftReport:
    """What drafting did so far: tokens drafted and accepted, and passes of the full trajectory."""

    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """The share that was accepted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


def best_length(cost: Cost, draft: Draft, budget: int, rate: float) -> int:
    """The draft length with the most tokens per FLOP, verified at this budget, if each drafted token is accepted
    with this probability."""
    price = cost.forward_flops(draft.budget) / cost.forward_flops(budget)
    rate = min(rate, 0.99)

    def gain(length: int) -> float:
        return (1 - rate ** (length + 1)) / (1 - rate) / (1 + length * price)

    return max(range(1, LONGEST + 1), key=gain)


def updated_rate(rate: float, drafted: int, accepted: int) -> float:
    """The probability that a drafted token is accepted, after one more draft.

    Each token that was tested counts: those that were accepted and the one after them. What follows was never
    tested.
    """
    for number in range(min(accepted + 1, drafted)):
        rate += WEIGHT_OF_ONE * ((number < accepted) - rate)
    return rate
