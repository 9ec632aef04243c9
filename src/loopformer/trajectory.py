"""Trajectories: the step size of each loop, as a tuple that sums to 1. The number of steps is the budget.

Trajectory.uniform(4)                 # four equal steps
Trajectory.parse("2-1-2-3")           # weights, normalised
Trajectory.parse("cosine:4")          # a named family at a budget
Trajectory.sample(8, random.Random(0))  # a random one, as in training

Step i takes the state from time t_i to t_i + Δ_i. Steps are exact fractions, so equality, hashing and
the common prefixes of trajectories are exact.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

from loopformer.errors import LoopformerError

Number = Fraction | int | float | str
Sampler = Literal["compositions", "sequential", "uniform", "continuous"]

SAMPLERS: tuple[str, ...] = get_args(Sampler)
FAMILIES = ("uniform", "coarse-to-fine", "fine-to-coarse", "cosine")
MAX_STEPS = 4096  # far above the loops of any model
_TOLERANCE = Fraction(1, 10**6)  # rounding allowed in a float or decimal step
_MAX_DENOMINATOR = 4096  # of the fractions that floats and decimals are rounded to
_CONTINUOUS_GRID = 2**20  # resolution of the `continuous` sampler: much finer than 1/L, yet short to print


@dataclass(frozen=True, init=False)
class Trajectory:
    """Positive steps Δ₁…Δ_M that sum to 1. Immutable and hashable; `parse(str(t)) == t`."""

    steps: tuple[Fraction, ...]

    def __init__(self, steps: Iterable[Number]) -> None:
        if isinstance(steps, str) or not isinstance(steps, Iterable):
            raise LoopformerError(f"A trajectory is made of steps, not {steps!r}; use Trajectory.parse for text.")
        object.__setattr__(self, "steps", _exact_steps(list(steps)))

    @property
    def budget(self) -> int:
        """M, the number of loops through the shared stack."""
        return len(self.steps)

    @cached_property
    def times(self) -> tuple[Fraction, ...]:
        """The time t before each step: 0, Δ₁, Δ₁+Δ₂, …"""
        return tuple(itertools.accumulate(self.steps[:-1], initial=Fraction(0)))

    @cached_property
    def _hash(self) -> int:
        return hash(self.steps)

    def __hash__(self) -> int:
        return self._hash  # kept, because hashing fractions is slow and trajectories are the keys of many tables

    @property
    def is_uniform(self) -> bool:
        return len(set(self.steps)) == 1

    @property
    def label(self) -> str:
        """A short name for people: M=4, or the schedule."""
        return f"M={self.budget}" if self.is_uniform else str(self)

    def __len__(self) -> int:
        return self.budget

    def __str__(self) -> str:
        if self.is_uniform:
            return str(self.budget)
        common = math.lcm(*(step.denominator for step in self.steps))
        if common <= _MAX_DENOMINATOR:
            return "-".join(str(int(step * common)) for step in self.steps)
        return ",".join(str(step) for step in self.steps)

    def __repr__(self) -> str:
        return f"Trajectory.parse({str(self)!r})"

    @classmethod
    def uniform(cls, budget: int) -> Trajectory:
        """M equal steps."""
        budget = _check_budget(budget)
        return _between(tuple(range(1, budget)), budget)

    @classmethod
    def named(cls, family: str, budget: int) -> Trajectory:
        """A named family at a budget: uniform, coarse-to-fine (M…1), fine-to-coarse (1…M), cosine."""
        budget = _check_budget(budget)
        if family == "cosine":
            times = [math.sin(math.pi * i / (2 * budget)) for i in range(budget + 1)]
            return cls([after - before for before, after in itertools.pairwise(times)])
        weights = {"coarse-to-fine": range(budget, 0, -1), "fine-to-coarse": range(1, budget + 1)}
        if family != "uniform" and family not in weights:
            raise LoopformerError(f"Unknown trajectory family {family!r}; choose one of {', '.join(FAMILIES)}.")
        return cls.from_weights(weights.get(family, [1] * budget))

    @classmethod
    def from_weights(cls, weights: Iterable[Number]) -> Trajectory:
        """Positive weights, normalised to sum to 1."""
        exact = [_fraction(weight) for weight in weights]
        if not exact or min(exact) <= 0:
            raise LoopformerError(f"Trajectory weights must be positive, got {_join(exact) or 'none'}.")
        total = sum(exact)
        return cls([weight / total for weight in exact])

    @classmethod
    def parse(cls, text: str) -> Trajectory:
        """Read "4" (uniform), "2-1-2-3" (weights), "0.25,0.25,0.5" or "1/4,1/4,1/2" (steps), "cosine:4"."""
        plain = "".join(str(text).split())
        if match := re.fullmatch(r"(?:([a-z-]+):)?0*(\d{1,9})", plain):
            return cls.named(match[1] or "uniform", int(match[2]))
        try:
            if re.fullmatch(r"[\d.]{1,40}(-[\d.]{1,40})+", plain):
                return cls.from_weights(plain.split("-"))
            if re.fullmatch(r"[\d./]{1,40}(,[\d./]{1,40})*", plain):
                return cls(plain.split(","))
        except (ZeroDivisionError, _NotANumber):
            pass
        raise LoopformerError(
            f"Cannot read {text!r} as a trajectory; write a budget (4), weights (2-1-2-3), "
            "steps that sum to 1 (0.25,0.25,0.5 or 1/4,1/4,1/2) or a family (cosine:4)."
        )

    @classmethod
    def enumerate(cls, loops: int, budget: int) -> Iterator[Trajectory]:
        """All C(L-1, M-1) trajectories of M steps that are multiples of 1/L, in lexicographic order."""
        budget = _check_budget(budget, loops)
        return (_between(cuts, loops) for cuts in itertools.combinations(range(1, loops), budget - 1))

    @classmethod
    def sample(cls, loops: int, rng: Any, budget: int | None = None, sampler: str = "compositions") -> Trajectory:
        """Draw a trajectory for a model of L loops, with `random.Random` or `numpy.random.Generator`.

        The length S is uniform on 1…L-1 unless `budget` is given. The sampler draws the steps:
        compositions  uniform among the C(L-1, S-1) compositions of L into S parts (as in the paper's text)
        sequential    part by part, uniform among the sizes that leave 1 for each later part (as in the
                      published code; early steps are larger)
        uniform       S equal steps
        continuous    Dirichlet(1, …, 1), not on the grid of 1/L
        """
        loops = _check_budget(loops)
        if budget is None:
            if loops < 2:
                raise LoopformerError(f"A model of {loops} loop has no shorter trajectory to draw.")
            budget = 1 + _draw_below(rng, loops - 1)
        budget = _check_budget(budget, loops)
        if sampler in ("compositions", "continuous"):
            # The gaps between sorted uniform points of a fine grid are Dirichlet(1, …, 1).
            grid = loops if sampler == "compositions" else _CONTINUOUS_GRID
            return _between(tuple(_draw_distinct(rng, budget - 1, grid - 1)), grid)
        if sampler == "sequential":
            parts: list[int] = []
            for later in range(budget - 1, 0, -1):
                parts.append(1 + _draw_below(rng, loops - sum(parts) - later))
            return cls.from_weights([*parts, loops - sum(parts)])
        if sampler == "uniform":
            return cls.uniform(budget)
        raise LoopformerError(f"Unknown sampler {sampler!r}; choose one of {', '.join(SAMPLERS)}.")


@lru_cache(maxsize=4096)  # training draws a trajectory for each row, and fractions are slow
def _between(cuts: tuple[int, ...], grid: int) -> Trajectory:
    """The trajectory that steps through the times 0, cuts/grid, 1."""
    return Trajectory([Fraction(b - a, grid) for a, b in itertools.pairwise([0, *cuts, grid])])


def resolve(trajectory: Trajectory | str | int | None, loops: int, beyond: bool = False) -> Trajectory:
    """The trajectory for what a user gave: an int means that many equal steps, None means uniform(L).

    More than L steps are an error unless `beyond` is set, for studies of extrapolation.
    """
    if isinstance(trajectory, str):
        trajectory = Trajectory.parse(trajectory)
    if isinstance(trajectory, Trajectory):
        _check_budget(trajectory.budget, None if beyond else loops)
        return trajectory
    budget = loops if trajectory is None else trajectory
    return Trajectory.uniform(_check_budget(budget, None if beyond else loops))


class _NotANumber(LoopformerError):
    """Text that is not a number."""


def _check_budget(given: int, loops: int | None = None) -> int:
    """The budget as an int, if it is in range. NumPy integers are accepted; bools and floats are not."""
    try:
        budget = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        budget = 0
    if budget < 1:
        raise LoopformerError(f"A budget is a whole number of loops, 1 or more; got {given!r}.")
    if loops is not None and budget > loops:
        raise LoopformerError(f"Budget {budget} is above the model's {loops} loops; choose 1 to {loops}.")
    if budget > MAX_STEPS:
        raise LoopformerError(f"A trajectory has at most {MAX_STEPS} steps, not {budget}.")
    return budget


def _fraction(value: Any) -> Fraction:
    try:
        if isinstance(value, numbers.Integral):
            return Fraction(int(value))
        if isinstance(value, numbers.Real) and not isinstance(value, Fraction):
            return Fraction(repr(float(value)))
        return Fraction(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise _NotANumber(f"{value!r} is not a number, as a trajectory step must be.") from error


def _exact_steps(values: list[Number]) -> tuple[Fraction, ...]:
    """Steps that sum to 1 exactly. A float or decimal within 1e-6 of a fraction p/q with q ≤ 4096 becomes p/q."""
    if not values:
        raise LoopformerError("A trajectory needs at least one step.")
    _check_budget(len(values))
    raw = [_fraction(value) for value in values]
    if min(raw) <= 0:
        raise LoopformerError(f"Trajectory steps must be positive, got {_join(raw)}.")
    steps, tolerance = list(raw), Fraction(0)
    for index, value in enumerate(values):
        if not isinstance(value, numbers.Rational) and not (isinstance(value, str) and "/" in value):
            tolerance += _TOLERANCE
            rounded = raw[index].limit_denominator(_MAX_DENOMINATOR)
            if rounded > 0 and abs(rounded - raw[index]) <= _TOLERANCE:
                steps[index] = rounded
    total = sum(raw, Fraction(0))
    if abs(total - 1) > tolerance:
        raise LoopformerError(
            f"Trajectory steps must sum to 1, but {_join(raw)} sum to {float(total):.6g}; "
            "write weights as 2-1-2-3 to have them normalised."
        )
    # Rounded decimals may not sum to 1 exactly. The largest step absorbs the difference, as it changes least.
    largest = steps.index(max(steps))
    steps[largest] += 1 - sum(steps)
    return tuple(steps)


def _join(values: Iterable[Fraction]) -> str:
    return ", ".join(f"{float(value):.6g}" for value in values)


def _draw_below(rng: Any, bound: int) -> int:
    """A uniform integer in 0…bound-1 from either kind of generator."""
    return int(rng.integers(bound)) if hasattr(rng, "integers") else int(rng.randrange(bound))


def _draw_distinct(rng: Any, count: int, bound: int) -> list[int]:
    """A uniform subset of `count` integers in 1…bound, sorted (Floyd's algorithm)."""
    chosen: set[int] = set()
    for top in range(bound - count + 1, bound + 1):
        drawn = 1 + _draw_below(rng, top)
        chosen.add(top if drawn in chosen else drawn)
    return sorted(chosen)
