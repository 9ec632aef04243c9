"""Self-speculation on a trained model: acceptance, and tokens per second against plain decoding in the same run.

    python benchmarks/speculation.py [--model box] [--text TEXT] [--out results/…json]
    python benchmarks/speculation.py --fast [--model runs/mine] [--int8]      # fused, on a GPU

Greedy continuations of what texts begin with, by default those held out for the model; without --fast one at a time
and together, on the CPU, in seconds of its one thread.
Speed-ups are ratios inside one run; the texts are compared. The last line is JSON.

With --fast, prompts are continued one at a time, by `--new-tokens` tokens whatever they are. Speed is that of
decoding alone; `speed_up_with_prompt` counts the prompts too, which speculation runs along two trajectories. In
bf16 products of several rows round otherwise than those of one, so a text may part from the plain one where two
tokens are almost equally likely: `same_before_parting` is the share of tokens before that.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer import LM, Trajectory
from loopformer.benchmark.machine import describe, publish
from loopformer.config.model import BOX
from loopformer.device import DTYPES
from loopformer.errors import require
from loopformer.evaluation.text import default_text, read_text
from loopformer.inference.draft import Draft
from loopformer.inference.engine import generate, speculate
from loopformer.inference.fused.quantise import quantised
from loopformer.inference.request import Request

Row = dict[str, Any]
Prompts = list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BOX)
    parser.add_argument("--text", help="as in `loopformer eval`; what is held out for the model by default")
    parser.add_argument("--fast", action="store_true", help="fused decoding on a GPU")
    parser.add_argument("--int8", action="store_true", help="with --fast: int8 weights, for all")
    parser.add_argument("--dtype", choices=DTYPES, help="float32, with --fast bfloat16")
    parser.add_argument("--prompts", type=int, help="16, with --fast 8")
    parser.add_argument("--prompt-tokens", type=int, help="32, with --fast 128")
    parser.add_argument("--new-tokens", type=int, help="64, with --fast 128")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    require(asked.fast or not asked.int8, "--int8 goes with --fast.")
    require(torch.cuda.is_available() or not asked.fast, "--fast needs a GPU; leave it out.")

    torch.set_num_threads(1)
    count, prompt_tokens, new_tokens = (
        (fast if asked.fast else usual) if given is None else given
        for given, usual, fast in (
            (asked.prompts, 16, 8),
            (asked.prompt_tokens, 32, 128),
            (asked.new_tokens, 64, 128),
        )
    )
    require(count >= 1 and prompt_tokens >= 1, "--prompts and --prompt-tokens must be 1 or more.")
    require(new_tokens >= 2, f"--new-tokens must be 2 or more, as the first one is not drafted; got {new_tokens}.")
    dtype = asked.dtype or ("bfloat16" if asked.fast else "float32")
    lm = loopformer.load(asked.model).to("cuda" if asked.fast else "cpu", DTYPES[dtype])
    config = lm.model.config
    require(config.loops >= 2, "A model of 1 loop has no shorter trajectory to draft along; take another model.")
    text = asked.text or default_text(asked.model) or ""
    require(text != "", f"Nothing is held out for {asked.model}; name a --text.")
    documents = read_text(text, lm.need_tokenizer()).documents
    prompts = [tuple(one[:prompt_tokens].tolist()) for one in documents if len(one) >= prompt_tokens][:count]
    require(len(prompts) == count, f"{text} has {len(prompts)} documents of {prompt_tokens} tokens; take fewer.")
    machine: Row = {
        "hardware": f"{platform.processor() or platform.machine()}, 1 thread",
        "torch": torch.__version__,
    }
    if asked.fast:
        require(
            prompt_tokens + new_tokens <= config.context,
            f"{prompt_tokens} + {new_tokens} tokens do not fit the context of {config.context}; take fewer.",
        )
        machine = describe(lm.model.device)
    rows = []
    for row in fused(lm, prompts, new_tokens, asked.int8) if asked.fast else eager(lm, prompts, new_tokens):
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    report = {
        "benchmark": "fast speculation" if asked.fast else "speculation",
        "command": " ".join(["python", *sys.argv]),
        **machine,
        "dtype": dtype,
        "int8": asked.int8,
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


def eager(lm: LM, prompts: Prompts, new_tokens: int) -> Iterator[Row]:
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


@torch.no_grad()
def fused(lm: LM, prompts: Prompts, new_tokens: int, int8: bool) -> Iterator[Row]:
    """`Speculator` against `Decoder.greedy`, which is timed anew before each budget of a draft."""
    from loopformer.inference.fused.decoder import Decoder
    from loopformer.inference.fused.speculate import Speculator

    model, loops = lm.model, lm.model.config.loops
    full, weights = Trajectory.uniform(loops), quantised(model) if int8 else None
    decoder = Decoder(model, full, 1, weights)
    kept: list[tuple[int, int]] = []  # drafted and accepted, round by round

    def likeliest(hidden: torch.Tensor) -> int:
        return int(model.head(hidden)[: model.config.vocab].argmax())

    def fill(prompt: tuple[int, ...]) -> int:
        return likeliest(decoder.prefill([prompt])[0])

    def greedy(first: int) -> list[int]:
        decoder.ids.fill_(first)
        found: list[int] = decoder.greedy(new_tokens - 1)[:, 0].tolist()
        return found

    def fill_both(prompt: tuple[int, ...]) -> int:
        return likeliest(speculator.prefill(prompt))

    def speculated(first: int) -> list[int]:
        verdicts = list(speculator.follow(first, new_tokens - 1))
        kept.extend((verdict.drafted, len(verdict.tokens) - 1) for verdict in verdicts)
        return [token for verdict in verdicts for token in verdict.tokens][: new_tokens - 1]

    for budget in _shorter(loops):
        _timed(prompts[:1], fill, greedy)
        expected, filled, decoded = _timed(prompts, fill, greedy)
        tokens = len(prompts) * (new_tokens - 1)
        yield {"path": "plain", "budget": loops, "tokens_per_second": tokens / decoded}
        for length in (1, 2, 3) if int8 else (2, 4, 6):
            speculator = Speculator(model, full, Draft(Trajectory.uniform(budget), length), weights)
            _timed(prompts[:1], fill_both, speculated)  # compiles
            kept.clear()
            got, filled_twice, speculating = _timed(prompts, fill_both, speculated)
            drafted, accepted = (sum(column) for column in zip(*kept, strict=True))
            yield {
                "path": "speculation",
                "draft": budget,
                "length": length,
                "acceptance": accepted / drafted if drafted else None,
                "tokens_per_round": (accepted + len(kept)) / len(kept),
                "tokens_per_second": tokens / speculating,
                "speed_up": decoded / speculating,
                "speed_up_with_prompt": (filled + decoded) / (filled_twice + speculating),
                "same_texts": sum(a == b for a, b in zip(expected, got, strict=True)) / len(got),
                "same_before_parting": sum(map(_common, expected, got)) / (tokens + len(got)),
            }


def _shorter(loops: int) -> list[int]:
    """Budgets to draft with: 1, 2, 4, … below the full one."""
    return [2**power for power in range((loops - 1).bit_length())]


def _timed(
    prompts: Prompts, fill: Callable[[tuple[int, ...]], int], follow: Callable[[int], list[int]]
) -> tuple[list[list[int]], float, float]:
    """The texts, and the seconds of all prompts and of all decoding; both ways end with what the host has read."""
    texts, filling, following = [], 0.0, 0.0
    for prompt in prompts:
        started = time.perf_counter()
        first = fill(prompt)
        between = time.perf_counter()
        texts.append([first, *follow(first)])
        filling, following = filling + between - started, following + time.perf_counter() - between
    return texts, filling, following


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens are the same before the first that is not."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


if __name__ == "__main__":
    main()
