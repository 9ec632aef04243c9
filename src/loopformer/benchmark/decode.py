"""Decoding speed: the time, FLOPs and memory traffic of a token on every path.

    report = decode(model, budgets=(8, 4, 2), batches=(1, 64), contexts=(512,))

    naive                  the whole sequence again for every token, without a cache, as the published code does
    plain                  the engine in PyTorch
    fused                  the engine through fused kernels, on a GPU
    transformers           a GPT-2 of Transformers with as many blocks as the budget applies, with its own cache
    transformers compiled  the same with a static cache, through torch.compile with CUDA graphs, on a GPU

Decoding is greedy, from random prompts. On `plain` and `fused` requests run through the engine, which also makes
their text and searches it for a stop string. Tokens are counted in three windows in which all requests run, after
their prompts and first tokens. The fastest window counts.

Each path, budget, batch and context is a row of the report. The naive path and both of GPT-2 run only at the
largest budget, and windows of the naive path have few tokens. FLOPs and bytes are those of decoding with a cache,
so they are the same for every path (`model.cost`). FLOPs count the matmuls of one new token per row. Bytes count
the weights, read once per loop and step, and the keys and values of each row. MFU is relative to the device's bf16
peak, MBU to its measured copy bandwidth. Peak memory includes the weights and covers the timed tokens. The figures
of a row that runs out of memory are None. Paths that cannot run here are in `left_out`, with the reason.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.benchmark.machine import (
    Measurement,
    Say,
    check_paths,
    describe,
    gpt2,
    measure_rows,
    peak_gib,
    reset_peak,
)
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.inference.engine import Engine
from loopformer.inference.fused.batch_pool import unsupported_reason
from loopformer.inference.request import Request
from loopformer.inference.runner import PlainRunner
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

DECODE_PATHS = ("naive", "plain", "fused", "transformers", "transformers compiled")
ENGINE_PATHS = ("plain", "fused")
NAIVE_TOKENS = 4  # per row and window; each token runs the whole sequence
FIGURES = ("ms_per_step", "tokens_per_second", "bytes", "tflops", "mfu", "gb_per_second", "mbu", "peak_gib")
STOPS = ("\n\n###",)  # makes every request search its text for a stop string, as served requests do
MAX_WAITING = 4096  # requests; high enough that the engine never refuses any
WINDOWS = 3  # timed intervals of each case
WARM_UP_TOKENS = 4  # of each request before the windows: enough to capture every CUDA graph


def decode(
    model: LoopedLM,
    budgets: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int = 32,
    paths: Sequence[str] = DECODE_PATHS,
    say: Say = lambda row: None,
) -> dict[str, Any]:
    """Measure every combination by every path that can run here; `say` gets each row as it comes."""
    check_paths("decoding", paths, DECODE_PATHS)
    missing = left_out(model, paths)
    available = [path for path in dict.fromkeys(paths) if path not in missing]
    if not available:
        reasons = "; ".join(f"{path}: {need}" for path, need in missing.items())
        raise LoopformerError(f"None of these decoding paths can run here ({reasons}); measure plain.")
    machine, cost = describe(model.device), model.cost
    detokenizer = DummyDetokenizer()
    cases = [
        {"path": path, "budget": budget, "batch": batch, "context": context}
        for path in available
        for batch, context, budget in product(
            batches, contexts, budgets if path in ENGINE_PATHS else [max(budgets)]
        )
    ]

    def measure(case: Measurement) -> Measurement:
        path, budget, batch, context = case.values()
        # The looped model is on the device, too, but does not count toward the memory of Transformers' GPT-2.
        is_gpt2_on_gpu = path.startswith("transformers") and model.device.type == "cuda"
        other_bytes = torch.cuda.memory_allocated(model.device) if is_gpt2_on_gpu else 0
        if path in ENGINE_PATHS:
            steps = engine_steps(
                make_engine(model, detokenizer, path, batch), make_requests(model, [budget] * batch, context)
            )
        else:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(model.config.vocab, (batch, context), generator=generator).to(model.device)
            steps = (len(next_tokens) for next_tokens in DECODERS[path](model, budget, ids))
        length = min(tokens, NAIVE_TOKENS) if path == "naive" else tokens
        rate = max(measure_windows(model.device, steps, batch * length), default=None)
        if rate is None:
            return {}
        size, peak = model.tokens.weight.element_size(), machine["peak_tflops"]
        weight_bytes = cost.decode_bytes(budget, 0, 1 if model.dtype_name == "int8" else size)
        nbytes = weight_bytes + batch * context * cost.kv_bytes(budget, size)  # of a step
        bandwidth = rate / batch * nbytes / 1e9
        tflops = rate * cost.forward_flops(budget, context, causal=False) / 1e12
        return {
            "tokens_per_second": rate,
            "peak_gib": peak_gib(model.device, other_bytes),
            "ms_per_step": 1e3 * batch / rate,
            "bytes": nbytes,
            "tflops": tflops,
            "mfu": tflops / peak if peak and model.dtype_name == "bfloat16" else None,
            "gb_per_second": bandwidth,
            "mbu": bandwidth / machine["copy_gb_per_second"],
        }

    rows = measure_rows(model.device, cases, FIGURES, measure, say)
    report = {"benchmark": "decode", **machine, "dtype": model.dtype_name, "tokens": tokens, "rows": rows}
    return {**report, "left_out": missing}


def left_out(model: LoopedLM, paths: Sequence[str]) -> dict[str, str]:
    """The paths that cannot run here, each with what it needs."""
    needs = {}
    if (reason := unsupported_reason(model)) is not None:
        needs["fused"] = f"it {reason}"
    if model.device.type != "cuda":
        needs["transformers compiled"] = "it needs a GPU"
    if find_spec("transformers") is None:
        for path in ("transformers", "transformers compiled"):
            needs[path] = "it needs Transformers: pip install 'loopformer[hf]'"
    return {path: need for path, need in needs.items() if path in paths}


@torch.no_grad()
def _decode_naively(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
    """Yield the next token of each row, and run the whole sequences [B, T] for each."""
    while ids.shape[1] < model.config.context:
        hidden = model(ids, Trajectory.uniform(budget), logits=False, check=False).hidden[:, -1]
        next_tokens = model.head(hidden)[:, : model.config.vocab].argmax(-1)
        ids = torch.cat([ids, next_tokens[:, None]], 1)
        yield next_tokens.tolist()


@torch.no_grad()
def _decode_with_transformers(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
    """Yield the next token of each row, from a GPT-2 of the same compute with its own cache."""
    from transformers import DynamicCache

    reference, cache = gpt2(model.config, budget, model.tokens.weight), DynamicCache()
    for _ in range(model.config.context - ids.shape[1]):
        out = reference(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        yield ids[:, 0].tolist()


@torch.no_grad()
def _decode_with_static_cache(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
    """Yield the next token of each row, from the same GPT-2 through CUDA graphs that torch.compile captures."""
    from transformers import StaticCache

    reference = gpt2(model.config, budget, model.tokens.weight)
    cache = StaticCache(config=reference.config, max_cache_len=model.config.context)
    # The prompt runs uncompiled: it allocates the cache, whose addresses the graphs then hold.
    step, compiled = reference, torch.compile(reference, mode="reduce-overhead", fullgraph=True)
    for _ in range(model.config.context - ids.shape[1]):
        out = step(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, step = out.logits[:, -1].argmax(-1, keepdim=True), compiled
        yield ids[:, 0].tolist()


# path → function of a model, a budget and prompts [B, T] that yields the next tokens [B] step by step
DECODERS: dict[str, Callable[[LoopedLM, int, Tensor], Iterator[list[int]]]] = {
    "naive": _decode_naively,
    "transformers": _decode_with_transformers,
    "transformers compiled": _decode_with_static_cache,
}


# Requests through the engine.


class DummyDetokenizer:
    """A detokenizer for any vocabulary: it maps ids to those of a small tokenizer."""

    eot = -1  # no token has this id, so every request runs to its last token

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.train([Path(str(torch.__file__)).read_text("utf-8")], 2048)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([number % self._tokenizer.vocab_size for number in ids])


def make_engine(model: LoopedLM, detokenizer: DummyDetokenizer, path: str, rows: int) -> Engine:
    """An engine that decodes by the path and reuses no prefixes of earlier prompts."""
    if path == "plain":
        return Engine(model, detokenizer, PlainRunner(model, rows, share_prompts=False), queue=MAX_WAITING)
    from loopformer.inference.fused.launch import DecodeBatch
    from loopformer.inference.fused.runner import FusedRunner

    return Engine(model, detokenizer, FusedRunner(DecodeBatch(model, rows), share_prompts=False), queue=MAX_WAITING)


def make_requests(model: LoopedLM, budgets: Sequence[int], context: int) -> list[Request]:
    """A request for each budget, with a random prompt of `context` tokens; it runs to the end of the context."""
    rng, max_tokens = random.Random(0), model.config.context - context
    return [
        Request(
            tuple(rng.randrange(model.config.vocab) for _ in range(context)),
            Trajectory.uniform(budget),
            max_tokens=max_tokens,
            stops=STOPS,
        )
        for budget in budgets
    ]


def engine_steps(engine: Engine, requests: Sequence[Request]) -> Iterator[int]:
    """Yield 0 after the warm-up, then the number of new tokens of each step as long as all requests run."""
    received = {engine.submit(request): 0 for request in requests}
    while min(received.values()) < WARM_UP_TOKENS and not engine.idle:
        for event in engine.step():
            received[event.ticket] += len(event.choices)
    yield 0
    while engine.running == len(received):
        yield sum(len(event.choices) for event in engine.step())


def measure_windows(device: torch.device, steps: Iterator[int], tokens: int) -> list[float]:
    """Tokens per second in up to three windows of about `tokens` tokens each; the first step is not timed.

    The end of a request cuts a window short. Such a window counts only if it is the first.
    """
    next(steps)
    reset_peak(device)
    rates: list[float] = []
    while len(rates) < WINDOWS:
        # No synchronisation: as much GPU work is in flight at the start of a window as at its end.
        count, started = 0, time.perf_counter()
        while count < tokens and (new := next(steps, None)) is not None:
            count += new
        if count == 0 or (rates and count < tokens):
            break
        rates.append(count / (time.perf_counter() - started))
    return rates
