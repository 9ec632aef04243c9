"""Training speed and memory: the naive path, ours, and Transformers' model of the same compute.

report = train(ModelConfig(), micro_batch=12, device=torch.device("cuda"))

A micro-batch is a forward and backward pass over random tokens, without the optimizer; the short route has L/2
steps, its mean length. Naive is the eager model with all logits at once. FLOPs count causal attention; MFU is their
rate over the device's peak in bf16.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.benchmark.machine import describe
from loopformer.config import ModelConfig, ObjectiveConfig
from loopformer.inference.budget import wait
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.training.objective import Divisors, Objective
from loopformer.trajectory import Trajectory

Row = dict[str, Any]
Step = Callable[[], Tensor]  # forward: the loss


def train(
    config: ModelConfig,
    micro_batch: int,
    device: torch.device,
    dtype: str = "bfloat16",
    compiled: bool = True,
    steps: int = 20,
    say: Callable[[Row], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every way, with both routes and with the full one alone; `say` gets each row as it comes."""
    machine = describe(device)
    low = dtype == "bfloat16"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (micro_batch, config.context + 1), generator=generator).to(device)
    short = mean_short(config)
    routes = [short, None] if short is not None else [None]
    rows: list[Row] = []
    for path in ("naive", "ours", "transformers"):
        for route in routes:
            step = _WAYS[path](config, ids, route, compiled and path == "ours")
            if step is None:
                continue
            row: Row = {"path": path, "routes": "full and short" if route else "full", "micro_batch": micro_batch}
            row |= measure(step, device, low, steps)
            flops = Cost(config).training_flops(short_budget=route.budget if route else None)
            row["tokens_per_second"] = ids[:, 1:].numel() / row["ms"] * 1e3
            row["tflops"] = row["tokens_per_second"] * flops / 1e12
            row["mfu"] = row["tflops"] / machine["peak_tflops"] if machine["peak_tflops"] and low else None
            rows.append(row)
            say(row)
            del step
    return {"benchmark": "train", **machine, "dtype": dtype, "compiled": compiled, "rows": rows}


def mean_short(config: ModelConfig) -> Trajectory | None:
    """A short route of mean length; None for a model of one loop."""
    return Trajectory.uniform(max(1, config.loops // 2)) if config.loops > 1 else None


def measure(step: Step, device: torch.device, low: bool, steps: int) -> Row:
    """Milliseconds and peak memory of a forward and backward pass."""

    def once() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            loss = step()
        torch.autograd.backward(loss)

    _empty(device)
    for _ in range(2):
        once()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()  # the mean, not the best: under load a card lowers its clock
    for _ in range(steps):
        once()
    wait(device)
    seconds = (time.perf_counter() - started) / steps
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"ms": seconds * 1e3, "peak_gib": peak}


def naive(config: ModelConfig, ids: Tensor, short: Trajectory | None, compiled: bool) -> Step:
    """All logits of both routes, and losses as one would write them down."""
    model, targets = _model(config, ids.device), ids[:, 1:].flatten()

    def loss(route: Trajectory | None) -> tuple[Tensor, Tensor]:
        out = model(ids[:, :-1], route)
        assert out.logits is not None
        return F.cross_entropy(out.logits.float().flatten(0, 1), targets), out.hidden

    def step() -> Tensor:
        full, teacher = loss(None)
        if short is None:
            return full
        brief, hidden = loss(short)
        return full + 0.1 * brief + 0.1 * (hidden - teacher.detach()).float().square().mean()

    return step


def ours(
    config: ModelConfig, ids: Tensor, short: Trajectory | None, compiled: bool, checkpoint_loops: bool = False
) -> Step:
    """The objective as it is trained."""
    model = _model(config, ids.device)
    if compiled:
        model.compile()
    objective, tokens = Objective(model, ObjectiveConfig(), checkpoint_loops), float(ids[:, 1:].numel())
    rows = tuple(range(len(ids))) if short is not None else ()

    def step() -> Tensor:
        total: Tensor = objective(ids[:, :-1], ids[:, 1:], None, Divisors(tokens, tokens), None, short, rows).total
        return total

    return step


def _transformers(config: ModelConfig, ids: Tensor, short: Trajectory | None, compiled: bool) -> Step | None:
    """A GPT-2 of as many blocks as ours applies; it has no short route."""
    if short is not None:
        return None
    try:
        import transformers
    except ImportError:
        return None
    make: Any = transformers.GPT2LMHeadModel
    model = make(
        transformers.GPT2Config(
            vocab_size=config.vocab_rows,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.blocks * config.loops,
            n_head=config.heads,
            n_inner=config.ffn,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).to(ids.device)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
        return loss

    return step


_WAYS: dict[str, Callable[[ModelConfig, Tensor, Trajectory | None, bool], Step | None]] = {
    "naive": naive,
    "ours": ours,
    "transformers": _transformers,
}


def _model(config: ModelConfig, device: torch.device) -> LoopedLM:
    """Random weights with open gates: behind closed ones products are of zeros, which a card does faster."""
    torch.manual_seed(0)
    return LoopedLM(replace(config, modulator_start="one")).to(device)


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
