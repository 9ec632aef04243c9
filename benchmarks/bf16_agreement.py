"""How often bf16 chooses the same token as fp32, and cached decoding the same as uncached.

    python benchmarks/bf16_agreement.py --model runs/demo/elastic --data data/demo [--device cpu] [--out FILE]

Greedy choices at every place of 24 validation windows, each after the text's own tokens. On a GPU with Triton also
the fused path. The last line is JSON.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor

from loopformer import LoopedLM, load
from loopformer.benchmark.machine import describe, publish
from loopformer.evaluation.text import read_text
from loopformer.inference.fused.backend import DecoderPool

WINDOWS, LENGTH = 24, 64


@torch.no_grad()
def uncached(model: LoopedLM, ids: Tensor, budget: int) -> Tensor:
    """The choices [B, T] of one forward pass."""
    return model.head(model(ids, budget, logits=False).hidden)[..., : model.config.vocab].argmax(-1)


@torch.no_grad()
def cached(model: LoopedLM, ids: Tensor, budget: int) -> Tensor:
    """The choices, one token at a time through the cache."""
    cache = model.cache(budget, len(ids))
    steps = [model.head(model.extend(one, cache)[:, 0]) for one in torch.split(ids, 1, dim=1)]
    return torch.stack(steps, 1)[..., : model.config.vocab].argmax(-1)


@torch.no_grad()
def fused(model: LoopedLM, ids: Tensor, budget: int, rows: int) -> Tensor:
    """The choices of the fused kernels, `rows` windows at a time; the first place is a prefill."""
    from loopformer.inference.fused.decoder import Decoder

    decoder = Decoder(model, model.resolve(budget), rows)
    parts = []
    for part in torch.split(ids, rows):
        first = model.head(decoder.prefill(part[:, :1].tolist()))[:, : model.config.vocab]
        steps = [first, *(decoder.step(one).clone() for one in part[:, 1:].unbind(1))]
        parts.append(torch.stack(steps, 1).argmax(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    lm = load(asked.model)
    documents = [one for one in read_text(asked.data, lm.need_tokenizer()).documents if len(one) >= LENGTH]
    ids = torch.tensor([one[:LENGTH].tolist() for one in documents[:WINDOWS]], device=asked.device)
    exact = lm.model.to(asked.device)
    low = copy.deepcopy(exact).to(torch.bfloat16)
    rows = []
    for budget in range(1, exact.config.loops + 1):
        wanted = uncached(exact, ids, budget)
        ways = {"fp32, cached": cached(exact, ids, budget), "bf16, uncached": uncached(low, ids, budget)}
        ways["bf16, cached"] = cached(low, ids, budget)
        if DecoderPool.ready(low):
            ways["bf16, fused, 1 row"] = fused(low, ids, budget, 1)
            ways["bf16, fused, 8 rows"] = fused(low, ids, budget, 8)
        for name, choices in ways.items():
            rate = float((choices == wanted).float().mean())
            rows.append({"budget": budget, "path": name, "same_as_fp32_uncached": rate})
            print(f"M = {budget}  {name:20s} {rate:.4f}")
        same = float((ways["bf16, cached"] == ways["bf16, uncached"]).float().mean())
        rows.append({"budget": budget, "path": "bf16, cached", "same_as_bf16_uncached": same})
    report = {
        "benchmark": "bf16_agreement",
        "command": " ".join(["python", *sys.argv]),
        **describe(torch.device(asked.device)),
        "seed": None,
        "places": ids.numel(),
        "rows": rows,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
