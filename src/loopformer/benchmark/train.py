"""Training speed and memory: the naive path, ours, and Transformers' model of the same compute.

    report = train(ModelConfig(), micro_batches=(4, 12), device=torch.device("cuda"))

What is measured is a forward and backward pass over a micro-batch of random tokens, without the optimizer. The
short trajectory has L/2 steps, its mean length. `naive` is the eager model with all logits at once. `plain` is our
objective over the eager stack, `compiled` over the compiled one. `fused`, `fused fp8` and `fused recomputed`, which
computes loops again in backward, run through training/fused. `transformers` is a GPT-2 of as many blocks. FLOPs
count causal attention. MFU is their rate over the device's peak in bf16.

The peak of memory is the allocator's, gradients included and the optimizer's moments not; it needs a GPU. Figures
are None where a row did not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.benchmark.machine import (
    Measurement,
    Say,
    check_paths,
    describe,
    gpt2,
    measure_rows,
    peak_gib,
    reset_peak,
)
from loopformer.config import ModelConfig, ObjectiveConfig
from loopformer.device import synchronise
from loopformer.errors import require
from loopformer.model.cost import Cost
from loopformer.model.looped import LoopedLM
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import unsupported_reason
from loopformer.training.objective import Objective
from loopformer.trajectory import Trajectory

TRAIN_PATHS = ("naive", "plain", "compiled", "fused", "fused recomputed", "fused fp8", "transformers")
FIGURES = ("ms", "tokens_per_second", "tflops", "mfu", "peak_gib")


def train(
    config: ModelConfig,
    micro_batches: Sequence[int],
    device: torch.device,
    dtype: str = "bfloat16",
    paths: Sequence[str] | None = None,
    steps: int = 20,
    say: Say = lambda row: None,
) -> dict[str, Any]:
    """Measure every path, with both trajectories and with the full one alone; `say` gets each row as it comes."""
    low = dtype == "bfloat16"
    chosen = usual_paths(config, device, low) if paths is None else paths
    check_paths("training", chosen, TRAIN_PATHS)
    for path in chosen:
        fp8 = path == "fused fp8"
        require(low or not fp8, "fused fp8 is measured with --dtype bfloat16, which the rest of it runs in.")
        why = unsupported_reason(config, device, fp8) if path.startswith("fused") else None
        require(why is None, f"{path} cannot be measured: {why}.")
    machine = describe(device)
    short = Trajectory.uniform(max(1, config.loops // 2)) if config.loops > 1 else None
    cases = [
        {"path": path, "routes": routes, "micro_batch": size}
        for path in chosen
        for size in micro_batches
        for routes in ("full and short", "full")
        if routes == "full" or (short is not None and path != "transformers")
    ]

    def measure(case: Measurement) -> Measurement:
        size, trajectory = case["micro_batch"], short if case["routes"] == "full and short" else None
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab, (size, config.context + 1), generator=generator).to(device)
        figures = time_passes(make_loss(case["path"], config, ids, trajectory, low), device, low, steps)
        budgets = [config.loops, *([trajectory.budget] if trajectory else [])]
        rate = size * config.context / figures["ms"] * 1e3
        tflops, peak = rate * Cost(config).training_flops(budgets=budgets) / 1e12, machine["peak_tflops"]
        mfu = tflops / peak if peak and low else None
        return {**figures, "tokens_per_second": rate, "tflops": tflops, "mfu": mfu}

    rows = measure_rows(device, cases, FIGURES, measure, say)
    return {"benchmark": "train", **machine, "dtype": dtype, "rows": rows}


def usual_paths(config: ModelConfig, device: torch.device, low: bool) -> list[str]:
    """The paths that are measured by default on a device."""
    paths = ["naive", "compiled" if device.type == "cuda" else "plain"]
    if device.type == "cuda" and low:
        fused = {"fused": False, "fused fp8": True}
        paths += [path for path, fp8 in fused.items() if unsupported_reason(config, device, fp8) is None]
    return [*paths, *(["transformers"] if find_spec("transformers") else [])]


def make_loss(
    path: str, config: ModelConfig, ids: Tensor, short: Trajectory | None, low: bool
) -> Callable[[], Tensor]:
    """The function that computes a path's loss of a micro-batch ids [B, T + 1]; `low` is bf16."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if path == "transformers":  # it has no short trajectory
        theirs = gpt2(config, config.loops, torch.empty(0, device=ids.device))  # not in training mode: no dropout
        return lambda: theirs(input_ids=inputs, labels=inputs, use_cache=False).loss
    torch.manual_seed(0)
    # With open gates: a GPU multiplies the zeros behind closed ones faster.
    model = LoopedLM(replace(config, modulator_start="one")).to(ids.device)
    if path == "naive":

        def run(trajectory: Trajectory | None) -> tuple[Tensor, Tensor]:
            out = model(inputs, trajectory)
            assert out.logits is not None
            return F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten()), out.hidden

        def naive_loss() -> Tensor:
            full, teacher = run(None)
            if short is None:
                return full
            short_loss, hidden = run(short)
            return full + 0.1 * short_loss + 0.1 * (hidden - teacher.detach()).float().square().mean()

        return naive_loss
    if path == "compiled":
        model.compile()
    precision = Precision(torch.bfloat16 if low else torch.float32, path == "fused fp8")
    fused = precision if path.startswith("fused") else None
    objective = Objective(model, ObjectiveConfig(), path == "fused recomputed", fused)
    trajectories, rows = [Trajectory.uniform(config.loops), short], [range(len(ids))] * 2

    def loss() -> Tensor:
        total: Tensor = objective(inputs, targets, None, trajectories, rows, [float(targets.numel())] * 2).total
        return total

    return loss


def time_passes(loss: Callable[[], Tensor], device: torch.device, low: bool, steps: int) -> Measurement:
    """Milliseconds and peak memory of a forward and backward pass."""

    def run_pass() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            value = loss()
        torch.autograd.backward(value)

    for _ in range(2):
        run_pass()
    synchronise(device)
    reset_peak(device)
    started = time.perf_counter()  # the mean, not the fastest: under load a GPU lowers its clock
    for _ in range(steps):
        run_pass()
    synchronise(device)
    return {"ms": (time.perf_counter() - started) / steps * 1e3, "peak_gib": peak_gib(device)}
