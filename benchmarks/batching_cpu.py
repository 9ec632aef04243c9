"""Continuous batching against static batches per budget, on the CPU.

    python benchmarks/batching_cpu.py [--rows 32] [--threads 2] [--out results/batching_cpu.json]

32 requests (8 at each of the budgets 1, 2, 4 and 8, in mixed order, prompts of 16 to 128 tokens, 16 to 96 new
tokens, greedy) to a LoopFormer of random weights (3⊗8, width 512, vocabulary 16,384), fp32. Static batches hold the
requests of one budget and run one after another: once as is usual, where a batch runs until its longest request is
done, and once with rows leaving as they finish (`inference/decode.py`). The three take turns in one run, the best
of each counts. The last line is JSON.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cpu_model import VOCAB, header, random_model

from loopformer import LoopedLM, Trajectory
from loopformer.benchmark.machine import publish
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.decode import prefill
from loopformer.inference.engine import Engine, generate
from loopformer.inference.request import Request
from loopformer.lm import lay_out

BUDGETS = (1, 2, 4, 8)


def continuous(model: LoopedLM, tokenizer: Tokenizer, requests: list[Request], rows: int) -> list[tuple[int, ...]]:
    engine = Engine(model, tokenizer, rows=rows)
    for request in requests:
        engine.submit(request)
    results = {event.ticket: event.result.ids for event in engine.run() if event.result is not None}
    return [results[number] for number in range(len(requests))]


def leaving(model: LoopedLM, tokenizer: Tokenizer, requests: list[Request]) -> list[tuple[int, ...]]:
    """Batches of one budget; a row that is done leaves."""
    found: dict[int, tuple[int, ...]] = {}
    for budget in BUDGETS:
        batch = [number for number, one in enumerate(requests) if one.trajectory.budget == budget]
        for event in generate(model, tokenizer, [requests[number] for number in batch]):
            if event.result is not None:
                found[batch[event.ticket]] = event.result.ids
    return [found[number] for number in range(len(requests))]


@torch.no_grad()
def static(model: LoopedLM, tokenizer: Tokenizer, requests: list[Request]) -> list[tuple[int, ...]]:
    """Batches of one budget, all rows until the longest is done."""
    found: dict[int, tuple[int, ...]] = {}
    for budget in BUDGETS:
        batch = [number for number, one in enumerate(requests) if one.trajectory.budget == budget]
        prompts = [requests[number].prompt for number in batch]
        cache, hidden = prefill(model, prompts, [Trajectory.uniform(budget)] * len(batch))
        steps = []
        for _ in range(max(requests[number].max_tokens for number in batch)):
            steps.append(model.head(hidden)[:, :VOCAB].argmax(-1))
            hidden = model.extend(steps[-1][:, None], cache, check=False)[:, 0]
        for row, number in enumerate(batch):
            ids = torch.stack(steps)[: requests[number].max_tokens, row].tolist()
            end = ids.index(tokenizer.eot) + 1 if tokenizer.eot in ids else len(ids)
            found[number] = tuple(ids[:end])
    return [found[number] for number in range(len(requests))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    model = lay_out(random_model(context=256))
    tokenizer = Tokenizer.train(["words to make a tokenizer of"] * 4, 300)
    draw = random.Random(0)
    requests = [
        Request(
            tuple(draw.choices(range(VOCAB), k=draw.randint(16, 128))),
            Trajectory.uniform(budget),
            max_tokens=draw.randint(16, 96),
        )
        for budget in BUDGETS
        for _ in range(8)
    ]
    draw.shuffle(requests)
    ways: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "continuous": lambda: continuous(model, tokenizer, requests, asked.rows),
        "static": lambda: static(model, tokenizer, requests),
        "static, rows leave": lambda: leaving(model, tokenizer, requests),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(asked.turns):
        for name, way in ways.items():
            started = time.perf_counter()
            texts[name] = way()
            seconds[name].append(time.perf_counter() - started)
    tokens = sum(len(ids) for ids in texts["continuous"])
    best = {name: min(times) for name, times in seconds.items()}
    same = sum(
        a == b
        for one, other in zip(texts["continuous"], texts["static"], strict=True)
        for a, b in zip(one, other, strict=False)
    )
    report = {
        **header("batching_cpu", asked.threads),
        "rows": asked.rows,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "new_tokens": tokens,
        "same_tokens": same / tokens,
        "seconds": seconds,
        "tokens_per_second": {name: tokens / time for name, time in best.items()},
        "speed_up_on_static": best["static"] / best["continuous"],
        "speed_up_on_static_rows_leave": best["static, rows leave"] / best["continuous"],
    }
    for name, least in best.items():
        print(f"{name}: {tokens / least:.0f} new tokens a second")
    publish(report, asked.out)


if __name__ == "__main__":
    main()
