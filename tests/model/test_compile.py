"""The step is the compiled unit: one graph serves every budget and schedule."""

from dataclasses import replace

import pytest
import torch
from options import OPTIONS, Option
from torch._dynamo.testing import CompileCounter

from loopformer import LoopedLM, Trajectory
from loopformer.config import ModelConfig


@pytest.mark.parametrize("option", [{}, *OPTIONS], ids=str)
def test_one_graph_per_shape_and_grad_mode(tiny: ModelConfig, option: Option) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = LoopedLM(replace(tiny, **option))
    ids = torch.randint(tiny.vocab, (2, 12))
    trajectories = [trajectory for budget in range(1, 5) for trajectory in Trajectory.enumerate(4, budget)]
    expected = [model(ids, trajectory).logits for trajectory in trajectories]
    model.compile(backend=counter, fullgraph=True)
    for trajectory, logits in zip(trajectories, expected, strict=True):
        torch.testing.assert_close(model(ids, trajectory).logits, logits)
    assert counter.frame_count == 1
    with torch.no_grad():
        for trajectory in trajectories:
            model(ids, trajectory)
    assert counter.frame_count == 2
    for trajectory in trajectories:
        model(ids, trajectory).logits.sum().backward()
    assert counter.frame_count == 2


def test_compiling_the_whole_model_does_not_unroll_the_loop() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    config = ModelConfig(blocks=1, loops=12, width=32, heads=4, ffn=80, context=32, vocab=96, modulator_start="one")
    model = LoopedLM(config)
    ids = torch.randint(96, (2, 12))
    compiled = torch.compile(model, backend=counter)
    for budget in range(1, 13):
        torch.testing.assert_close(compiled(ids, budget).logits, model(ids, budget).logits)
    assert counter.frame_count <= 3  # the step, the final norm, the head


def test_rows_of_several_budgets_add_few_graphs(tiny: ModelConfig) -> None:
    """Fewer rows each time a row is done: the batch becomes one symbolic size, besides the special sizes."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = LoopedLM(tiny)
    model.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        for rows in (5, 6, 7, 8):
            model(torch.randint(tiny.vocab, (rows, 12)), [1 + row % 4 for row in range(rows)])
    assert counter.frame_count <= 4
