"""Memory: the peak of training by micro-batch and path, and what a row of decoding keeps at each budget.

report = memory(ModelConfig(), micro_batches=(4, 12), device=torch.device("cuda"))

Training's peak is the allocator's own, of a forward and backward pass with both routes, gradients included and the
optimizer's moments not; it needs a GPU. A peak of None did not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from loopformer.benchmark.machine import describe
from loopformer.benchmark.train import Row, make_step, mean_short, measure
from loopformer.config import ModelConfig
from loopformer.errors import require
from loopformer.model.cost import Cost

WAYS = {  # the path of bench train, and whether loops are computed again
    "naive": ("naive", False),
    "compiled": ("compiled", False),
    "fused": ("fused", False),
    "fused, loops recomputed": ("fused", True),
}


def memory(
    config: ModelConfig,
    micro_batches: Sequence[int],
    device: torch.device,
    say: Callable[[Row], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every way at every micro-batch in bf16; `say` gets each row as it comes."""
    require(device.type == "cuda", "The peak memory of training is measured on a GPU; here is none.")
    rows: list[Row] = []
    for name, (path, recompute) in WAYS.items():
        for size in micro_batches:
            row: Row = {"path": name, "micro_batch": size, "peak_gib": None}
            ids = torch.randint(config.vocab, (size, config.context + 1), device=device)
            try:
                step = make_step(path, config, ids, mean_short(config), low=True, recompute=recompute)
                row["peak_gib"] = measure(step, device, low=True, steps=1)["peak_gib"]
            except torch.OutOfMemoryError:
                pass
            rows.append(row)
            say(row)
            step = None  # type: ignore[assignment]
    cost, budgets = Cost(config), range(1, config.loops + 1)
    kept = {budget: cost.kv_bytes(budget) * config.context / 2**20 for budget in budgets}
    report = {"benchmark": "memory", **describe(device), "dtype": "bfloat16"}
    return {**report, "rows": rows, "kv_mib_per_row_at_full_context": kept}
