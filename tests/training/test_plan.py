import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopformer import LoopformerError
from loopformer.config import ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig, load_run
from loopformer.config.run import TrainedTrajectory
from loopformer.model.cost import Cost
from loopformer.training.fused.passes import FP8_LOOPS_PER_GRADIENT
from loopformer.training.plan import (
    assign_rows,
    check_ranks,
    costliest_step,
    draw_exits,
    draw_trajectories,
    estimated_micro_batch,
    make_plan,
    memory_bytes,
    micro_batch_sizes,
    plan_step,
    training_flops_per_token,
)
from loopformer.trajectory import Trajectory

from .runs import pair


def run_of(batch: int, objective: ObjectiveConfig, is_sharded: bool = False) -> RunConfig:
    training = TrainingConfig(batch=batch, strategy="fsdp" if is_sharded else "ddp")
    return RunConfig(ModelConfig(), objective=objective, training=training)


@given(
    groups=st.integers(1, 4),
    share=st.integers(1, 6),
    world=st.sampled_from([1, 2, 3]),
    micro=st.integers(1, 9),
    fraction=st.sampled_from([0.25, 0.5, 0.7, 1.0]),
    draws=st.sampled_from(["part", "row"]),
    step=st.integers(1, 100),
)
def test_any_ranks_and_micro_batches_train_the_same_rows(
    groups: int, share: int, world: int, micro: int, fraction: float, draws: Any, step: int
) -> None:
    groups = groups if draws == "part" else 1
    batch = groups * share * world
    objective = ObjectiveConfig(pair(rows=fraction), draws=draws, trajectory_groups=groups)
    assume(share * world * fraction >= 1)  # a run refuses an entry without a row
    run = run_of(batch, objective)
    drawn = draw_trajectories(run, step)
    assert drawn[0] == dict.fromkeys(range(batch), Trajectory.uniform(8))
    found: list[dict[int, Trajectory]] = [{}, {}]
    ranks = [plan_step(run, step, micro, rank, world) for rank in range(world)]
    for parts in zip(*ranks, strict=True):
        assert len({part.loops for part in parts}) == 1, "all ranks run as many loops at the same time"
        for part in parts:
            assert 0 < len(part.rows) <= micro
            assert part.loops >= max(each.budget for entry in part.trajectories for each in entry.values())
            for entry, trajectories in zip(found, part.trajectories, strict=True):
                assert not entry.keys() & {part.rows[row] for row in trajectories}
                entry |= {part.rows[row]: trajectory for row, trajectory in trajectories.items()}
    assert found == drawn
    lengths = [len(part.rows) for parts in ranks for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == batch


def test_micro_batches_cost_about_the_same() -> None:
    run = run_of(128, load_run("elastic")[0].objective)
    cost = Cost(run.model)
    flops = [part.training_flops(cost) for rank in range(4) for part in plan_step(run, 40_000, 16, rank, 4)]
    assert max(flops) < 1.15 * min(flops)


def test_budgets_are_dealt_out_evenly_over_rows() -> None:
    entries = (TrainedTrajectory((4, 7), "compositions", rows=0.5), TrainedTrajectory((2, 3), rows=0.5))
    run = run_of(44, ObjectiveConfig(entries, draws="row"))
    schedules = set()
    for step in range(1, 20):
        long, short = draw_trajectories(run, step)
        assert set(long) | set(short) == set(range(44))
        budgets = Counter(each.budget for each in long.values())  # of 22 rows: five each, and two that are drawn
        assert set(budgets) == {4, 5, 6, 7}
        assert sorted(budgets.values()) == [5, 5, 6, 6]
        assert Counter(each.budget for each in short.values()) == {2: 11, 3: 11}
        assert all(each.is_uniform for each in short.values())
        schedules |= set(long.values())
        assert draw_trajectories(run, step) == [long, short] != draw_trajectories(run, step + 1)
    assert len(schedules) > 80, "rows draw their steps one by one"


@pytest.mark.parametrize("draws", ["part", "row"])
def test_exits_come_before_the_last_loop_and_change_no_trajectory(draws: Any) -> None:
    entries = (TrainedTrajectory("full", exits=0.1), TrainedTrajectory((2, 4), weight=0.2))
    plain = ObjectiveConfig(tuple(replace(entry, exits=0.0) for entry in entries), draws=draws)
    run = run_of(28, ObjectiveConfig(entries, draws=draws))
    seen = set[int]()
    for step in range(1, 40):
        drawn = draw_trajectories(run, step)
        assert drawn == draw_trajectories(run_of(28, plain), step)
        full, ranged = draw_exits(run, step, drawn)
        assert full.keys() == drawn[0].keys()
        assert not ranged
        assert Counter(full.values()) == dict.fromkeys(range(1, 8), 4) or (
            draws == "part" and len({*full.values()}) == 1
        )
        seen |= {*full.values()}
        parts = [part for rank in range(2) for part in plan_step(run, step, 7, rank, 2)]
        assert {part.rows[row]: loop for part in parts for row, loop in part.exits[0].items()} == full
    assert seen == set(range(1, 8))
    cost = Cost(run.model)
    (exiting,), (other,) = plan_step(run, 1, 28), plan_step(run_of(28, plain), 1, 28)
    extra = exiting.training_flops(cost) - other.training_flops(cost)
    assert extra == pytest.approx(28 * cost.training_flops(budgets=[0]))


def test_exits_are_dealt_out_evenly_over_the_rows_of_each_budget() -> None:
    entries = (TrainedTrajectory("full", exits=0.1, rows=0.2), TrainedTrajectory((2, 4), exits=0.1, rows=0.8))
    run = run_of(20, ObjectiveConfig(entries, draws="row"))
    seen = Counter[tuple[int, int]]()
    for step in range(1, 85):
        drawn = draw_trajectories(run, step)
        now = Counter[tuple[int, int]]()
        for trajectories, exits in zip(drawn, draw_exits(run, step, drawn), strict=True):
            assert trajectories.keys() == exits.keys()
            now.update((trajectories[row].budget, loop) for row, loop in exits.items())
        for budget in (2, 3, 4, 8):
            counts = [now[budget, loop] for loop in range(1, budget)]
            assert max(counts) - min(counts) <= 1
        seen += now
    # Four rows reach all seven loops over the steps.
    assert [seen[8, loop] for loop in range(1, 8)] == [84 * 4 / 7] * 7
    assert max(seen[4, loop] for loop in (1, 2, 3)) < 1.1 * min(seen[4, loop] for loop in (1, 2, 3))


def test_exits_need_two_loops() -> None:
    entries = (TrainedTrajectory("full"), TrainedTrajectory("any", exits=0.1))
    with pytest.raises(LoopformerError, match="budget any: exits needs 2 loops or more"):
        RunConfig(ModelConfig(), objective=ObjectiveConfig(entries))


def test_drawing_for_rows_has_no_groups() -> None:
    with pytest.raises(LoopformerError, match=r"draws=row draws for every row; leave .*trajectory_groups at 1"):
        ObjectiveConfig(draws="row", trajectory_groups=2)


def drawn(objective: ObjectiveConfig, seed: int = 0, steps: int = 5) -> list[list[Trajectory | None]]:
    """The trajectory of each entry in every group of every step; None if it is not active."""
    groups, size = objective.trajectory_groups, 4
    training = TrainingConfig(seed=seed, steps=steps, batch=groups * size)
    run = RunConfig(ModelConfig(), objective=objective, training=training)
    found: list[list[Trajectory | None]] = []
    for step in range(1, steps + 1):
        entries = draw_trajectories(run, step)
        for group in range(groups):
            shared = [
                {entry[row] for row in range(group * size, (group + 1) * size) if row in entry} for entry in entries
            ]
            assert all(len(each) <= 1 for each in shared), "rows of a group share a draw"
            found.append([next(iter(each), None) for each in shared])
    return found


def test_trajectories_follow_from_seed_step_and_group() -> None:
    paper = ObjectiveConfig(trajectory_groups=5)
    short = [followed[1] for followed in drawn(paper)]
    assert drawn(paper) == drawn(paper) != drawn(paper, seed=1)
    assert len(set(short)) > 10
    assert {followed[0] for followed in drawn(paper)} == {Trajectory.uniform(8)}
    assert all(len(followed) == 1 for followed in drawn(ObjectiveConfig((TrainedTrajectory("full"),))))


def test_the_papers_pair_is_drawn_as_before() -> None:
    """The same draws as `Trajectory.sample` makes from the group's own generator, so that old runs go on."""
    for number, followed in enumerate(drawn(ObjectiveConfig(trajectory_groups=3), seed=3, steps=7)):
        step, group = 1 + number // 3, number % 3
        expected = Trajectory.sample(8, random.Random(f"3/{step}/{group}"), sampler="compositions")
        assert followed == [Trajectory.uniform(8), expected]


def test_only_what_is_random_is_drawn() -> None:
    """A full or fixed budget takes no number from the generator, which the entries after it share."""
    entries = (
        TrainedTrajectory("full"),
        TrainedTrajectory(2, "compositions"),
        TrainedTrajectory("any", "sequential"),
    )
    for step, followed in enumerate(drawn(ObjectiveConfig(trajectories=entries), steps=19), start=1):
        rng = random.Random(f"0/{step}/0")
        fixed = Trajectory.sample(8, rng, 2, "compositions")
        budget = 1 + rng.randrange(8)
        assert followed == [Trajectory.uniform(8), fixed, Trajectory.sample(8, rng, budget, "sequential")]


def test_budgets_of_a_list() -> None:
    objective = ObjectiveConfig(
        trajectories=(
            TrainedTrajectory("any"),
            TrainedTrajectory(1, weight=0.5),
            TrainedTrajectory((3, 5), "compositions"),
            TrainedTrajectory(4, active_range=(0.5, 1.0)),
        )
    )
    followed = list(zip(*drawn(objective, steps=200), strict=True))
    budgets = [{None if one is None else one.budget for one in each} for each in followed]
    assert budgets == [set(range(1, 9)), {1}, {3, 4, 5}, {None, 4}]
    assert all(one is not None and one.is_uniform for one in followed[0])
    assert [one is None for one in followed[3]] == [True] * 100 + [False] * 100


def test_the_costliest_step_has_the_longest_of_those_that_are_followed_together() -> None:
    entries = (
        TrainedTrajectory("any", active_range=(0, 0.9)),
        TrainedTrajectory(6, active_range=(0.9, 1)),
        TrainedTrajectory(2),
        TrainedTrajectory("full", active_range=(0.5, 0.7), rows=0.25),
    )
    run = RunConfig(ModelConfig(), objective=ObjectiveConfig(trajectories=entries))
    assert [one and one.budget for one in costliest_step(run)] == [8, None, 2, 8]


def test_runs_that_were_stored_with_a_chance_of_one_are_read() -> None:
    stored: Any = [{"budget": "any", "chance": 1.0}]
    assert ObjectiveConfig(trajectories=stored).trajectories == (TrainedTrajectory("any"),)
    with pytest.raises(LoopformerError, match="chance"):
        ObjectiveConfig(trajectories=[{"budget": "any", "chance": 0.5}])  # type: ignore[arg-type]


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(LoopformerError, match=r"The 8 rows of the batch cannot be shared evenly by 3 ranks"):
        plan_step(run_of(8, ObjectiveConfig(trajectory_groups=2)), 1, 2, 0, 3)
    forty = run_of(480, ObjectiveConfig(trajectory_groups=40))
    assert {len(plan_step(forty, 1, 12, rank, 8)) for rank in range(8)} == {5}


@given(size=st.integers(1, 64), shares=st.lists(st.sampled_from([0.125, 0.25, 0.5]), min_size=1, max_size=4))
def test_shares_of_the_rows_lie_side_by_side(size: int, shares: list[float]) -> None:
    assume(sum(shares) <= 1)
    entries = [TrainedTrajectory("any"), *(TrainedTrajectory(1, rows=share) for share in shares)]
    everyone, *taken = assign_rows(size, ObjectiveConfig(trajectories=tuple(entries)))
    assert everyone == set(range(size))
    for share, rows in zip(shares, taken, strict=True):
        assert abs(len(rows) - size * share) < 1
    assert len(frozenset().union(*taken)) == sum(map(len, taken))
    assert sum(shares) < 1 or frozenset().union(*taken) == everyone


def test_shares_are_of_those_that_are_followed_together() -> None:
    """Two phases that lie between each other in the list."""
    entries = (
        TrainedTrajectory("full", rows=0.7, active_range=(0, 0.5)),
        TrainedTrajectory("full", rows=0.5, active_range=(0.5, 1)),
        TrainedTrajectory(1, rows=0.3, active_range=(0, 0.5)),
        TrainedTrajectory(2, rows=0.5, active_range=(0.5, 1)),
    )
    rows = assign_rows(100, ObjectiveConfig(trajectories=entries))
    assert rows[0] | rows[2] == rows[1] | rows[3] == set(range(100))
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[3]


QUARTERS = (0.0, 0.25, 0.5, 0.75)
PHASES = st.tuples(
    st.integers(1, 6), st.integers(0, 3), st.integers(1, 4)
)  # eighths of the rows, from, for so long


@given(parts=st.integers(1, 5), phases=st.lists(PHASES, max_size=6), turn=st.randoms())
def test_shares_that_come_and_go_leave_no_row_untrained(
    parts: int, phases: list[tuple[int, int, int]], turn: random.Random
) -> None:
    shares, entries = [0] * 4, []
    for eighths, start, count in phases:
        quarters = range(start, min(4, start + count))
        entries.append(TrainedTrajectory(2, rows=eighths / 8, active_range=(start / 4, (quarters[-1] + 1) / 4)))
        shares = [share + eighths * (quarter in quarters) for quarter, share in enumerate(shares)]
    entries += [
        TrainedTrajectory(1, rows=(8 - share) / 8, active_range=(quarter / 4, (quarter + 1) / 4))
        for quarter, share in enumerate(shares)
        if share < 8
    ]
    turn.shuffle(entries)
    rows = assign_rows(8 * parts, ObjectiveConfig(trajectories=tuple(entries)))
    for moment, share in zip(QUARTERS, shares, strict=True):
        followed = [
            row for entry, taken in zip(entries, rows, strict=True) if entry.is_active(moment) for row in taken
        ]
        assert set(followed) == set(range(8 * parts))
        assert len(followed) == parts * max(8, share), "and none twice where they add up to 1"


@given(size=st.integers(1, 64), shares=st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75]), min_size=1, max_size=5))
def test_shares_that_are_always_followed_go_round(size: int, shares: list[float]) -> None:
    entries = [TrainedTrajectory("full"), *(TrainedTrajectory(1, rows=share) for share in shares)]
    _, *taken = assign_rows(size, ObjectiveConfig(trajectories=tuple(entries)))
    times = [sum(row in rows for rows in taken) for row in range(size)]
    assert max(times) - min(times) <= 1


@pytest.mark.parametrize("batch", [10, 12, 30, 100, 127])
def test_the_preset_trains_every_row_of_any_batch(batch: int) -> None:
    first, *later = assign_rows(batch, load_run("elastic")[0].objective)
    assert first == frozenset().union(*later) == set(range(batch))


def test_shares_that_add_up_to_all_rows_train_all_of_them() -> None:
    halves = (TrainedTrajectory("full", rows=0.5), TrainedTrajectory("short", rows=0.5))
    (only,) = plan_step(run_of(8, ObjectiveConfig(trajectories=halves)), 1, 8)
    assert sorted([*only.trajectories[0], *only.trajectories[1]]) == list(range(8))
    with pytest.raises(LoopformerError, match="not all rows are trained"):
        ObjectiveConfig(trajectories=(TrainedTrajectory("full", rows=0.5), TrainedTrajectory("short", rows=0.25)))
    for late in (TrainedTrajectory("full", active_range=(0.5, 1)), TrainedTrajectory("full", weight=0)):
        with pytest.raises(LoopformerError, match="from 0 of training on no active trajectory has a weight"):
            ObjectiveConfig(trajectories=(late,))


SHARES = st.sampled_from([0.05, 0.1, 0.125, 0.25, 0.3, 1 / 3, 0.5, 0.7, 1.0])


@st.composite
def objectives(draw: st.DrawFn) -> ObjectiveConfig:
    """Lists of any shares, ranges and weights; entries that fill up what is missing at a time are added."""
    entries = [TrainedTrajectory("full", weight=0)]
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, 9))
        active = (start / 10, draw(st.integers(start + 1, 10)) / 10)
        weight = draw(st.sampled_from([0.0, 1.0, 1.0, 1.0]))
        entries.append(TrainedTrajectory(2, weight=weight, match=0.1, rows=draw(SHARES), active_range=active))
    for start in range(10):
        share = sum(entry.rows for entry in entries if entry.is_active(start / 10) and entry.weight)
        if share < 1 - 1e-9:
            active = (start / 10, draw(st.integers(start + 1, 10)) / 10)
            entries.append(TrainedTrajectory(1, rows=1 - share, active_range=active))
    return ObjectiveConfig(tuple(draw(st.permutations(entries))))


def untrained_rows(size: int, objective: ObjectiveConfig, rows: list[frozenset[int]]) -> set[int]:
    """The rows that have no active entry with a weight at some time."""
    untrained = set[int]()
    for time in range(10):
        entries = zip(objective.trajectories, rows, strict=True)
        trained = (taken for entry, taken in entries if entry.weight and entry.is_active(time / 10))
        untrained |= set(range(size)).difference(*trained)
    return untrained


def rows_by_the_first_rule(size: int, objective: ObjectiveConfig) -> list[frozenset[int]]:
    """The rows that versions up to 0.2 gave to each entry; runs that they began must resume with them."""
    stride = next(step for step in range(max(1, round(0.618 * size)), size + 1) if math.gcd(step, size) == 1)
    spread = sorted(range(size), key=lambda row: row * stride % size)
    entries = objective.trajectories
    busy = dict.fromkeys(spread, (0.0, 0))
    assigned: dict[int, frozenset[int]] = {}
    for index in sorted(range(len(entries)), key=lambda number: entries[number].active_range[0]):
        entry = entries[index]
        share_start = sum(entries[other].rows for other in assigned if entries[other].splits_rows_with(entry))
        first, last = (math.floor(size * border + 0.5 + 1e-9) for border in (share_start, share_start + entry.rows))
        assigned[index] = frozenset(sorted(spread, key=busy.__getitem__)[: last - first])
        if entry.rows < 1:
            end = entry.active_range[1]
            busy |= {row: (max(busy[row][0], end), busy[row][1] + 1) for row in assigned[index]}
    return [assigned[index] for index in range(len(entries))]


@settings(max_examples=1000)
@given(size=st.integers(1, 200), objective=objectives())
def test_every_row_is_trained_at_every_time(size: int, objective: ObjectiveConfig) -> None:
    rows = [frozenset(taken) for taken in assign_rows(size, objective)]
    assert not untrained_rows(size, objective, rows)
    for entry, taken in zip(objective.trajectories, rows, strict=True):
        share = size * entry.rows
        assert math.floor(share + 1e-6) <= len(taken) <= math.ceil(share - 1e-6)


@settings(max_examples=1000)
@given(size=st.integers(1, 200), objective=objectives())
def test_rows_are_those_of_the_first_rule_unless_it_left_some_out(size: int, objective: ObjectiveConfig) -> None:
    before = rows_by_the_first_rule(size, objective)
    assume(not untrained_rows(size, objective, before))
    assert assign_rows(size, objective) == before


@pytest.mark.parametrize("size", [1, 3, 5, 7, 31, 127])
def test_halves_that_overlap_in_time_train_every_row(size: int) -> None:
    early, late = ((0.0, 0.5), (0.5, 1.0))
    entries = (
        TrainedTrajectory("full", rows=0.5, active_range=early),
        TrainedTrajectory(1, rows=0.5),
        TrainedTrajectory(2, rows=0.5, active_range=late),
    )
    first, always, last = assign_rows(size, ObjectiveConfig(entries))
    assert first | always == always | last == set(range(size))
    assert len(first) + len(always) == len(always) + len(last) == size, "and none twice"


def test_a_batch_of_any_size_is_planned_at_once() -> None:
    """Ranges of rows take no time or memory in proportion to the batch."""
    run = run_of(10**9, load_run("elastic")[0].objective)
    full, *others = assign_rows(10**9, run.objective)
    assert len(full) == sum(map(len, others)) == 10**9
    assert sum(row in entry_rows for row in range(10**9 - 100, 10**9) for entry_rows in others) == 100
    sizes = micro_batch_sizes(run, 1)
    assert sizes == sorted((2**i * 5**j for i in range(10) for j in range(10)), reverse=True)
    for world in (1, 1000):
        check_ranks(run, world)
    with pytest.raises(LoopformerError, match="cannot be shared evenly by 3 ranks"):
        check_ranks(run, 3)


def test_a_plan_adds_up() -> None:
    run = RunConfig(ModelConfig(), training=TrainingConfig(batch=12, steps=50))
    plan = make_plan(run, 1000, torch.device("cpu"), micro_batch=4, world=3, fused=False, graphs=False)
    cost = Cost(run.model)
    assert plan["parameters"] == cost.parameters.total
    assert plan["parameters_without_embeddings"] == cost.parameters.without_embeddings
    assert plan["tokens"] == 50 * 12 * run.model.context
    assert plan["epochs"] == plan["tokens"] / 1000
    assert plan["training_gflops_per_token"] == pytest.approx(cost.training_flops(budgets=[8, 4]) / 1e9)
    assert plan["total_flops"] == pytest.approx(cost.training_flops(budgets=[8, 4]) * plan["tokens"])
    assert plan["memory_gib_per_device"] == memory_bytes(run, 4, 3, fused=False, graphs=False) / 2**30
    assert plan["hours"] * 3600 * 3 * plan["device_tflops"] * 1e12 == pytest.approx(plan["total_flops"])
    assert (
        make_plan(run, 0, torch.device("cpu"), micro_batch=4, world=3, fused=False, graphs=False)["epochs"] is None
    )


def test_flops_are_those_of_the_rows_that_train() -> None:
    entries = (
        TrainedTrajectory("full"),
        TrainedTrajectory(2, rows=0.5, active_range=(0.5, 1)),
        TrainedTrajectory((3, 5), active_range=(0, 0.25)),
    )
    run = RunConfig(
        ModelConfig(), objective=ObjectiveConfig(trajectories=entries), training=TrainingConfig(batch=8)
    )
    cost = Cost(run.model)
    full, two, four = (cost.training_flops(budgets=[budget]) for budget in (8, 2, 4))
    assert training_flops_per_token(run) == pytest.approx(full + two / 4 + four / 4)
    (last,) = plan_step(run, run.training.steps, 8)
    assert last.training_flops(cost) == pytest.approx(8 * full + 4 * two)


@pytest.mark.parametrize("positions", ["learned", "rotary"])  # queries and keys are rotated in place
@pytest.mark.parametrize("checkpoint_loops", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fused"),
    [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True), ("float8", True)],
)
def test_memory_is_that_of_the_weights_and_of_the_tokens(
    dtype: Any, fused: bool, checkpoint_loops: bool, positions: Any
) -> None:
    """By the formula: states in fp32, activations, and a chunk of the head with its gradient."""
    training = TrainingConfig(batch=12, dtype=dtype, checkpoint_loops=checkpoint_loops)
    run = RunConfig(ModelConfig(positions=positions), training=training)
    config, loops = run.model, 8 + 7
    width, ffn, rows = config.width, config.ffn, config.vocab_rows
    block = 48 * width + 8 * ffn if dtype == "float32" else 28 * width + 4 * ffn
    if fused:
        block = 8 * width + (4 if dtype == "float32" else 2) * (6 * width + ffn)
    waiting = 0
    if dtype == "float8":
        block += 3 * width + ffn
        waiting = (FP8_LOOPS_PER_GRADIENT - 1) * config.blocks * (8 * width + 2 * ffn)
    token = loops * config.blocks * block
    if checkpoint_loops:
        token = loops * 4 * width + config.blocks * block + waiting
    for micro_batch in (1, 2):
        tokens = micro_batch * config.context
        head = 3 * 4 * rows * 2 * min(tokens, run.objective.chunk) + 4 * rows * width
        expected = 16 * Cost(config).parameters.total + tokens * token + head
        assert memory_bytes(run, micro_batch, 1, fused=fused, graphs=False) == expected
        assert (
            memory_bytes(run, micro_batch, 4, fused=fused, graphs=False) == expected
        )  # every device has all weights


def test_micro_batches_divide_the_rows_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(24, ObjectiveConfig(trajectory_groups=2))
    assert micro_batch_sizes(run, 1) == [24, 12, 8, 6, 4, 3, 2, 1]
    assert micro_batch_sizes(run, 3) == [8, 4, 2, 1]
    sharded = run_of(24, ObjectiveConfig(trajectory_groups=2), is_sharded=True)
    needed = partial(memory_bytes, fused=False, graphs=False)

    def estimated(usable: float, kind: str, share: float) -> int:
        monkeypatch.setattr("loopformer.training.plan.available_bytes", lambda device: usable / share)
        return estimated_micro_batch(run, torch.device(kind), 1, fused=False, graphs=False)

    for kind, share in (("cpu", 0.6), ("cuda", 0.9)):
        for size in micro_batch_sizes(run, 1):
            assert estimated(needed(run, size, 1) * 1.001, kind, share) == size
        assert estimated(needed(run, 2, 1) * 0.999, kind, share) == 1
        assert estimated(0, kind, share) == 1
    states = Cost(run.model).parameters.total
    assert needed(run, 1, 4) - needed(sharded, 1, 4) == pytest.approx(states * 12 * 3 / 4)
