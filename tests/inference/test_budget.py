import copy
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference import budget
from loopformer.inference.budget import budget_for_flops, budget_for_milliseconds, milliseconds_per_token


def test_flops_are_resolved_by_the_cost_model(lm: LM) -> None:
    cost = lm.model.cost
    for loops in range(1, 5):
        assert budget_for_flops(lm.model, cost.forward_flops(loops)) == loops
    assert budget_for_flops(lm.model, 1e15) == 4
    one_loop = re.escape(
        f"One loop takes {cost.forward_flops(1):.4g} FLOPs per token, above the limit of 1; raise it."
    )
    with pytest.raises(LoopformerError, match=one_loop):
        budget_for_flops(lm.model, 1.0)


def test_milliseconds_are_resolved_by_measuring(lm: LM) -> None:
    assert milliseconds_per_token(lm.model, Trajectory.parse("2-1-1"), [1, 2, 3]) > 0
    assert milliseconds_per_token(lm.model, Trajectory.uniform(1), [1] * 999) > 0  # only what fits the context
    assert budget_for_milliseconds(lm.model, 1e6, [1, 2, 3])[0] == 4
    with pytest.raises(LoopformerError, match="ms per token here"):
        budget_for_milliseconds(lm.model, 1e-9, [1, 2, 3])


def test_budgets_between_the_measured_ones_are_interpolated(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 2.0, 4: 8.0}  # of all four loops, and of one
    monkeypatch.setattr(
        budget, "milliseconds_per_token", lambda model, trajectory, prompt: times[trajectory.budget]
    )
    found = [budget_for_milliseconds(lm.model, limit, [1]) for limit in (2.0, 3.9, 4.0, 7.0, 8.0, 99.0)]
    assert found == [(1, 2.0), (1, 2.0), (2, 4.0), (3, 6.0), (4, 8.0), (4, 8.0)]
    with pytest.raises(
        LoopformerError, match=r"One loop takes 2 ms per token here, above the limit of 1\.99; raise it"
    ):
        budget_for_milliseconds(lm.model, 1.99, [1])
    single = copy.copy(lm.model)
    single.config = replace(lm.model.config, loops=1)
    assert budget_for_milliseconds(single, 5.0, [1]) == (1, 2.0)


def test_the_median_time_of_eight_tokens_after_the_prompt_counts(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([*range(10, 90, 10), 0])  # of each token: the median is the fifth
    now, ends = [0.0], [False]

    def clock() -> float:
        now[0] += next(seconds) / 1e3 if ends[0] else 0.0
        ends[0] = not ends[0]
        return now[0]

    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=clock))
    assert milliseconds_per_token(lm.model, Trajectory.uniform(2), [1, 2, 3]) == pytest.approx(50)
    assert next(seconds) == 0, "eight tokens are timed"
