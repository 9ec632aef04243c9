"""The budget for a target: FLOPs per token by the cost model, or milliseconds per token by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loopformer.device import synchronise
from loopformer.errors import require
from loopformer.inference.decode import PlainBackend
from loopformer.inference.engine import Engine
from loopformer.inference.request import Request
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

TIMED_TOKENS = 8


def budget_for_flops(model: LoopedLM, most: float) -> int:
    """The largest budget with a forward pass of at most `most` FLOPs per token, at a full context."""
    affordable = [m for m in range(1, model.config.loops + 1) if model.cost.forward_flops(m) <= most]
    least = model.cost.forward_flops(1)
    require(
        bool(affordable), f"One loop takes {least:.4g} FLOPs per token, above the limit of {most:.4g}; raise it."
    )
    return affordable[-1]


def budget_for_milliseconds(model: LoopedLM, most: float, prompt: Sequence[int]) -> tuple[int, float]:
    """The largest budget that decodes a token in at most `most` milliseconds after this prompt, and its time.

    One loop and all loops are measured; budgets between them are interpolated.
    """
    loops = model.config.loops
    measured = [milliseconds_per_token(model, Trajectory.uniform(m), prompt) for m in sorted({1, loops})]
    slope = (measured[-1] - measured[0]) / max(1, loops - 1)

    def expected(budget: int) -> float:
        return measured[0] + slope * (budget - 1)

    affordable = [budget for budget in range(1, loops + 1) if expected(budget) <= most]
    require(
        bool(affordable),
        f"One loop takes {measured[0]:.3g} ms per token here, above the limit of {most:.3g}; raise it.",
    )
    return affordable[-1], expected(affordable[-1])


def milliseconds_per_token(model: LoopedLM, trajectory: Trajectory, prompt: Sequence[int]) -> float:
    """The median time to decode one token at batch 1 after the prompt, without its text."""
    config = model.config
    prompt = tuple(prompt)[-max(1, config.context - TIMED_TOKENS) :]
    request = Request(prompt, trajectory, max_tokens=TIMED_TOKENS + 1)
    engine = Engine(model, _NoText(), PlainBackend(model, 1, remember=0), rows=1, queue=1)
    engine.submit(request)
    while engine.waiting:  # a long prompt takes several steps
        engine.step()
    times = []
    while not engine.idle:
        synchronise(model.device)
        started = time.perf_counter()
        engine.step()
        synchronise(model.device)
        times.append(time.perf_counter() - started)
    require(len(times) > 0, "The text ends at once, so its speed cannot be measured; give a budget.")
    return sorted(times)[len(times) // 2] * 1e3


class _NoText:
    """A detokenizer without text: no token ends the text, and none adds to it."""

    eot = -1

    def decode(self, ids: Sequence[int]) -> str:
        return ""
