"""Training speed and memory of several execution paths, and of a GPT-2 of Transformers with the same compute.

    report = train(ModelConfig(), micro_batches=(4, 12), device=torch.device("cuda"))

A measurement is a forward and backward pass over a micro-batch of random tokens, without the optimizer. The short
trajectory has L/2 steps, the mean length in training.

naive              the eager model, with all logits in memory at once
plain, compiled    the training objective over the eager or the compiled stack
fused, fused fp8   the same through training/fused, without and with fp8 matmuls
fused recomputed   the same with loops that backward computes again, to save memory
transformers       a GPT-2 with k·L blocks

FLOPs count attention as causal. MFU is FLOPs per second over the device's bf16 peak. Peak memory is the allocator's
and needs a GPU. It includes gradients, but not the optimizer's moments. Figures are None if a row does not fit.
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
    """Measure every path, with both trajectories and with the full one alone. `say` is called with each new row."""
    bf16 = dtype == "bfloat16"
    chosen = default_paths(config, device, bf16) if paths is None else paths
    check_paths("training", chosen, TRAIN_PATHS)
    for path in chosen:
        fp8 = path == "fused fp8"
        require(bf16 or not fp8, "fused fp8 is measured with --dtype bfloat16, the dtype of all other tensors.")
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
        figures = time_passes(make_loss(case["path"], config, ids, trajectory, bf16), device, bf16, steps)
        budgets = [config.loops, *([trajectory.budget] if trajectory else [])]
        rate = size * config.context / figures["ms"] * 1e3
        tflops, peak = rate * Cost(config).training_flops(budgets=budgets) / 1e12, machine["peak_tflops"]
        mfu = tflops / peak if peak and bf16 else None
        return {**figures, "tokens_per_second": rate, "tflops": tflops, "mfu": mfu}

    rows = measure_rows(device, cases, FIGURES, measure, say)
    return {"benchmark": "train", **machine, "dtype": dtype, "rows": rows}


def default_paths(config: ModelConfig, device: torch.device, bf16: bool) -> list[str]:
    """The paths that are measured by default on this device."""
    paths = ["naive", "compiled" if device.type == "cuda" else "plain"]
    for path in ("fused", "fused fp8") if device.type == "cuda" and bf16 else ():
        if unsupported_reason(config, device, path == "fused fp8") is None:
            paths.append(path)
    return [*paths, *(["transformers"] if find_spec("transformers") else [])]


def make_loss(
    path: str, config: ModelConfig, ids: Tensor, short: Trajectory | None, bf16: bool
) -> Callable[[], Tensor]:
    """A function that computes the loss of a path on the micro-batch ids [B, T + 1]."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if path == "transformers":  # GPT-2 has no short trajectory
        gpt2_model = gpt2(config, config.loops, torch.empty(0, device=ids.device))  # in eval mode: no dropout
        return lambda: gpt2_model(input_ids=inputs, labels=inputs, use_cache=False).loss
    torch.manual_seed(0)
    # Open the gates. Closed gates give zeros, which a GPU multiplies faster than other numbers.
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
    precision = Precision(torch.bfloat16 if bf16 else torch.float32, path == "fused fp8")
    fused = precision if path.startswith("fused") else None
    objective = Objective(model, ObjectiveConfig(), path == "fused recomputed", fused)
    rows = range(len(ids))
    full = dict.fromkeys(rows, Trajectory.uniform(config.loops))
    trajectories = [full, dict.fromkeys(rows, short) if short else {}]

    def loss() -> Tensor:
        total: Tensor = objective(inputs, targets, None, trajectories, [float(targets.numel())] * 2).total
        return total

    return loss


def time_passes(loss: Callable[[], Tensor], device: torch.device, bf16: bool, steps: int) -> Measurement:
    """Milliseconds and peak memory of a forward and backward pass."""

    def run_pass() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss()
        torch.autograd.backward(value)

    for _ in range(2):  # warm up: compile, and allocate the gradients
        run_pass()
    synchronise(device)
    reset_peak(device)
    # Take the mean, not the fastest pass: a GPU lowers its clock under load, as in training.
    started = time.perf_counter()
    for _ in range(steps):
        run_pass()
    synchronise(device)
    return {"ms": (time.perf_counter() - started) / steps * 1e3, "peak_gib": peak_gib(device)}
