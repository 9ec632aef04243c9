"""What `micro_batch: auto` tries out on a GPU."""

import pytest
import torch

from loopformer import LoopedLM
from loopformer.config import ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from loopformer.config.run import TrainedTrajectory
from loopformer.training import trainer
from loopformer.training.objective import Objective
from loopformer.training.packing import PackedShape
from loopformer.training.plan import memory_bytes


@pytest.mark.parametrize("graphs", [False, True])
def test_a_trial_needs_the_memory_of_a_step(
    graphs: bool, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of exits, and with graphs that of a recorded pass and of another one at the same time."""
    objective = ObjectiveConfig((TrainedTrajectory("full", exits=0.1), TrainedTrajectory(2, rows=0.5)))
    run = RunConfig(model=tiny, objective=objective, training=TrainingConfig(dtype="float32"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    trial, shapes = Objective(LoopedLM(tiny), objective), list[PackedShape]()
    trial.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[3].shape))
    assert trainer._fits(run, trial, torch.device("cpu"), 4, graphs)
    assert [shape.exits for shape in shapes] == [((0, 4),)] * (1 + graphs)
    assert sum(shapes[0].active) == 4 * tiny.loops + 2 * 2
    assert all(parameter.grad is None for parameter in trial.parameters())
    one, these = (memory_bytes(run, 4, 1, fused=False, graphs=each) for each in (False, graphs))
    assert (these > one) == graphs
