"""How often bf16 chooses the same token as fp32, and cached decoding the same as uncached.

    python benchmarks/bf16_agreement.py [--model box] [--text TEXT] [--device cpu] [--out FILE]

Greedy choices at every place of the beginnings of 24 texts, by default of those held out for the model, each after
the text's own tokens; then greedy texts of 48 tokens after the first 16 of each: how many are the same alone and in
company, and, where they first part, how near the two best logits were (in fp32). With a GPU and Triton the fused
path is one more, in both dtypes. Budgets 1, 2, 4, …, L. The last line is JSON.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from publish import publish
from torch import Tensor

from loopformer import LM, LoopedLM, Trajectory, load
from loopformer.benchmark.machine import describe
from loopformer.config.model import BOX
from loopformer.errors import require
from loopformer.evaluation.text import default_text, read_text
from loopformer.inference.fused.batch_pool import unsupported_reason
from loopformer.inference.request import Request
from loopformer.inference.runner import prefill

WINDOWS, LENGTH = 24, 64
PROMPT, TOKENS = 16, 48

Ids = Sequence[tuple[int, ...]]


@torch.no_grad()
def uncached(model: LoopedLM, ids: Tensor, budget: int) -> Tensor:
    """The choices [B, T] of one forward pass."""
    return model.head(model(ids, budget, logits=False).hidden)[..., : model.config.vocab].argmax(-1)


@torch.no_grad()
def cached(model: LoopedLM, ids: Tensor, budget: int) -> Tensor:
    """The choices, one token at a time through the cache."""
    cache = model.cache(budget, len(ids))
    steps = [model.head(model.extend(one, cache)[:, 0]) for one in torch.split(ids, 1, dim=1)]
    return torch.stack(steps, 1)[..., : model.config.vocab].argmax(-1)


@torch.no_grad()
def fused(model: LoopedLM, ids: Tensor, budget: int, rows: int) -> Tensor:
    """The choices of the fused kernels, `rows` windows at a time; the first token of each is its prompt."""
    from loopformer.inference.fused.launch import DecodeBatch

    trajectory = model.resolve(budget)
    batch, parts = DecodeBatch(model, rows), []
    needed = budget * -(-ids.shape[1] // batch.page_tokens)
    for part in torch.split(ids, rows):
        cache, hidden = prefill(model, part[:, :1].tolist(), [trajectory] * len(part))
        slots = range(len(part))
        for slot in slots:
            pages = range(slot * needed, (slot + 1) * needed)
            batch.fill(slot, pages, cache.read(slot), 1, model.condition(trajectory))
        steps = [model.head(hidden)[:, : model.config.vocab]]
        for position, tokens in enumerate(part[:, 1:].t().tolist(), 1):
            batch.set_tokens_from_host({slot: (token, position) for slot, token in enumerate(tokens)})
            if rows == 1:
                steps.append(batch.single_row_logits(0, budget).clone())
            else:
                batch.run(slots, budget)
                steps.append(batch.logits(slots).clone())
        parts.append(torch.stack(steps, 1).argmax(-1))
    return torch.cat(parts)


def texts(lm: LM, prompts: Ids, budget: int, fast: bool, together: bool) -> Ids:
    """Greedy texts, all in one batch or each alone."""
    requests = [Request(prompt, Trajectory.uniform(budget), max_tokens=TOKENS) for prompt in prompts]
    batches = [requests] if together else [[request] for request in requests]
    return [
        result.ids
        for batch in batches
        for _, result in sorted(
            (event.ticket, event.result) for event in lm.events(batch, fast) if event.result is not None
        )
    ]


@torch.no_grad()
def compared(exact: LoopedLM, prompts: Ids, budget: int, wanted: Ids, other: Ids) -> dict[str, Any]:
    """The share of equal texts, and the gap between the two best logits in fp32 where the others first part."""
    gaps = []
    for prompt, one, two in zip(prompts, wanted, other, strict=True):
        if one != two:
            same = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
            ids = torch.tensor([[*prompt, *one[:same]]], device=exact.device)
            hidden = exact(ids, budget, logits=False).hidden[0, -1]
            best = exact.head(hidden)[: exact.config.vocab].topk(2).values
            gaps.append(float(best[0] - best[1]))
    median, largest = (statistics.median(gaps), max(gaps)) if gaps else (None, None)
    return {"same_texts": 1 - len(gaps) / len(prompts), "median_gap": median, "largest_gap": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BOX)
    parser.add_argument("--text", help="as in `loopformer eval`; what is held out for the model by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    lm = load(asked.model)
    text = asked.text or default_text(asked.model) or ""
    require(text != "", f"Nothing is held out for {asked.model}; name a --text.")
    documents = [one for one in read_text(text, lm.need_tokenizer()).documents if len(one) >= LENGTH]
    ids = torch.tensor([one[:LENGTH].tolist() for one in documents[:WINDOWS]], device=asked.device)
    exact = lm.to(asked.device).model
    loops = exact.config.loops
    budgets = sorted({*(2**power for power in range(loops.bit_length())), loops})
    low = copy.deepcopy(exact).to(torch.bfloat16)
    rows = []
    for budget in budgets:
        wanted = uncached(exact, ids, budget)
        ways = {"fp32, cached": cached(exact, ids, budget), "bf16, uncached": uncached(low, ids, budget)}
        ways["bf16, cached"] = cached(low, ids, budget)
        if unsupported_reason(low) is None:
            ways["bf16, fused, 1 row"] = fused(low, ids, budget, 1)
            ways["bf16, fused, 8 rows"] = fused(low, ids, budget, 8)
        for name, choices in ways.items():
            rate = float((choices == wanted).float().mean())
            rows.append({"budget": budget, "path": name, "same_as_fp32_uncached": rate})
            print(f"M = {budget}  {name:20s} {rate:.4f}")
        same = float((ways["bf16, cached"] == ways["bf16, uncached"]).float().mean())
        rows.append({"budget": budget, "path": "bf16, cached", "same_as_bf16_uncached": same})
    prompts = [tuple(row[:PROMPT].tolist()) for row in ids]
    full, rounded = LM(exact, lm.tokenizer), LM(low, lm.tokenizer)
    for budget in budgets:
        plain = {
            name: texts(one, prompts, budget, False, False) for name, one in (("fp32", full), ("bf16", rounded))
        }
        pairs = [
            ("fp32 together, fp32 alone", texts(full, prompts, budget, False, True), plain["fp32"]),
            ("bf16 alone, fp32 alone", plain["bf16"], plain["fp32"]),
            ("bf16 together, bf16 alone", texts(rounded, prompts, budget, False, True), plain["bf16"]),
        ]
        if unsupported_reason(low) is None:
            for dtype, one in (("fp32", full), ("bf16", rounded)):
                for company, together in (("alone", False), ("together", True)):
                    made = texts(one, prompts, budget, True, together)
                    pairs.append((f"fused {dtype} {company}, {dtype} alone", made, plain[dtype]))
        for name, made, wanted_texts in pairs:
            row = {"budget": budget, "texts": name, **compared(exact, prompts, budget, wanted_texts, made)}
            rows.append(row)
            print(f"M = {budget}  {name:32s} same {row['same_texts']:.3f}, gap where they part {row['median_gap']}")
    report = {
        "benchmark": "bf16_agreement",
        "command": " ".join(["python", *sys.argv]),
        **describe(torch.device(asked.device)),
        "seed": None,
        "places": ids.numel(),
        "rows": rows,
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
