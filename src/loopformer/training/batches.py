"""Which rows of a step follow which trajectory: a rank's micro-batches, and the short trajectory of each.

    for rows in micro_batches(480, 12, run.objective):
        short = short_trajectory(run.model.loops, run.objective, seed, step, rows.part)

A global batch is cut into `route_draws` equal parts. The length and schedule of each part's short trajectory come
from (seed, step, part) alone, so any number of ranks trains the same thing.
"""

import math
import random
from dataclasses import dataclass

from loopformer.config import ObjectiveConfig
from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """Rows start:stop of the global batch, the part they lie in, and which of them follow its short trajectory."""

    start: int
    stop: int
    part: int
    short_rows: tuple[int, ...]  # counted from `start`


def short_trajectory(loops: int, objective: ObjectiveConfig, seed: int, step: int, part: int) -> Trajectory | None:
    """The short trajectory of a part at a step; None where the objective has none."""
    if not objective.elastic:
        return None
    return Trajectory.sample(loops, random.Random(f"{seed}/{step}/{part}"), sampler=objective.sampler)


def micro_batches(
    batch: int, micro_batch: int, objective: ObjectiveConfig, rank: int = 0, world: int = 1, in_step: bool = False
) -> list[MicroBatch]:
    """A rank's micro-batches of one step, in order; none of them crosses the border of a part.

    Each rank takes a run of rows. With `in_step` each takes a share of every part instead, so that all ranks follow
    the same trajectory at the same time, as sharded weights need.
    """
    size = batch // objective.route_draws
    shared = size if in_step else batch
    if shared % world:
        what = f"each of the {objective.route_draws} parts of the batch" if in_step else "the batch"
        raise LoopformerError(
            f"The {shared} rows of {what} cannot be shared evenly by {world} ranks; change training.batch"
            + (" or objective.route_draws." if in_step else ".")
        )
    share = shared // world
    mine = []
    for part in range(objective.route_draws):
        first = part * size + rank * share if in_step else max(part * size, rank * share)
        last = first + share if in_step else min((part + 1) * size, (rank + 1) * share)
        for start in range(first, last, micro_batch):
            stop = min(start + micro_batch, last)
            mine.append(MicroBatch(start, stop, part, _short_rows(start, stop, part * size, objective)))
    return mine


def largest_micro_batch(batch: int, objective: ObjectiveConfig, world: int, in_step: bool) -> int:
    """Rows that a micro-batch can have at most."""
    size = batch // objective.route_draws
    return max(1, size // world if in_step else min(size, batch // world))


def _short_rows(start: int, stop: int, origin: int, objective: ObjectiveConfig) -> tuple[int, ...]:
    """The rows that follow the short trajectory, spread evenly over the part and the same for any cut of it."""
    if not objective.elastic:
        return ()
    fraction = objective.short_fraction

    def taken(row: int) -> bool:
        return math.floor((row + 1) * fraction + 1e-9) > math.floor(row * fraction + 1e-9)

    return tuple(row - start for row in range(start, stop) if taken(row - origin))
