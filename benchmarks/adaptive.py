"""Depth by certainty against fixed budgets on a trained model: every mode, measure and fill at a few mean budgets.

    python benchmarks/adaptive.py --model runs/demo/elastic --data data/demo [--out results/…json]

Thresholds are picked on the first half of the validation windows and reported on the second, as `loopformer
calibrate` does. Gains are in nats per token against fixed budgets of equal cost. The last line is JSON.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer import LoopformerError
from loopformer.benchmark.machine import publish
from loopformer.evaluation.calibrate import Wanted, calibrate, plain
from loopformer.evaluation.simulate import cut
from loopformer.evaluation.text import read_text
from loopformer.inference.adaptive.policy import MEASURES

WAYS = [("token", "exact"), ("token", "copy"), ("prompt", "exact")]
LEFT_OUT = ("format", "version", "curve")  # of what `loopformer calibrate` writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.5, 2.5, 3.5])
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--copy-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(1)
    started = time.perf_counter()
    lm = loopformer.load(asked.model)
    rows = cut(read_text(asked.data, lm.need_tokenizer()), lm.model.config.context, asked.windows)
    found: list[dict[str, Any]] = []
    for mode, fill in WAYS:
        for measure in MEASURES:
            for budget in asked.budgets:
                wanted = Wanted(budget, mode, measure, fill, copy_tokens=asked.copy_tokens)
                row: dict[str, Any] = {"mode": mode, "fill": fill, "measure": measure, "wanted": budget}
                try:
                    row |= plain(calibrate(lm.model, rows, wanted), wanted, {})
                except LoopformerError as error:
                    found.append({**row, "impossible": str(error)})
                    print(f"{mode} {fill} {measure} {budget}: {error}", flush=True)
                    continue
                found.append({name: value for name, value in row.items() if name not in LEFT_OUT})
                for one in row["against_fixed"].values():
                    print(f"{mode} {fill} {measure} {budget}: {one['sentence']}", flush=True)
    report = {
        "benchmark": "adaptive",
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.processor() or platform.machine()}), 1 thread, fp32",
        "torch": torch.__version__,
        "seed": 0,
        "windows": len(rows),
        "context": lm.model.config.context,
        "seconds": time.perf_counter() - started,
        "rows": found,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
