"""Choose the largest budget within a limit on FLOPs per token (computed) or milliseconds per token (measured)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loopformer.device import synchronise
from loopformer.errors import require
from loopformer.inference.engine import Engine
from loopformer.inference.request import Request
from loopformer.inference.runner import PlainRunner
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

TIMED_TOKENS = 8  # decoded tokens in one measurement


def budget_for_flops(model: LoopedLM, limit: float) -> int:
    """The largest budget with a forward pass of at most `limit` FLOPs per token, at a full context."""
    affordable = [m for m in range(1, model.config.loops + 1) if model.cost.forward_flops(m) <= limit]
    one_loop = model.cost.forward_flops(1)
    require(
        bool(affordable),
        f"One loop takes {one_loop:.4g} FLOPs per token, above the limit of {limit:.4g}; raise it.",
    )
    return affordable[-1]


def budget_for_milliseconds(model: LoopedLM, limit: float, prompt: Sequence[int]) -> tuple[int, float]:
    """The largest budget that decodes a token in at most `limit` milliseconds after this prompt, and that time.

    One loop and all loops are measured; budgets between them are interpolated.
    """
    loops = model.config.loops
    measured = [milliseconds_per_token(model, Trajectory.uniform(m), prompt) for m in sorted({1, loops})]
    slope = (measured[-1] - measured[0]) / max(1, loops - 1)

    def expected(budget: int) -> float:
        return measured[0] + slope * (budget - 1)

    affordable = [budget for budget in range(1, loops + 1) if expected(budget) <= limit]
    require(
        bool(affordable),
        f"One loop takes {measured[0]:.3g} ms per token here, above the limit of {limit:.3g}; raise it.",
    )
    return affordable[-1], expected(affordable[-1])


def milliseconds_per_token(model: LoopedLM, trajectory: Trajectory, prompt: Sequence[int]) -> float:
    """The median time to decode one token after the prompt at batch 1, without detokenizing it."""
    config = model.config
    prompt = tuple(prompt)[-max(1, config.context - TIMED_TOKENS) :]
    request = Request(prompt, trajectory, max_tokens=TIMED_TOKENS + 1)
    engine = Engine(model, _EmptyDetokenizer(), PlainRunner(model, 1, share_prompts=False), queue=1)
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
    require(len(times) > 0, "No token was decoded, so decoding cannot be timed; give a budget.")
    return sorted(times)[len(times) // 2] * 1e3


class _EmptyDetokenizer:
    """A detokenizer for measurements: no token ends the text, and every token decodes to nothing."""

    eot = -1

    def decode(self, ids: Sequence[int]) -> str:
        return ""
