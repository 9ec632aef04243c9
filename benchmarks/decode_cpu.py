"""Decoding on the CPU: with the cache against without it, and time against budget beside the cost model.

    python benchmarks/decode_cpu.py [--prompt 512] [--new 64] [--out results/decode_cpu.json]

A LoopFormer of random weights (3⊗8, width 512, vocabulary 16,384 by default), fp32, batch 1, greedy. Ratios are
inside one run. The last line is JSON.
"""

import argparse
import time
from pathlib import Path

import torch
from cpu_model import VOCAB, header, random_model

from loopformer import LoopedLM, Trajectory
from loopformer.benchmark.machine import publish
from loopformer.inference.decode import prefill
from loopformer.lm import lay_out


@torch.no_grad()
def cached(model: LoopedLM, prompt: list[int], budget: int, new: int) -> tuple[list[int], float, float]:
    """Tokens, seconds in all, and the median seconds of one decoded token."""
    started = time.perf_counter()
    cache, hidden = prefill(model, [prompt], [Trajectory.uniform(budget)])
    tokens, each = [], []
    for _ in range(new):
        begun = time.perf_counter()
        tokens.append(int(model.head(hidden).argmax()))
        if len(tokens) < new:
            hidden = model.extend(torch.tensor([[tokens[-1]]]), cache, check=False)[:, 0]
            each.append(time.perf_counter() - begun)
    return tokens, time.perf_counter() - started, sorted(each)[len(each) // 2]


@torch.no_grad()
def uncached(model: LoopedLM, prompt: list[int], budget: int, new: int) -> tuple[list[int], float]:
    """The whole prefix anew for every token, with the head on the last position only."""
    ids, started = list(prompt), time.perf_counter()
    for _ in range(new):
        hidden = model(torch.tensor([ids]), budget, logits=False).hidden
        ids.append(int(model.head(hidden[0, -1]).argmax()))
    return ids[len(prompt) :], time.perf_counter() - started


@torch.no_grad()
def prefill_seconds(model: LoopedLM, prompt: list[int], budget: int) -> float:
    """The prompt, and the logits of its last token."""
    started = time.perf_counter()
    _, hidden = prefill(model, [prompt], [Trajectory.uniform(budget)])
    model.head(hidden)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    model = random_model(asked.prompt + asked.new, asked.width)
    prompt = torch.randint(VOCAB, (asked.prompt,)).tolist()
    by_rows = min(cached(model, prompt, 8, min(16, asked.new))[2] for _ in range(2))
    lay_out(model)  # as `loopformer.load` does
    cached(model, prompt, 8, 4)
    with_cache, seconds, _ = cached(model, prompt, 8, asked.new)
    without, plain_seconds = uncached(model, prompt, 8, asked.new)
    budgets = {}
    for budget in (1, 2, 4, 8):
        median = min(cached(model, prompt, budget, asked.new)[2] for _ in range(3))
        budgets[budget] = {
            "ms_per_token": median * 1e3,
            "prefill_seconds": min(prefill_seconds(model, prompt, budget) for _ in range(5)),
            "prefill_flops": model.cost.prefill_flops(asked.prompt, budget),
            "bytes_read": model.cost.decode_bytes(budget, asked.prompt, value_bytes=4),
        }
        first = budgets[budget]["prefill_seconds"]
        print(f"M = {budget}: {median * 1e3:.2f} ms per token, {first * 1e3:.1f} ms for the prompt")
    measured = budgets[2]["ms_per_token"] / budgets[8]["ms_per_token"]
    predicted = budgets[2]["bytes_read"] / budgets[8]["bytes_read"]
    first = budgets[2]["prefill_seconds"] / budgets[8]["prefill_seconds"]
    counted = budgets[2]["prefill_flops"] / budgets[8]["prefill_flops"]
    report = {
        **header("decode_cpu", asked.threads),
        "prompt": asked.prompt,
        "new": asked.new,
        "width": asked.width,
        "cached_seconds": seconds,
        "uncached_seconds": plain_seconds,
        "speed_up": plain_seconds / seconds,
        "ms_per_token_with_weights_by_rows": by_rows * 1e3,
        "same_tokens": sum(a == b for a, b in zip(with_cache, without, strict=True)) / asked.new,
        "budgets": budgets,
        "prefill_quarter_to_full": {"measured": first, "predicted": counted, "off_by": first / counted - 1},
        "ratio_quarter_to_full": {"measured": measured, "predicted": predicted, "off_by": measured / predicted - 1},
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
