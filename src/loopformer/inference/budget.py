"""A budget asked for as a target: FLOPs per token by the cost model, milliseconds by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from loopformer.device import synchronise
from loopformer.errors import require
from loopformer.inference.decode import prefill
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory


def budget_for_flops(model: LoopedLM, most: float) -> int:
    """The largest budget whose forward pass takes at most so many FLOPs per token, at a full context."""
    fitting = [m for m in range(1, model.config.loops + 1) if model.cost.forward_flops(m) <= most]
    least = model.cost.forward_flops(1)
    require(bool(fitting), f"One loop takes {least:.4g} FLOPs per token, above the limit of {most:.4g}; raise it.")
    return fitting[-1]


def budget_for_milliseconds(model: LoopedLM, most: float, prompt: Sequence[int]) -> tuple[int, float]:
    """The largest budget that decodes a token in at most so many milliseconds after this prompt, and its time."""
    loops = model.config.loops
    ends = sorted({1, loops})
    measured = [milliseconds_per_token(model, budget, prompt) for budget in ends]
    slope = (measured[-1] - measured[0]) / max(1, loops - 1)

    def expected(budget: int) -> float:
        return measured[0] + slope * (budget - 1)

    fitting = [budget for budget in range(1, loops + 1) if expected(budget) <= most]
    require(
        bool(fitting),
        f"One loop takes {measured[0]:.3g} ms per token here, above the limit of {most:.3g}; raise it.",
    )
    return fitting[-1], expected(fitting[-1])


@torch.no_grad()
def milliseconds_per_token(model: LoopedLM, budget: int, prompt: Sequence[int], tokens: int = 8) -> float:
    """The median time of decoding one token at batch 1, after the prompt."""
    room = model.config.context - tokens
    cache, hidden = prefill(model, [list(prompt)[-max(1, room) :]], [Trajectory.uniform(budget)])
    times = []
    for _ in range(min(tokens, cache.capacity - cache.lengths[0])):
        synchronise(hidden.device)
        started = time.perf_counter()
        token = model.head(hidden).argmax(-1, keepdim=True)
        hidden = model.extend(token, cache, check=False)[:, 0]
        synchronise(hidden.device)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e3
