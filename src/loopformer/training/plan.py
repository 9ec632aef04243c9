"""What a run will take, before it is started: parameters, tokens, FLOPs, memory, hours.

Memory and hours are estimates: activations by a formula for the tensors that backward keeps, hours from a share
of the device's peak that training commonly reaches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from loopformer.config import RunConfig
from loopformer.device import device_name, peak_flops
from loopformer.model.cost import Cost
from loopformer.training.batches import costliest_step, followers, largest_micro_batch
from loopformer.training.fused.passes import FP8_PASSES_PER_GRADIENT
from loopformer.trajectory import Trajectory

COMMON_SHARE = 0.4  # of the peak, on a GPU
CPU_SHARE = 0.5  # of what large matmuls reach, on a CPU


def make_plan(
    run: RunConfig, tokens_in_data: int, device: torch.device, micro_batch: int, world: int, fused: bool
) -> dict[str, Any]:
    """The estimate for a run on `world` devices like this one; epochs and hours are None where they are unknown."""
    cost, training = Cost(run.model), run.training
    per_token = training_flops_per_token(run)
    tokens = training.steps * training.batch * run.model.context
    rate = reachable_flops(device)
    return {
        "parameters": cost.parameters.total,
        "parameters_without_embeddings": cost.parameters.without_embeddings,
        "steps": training.steps,
        "tokens": tokens,
        "epochs": tokens / tokens_in_data if tokens_in_data else None,
        "training_gflops_per_token": per_token / 1e9,
        "total_flops": per_token * tokens,
        "micro_batch": micro_batch,
        "memory_gib_per_device": memory_bytes(run, micro_batch, world, fused) / 2**30,
        "device": device_name(device),
        "device_tflops": None if rate is None else rate / 1e12,
        "hours": None if rate is None else per_token * tokens / (rate * world) / 3600,
    }


def training_flops_per_token(run: RunConfig, followed: Sequence[Trajectory | None] | None = None) -> float:
    """Forward and backward of the objective's trajectories: those followed in a step, or the mean over training."""
    cost, flops = Cost(run.model), 0.0
    part = run.training.batch // run.objective.trajectory_groups
    rows = followers(part, run.objective)
    for place, entry in enumerate(run.objective.trajectories):
        if followed is None:
            budget = sum(entry.budgets(run.model.loops)) / 2
            share = entry.active_range[1] - entry.active_range[0]
        else:
            drawn = followed[place]
            budget, share = (0.0, 0.0) if drawn is None else (drawn.budget, 1.0)
        flops += share * len(rows[place]) / part * cost.training_flops(budgets=[budget])
    return flops


def memory_bytes(run: RunConfig, micro_batch: int, world: int, fused: bool) -> float:
    """Weights, gradients and two moments in fp32, and what backward keeps of one micro-batch."""
    config, training = run.model, run.training
    shards = world if training.sharded else 1
    parameters = Cost(config).parameters.total
    states = parameters * 4 * (1 + 3 / shards)  # the gathered weights stay whole during a step
    low = training.dtype != "float32"
    # Kept per token and block: inputs of norms, attention and matmuls. Calibrated against measured peaks.
    per_block = (28 * config.width + 4 * config.ffn) if low else (48 * config.width + 8 * config.ffn)
    waiting = 0
    if fused:  # two states, what four matmuls gave, attention's result; in fp8 also what went into them
        size, fp8, turned = (2 if low else 4), training.dtype == "float8", 2 * (config.positions == "rotary")
        factors = (3 * config.width + config.ffn) * fp8
        per_block = 8 * config.width + size * ((6 + turned) * config.width + config.ffn) + factors
        # Both factors of the weight gradients of some passes; without recomputing, backward has freed more by then.
        waiting = (FP8_PASSES_PER_GRADIENT - 1) * config.blocks * (8 * config.width + 2 * config.ffn) * fp8
    followed = costliest_step(run)
    passes = sum(
        entry.rows * trajectory.budget
        for entry, trajectory in zip(run.objective.trajectories, followed, strict=True)
        if trajectory is not None
    )
    if training.checkpoint_loops:
        per_token = passes * 4 * config.width + config.blocks * per_block + waiting
    else:
        per_token = passes * config.blocks * per_block
    chunk = min(run.objective.chunk, micro_batch * config.context)
    together = sum(trajectory is not None for trajectory in followed)
    head = chunk * config.vocab_rows * 4 * 3 * together + config.vocab_rows * config.width * 4
    return states + micro_batch * config.context * per_token + head


def micro_batch_sizes(run: RunConfig, world: int) -> list[int]:
    """The micro-batches that cut a part of the batch evenly, largest first."""
    rows = largest_micro_batch(run.training.batch, run.objective, world, run.training.sharded)
    return [size for size in range(rows, 0, -1) if rows % size == 0]


def estimated_micro_batch(run: RunConfig, room: float, world: int, fused: bool) -> int:
    """The largest micro-batch that should fit into so many bytes."""
    return next((size for size in micro_batch_sizes(run, world) if memory_bytes(run, size, world, fused) < room), 1)


def reachable_flops(device: torch.device) -> float | None:
    """What training commonly reaches: a share of a GPU's peak, or of a short measurement on the CPU."""
    peak = peak_flops(device)
    if peak is not None:
        return COMMON_SHARE * peak
    if device.type != "cpu":
        return None
    a = torch.randn(512, 512)
    (a @ a).sum()
    started = time.perf_counter()
    for _ in range(10):
        a @ a
    return CPU_SHARE * 10 * 2 * 512**3 / (time.perf_counter() - started)
