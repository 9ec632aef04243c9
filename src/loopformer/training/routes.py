"""Which rows of a step go where: the short routes of the global batch, and each rank's share of its rows.

A global batch is cut into `route_draws` equal parts. The length and schedule of each part's short route come
from (seed, step, part) alone, so any number of ranks trains the same thing. Every rank works on the same part at
the same time, since ranks with routes of different lengths would wait for each other.
"""

import math
import random
from dataclasses import dataclass

from loopformer.config import ObjectiveConfig
from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class Piece:
    """Rows start:stop of the global batch, one micro-batch: its short route and which rows take it."""

    start: int
    stop: int
    part: int
    short_rows: tuple[int, ...]  # counted from `start`


def short_route(loops: int, objective: ObjectiveConfig, seed: int, step: int, part: int) -> Trajectory | None:
    """The short route of a part at a step; None where the objective has none."""
    if not objective.elastic:
        return None
    return Trajectory.sample(loops, random.Random(f"{seed}/{step}/{part}"), sampler=objective.sampler)


def pieces(batch: int, micro_batch: int, objective: ObjectiveConfig, rank: int = 0, world: int = 1) -> list[Piece]:
    """A rank's micro-batches of one step, in order, part by part."""
    size = batch // objective.route_draws
    if size % world:
        raise LoopformerError(
            f"Each of the {objective.route_draws} parts of the batch has {size} rows, which {world} ranks cannot "
            "share evenly; change training.batch or objective.route_draws."
        )
    share = size // world
    found = []
    for part in range(objective.route_draws):
        first = part * size + rank * share
        for start in range(first, first + share, micro_batch):
            stop = min(start + micro_batch, first + share)
            found.append(Piece(start, stop, part, _short_rows(start, stop, part * size, objective)))
    return found


def _short_rows(start: int, stop: int, origin: int, objective: ObjectiveConfig) -> tuple[int, ...]:
    """The rows that take the short route, spread evenly over the part and the same for any cut of it."""
    if not objective.elastic:
        return ()
    fraction = objective.short_fraction

    def taken(row: int) -> bool:
        return math.floor((row + 1) * fraction + 1e-9) > math.floor(row * fraction + 1e-9)

    return tuple(row - start for row in range(start, stop) if taken(row - origin))


def short_row_count(batch: int, objective: ObjectiveConfig) -> int:
    """Rows of the whole batch that take a short route."""
    return sum(len(piece.short_rows) for piece in pieces(batch, batch, objective))
