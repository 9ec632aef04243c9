"""Training at the paper's size: the naive path, ours, and ours with part of the activations computed again.

    python benchmarks/train_variants.py [--steps 8] [--out FILE]

Forward and backward of a micro-batch of 12 x 1024 random tokens, full route and a short one of 4 steps, bf16,
random weights with open gates. `kept` is the share of activations that PyTorch's compiler may keep for the backward
pass (`activation_memory_budget`). Needs a GPU. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch._functorch.config as compiler

from loopformer.benchmark.machine import describe, publish
from loopformer.benchmark.train import mean_short, measure, naive, ours
from loopformer.config import load_run, with_expected_vocab

TOKENS = 12 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    config = with_expected_vocab(*load_run("paper/loopformer-3x8")).model
    ids = torch.randint(config.vocab, (12, config.context + 1), device=device)
    short, rows = mean_short(config), []
    variants = [("naive", short, 1.0), ("ours", short, 1.0), ("ours", None, 1.0), ("ours", short, 0.75)]
    for path, route, kept in [*variants, ("ours", short, 0.55)]:
        torch._dynamo.reset()
        compiler.activation_memory_budget = kept
        step = naive(config, ids, route, False) if path == "naive" else ours(config, ids, route, True)
        found = measure(step, device, low=True, steps=asked.steps)
        speed = {"tokens_per_second": TOKENS / found["ms"] * 1e3, **found}
        rows.append({"path": path, "routes": "full and short" if route else "full", "kept": kept, **speed})
        print(json.dumps(rows[-1]))
    report = {
        "benchmark": "train_variants",
        "command": " ".join(["python", *sys.argv]),
        **describe(device),
        "seed": 0,
        "rows": rows,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
