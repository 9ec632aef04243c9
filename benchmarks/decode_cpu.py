"""Decoding on a CPU: with a cache and without, time against budget, and Transformers' GPT-2 of the same compute.

    python benchmarks/decode_cpu.py [--prompt 512] [--new 64] [--width 512] [--out results/cpu/decode.json]
    python benchmarks/decode_cpu.py --gpt2 [--turns 4] [--out results/cpu/against_gpt2.json]   # needs `hf`

The model is a LoopFormer 3⊗8 with random weights (width 512, vocabulary 16,384), fp32, greedy. Ratios are between
measurements of one run. The GPT-2 has 24 layers of the same sizes, so as many block applications; both run through
what a user calls, take turns, and the best turn of each counts. The last line is JSON.
"""

import argparse
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from loopformer import LoopedLM, ModelConfig, Trajectory
from loopformer.benchmark.decode import gpt2
from loopformer.benchmark.machine import publish
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.decode import prefill
from loopformer.inference.engine import generate
from loopformer.inference.request import Request
from loopformer.lm import lay_out

VOCAB = 16384


def random_model(context: int, width: int) -> LoopedLM:
    """A 3⊗8 model with open gates: behind closed gates the matmuls would multiply zeros."""
    torch.manual_seed(0)
    config = ModelConfig(
        blocks=3,
        loops=8,
        width=width,
        heads=width // 64,
        ffn=width * 5 // 2,
        context=context,
        vocab=VOCAB,
        modulator_start="one",
    )
    return LoopedLM(config).eval()


@torch.no_grad()
def decode_cached(model: LoopedLM, prompt: list[int], budget: int, new: int) -> tuple[list[int], float, float]:
    """The tokens, the seconds in all, and the median seconds of a decoded token."""
    started = time.perf_counter()
    cache, hidden = prefill(model, [prompt], [Trajectory.uniform(budget)])
    tokens: list[int] = []
    seconds: list[float] = []
    for _ in range(new):
        step_started = time.perf_counter()
        tokens.append(int(model.head(hidden).argmax()))
        if len(tokens) < new:
            hidden = model.extend(torch.tensor([[tokens[-1]]]), cache, check=False)[:, 0]
            seconds.append(time.perf_counter() - step_started)
    return tokens, time.perf_counter() - started, sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def decode_uncached(model: LoopedLM, prompt: list[int], budget: int, new: int) -> tuple[list[int], float]:
    """The tokens and the seconds when every token runs the whole prefix again."""
    ids, started = list(prompt), time.perf_counter()
    for _ in range(new):
        hidden = model(torch.tensor([ids]), budget, logits=False).hidden
        ids.append(int(model.head(hidden[0, -1]).argmax()))
    return ids[len(prompt) :], time.perf_counter() - started


@torch.no_grad()
def prefill_seconds(model: LoopedLM, prompt: list[int], budget: int) -> float:
    """The seconds of a prompt and the logits of its last token."""
    started = time.perf_counter()
    _, hidden = prefill(model, [prompt], [Trajectory.uniform(budget)])
    model.head(hidden)
    return time.perf_counter() - started


def measure_budgets(args: argparse.Namespace) -> dict[str, Any]:
    """The cache against no cache, and each budget's time beside the cost model."""
    model = random_model(args.prompt + args.new, args.width)
    prompt = torch.randint(VOCAB, (args.prompt,)).tolist()
    by_rows = min(decode_cached(model, prompt, 8, min(16, args.new))[2] for _ in range(2))
    lay_out(model)  # as `loopformer.load` does
    decode_cached(model, prompt, 8, 4)
    with_cache, seconds, _ = decode_cached(model, prompt, 8, args.new)
    without, plain_seconds = decode_uncached(model, prompt, 8, args.new)
    budgets = {}
    for budget in (1, 2, 4, 8):
        budgets[budget] = {
            "ms_per_token": min(decode_cached(model, prompt, budget, args.new)[2] for _ in range(3)) * 1e3,
            "prefill_seconds": min(prefill_seconds(model, prompt, budget) for _ in range(5)),
            "prefill_flops": model.cost.prefill_flops(args.prompt, budget),
            "bytes_read": model.cost.decode_bytes(budget, args.prompt, value_bytes=4),
        }
        print(f"M = {budget}: {budgets[budget]}")

    def quarter_to_full(measured_by: str, predicted_by: str) -> dict[str, float]:
        measured, predicted = (budgets[2][name] / budgets[8][name] for name in (measured_by, predicted_by))
        return {"measured": measured, "predicted": predicted, "off_by": measured / predicted - 1}

    return {
        "width": args.width,
        "cached_seconds": seconds,
        "uncached_seconds": plain_seconds,
        "speed_up": plain_seconds / seconds,
        "ms_per_token_with_weights_by_rows": by_rows * 1e3,
        "same_tokens": sum(a == b for a, b in zip(with_cache, without, strict=True)) / args.new,
        "budgets": budgets,
        "prefill_quarter_to_full": quarter_to_full("prefill_seconds", "prefill_flops"),
        "ratio_quarter_to_full": quarter_to_full("ms_per_token", "bytes_read"),
    }


def measure_against_gpt2(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of our `generate` and of Transformers' for one prompt and for eight."""
    import transformers

    ours = lay_out(random_model(args.prompt + args.new, args.width))
    theirs = gpt2(ours.config, 8, ours.tokens.weight)
    theirs.generation_config.pad_token_id = 0
    tokenizer = Tokenizer.train(["words to make a tokenizer of"] * 4, 300)
    rng = random.Random(0)

    def run_ours(prompts: list[tuple[int, ...]]) -> int:
        requests = [Request(prompt, Trajectory.uniform(8), max_tokens=args.new) for prompt in prompts]
        events = list(generate(ours, tokenizer, requests))
        return sum(len(event.result.ids) for event in events if event.result is not None)

    def run_theirs(prompts: list[tuple[int, ...]]) -> int:
        ids = torch.tensor(prompts)
        length = {"max_new_tokens": args.new, "min_new_tokens": args.new}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        return int(out[:, args.prompt :].numel())

    rows = []
    for batch in (1, 8):
        prompts = [tuple(rng.choices(range(VOCAB), k=args.prompt)) for _ in range(batch)]
        rates: dict[str, list[float]] = {"ours": [], "transformers": []}
        for _ in range(args.turns):
            for name, run in (("ours", run_ours), ("transformers", run_theirs)):
                started = time.perf_counter()
                tokens = run(prompts)
                assert tokens == batch * args.new, "a text ended early"
                rates[name].append(tokens / (time.perf_counter() - started))
        ratio = max(rates["ours"]) / max(rates["transformers"])
        rows.append({"batch": batch, "tokens_per_second": rates, "ratio": ratio})
        print(f"batch {batch}: {ratio:.2f} times as fast as Transformers")
    return {"transformers": transformers.__version__, "batches": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gpt2", action="store_true", help="measure beside Transformers' GPT-2 instead")
    parser.add_argument("--turns", type=int, default=3, help="of each side, with --gpt2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = {
        "benchmark": "against_gpt2_cpu" if args.gpt2 else "decode_cpu",
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{platform.processor() or platform.machine()}, {args.threads} threads, fp32",
        "torch": torch.__version__,
        "seed": 0,
        "prompt": args.prompt,
        "new": args.new,
        **(measure_against_gpt2(args) if args.gpt2 else measure_budgets(args)),
    }
    publish(report, args.out)


if __name__ == "__main__":
    main()
