"""What trajectories have in common is computed once, and nothing changes by it."""

import weakref

import pytest
import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.evaluation.score import Walker, shared_passes
from loopformer.trajectory import Trajectory

from .small import make_model


@pytest.mark.parametrize(("loops", "budget", "shared", "separate"), [(8, 4, 90, 140), (12, 6, 1253, 2772)])
def test_all_schedules_in_as_few_passes_as_can_be(
    tokenizer: Tokenizer, loops: int, budget: int, shared: int, separate: int
) -> None:
    model = make_model(tokenizer, loops)
    trajectories = list(Trajectory.enumerate(loops, budget))
    kept: list[weakref.ref[Tensor]] = []
    count = most = 0

    def note(_module: object, _inputs: object, output: Tensor) -> None:
        nonlocal count, most, kept
        kept = [*(one for one in kept if one() is not None), weakref.ref(output)]
        count, most = count + 1, max(most, len(kept))

    model.stack.register_forward_hook(note)
    seen = [trajectory for trajectory, _ in Walker(model, trajectories).walk(torch.tensor([[5, 6, 7]]))]
    assert sorted(seen, key=str) == sorted(trajectories, key=str)
    assert count == shared == shared_passes(trajectories)
    assert sum(map(len, trajectories)) == separate
    assert most == budget  # only the states on the current path


def test_states_equal_those_of_each_trajectory_alone(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 6)
    ids = torch.randint(0, tokenizer.vocab_size, (3, 16))
    trajectories = [
        *Trajectory.enumerate(6, 3),
        *Trajectory.enumerate(6, 2),
        Trajectory.uniform(4),
        Trajectory.uniform(6),
    ]
    found = dict(Walker(model, trajectories).walk(ids))
    assert set(found) == set(trajectories)
    for trajectory, hidden in found.items():
        torch.testing.assert_close(hidden, model(ids, trajectory, logits=False).hidden)
