"""Decoding on a CPU in float32, bfloat16 and int8, and Transformers' GPT-2 of the same compute in its dtypes.

    python benchmarks/decode_dtypes_cpu.py [--widths 512,768] [--batches 1,8,16] [--rounds 5] [--out FILE]

Models 1⊗8 with random weights and a vocabulary of 16,384. All cases run by turns, so that a busy machine slows all
of them alike, and each case counts by its median round. `ratio` is against the float32 engine of the same round,
again the median. MBU is the share of the bandwidth of a copy, which weights that stay in the cache can exceed. The
last line is JSON.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from publish import publish

from loopformer import LM, LoopedLM, ModelConfig
from loopformer.benchmark.decode import decode
from loopformer.benchmark.machine import describe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
LOOPS, CONTEXT, VOCAB = 8, 256, 16384
PROMPT, TOKENS = 64, 24


def make_model(width: int, dtype: torch.dtype) -> LoopedLM:
    """A model of the preset elastic's kind at this width."""
    torch.manual_seed(0)
    config = ModelConfig(
        blocks=1,
        loops=LOOPS,
        width=width,
        heads=width // 64,
        ffn=5 * width // 2,
        context=CONTEXT,
        vocab=VOCAB,
        positions="rotary",
        modulator_start="one",
        inject="gated",
        start="normed",
    )
    return LM(LoopedLM(config).eval()).to("cpu", dtype).model


def measure(width: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each dtype and path."""
    models = {name: make_model(width, dtype) for name, dtype in DTYPES.items()}
    cases = [(name, "plain") for name in models] + [("float32", "transformers"), ("bfloat16", "transformers")]
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        for dtype, path in cases:
            report = decode(models[dtype], (LOOPS,), (batch,), (PROMPT,), TOKENS, (path,))
            found[dtype, path] += report["rows"]
    rows = []
    for (dtype, path), rounds_of_case in found.items():
        pairs = zip(rounds_of_case, found["float32", "plain"], strict=True)
        rows.append(
            {
                "width": width,
                "batch": batch,
                "dtype": dtype,
                "path": path,
                "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rounds_of_case),
                "mbu": statistics.median(row["mbu"] for row in rounds_of_case),
                "ratio": statistics.median(
                    one["tokens_per_second"] / two["tokens_per_second"] for one, two in pairs
                ),
            }
        )
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="512,768")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = {"command": " ".join(["python", *sys.argv]), "seed": 0, **describe(torch.device("cpu"))}
    pairs = [(int(width), int(batch)) for width in args.widths.split(",") for batch in args.batches.split(",")]
    report["rows"] = [row for width, batch in pairs for row in measure(width, batch, args.rounds)]
    publish(report, args.out)


if __name__ == "__main__":
    main()
