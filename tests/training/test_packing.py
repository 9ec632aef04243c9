"""The rows of a pass: what lies where, and which passes have the same shape."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopformer import Trajectory
from loopformer.config import ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from loopformer.config.run import TrainedTrajectory
from loopformer.training.packing import pack_rows
from loopformer.training.plan import plan_step

CONFIG = ModelConfig(loops=4, time_scale=3.0)
BUDGETS = st.dictionaries(st.integers(0, 5), st.integers(1, 4))
ENTRIES = st.lists(BUDGETS, min_size=1, max_size=3).filter(any)


@given(ENTRIES, st.integers(0, 4))
def test_every_row_of_every_entry_is_in_the_pass_once(entries: list[dict[int, int]], loops: int) -> None:
    drawn = [{row: Trajectory.uniform(budget) for row, budget in entry.items()} for entry in entries]
    packed = pack_rows(CONFIG, drawn, loops=loops)
    shape, longest = packed.shape, max(budget for entry in entries for budget in entry.values())
    assert shape.has_padding == (loops > longest)
    assert list(shape.active) == sorted(shape.active, reverse=True)
    assert len(shape.active) == max(loops, longest)
    budgets = [sum(count > number for count in shape.active) for number in range(len(packed.input_rows))]
    states, targets = iter(packed.loss_rows.tolist()), iter(packed.target_rows.tolist())
    found: list[tuple[int, int, int]] = []
    for indices, count in shape.groups:
        rows = [next(targets) for _ in range(count)]
        for index in indices:
            for row in rows:
                position = next(states)
                assert packed.input_rows[position] == row
                found.append((index, row, budgets[position]))
    assert sorted(found) == sorted(
        (i, row, budget) for i, entry in enumerate(entries) for row, budget in entry.items()
    )


def test_scalars_are_those_of_each_row_in_each_loop() -> None:
    packed = pack_rows(CONFIG, [{0: Trajectory.parse("3-1"), 1: Trajectory.uniform(1)}])
    expected = [[0.0, 2.25, 0.0], [0.0, 3.0, 0.0], [2.25, 0.75, 1.0]]  # time and step times the scale, index
    assert packed.input_rows.tolist() == [0, 1]
    assert packed.scalars.tolist() == expected


def test_exits_are_taken_loop_by_loop_and_scored_entry_by_entry() -> None:
    full = dict.fromkeys(range(3), Trajectory.uniform(4))
    packed = pack_rows(CONFIG, [full, {1: Trajectory.uniform(3)}], [{0: 3, 1: 1, 2: 3}, {1: 2}])
    assert packed.shape.exiting == (1, 1, 2, 0)
    assert packed.exit_rows.tolist() == [1, 3, 0, 2]  # in the pass, the three full rows lie before the other one
    assert packed.shape.exits == ((0, 3), (1, 1))
    assert packed.exit_order.tolist() == [0, 2, 3, 1]
    assert packed.exit_target_rows.tolist() == [1, 0, 2, 1]


def test_all_steps_with_a_draw_for_each_row_have_one_shape() -> None:
    """A CUDA graph of a step serves all of them. Twelve rows share three exits evenly."""
    full, other = (0.0, 0.5), (0.5, 1.0)
    entries = (
        TrainedTrajectory("full", active_range=full),
        TrainedTrajectory("full", rows=0.5, exits=0.1, active_range=other),
        TrainedTrajectory((2, 3), "compositions", rows=0.25, active_range=other),
        TrainedTrajectory(1, rows=0.25, active_range=other),
    )
    objective = ObjectiveConfig(entries, draws="row")
    run = RunConfig(model=CONFIG, objective=objective, training=TrainingConfig(steps=8, batch=24))
    for micro_batch in (6, 24):
        steps = [plan_step(run, step, micro_batch) for step in range(1, 9)]
        shapes = [[pack_rows(CONFIG, part.trajectories, part.exits).shape for part in step] for step in steps]
        assert all(shape == shapes[0][0] for step in shapes[:4] for shape in step)
        assert all(step == shapes[4] for step in shapes[4:])
    part = replace(objective, draws="part")
    drawn = {
        pack_rows(CONFIG, plan_step(replace(run, objective=part), step, 24)[0].trajectories).shape
        for step in (5, 6, 7, 8)
    }
    assert 1 <= len(drawn) <= 2


def test_it_moves_as_a_whole() -> None:
    packed = pack_rows(CONFIG, [{0: Trajectory.uniform(2)}]).to(torch.device("meta"))
    assert {packed.input_rows.device.type, packed.scalars.device.type, packed.exit_target_rows.device.type} == {
        "meta"
    }
