"""What int8 weights cost in perplexity, at each budget.

    python benchmarks/int8_perplexity.py --model runs/demo/elastic --data data/demo [--out results/int8_demo.json]
        [--device cuda --dtype bfloat16]

The model as it is beside one whose products and head have the values that `inference/fused/quantise.py` rounds to,
on the validation text. The embedding is not rounded. Runs on any device; the last line is JSON.

In bfloat16 those values are rounded once more, to bfloat16, which the kernels do not do: they multiply whole
numbers and apply the scale to the sum. What int8 alone costs is what it costs in float32.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from loopformer import LoopedLM, load
from loopformer.benchmark.machine import describe, publish
from loopformer.device import DTYPES
from loopformer.evaluation.text import Protocol, perplexity, read_text
from loopformer.inference.fused.quantise import quantised


class Rounded(LoopedLM):
    """A model whose head is another matrix than its embedding."""

    rounded_head: Tensor

    def head(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.rounded_head)


@torch.no_grad()
def rounded(model: LoopedLM) -> LoopedLM:
    """The model that the bytes stand for."""
    other = copy.deepcopy(model)
    weights = quantised(model)
    for block, four in zip(other.stack.each(), weights.blocks, strict=True):
        parts = (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down)
        for part, weight in zip(parts, four, strict=True):
            part.weight.copy_(weight.dequantised())
    other.__class__ = Rounded
    other.rounded_head = weights.head.dequantised().to(model.tokens.weight.dtype)
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lm = load(asked.model)
    lm.model.to(asked.device, DTYPES[asked.dtype])
    text = read_text(asked.data, lm.need_tokenizer())
    budgets = list(range(1, lm.model.config.loops + 1))
    rows = []
    for name, model in (("as it is", lm.model), ("int8", rounded(lm.model))):
        for budget, result in zip(budgets, perplexity(model, text, budgets, Protocol()), strict=True):
            rows.append({"weights": name, "budget": budget, "perplexity": result["perplexity"]})
            print(f"{name:9s} M = {budget}: {result['perplexity']:.4f}")
    plain, bytes_ = rows[: len(budgets)], rows[len(budgets) :]
    report = {
        "benchmark": "int8_perplexity",
        "command": " ".join(["python", *sys.argv]),
        **describe(torch.device(asked.device)),
        "dtype": asked.dtype,
        "seed": None,
        "tokens": result["tokens"],
        "rows": rows,
        "cost": {b["budget"]: b["perplexity"] / a["perplexity"] - 1 for a, b in zip(plain, bytes_, strict=True)},
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
