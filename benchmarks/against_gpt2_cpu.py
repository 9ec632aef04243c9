"""Our generation against transformers' own `generate` of a GPT-2 of the same compute, on the CPU.

    python benchmarks/against_gpt2_cpu.py [--prompt 512] [--new 64] [--threads 2] [--out FILE]

LoopFormer 3⊗8 beside a GPT-2 of 24 layers: the same number of block applications, width 512, 8 heads, FFN 1280,
vocabulary 16,384, random weights, fp32, greedy, batch 1 and 8. Both run through what a user calls: `generate` with
its text handling on our side, `model.generate` with its cache on theirs. The two take turns in one run, the best of
each counts. Needs the extra `hf`. The last line is JSON.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import transformers
from cpu_model import VOCAB, header, random_model

from loopformer import Trajectory
from loopformer.benchmark.decode import gpt2
from loopformer.benchmark.machine import publish
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.engine import generate
from loopformer.inference.request import Request
from loopformer.lm import lay_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    ours = lay_out(random_model(asked.prompt + asked.new))
    theirs = gpt2(ours.config, 8, ours.tokens.weight)
    theirs.generation_config.pad_token_id = 0
    tokenizer = Tokenizer.train(["words to make a tokenizer of"] * 4, 300)
    draw = random.Random(0)

    def run_ours(prompts: list[tuple[int, ...]]) -> int:
        requests = [Request(prompt, Trajectory.uniform(8), max_tokens=asked.new) for prompt in prompts]
        events = list(generate(ours, tokenizer, requests))
        return sum(len(event.result.ids) for event in events if event.result is not None)

    def run_theirs(prompts: list[tuple[int, ...]]) -> int:
        ids = torch.tensor(prompts)
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked.new,
            min_new_tokens=asked.new,
            do_sample=False,
        )
        return int(out[:, asked.prompt :].numel())

    rows = []
    for batch in (1, 8):
        prompts = [tuple(draw.choices(range(VOCAB), k=asked.prompt)) for _ in range(batch)]
        rates: dict[str, list[float]] = {"ours": [], "transformers": []}
        for _ in range(asked.turns):
            for name, run in (("ours", run_ours), ("transformers", run_theirs)):
                started = time.perf_counter()
                tokens = run(prompts)
                assert tokens == batch * asked.new, "a text ended early"
                rates[name].append(tokens / (time.perf_counter() - started))
        best = {name: max(all_) for name, all_ in rates.items()}
        rows.append({"batch": batch, "tokens_per_second": rates, "ratio": best["ours"] / best["transformers"]})
        print(f"batch {batch}: ours {best['ours']:.1f}, transformers {best['transformers']:.1f} tokens a second")
    report = {
        **header("against_gpt2_cpu", asked.threads),
        "transformers": transformers.__version__,
        "prompt": asked.prompt,
        "new": asked.new,
        "batches": rows,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
