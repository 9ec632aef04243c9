"""Self-speculation on a trained model: acceptance, and tokens per second against plain decoding in the same run.

    python benchmarks/speculation.py --model runs/demo/elastic --data data/demo [--out results/…json]

Greedy continuations of prompts from the validation split, one at a time and together. Speed-ups are ratios inside
one run; the texts are checked to be the same. The last line is JSON.
"""

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer import Trajectory
from loopformer.benchmark.machine import publish
from loopformer.data.loader import validation_windows
from loopformer.data.tokens import TokenData
from loopformer.inference.generate import Request, generate
from loopformer.inference.speculative import Draft, speculate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(1)
    lm = loopformer.load(asked.model)
    loops, tokenizer = lm.model.config.loops, lm.need_tokenizer()
    full = Trajectory.uniform(loops)
    windows = validation_windows(TokenData.open(asked.data, "val"), asked.prompt_tokens, asked.prompts)
    prompts = [tuple(row.tolist()) for row in windows.batch(0, asked.prompts).inputs]
    requests = [Request(prompt, full, max_tokens=asked.new_tokens) for prompt in prompts]

    def plain(batch: list[Request]) -> list[tuple[int, ...]]:
        found = {event.row: event.result.ids for event in generate(lm.model, tokenizer, batch) if event.result}
        return [found[row] for row in range(len(batch))]

    rows: list[dict[str, Any]] = []
    drafts = [Draft(Trajectory.uniform(m), k) for m in range(1, loops) for k in (2, 4, None)]
    drafts += [Draft(full, 4, passes) for passes in range(1, loops)]
    for together in (1, len(requests)):
        batches = [requests[start : start + together] for start in range(0, len(requests), together)]
        plain(batches[0])
        for draft in drafts:
            started = time.perf_counter()
            expected = [ids for batch in batches for ids in plain(batch)]
            between = time.perf_counter()
            runs = [speculate(lm.model, tokenizer, batch, draft) for batch in batches]
            ended = time.perf_counter()
            got = [result.ids for results, _ in runs for result in results]
            drafted, accepted = (
                sum(getattr(report, name) for _, report in runs) for name in ("drafted", "accepted")
            )
            rows.append(
                {
                    "batch": together,
                    "draft": f"first {draft.passes} of {loops}" if draft.passes else f"M = {draft.budget}",
                    "length": draft.length or "adapted",
                    "acceptance": accepted / drafted,
                    "speed_up": (between - started) / (ended - between),
                    "same_texts": sum(a == b for a, b in zip(expected, got, strict=True)) / len(got),
                }
            )
            print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    report = {
        "benchmark": "speculation",
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{platform.processor() or platform.machine()}, 1 thread, fp32",
        "torch": torch.__version__,
        "seed": 0,
        "prompts": asked.prompts,
        "new_tokens": asked.new_tokens,
        "rows": rows,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
