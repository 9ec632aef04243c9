"""Plan a run: the rows and trajectories of each step, and estimates of FLOPs, memory and hours.

    for micro_batch in plan_step(run, step, micro_batch=12):
        micro_batch.rows, micro_batch.trajectories
    make_plan(run, tokens, device, micro_batch=12, world=1, fused=True)["hours"]

Every row of a step has a trajectory for each entry of the objective that it trains on. They follow from the seed,
the step and the row alone, so any number of ranks and any micro-batch train the same model.

Memory and hours are estimates: activations by a formula for the tensors that backward keeps, hours from a share of
the device's peak that training commonly reaches.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from loopformer.config import ObjectiveConfig, RunConfig
from loopformer.config.run import TrainedTrajectory
from loopformer.device import available_bytes, device_name, peak_flops
from loopformer.errors import LoopformerError
from loopformer.model.cost import Cost
from loopformer.training.fused.passes import FP8_LOOPS_PER_GRADIENT
from loopformer.trajectory import Trajectory

T = TypeVar("T")
GPU_PEAK_SHARE = 0.4  # the share of peak FLOP/s that training commonly reaches
CPU_PEAK_SHARE = 0.5  # the same, relative to the speed of large matmuls
USABLE_MEMORY = {"cuda": 0.9}  # the share of the free memory that an estimate may fill; elsewhere 0.6


RowTrajectories = dict[int, Trajectory]  # the trajectory of each row that trains on an entry, in ascending order
RowExits = dict[int, int]  # for rows that also train on an early exit, the loop after which they are read


@dataclass(frozen=True)
class MicroBatch:
    """Rows that a rank computes together."""

    rows: list[int]  # in the global batch, in ascending order
    trajectories: list[RowTrajectories]  # for each entry of the objective; rows are numbered within `rows`
    exits: list[RowExits]  # likewise
    loops: int  # the loops of its longest trajectory, or of another rank's at the same time if that is longer

    def training_flops(self, cost: Cost) -> float:
        """The FLOPs of its forward and backward, divided by the tokens of a row."""
        budgets = [trajectory.budget for entry in self.trajectories for trajectory in entry.values()]
        heads = [0 for entry in self.exits for _ in entry]  # an exit takes no loop, but the head
        return cost.training_flops(budgets=[*budgets, *heads])


def plan_step(run: RunConfig, step: int, micro_batch: int, rank: int = 0, world: int = 1) -> list[MicroBatch]:
    """A rank's micro-batches of a step, in order. Steps count from 1.

    Rows are dealt out by their number of loops, so all micro-batches of all ranks cost about the same.
    """
    check_ranks(run, world)
    drawn, batch = draw_trajectories(run, step), run.training.batch
    exits = draw_exits(run, step, drawn)
    row_loops = [sum(entry[row].budget for entry in drawn if row in entry) for row in range(batch)]
    order = sorted(range(batch), key=lambda row: -row_loops[row])
    count = math.ceil(batch / (world * micro_batch))
    parts = []
    for number in range(count):
        # Every (count · world)-th row from the longest to the shortest, so each share has some of all.
        dealt = [sorted(order[number * world + other :: count * world]) for other in range(world)]
        loops = max(entry[row].budget for rows in dealt for entry in drawn for row in rows if row in entry)
        rows = dealt[rank]
        parts.append(MicroBatch(rows, _renumber(drawn, rows), _renumber(exits, rows), loops))
    return parts


def _renumber(entries: list[dict[int, T]], rows: list[int]) -> list[dict[int, T]]:
    """What each entry has for these rows of the batch, by their position in `rows`."""
    return [{number: entry[row] for number, row in enumerate(rows) if row in entry} for entry in entries]


def check_ranks(run: RunConfig, world: int) -> None:
    """Raise if the rows of a step cannot be divided among the ranks."""
    if (rows := run.training.batch) % world:
        raise LoopformerError(
            f"The {rows} rows of the batch cannot be shared evenly by {world} ranks; change training.batch."
        )


@dataclass(frozen=True, eq=False)
class EntryRows(Set[int]):
    """The rows of a group that train on an entry. They are stored as ranges, so any size costs the same."""

    size: int  # of the group
    stride: int  # row × stride modulo size is the position of a row; neighbouring positions lie far apart
    positions: tuple[range, ...]

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and any(row * self.stride % self.size in part for part in self.positions)

    def __iter__(self) -> Iterator[int]:
        return (row for row in range(self.size) if row in self)

    def __len__(self) -> int:
        return sum(map(len, self.positions))

    _from_iterable = frozenset  # the type of intersections and unions


@lru_cache(maxsize=8)
def assign_rows(size: int, objective: ObjectiveConfig) -> list[Set[int]]:
    """The rows of a group that train on each entry, spread over the group.

    Every row trains on an active entry with a weight at every step.
    """
    # A stride coprime to the size visits every row. Near the golden ratio, the first rows lie far apart.
    stride = next(step for step in range(max(1, round(0.618 * size)), size + 1) if math.gcd(step, size) == 1)
    entries = objective.trajectories
    order = sorted(range(len(entries)), key=lambda index: entries[index].active_range[0])
    positions = _assign_positions(size, objective, order)
    if not _covers_positions(size, objective, positions):  # entries without a weight keep others from some rows
        order.sort(key=lambda index: entries[index].weight == 0)
        positions = _assign_positions(size, objective, order)
    return [EntryRows(size, stride, parts) for parts in positions]


def _assign_positions(size: int, objective: ObjectiveConfig, order: list[int]) -> list[tuple[range, ...]]:
    """The positions of each entry. Entries are assigned in `order`, preferring positions that are freed earliest.

    Ordered by start time, entries whose counts add up to the size leave no position unused: an unused position has
    been free the longest, so it is taken before any that another entry has had.
    """
    entries, counts = objective.trajectories, _count_rows(size, objective, order)
    assigned: list[tuple[range, ...]] = [()] * len(entries)
    segments = [(0.0, 0, 0, size)]  # the end of its last entry, how many it has had, its first position, its end
    for index in order:
        end, missing = entries[index].active_range[1], counts[index]
        taken, free = [], []
        for busy_until, uses, start, stop in sorted(segments):
            border = min(stop, start + missing)
            missing -= border - start
            taken.append((max(busy_until, end), uses + 1, start, border))
            free.append((busy_until, uses, border, stop))
        assigned[index] = tuple(range(start, stop) for _, _, start, stop in taken if start < stop)
        if entries[index].rows < 1:
            segments = [segment for segment in (*taken, *free) if segment[2] < segment[3]]
    return assigned


def _count_rows(size: int, objective: ObjectiveConfig, order: list[int]) -> list[int]:
    """The number of rows of each entry: its share of the size, rounded so that no phase of training lacks a row."""
    entries, counts = objective.trajectories, [0] * len(objective.trajectories)
    for number, index in enumerate(order):
        entry = entries[index]
        share_start = sum(entries[other].rows for other in order[:number] if entries[other].splits_rows_with(entry))
        # Round both borders, not the count, so that shares which add up to 1 at one time cover all rows.
        first, last = (math.floor(size * border + 0.5 + 1e-9) for border in (share_start, share_start + entry.rows))
        counts[index] = last - first
    for start in objective.phase_starts:
        # Entries that begin at different times may all be rounded down. Then the one that begins last gets more
        # rows, because the phases before it have enough.
        active = [index for index in order if entries[index].is_active(start) and entries[index].weight > 0]
        while sum(counts[index] for index in active) < size:
            is_short = {index: counts[index] < size * entries[index].rows - 1e-6 for index in active}
            counts[max(active, key=lambda index: (is_short[index], entries[index].active_range[0]))] += 1
    return counts


def _covers_positions(size: int, objective: ObjectiveConfig, positions: list[tuple[range, ...]]) -> bool:
    """Whether every position has an active entry with a weight in every phase of training."""
    for start in objective.phase_starts:
        covered = 0
        entries = zip(objective.trajectories, positions, strict=True)
        parts = [part for entry, parts in entries if entry.is_active(start) and entry.weight > 0 for part in parts]
        for part in sorted(parts, key=lambda part: part.start):
            covered = max(covered, part.stop) if part.start <= covered else covered
        if covered < size:
            return False
    return True


def draw_trajectories(run: RunConfig, step: int) -> list[RowTrajectories]:
    """For each entry of the objective, the trajectories of its rows in the batch; none if it is not active.

    With `draws: part` all rows of a group share a draw. With `draws: row` each row has a draw of its own, and the
    budgets of a range are dealt out evenly, so that all steps run about the same number of rows in each loop.
    """
    progress = (step - 1) / run.training.steps
    active = {n: entry for n, entry in enumerate(run.objective.trajectories) if entry.is_active(progress)}
    drawn: list[RowTrajectories] = [{} for _ in run.objective.trajectories]
    draw = _draw_by_row if run.objective.draws == "row" else _draw_by_group
    for index, row, trajectory in draw(run, step, active):
        drawn[index][row] = trajectory
    return drawn


def _draw_by_group(
    run: RunConfig, step: int, active: dict[int, TrainedTrajectory]
) -> Iterator[tuple[int, int, Trajectory]]:
    """Entry, row and trajectory of every row that trains on an active entry."""
    objective, loops = run.objective, run.model.loops
    size = run.training.batch // objective.trajectory_groups
    entry_rows = assign_rows(size, objective)
    for group in range(objective.trajectory_groups):
        # Resumed runs repeat these draws, so keep their order: a generator per group, entry by entry, budget first.
        rng = random.Random(f"{run.training.seed}/{step}/{group}")
        for index, entry in active.items():
            low, high = entry.budgets(loops)
            budget = low + rng.randrange(high - low + 1) if low < high else low
            trajectory = draw_schedule(entry, loops, budget, rng)
            yield from ((index, group * size + row, trajectory) for row in entry_rows[index])


def _draw_by_row(
    run: RunConfig, step: int, active: dict[int, TrainedTrajectory]
) -> Iterator[tuple[int, int, Trajectory]]:
    """The same as `_draw_by_group`, with a draw for each row."""
    loops, entry_rows = run.model.loops, assign_rows(run.training.batch, run.objective)
    for index, entry in active.items():
        name, (low, high) = f"{run.training.seed}/{step}/{index}", entry.budgets(loops)
        choices = range(low, high + 1)
        whole, rest = divmod(len(entry_rows[index]), len(choices))
        # Budgets that do not divide the rows are drawn, none of them twice.
        budgets = [*choices] * whole + random.Random(name).sample(choices, rest)
        for row, budget in zip(entry_rows[index], budgets, strict=True):
            yield index, row, draw_schedule(entry, loops, budget, random.Random(f"{name}/{row}"))


def draw_exits(run: RunConfig, step: int, drawn: list[RowTrajectories]) -> list[RowExits]:
    """For each entry of the objective with exits, the loop after which each of its rows exits.

    With `draws: part` one loop is drawn for each group and entry. With `draws: row` loops are dealt out evenly over
    the rows of each budget, beginning at another loop in each step, because the rows may be fewer than the loops.
    """
    objective, exits = run.objective, list[RowExits]()
    size = run.training.batch // objective.trajectory_groups
    for index, (entry, trajectories) in enumerate(zip(objective.trajectories, drawn, strict=True)):
        loops: RowExits = {}
        dealt = Counter[int]()  # rows of each budget
        for row, trajectory in trajectories.items() if entry.exits else ():
            # A generator of its own: the draws of trajectories must not depend on exits.
            name = f"{run.training.seed}/{step}/{row // size}/{index}/exit"
            choices = trajectory.budget - 1
            number = step + dealt[choices] if objective.draws == "row" else random.Random(name).randrange(choices)
            dealt[choices] += 1
            loops[row] = 1 + number % choices
        exits.append(loops)
    return exits


def draw_schedule(entry: TrainedTrajectory, loops: int, budget: int, rng: random.Random) -> Trajectory:
    """A trajectory of this budget, with steps as the entry draws them."""
    if entry.budget == "full":
        return Trajectory.uniform(loops)
    return Trajectory.sample(loops, rng, budget, entry.sampler)


def costliest_step(run: RunConfig) -> list[Trajectory | None]:
    """The trajectories of the step with the most loops; None for entries that it does not use."""
    entries, loops = run.objective.trajectories, run.model.loops

    def active_at(progress: float) -> list[Trajectory | None]:
        longest = (Trajectory.uniform(entry.budgets(loops)[1]) for entry in entries)
        return [each if entry.is_active(progress) else None for entry, each in zip(entries, longest, strict=True)]

    def row_loops(step: list[Trajectory | None]) -> float:
        return sum(entry.rows * each.budget for entry, each in zip(entries, step, strict=True) if each is not None)

    # The set of active entries only grows when an entry starts, so the maximum is at a start.
    return max((active_at(entry.active_range[0]) for entry in entries), key=row_loops)


def make_plan(
    run: RunConfig,
    tokens_in_data: int,
    device: torch.device,
    micro_batch: int,
    world: int,
    *,
    fused: bool,
    graphs: bool,
) -> dict[str, Any]:
    """The estimate for a run on `world` devices like this one. Epochs and hours are None if unknown."""
    cost, training = Cost(run.model), run.training
    per_token = training_flops_per_token(run)
    tokens = training.steps * training.batch * run.model.context
    rate = reachable_flops(device)
    return {
        "parameters": cost.parameters.total,
        "parameters_without_embeddings": cost.parameters.without_embeddings,
        "steps": training.steps,
        "tokens": tokens,
        "epochs": tokens / tokens_in_data if tokens_in_data else None,
        "training_gflops_per_token": per_token / 1e9,
        "total_flops": per_token * tokens,
        "micro_batch": micro_batch,
        "memory_gib_per_device": memory_bytes(run, micro_batch, world, fused=fused, graphs=graphs) / 2**30,
        "device": device_name(device),
        "device_tflops": None if rate is None else rate / 1e12,
        "hours": None if rate is None else per_token * tokens / (rate * world) / 3600,
    }


def training_flops_per_token(run: RunConfig) -> float:
    """Training FLOPs per token, in the mean over training."""
    cost, flops = Cost(run.model), 0.0
    size = run.training.batch // run.objective.trajectory_groups
    for entry, rows in zip(run.objective.trajectories, assign_rows(size, run.objective), strict=True):
        budget = sum(entry.budgets(run.model.loops)) / 2
        start, stop = entry.active_range
        budgets = [budget, 0] if entry.exits else [budget]
        flops += (stop - start) * len(rows) / size * cost.training_flops(budgets=budgets)
    return flops


def memory_bytes(run: RunConfig, micro_batch: int, world: int, *, fused: bool, graphs: bool) -> float:
    """The memory of a device: weights, gradients and two moments in fp32, and activations of one micro-batch."""
    config, training = run.model, run.training
    shards = world if training.is_sharded else 1
    states = Cost(config).parameters.total * 4 * (1 + 3 / shards)  # weights stay gathered during a step
    half, fp8 = training.dtype != "float32", training.dtype == "float8"
    # Bytes per token and block: inputs of norms, attention and matmuls. Calibrated against measured peaks.
    per_block = (28 * config.width + 4 * config.ffn) if half else (48 * config.width + 8 * config.ffn)
    pending = 0
    if fused:  # two states, results of four matmuls and of attention; in fp8 also the operands of matmuls
        size, operands = (2 if half else 4), (3 * config.width + config.ffn) * fp8
        per_block = 8 * config.width + size * (6 * config.width + config.ffn) + operands
        # Operands of weight gradients wait until enough loops share a matmul. This raises the peak only if loops
        # are recomputed: otherwise backward has freed more than this by then.
        pending = (FP8_LOOPS_PER_GRADIENT - 1) * config.blocks * (8 * config.width + 2 * config.ffn) * fp8
    entries = zip(run.objective.trajectories, costliest_step(run), strict=True)
    active = [(entry.rows, trajectory.budget) for entry, trajectory in entries if trajectory is not None]
    loops = sum(rows * budget for rows, budget in active)
    if training.checkpoint_loops:
        per_token = loops * 4 * config.width + config.blocks * per_block + pending
    else:
        per_token = loops * config.blocks * per_block
    chunk = min(run.objective.chunk, micro_batch * config.context)
    head = chunk * config.vocab_rows * 4 * 3 * len(active) + config.vocab_rows * config.width * 4
    # Graphs never give back the memory of their largest pass, and a pass without a graph needs its own beside it.
    passes = 2 if graphs else 1
    return states + passes * (micro_batch * config.context * per_token + head)


def micro_batch_sizes(run: RunConfig, world: int) -> list[int]:
    """The micro-batch sizes that divide a rank's rows evenly, largest first."""
    rows = max(1, run.training.batch // world)
    small = [divisor for divisor in range(1, math.isqrt(rows) + 1) if rows % divisor == 0]
    return sorted({*small, *(rows // divisor for divisor in small)}, reverse=True)


def estimated_micro_batch(run: RunConfig, device: torch.device, world: int, *, fused: bool, graphs: bool) -> int:
    """The largest micro-batch that should fit into the memory of a device, or 1."""
    needed = partial(memory_bytes, run, world=world, fused=fused, graphs=graphs)
    free = USABLE_MEMORY.get(device.type, 0.6) * available_bytes(device)
    return next((size for size in micro_batch_sizes(run, world) if needed(size) < free), 1)


def reachable_flops(device: torch.device) -> float | None:
    """The FLOP/s that training commonly reaches: a share of a GPU's peak, or of matmuls timed on the CPU."""
    peak = peak_flops(device)
    if peak is not None:
        return GPU_PEAK_SHARE * peak
    if device.type != "cpu":
        return None
    a = torch.randn(512, 512)
    (a @ a).sum()
    started = time.perf_counter()
    for _ in range(10):
        a @ a
    return CPU_PEAK_SHARE * 10 * 2 * 512**3 / (time.perf_counter() - started)
