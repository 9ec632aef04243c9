"""Decoding speed of every path (decode_paths.py) against budget, context and batch.

report = decode(model, budgets=(1, 2, 4, 8), batches=(1, 64), contexts=(512,))

Greedy, from random prompts; `tokens` new ones are timed after prefill and a warm-up, and the best of three counts.
The naive path is timed over few tokens, and it and Transformers' GPT-2 at the largest budget alone.

FLOPs and bytes are what a token takes with a cache, and so the same for every path: the products of one new token
per row, the weights read once per loop and step and the keys of each row (`model.cost`). MFU is over the device's
peak in bf16, MBU over what a copy reaches on it. The peak of memory is that of the timed tokens, weights included.
Where one does not fit, its figures are None; what was asked for and not measured is in `left_out`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from loopformer.benchmark.decode_paths import PATHS, absent, left_out, most_int8_rows
from loopformer.benchmark.machine import best_of, describe, empty
from loopformer.errors import nearest, require
from loopformer.model import LoopedLM

Row = dict[str, Any]
CHOICES = ("naive", "plain", "fused", "transformers")
NAIVE_TOKENS = 4  # each runs the whole sequence
AT_LARGEST_BUDGET = ("naive", "transformers")
FIGURES = ("ms_per_step", "tokens_per_second", "tflops", "mfu", "gb_per_second", "mbu", "peak_gib")


def decode(
    model: LoopedLM,
    budgets: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int = 32,
    int8: bool = False,
    paths: Sequence[str] = CHOICES,
    say: Callable[[Row], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every combination by every path that can run here; `say` gets each row as it comes."""
    ways = _ways(model, paths, int8)
    machine = describe(model.tokens.weight.device)
    rows: list[Row] = []
    for path in ways:
        timed = min(tokens, NAIVE_TOKENS) if path == "naive" else tokens
        asked = [max(budgets)] if path in AT_LARGEST_BUDGET else budgets
        for batch, context, budget in product(batches, contexts, asked):
            if path == "fused int8" and batch > most_int8_rows():
                continue
            row: Row = {"path": path, "budget": budget, "batch": batch, "context": context, "tokens": timed}
            row |= {"bytes": _bytes(model, path, budget, batch, context), **dict.fromkeys(FIGURES)}
            try:
                row |= _measure(model, path, budget, batch, context, timed)
                row |= _rates(model, row, machine)
            except torch.OutOfMemoryError:
                pass
            rows.append(row)
            say(row)
    report = {"benchmark": "decode", **machine, "dtype": model.dtype_name, "tokens": tokens, "rows": rows}
    return {**report, "left_out": left_out(model, paths, int8, batches)}


def _ways(model: LoopedLM, paths: Sequence[str], int8: bool) -> list[str]:
    """What to measure of the paths that were asked for, in their order."""
    for path in paths:
        require(path in CHOICES, f"There is no path {path!r} of decoding; {nearest(path, list(CHOICES))}")
    missing = absent(model, paths)
    there = [path for path in dict.fromkeys(paths) if path not in missing]
    reasons = "; ".join(f"{path}: {need}" for path, need in missing.items())
    require(bool(there), f"No path of decoding that was asked for can run here ({reasons}); ask for plain.")
    if int8 and "fused" in there:
        there.insert(there.index("fused") + 1, "fused int8")
    return there


def _measure(model: LoopedLM, path: str, budget: int, batch: int, context: int, tokens: int) -> Row:
    """Milliseconds of a step, and the peak of memory on a GPU."""
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab, (batch, context), generator=generator).to(device)
    empty(device)
    ours = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run = PATHS[path](model, budget, ids, tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_of(3, device, run)
    peak = None
    if device.type == "cuda":  # our weights, which lie there, too, are no part of theirs
        peak = (torch.cuda.max_memory_allocated(device) - (ours if path == "transformers" else 0)) / 2**30
    return {"ms_per_step": seconds / tokens * 1e3, "peak_gib": peak}


def _rates(model: LoopedLM, row: Row, machine: dict[str, Any]) -> Row:
    """Tokens, FLOPs and bytes a second, and their shares of what the device can do."""
    seconds, peak = row["ms_per_step"] / 1e3, machine["peak_tflops"]
    flops = row["batch"] * model.cost.forward_flops(row["budget"], row["context"], causal=False)
    tflops, bandwidth = flops / seconds / 1e12, row["bytes"] / seconds / 1e9
    return {
        "tokens_per_second": row["batch"] / seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak and model.dtype_name == "bfloat16" else None,
        "gb_per_second": bandwidth,
        "mbu": bandwidth / machine["copy_gb_per_second"],
    }


def _bytes(model: LoopedLM, path: str, budget: int, batch: int, context: int) -> int:
    """What a step must read."""
    cost, size = model.cost, model.tokens.weight.element_size()
    read = cost.decode_bytes(budget, 0, size) + batch * context * cost.kv_bytes(budget, size)
    if path == "fused int8":
        read -= (cost.parameters.stack * budget + cost.head_products) * (size - 1)
    return read
