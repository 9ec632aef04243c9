"""Self-speculation on a trained model: acceptance, and tokens per second against plain decoding in the same run.

    python benchmarks/speculation.py [--model box] [--text TEXT] [--out results/…json]

Greedy continuations of what texts begin with, by default those held out for the model; one at a time and together,
on the CPU, in seconds of its one thread. Speed-ups are ratios inside one run; the texts are compared. The last line
is JSON.
"""

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer import LM, Trajectory
from loopformer.benchmark.machine import publish
from loopformer.config.model import BOX
from loopformer.device import DTYPES
from loopformer.errors import require
from loopformer.evaluation.text import default_text, read_text
from loopformer.inference.draft import Draft
from loopformer.inference.engine import generate, speculate
from loopformer.inference.request import Request

Row = dict[str, Any]
Prompts = list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BOX)
    parser.add_argument("--text", help="as in `loopformer eval`; what is held out for the model by default")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(1)
    count, prompt_tokens, new_tokens = asked.prompts, asked.prompt_tokens, asked.new_tokens
    require(count >= 1 and prompt_tokens >= 1, "--prompts and --prompt-tokens must be 1 or more.")
    require(new_tokens >= 2, f"--new-tokens must be 2 or more, as the first one is not drafted; got {new_tokens}.")
    lm = loopformer.load(asked.model).to("cpu", DTYPES[asked.dtype])
    config = lm.model.config
    require(config.loops >= 2, "A model of 1 loop has no shorter trajectory to draft along; take another model.")
    text = asked.text or default_text(asked.model) or ""
    require(text != "", f"Nothing is held out for {asked.model}; name a --text.")
    documents = read_text(text, lm.need_tokenizer()).documents
    prompts = [tuple(one[:prompt_tokens].tolist()) for one in documents if len(one) >= prompt_tokens][:count]
    require(len(prompts) == count, f"{text} has {len(prompts)} documents of {prompt_tokens} tokens; take fewer.")
    rows = []
    for row in measure(lm, prompts, new_tokens):
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    report = {
        "benchmark": "speculation",
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{platform.processor() or platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "dtype": asked.dtype,
        "model": f"{config.blocks}x{config.loops} of width {config.width}",
        "parameters": lm.model.cost.parameters.total,
        "context": config.context,
        "seed": None,
        "prompts": len(prompts),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rows": rows,
    }
    publish(report, asked.out)


def measure(lm: LM, prompts: Prompts, new_tokens: int) -> Iterator[Row]:
    """`speculate` against `generate`, one prompt at a time and all together."""
    loops, tokenizer = lm.model.config.loops, lm.need_tokenizer()
    full = Trajectory.uniform(loops)
    requests = [Request(prompt, full, max_tokens=new_tokens) for prompt in prompts]

    def plain(batch: list[Request]) -> list[tuple[int, ...]]:
        found = {event.ticket: event.result.ids for event in generate(lm.model, tokenizer, batch) if event.result}
        return [found[row] for row in range(len(batch))]

    drafts = [Draft(Trajectory.uniform(m), k) for m in _shorter(loops) for k in (2, 4, None)]
    for together in (1, len(requests)):
        batches = [requests[start : start + together] for start in range(0, len(requests), together)]
        plain(batches[0])
        for draft in drafts:
            started = time.process_time()
            expected = [ids for batch in batches for ids in plain(batch)]
            between = time.process_time()
            runs = [speculate(lm.model, tokenizer, batch, draft) for batch in batches]
            ended = time.process_time()
            got = [result.ids for results, _ in runs for result in results]
            drafted, accepted = (
                sum(getattr(report, name) for _, report in runs) for name in ("drafted", "accepted")
            )
            yield {
                "batch": together,
                "draft": f"M = {draft.budget}",
                "length": draft.length or "adapted",
                "acceptance": accepted / drafted if drafted else None,
                "speed_up": (between - started) / (ended - between),
                "same_texts": sum(a == b for a, b in zip(expected, got, strict=True)) / len(got),
            }


def _shorter(loops: int) -> list[int]:
    """Budgets to draft with: 1, 2, 4, … below the full one."""
    return [2**power for power in range((loops - 1).bit_length())]


if __name__ == "__main__":
    main()
