"""Decoding speed: the plain path, the fused one where there is a GPU, and time against budget, context and batch.

report = decode(model, budgets=(1, 2, 4, 8), batches=(1, 64), contexts=(512,))

Greedy, from random prompts; `tokens` new ones are timed after prefill and a warm-up. Bytes are those that must be
read (`model.cost.decode_bytes`: the weights once per loop and step, the keys of each row); MBU is their rate over
what a copy reaches on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loopformer.benchmark.machine import best_of, describe
from loopformer.inference.fast import Fast
from loopformer.inference.generate import prefill
from loopformer.inference.quantise import Weights, quantised
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Row = dict[str, Any]


def decode(
    model: LoopedLM,
    budgets: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int = 32,
    int8: bool = False,
    say: Callable[[Row], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every combination; `say` gets each row as it comes."""
    machine = describe(model.tokens.weight.device)
    rows: list[Row] = []
    weights = quantised(model) if int8 else None
    for batch in batches:
        for context in contexts:
            for budget in budgets:
                for row in _ways(model, budget, batch, context, tokens, weights):
                    row["gb_per_second"] = row["bytes"] / row["ms_per_step"] / 1e6
                    row["mbu"] = row["gb_per_second"] / machine["copy_gb_per_second"]
                    rows.append(row)
                    say(row)
    return {"benchmark": "decode", **machine, "dtype": model.dtype_name, "tokens": tokens, "rows": rows}


def _ways(
    model: LoopedLM, budget: int, batch: int, context: int, tokens: int, weights: Weights | None
) -> list[Row]:
    """One combination, by each path."""
    device, config = model.tokens.weight.device, model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (batch, context), generator=generator).tolist()
    size = model.tokens.weight.element_size()
    read = model.cost.decode_bytes(budget, 0, size) + batch * context * model.cost.kv_bytes(budget, size)
    shared = {"budget": budget, "batch": batch, "context": context}
    found = []

    def row(path: str, seconds: float, nbytes: int) -> None:
        step = seconds / tokens
        speed = {"ms_per_step": step * 1e3, "tokens_per_second": batch / step, "bytes": nbytes}
        found.append({"path": path, **shared, **speed})

    row("plain", best_of(3, device, _plain(model, Trajectory.uniform(budget), ids, tokens)), read)
    if Fast.ready(model):
        from loopformer.inference.decoder import MOST_INT8_ROWS

        row("fused", best_of(3, device, _fused(model, budget, ids, tokens, None)), read)
        if weights is not None and batch <= MOST_INT8_ROWS:
            parameters = model.cost.parameters.stack * budget + model.cost.head_products
            less = parameters * (size - 1)
            row("fused int8", best_of(3, device, _fused(model, budget, ids, tokens, weights)), read - less)
    return found


@torch.no_grad()
def _plain(model: LoopedLM, route: Trajectory, ids: list[list[int]], tokens: int) -> Callable[[], Tensor]:
    """One token at a time through the cache, as generate.py does."""
    cache, first = prefill(model, ids, [route] * len(ids))
    lengths = list(cache.lengths)

    @torch.no_grad()
    def run() -> Tensor:
        cache.lengths, hidden = list(lengths), first
        for _ in range(tokens):
            hidden = model.extend(model.head(hidden).argmax(-1, keepdim=True), cache, check=False)[:, 0]
        return hidden

    return run


def _fused(
    model: LoopedLM, budget: int, ids: list[list[int]], tokens: int, weights: Weights | None
) -> Callable[[], Tensor]:
    from loopformer.inference.decoder import Decoder

    decoder = Decoder(model, Trajectory.uniform(budget), len(ids), weights)
    decoder.prefill(ids)
    lengths = list(decoder.cache.lengths)

    def run() -> Tensor:
        decoder.cache.lengths = list(lengths)
        decoder.lengths.copy_(torch.tensor(lengths))
        return decoder.greedy(tokens)

    return run
