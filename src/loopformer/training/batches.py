"""Which rows of a step follow which trajectory: a rank's micro-batches, and the trajectories of each.

    for micro_batch in micro_batches(480, 12, run.objective):
        followed = draw_trajectories(run, step, micro_batch.part)

A global batch is cut into `trajectory_groups` equal parts. What is drawn for a part comes from (seed, step, part),
so any number of ranks trains the same thing.
"""

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from loopformer.config import ObjectiveConfig, RunConfig
from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """Rows start:stop of the global batch, the part they lie in, and who of them follows each trajectory."""

    start: int
    stop: int
    part: int
    rows: tuple[tuple[int, ...], ...]  # of each trajectory of the objective, counted from `start`


def draw_trajectories(run: RunConfig, step: int, part: int) -> list[Trajectory | None]:
    """The objective's trajectories for a part at a step, counted from 1; None for one that is not followed then."""
    rng, loops = random.Random(f"{run.training.seed}/{step}/{part}"), run.model.loops
    entries, progress = run.objective.trajectories, (step - 1) / run.training.steps
    drawn: list[Trajectory | None] = []
    for entry in entries:
        if not entry.is_active(progress):
            drawn.append(None)
            continue
        low, high = entry.budgets(loops)
        if entry.budget == "full":
            drawn.append(Trajectory.uniform(loops))
            continue
        budget = low + rng.randrange(high - low + 1) if low < high else low
        drawn.append(Trajectory.sample(loops, rng, budget, entry.sampler))
    return drawn


def costliest_step(run: RunConfig) -> list[Trajectory | None]:
    """The longest trajectories that one step may follow together; None for those that it does not."""
    entries, loops = run.objective.trajectories, run.model.loops
    longest = [Trajectory.uniform(entry.budgets(loops)[1]) for entry in entries]
    costs = [entry.rows * each.budget for entry, each in zip(entries, longest, strict=True)]

    steps = [
        {place for place, other in enumerate(entries) if other.is_active(entry.active_range[0])}
        for entry in entries
    ]
    costliest = max(steps, key=lambda places: sum(costs[place] for place in places))
    return [each if place in costliest else None for place, each in enumerate(longest)]


def micro_batches(
    batch: int, micro_batch: int, objective: ObjectiveConfig, rank: int = 0, world: int = 1, in_step: bool = False
) -> list[MicroBatch]:
    """A rank's micro-batches of one step, in order; none of them crosses the border of a part.

    Each rank takes a run of rows. With `in_step` each takes a share of every part instead, so that all ranks follow
    the same trajectory at the same time, as sharded weights need.
    """
    size = batch // objective.trajectory_groups
    shared = size if in_step else batch
    if shared % world:
        what = f"each of the {objective.trajectory_groups} parts of the batch" if in_step else "the batch"
        raise LoopformerError(
            f"The {shared} rows of {what} cannot be shared evenly by {world} ranks; change training.batch"
            + (" or objective.trajectory_groups." if in_step else ".")
        )
    share = shared // world
    everyone = followers(size, objective)

    def of_rank(number: int) -> list[MicroBatch]:
        cut = []
        for part in range(objective.trajectory_groups):
            first = part * size + number * share if in_step else max(part * size, number * share)
            last = first + share if in_step else min((part + 1) * size, (number + 1) * share)
            for start in range(first, last, micro_batch):
                stop = min(start + micro_batch, last)
                inside = range(start - part * size, stop - part * size)
                rows = (tuple(row - inside.start for row in inside if row in own) for own in everyone)
                cut.append(MicroBatch(start, stop, part, tuple(rows)))
        return cut

    mine = of_rank(rank)
    if in_step:
        passes = [[[bool(rows) for rows in each.rows] for each in of_rank(number)] for number in range(world)]
        if any(other != passes[0] for other in passes):
            raise LoopformerError(
                "With sharded weights all ranks must follow the same trajectories at the same time; raise rows "
                "or training.micro_batch, or use training.strategy=ddp."
            )
    return mine


def largest_micro_batch(batch: int, objective: ObjectiveConfig, world: int, in_step: bool) -> int:
    """Rows that a micro-batch can have at most."""
    size = batch // objective.trajectory_groups
    return max(1, size // world if in_step else min(size, batch // world))


@lru_cache(maxsize=8)
def followers(size: int, objective: ObjectiveConfig) -> list[frozenset[int]]:
    """The rows of a part that follow each trajectory; shares of them lie side by side, spread over the part.

    Whoever begins earlier in training chooses first, at once the earlier in the list, and takes the rows that are
    free the soonest. So none is left over where the shares that are followed together add up to 1 or more.
    """
    stride = next(step for step in range(max(1, round(0.618 * size)), size + 1) if math.gcd(step, size) == 1)
    spread = sorted(range(size), key=lambda row: row * stride % size)
    entries = objective.trajectories
    busy = dict.fromkeys(spread, (0.0, 0))  # until then with a share, and with how many so far
    rows_of: dict[int, frozenset[int]] = {}
    for place in sorted(range(len(entries)), key=lambda number: entries[number].active_range[0]):
        entry = entries[place]
        begin = sum(entries[other].rows for other in rows_of if entries[other].splits_rows_with(entry))
        first, last = (math.floor(size * border + 0.5 + 1e-9) for border in (begin, begin + entry.rows))
        rows_of[place] = frozenset(sorted(spread, key=busy.__getitem__)[: last - first])
        if entry.rows < 1:
            busy |= {row: (max(busy[row][0], entry.active_range[1]), busy[row][1] + 1) for row in rows_of[place]}
    return [rows_of[place] for place in range(len(entries))]
