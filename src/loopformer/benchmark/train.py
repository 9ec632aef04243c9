"""Training speed and memory: the naive path, ours, and Transformers' model of the same compute.

    report = train(ModelConfig(), micro_batch=12, device=torch.device("cuda"))
    report = memory(ModelConfig(), micro_batches=(4, 12), device=torch.device("cuda"))

What is measured is a forward and backward pass over a micro-batch of random tokens, without the optimizer; the
short trajectory has L/2 steps, its mean length. `naive` is the eager model with all logits at once; `plain` is
our objective over the eager stack, `compiled` over the compiled one, `fused` and `fused fp8` through
training/fused; `transformers` is a GPT-2 of as many blocks. FLOPs count causal attention; MFU is their rate
over the device's peak in bf16.

The peak of memory is the allocator's own, of a pass with both trajectories, gradients included and the
optimizer's moments not; it needs a GPU. Beside it stands what a row of decoding keeps at each budget. None did
not fit.
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

from loopformer.benchmark.decode import gpt2
from loopformer.benchmark.machine import Measurement, describe, free_memory
from loopformer.config import ModelConfig, ObjectiveConfig
from loopformer.device import synchronise
from loopformer.errors import LoopformerError, nearest, require
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import unsupported_reason
from loopformer.training.objective import Objective
from loopformer.trajectory import Trajectory

Forward = Callable[[], Tensor]  # computes the loss of a micro-batch

CHOICES = ("naive", "plain", "compiled", "fused", "fused fp8", "transformers")
FIGURES = ("ms", "tokens_per_second", "tflops", "mfu", "peak_gib")
MEMORY_PATHS = {  # the path of `train`, and whether loops are computed again in backward
    "naive": ("naive", False),
    "compiled": ("compiled", False),
    "fused": ("fused", False),
    "fused, loops recomputed": ("fused", True),
}


def train(
    config: ModelConfig,
    micro_batch: int,
    device: torch.device,
    dtype: str = "bfloat16",
    paths: Sequence[str] | None = None,
    steps: int = 20,
    say: Callable[[Measurement], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every path, with both trajectories and with the full one alone; `say` gets each row as it comes."""
    low = dtype == "bfloat16"
    chosen = usual_paths(config, device, low) if paths is None else paths
    for path in chosen:
        if path not in CHOICES:
            raise LoopformerError(f"There is no path {path!r} of training; {nearest(path, list(CHOICES))}")
        fp8 = path == "fused fp8"
        require(low or not fp8, "fused fp8 is measured with --dtype bfloat16, which the rest of it runs in.")
        why = unsupported_reason(config, device, fp8) if path.startswith("fused") else None
        require(why is None, f"{path} cannot be measured: {why}.")
    machine = describe(device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (micro_batch, config.context + 1), generator=generator).to(device)
    short = mean_short(config)
    rows: list[Measurement] = []
    for path in chosen:
        for trajectory in [short, None] if short is not None and path != "transformers" else [None]:
            row: Measurement = {
                "path": path,
                "routes": "full and short" if trajectory else "full",
                "micro_batch": micro_batch,
            }
            row |= dict.fromkeys(FIGURES)
            try:
                forward = make_forward(path, config, ids, trajectory, low)
                row |= measure(forward, device, low, steps)
                budgets = [config.loops, *([trajectory.budget] if trajectory else [])]
                flops = Cost(config).training_flops(budgets=budgets)
                row["tokens_per_second"] = ids[:, 1:].numel() / row["ms"] * 1e3
                row["tflops"] = row["tokens_per_second"] * flops / 1e12
                row["mfu"] = row["tflops"] / machine["peak_tflops"] if machine["peak_tflops"] and low else None
            except torch.OutOfMemoryError:
                pass
            forward = None  # type: ignore[assignment]
            rows.append(row)
            say(row)
    return {"benchmark": "train", **machine, "dtype": dtype, "rows": rows}


def memory(
    config: ModelConfig,
    micro_batches: Sequence[int],
    device: torch.device,
    say: Callable[[Measurement], object] = lambda row: None,
) -> dict[str, Any]:
    """The peak of every path at every micro-batch in bf16; `say` gets each row as it comes."""
    require(device.type == "cuda", "The peak memory of training is measured on a GPU; here is none.")
    rows: list[Measurement] = []
    for name, (path, recompute) in MEMORY_PATHS.items():
        for size in micro_batches:
            row: Measurement = {"path": name, "micro_batch": size, "peak_gib": None}
            ids = torch.randint(config.vocab, (size, config.context + 1), device=device)
            try:
                forward = make_forward(path, config, ids, mean_short(config), low=True, recompute=recompute)
                row["peak_gib"] = measure(forward, device, low=True, steps=1)["peak_gib"]
            except torch.OutOfMemoryError:
                pass
            rows.append(row)
            say(row)
            forward = None  # type: ignore[assignment]
    cost, budgets = Cost(config), range(1, config.loops + 1)
    kept = {budget: cost.kv_bytes(budget) * config.context / 2**20 for budget in budgets}
    report = {"benchmark": "memory", **describe(device), "dtype": "bfloat16"}
    return {**report, "rows": rows, "kv_mib_per_row_at_full_context": kept}


def usual_paths(config: ModelConfig, device: torch.device, low: bool) -> list[str]:
    """The paths that are measured by default on a device."""
    paths = ["naive", "compiled" if device.type == "cuda" else "plain"]
    if device.type == "cuda" and low:
        fused = {"fused": False, "fused fp8": True}
        paths += [path for path, fp8 in fused.items() if unsupported_reason(config, device, fp8) is None]
    return [*paths, *(["transformers"] if find_spec("transformers") else [])]


def mean_short(config: ModelConfig) -> Trajectory | None:
    """A short trajectory of mean length; None for a model of one loop."""
    return Trajectory.uniform(max(1, config.loops // 2)) if config.loops > 1 else None


def make_forward(
    path: str, config: ModelConfig, ids: Tensor, short: Trajectory | None, low: bool, recompute: bool = False
) -> Forward:
    """The function that computes a path's loss of a micro-batch ids [B, T + 1]; `low` is bf16."""
    if path == "naive":
        return _naive(config, ids, short)
    if path == "transformers":
        return _transformers(config, ids)
    precision = Precision(torch.bfloat16 if low else torch.float32, path == "fused fp8")
    model = _model(config, ids.device)
    if path == "compiled":
        model.compile()
    fused = precision if path.startswith("fused") else None
    objective, tokens = Objective(model, ObjectiveConfig(), recompute, fused), float(ids[:, 1:].numel())
    trajectories, rows = [Trajectory.uniform(config.loops), short], [range(len(ids))] * 2

    def forward() -> Tensor:
        total: Tensor = objective(ids[:, :-1], ids[:, 1:], None, trajectories, rows, [tokens, tokens]).total
        return total

    return forward


def measure(forward: Forward, device: torch.device, low: bool, steps: int) -> Measurement:
    """Milliseconds and peak memory of a forward and backward pass."""

    def run_pass() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            loss = forward()
        torch.autograd.backward(loss)

    free_memory(device)
    for _ in range(2):
        run_pass()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()  # the mean, not the fastest: under load a GPU lowers its clock
    for _ in range(steps):
        run_pass()
    synchronise(device)
    seconds = (time.perf_counter() - started) / steps
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"ms": seconds * 1e3, "peak_gib": peak}


def _naive(config: ModelConfig, ids: Tensor, short: Trajectory | None) -> Forward:
    """The objective written down plainly, with all logits of both trajectories at once."""
    model, targets = _model(config, ids.device), ids[:, 1:].flatten()

    def loss(trajectory: Trajectory | None) -> tuple[Tensor, Tensor]:
        out = model(ids[:, :-1], trajectory)
        assert out.logits is not None
        return F.cross_entropy(out.logits.float().flatten(0, 1), targets), out.hidden

    def forward() -> Tensor:
        full, teacher = loss(None)
        if short is None:
            return full
        short_loss, hidden = loss(short)
        return full + 0.1 * short_loss + 0.1 * (hidden - teacher.detach()).float().square().mean()

    return forward


def _transformers(config: ModelConfig, ids: Tensor) -> Forward:
    """A GPT-2 of as many blocks as ours applies; it has no short trajectory."""
    model = gpt2(config, config.loops, torch.empty(0, device=ids.device))  # not in training mode: no dropout

    def forward() -> Tensor:
        loss: Tensor = model(input_ids=ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
        return loss

    return forward


def _model(config: ModelConfig, device: torch.device) -> LoopedLM:
    """A model of random weights with open gates: a GPU multiplies the zeros behind closed ones faster."""
    torch.manual_seed(0)
    return LoopedLM(replace(config, modulator_start="one")).to(device)
