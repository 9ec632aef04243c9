"""Training speed and memory of several execution paths, and of a GPT-2 of Transformers with the same compute.

    report = train(load_run("elastic")[0], micro_batches=(64, 128), device=torch.device("cuda"))

A measurement is a forward and backward pass over a micro-batch of random tokens, without the optimizer. One row is
of the run's objective, with the trajectories of its last steps, and one of the full trajectory alone.

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
from loopformer.config import ModelConfig, RunConfig
from loopformer.config.run import TrainedTrajectory
from loopformer.device import synchronise
from loopformer.errors import require
from loopformer.model.cost import Cost
from loopformer.model.looped import LoopedLM
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import unsupported_reason
from loopformer.training.objective import Objective
from loopformer.training.packing import pack_rows
from loopformer.training.plan import MicroBatch, plan_step

TRAIN_PATHS = ("naive", "plain", "compiled", "fused", "fused recomputed", "fused fp8", "transformers")
FULL_ALONE = (TrainedTrajectory("full"),)
FIGURES = ("ms", "tokens_per_second", "tflops", "mfu", "peak_gib")


def train(
    run: RunConfig,
    micro_batches: Sequence[int],
    device: torch.device,
    dtype: str = "bfloat16",
    paths: Sequence[str] | None = None,
    steps: int = 20,
    say: Say = lambda row: None,
) -> dict[str, Any]:
    """Measure every path, with the run's objective and with the full trajectory alone. `say` gets each new row."""
    config = run.model
    bf16 = dtype == "bfloat16"
    chosen = default_paths(config, device, bf16) if paths is None else paths
    check_paths("training", chosen, TRAIN_PATHS)
    for path in chosen:
        fp8 = path == "fused fp8"
        require(bf16 or not fp8, "fused fp8 is measured with --dtype bfloat16, the dtype of all other tensors.")
        why = unsupported_reason(config, device, fp8) if path.startswith("fused") else None
        require(why is None, f"{path} cannot be measured: {why}.")
    machine = describe(device)
    runs = {
        (routes, size): with_one_micro_batch(run, entries, size)
        for size in micro_batches
        for routes, entries in (("objective", run.objective.trajectories), ("full", FULL_ALONE))
        if routes == "full" or entries != FULL_ALONE
    }
    cases = [
        {"path": path, "routes": routes, "micro_batch": size}
        for path in chosen
        for routes, size in runs
        if routes == "full" or path != "transformers"  # GPT-2 has one depth
    ]

    def measure(case: Measurement) -> Measurement:
        size, measured = case["micro_batch"], runs[case["routes"], case["micro_batch"]]
        last = run.training.steps  # by then, entries that begin late are active
        parts = [plan_step(measured, max(1, last - number), size)[0] for number in range(steps)]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab, (size, config.context + 1), generator=generator).to(device)
        figures = time_passes(make_loss(case["path"], measured, ids, parts, bf16), device, bf16, steps)
        rate = size * config.context / figures["ms"] * 1e3
        per_token = sum(part.training_flops(Cost(config)) for part in parts) / (steps * size)
        tflops, peak = rate * per_token / 1e12, machine["peak_tflops"]
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


def with_one_micro_batch(run: RunConfig, entries: tuple[TrainedTrajectory, ...], size: int) -> RunConfig:
    """The run with these entries as its objective and one micro-batch of this size as its batch."""
    objective = replace(run.objective, trajectories=entries, trajectory_groups=1)
    return replace(run, objective=objective, training=replace(run.training, batch=size, micro_batch=size))


def make_loss(
    path: str, run: RunConfig, ids: Tensor, parts: list[MicroBatch], bf16: bool
) -> Callable[[int], Tensor]:
    """A function that computes the loss of a path on ids [B, T + 1], as one of the micro-batches plans it."""
    config, inputs, targets = run.model, ids[:, :-1], ids[:, 1:]
    if path == "transformers":
        gpt2_model = gpt2(config, config.loops, torch.empty(0, device=ids.device))  # in eval mode: no dropout
        return lambda number: gpt2_model(input_ids=inputs, labels=inputs, use_cache=False).loss
    torch.manual_seed(0)
    # Open the gates. Closed gates give zeros, which a GPU multiplies faster than other numbers.
    model = LoopedLM(replace(config, modulator_start="one")).to(ids.device)
    if path == "naive":

        def naive_loss(number: int) -> Tensor:
            """One pass per entry, with all logits; distances are those of hidden states."""
            total, teacher = ids.new_zeros((), dtype=torch.float32), None
            for entry, trajectories in zip(run.objective.trajectories, parts[number].trajectories, strict=True):
                if not trajectories:
                    continue
                rows = list(trajectories)
                out = model(inputs[rows], list(trajectories.values()))
                assert out.logits is not None
                loss = F.cross_entropy(out.logits.float().flatten(0, 1), targets[rows].flatten())
                total = total + entry.weight * loss
                if entry.budget == "full" and len(rows) == len(ids):
                    teacher = out.hidden.detach()
                elif entry.match and teacher is not None:
                    total = total + entry.match * (out.hidden - teacher[rows]).float().square().mean()
            return total

        return naive_loss
    if path == "compiled":
        model.compile()
    precision = Precision(torch.bfloat16 if bf16 else torch.float32, path == "fused fp8")
    fused = precision if path.startswith("fused") else None
    objective = Objective(model, run.objective, path == "fused recomputed", fused)

    def loss(number: int) -> Tensor:
        part = parts[number]
        divisors = [float(max(1, len(entry)) * config.context) for entry in part.trajectories]
        packed = pack_rows(config, part.trajectories, part.exits).to(ids.device)
        total: Tensor = objective(inputs, targets, None, packed, divisors).total
        return total

    return loss


def time_passes(loss: Callable[[int], Tensor], device: torch.device, bf16: bool, steps: int) -> Measurement:
    """Milliseconds and peak memory of a forward and backward pass, in the mean over `steps` micro-batches."""

    def run_pass(number: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss(number)
        torch.autograd.backward(value)

    for number in range(steps):  # warm up: compile for every number of rows, and allocate the gradients
        run_pass(number)
    synchronise(device)
    reset_peak(device)
    # Take the mean, not the fastest pass: a GPU lowers its clock under load, as in training.
    started = time.perf_counter()
    for number in range(steps):
        run_pass(number)
    synchronise(device)
    return {"ms": (time.perf_counter() - started) / steps * 1e3, "peak_gib": peak_gib(device)}
