import pytest

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference.budget import budget_for_flops, budget_for_milliseconds, milliseconds_per_token


def test_flops_are_resolved_by_the_cost_model(lm: LM) -> None:
    cost = lm.model.cost
    for budget in range(1, 5):
        assert budget_for_flops(lm.model, cost.forward_flops(budget)) == budget
    assert budget_for_flops(lm.model, 1e15) == 4
    with pytest.raises(LoopformerError, match=r"One loop takes .* raise it"):
        budget_for_flops(lm.model, 1.0)


def test_milliseconds_are_resolved_by_measuring(lm: LM) -> None:
    assert milliseconds_per_token(lm.model, Trajectory.parse("2-1-1"), [1, 2, 3]) > 0
    assert milliseconds_per_token(lm.model, Trajectory.uniform(1), [1] * 999) > 0  # only what fits the context
    assert budget_for_milliseconds(lm.model, 1e6, [1, 2, 3])[0] == 4
    with pytest.raises(LoopformerError, match="ms per token here"):
        budget_for_milliseconds(lm.model, 1e-9, [1, 2, 3])
