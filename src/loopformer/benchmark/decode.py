"""Decoding speed: what a token takes on every path.

    report = decode(model, budgets=(8, 4, 2), batches=(1, 64), contexts=(512,))

    naive         the whole sequence again for every token, without a cache, as the authors' code does
    plain         the engine in PyTorch
    fused         the engine through fused kernels, on a GPU
    transformers  Transformers' GPT-2 of as many blocks as the budget applies, through its own cache

Decoding is greedy, from random prompts. On `plain` and `fused` requests run through the engine, with their text and
a stop string. Tokens are counted in three windows in which all requests run, after their prompts and first tokens.
The fastest window counts.

Each path, budget, batch and context is a row of the report. A window of the naive path has few tokens, and it and
Transformers' GPT-2 run at the largest budget alone. FLOPs and bytes are what a token takes with a cache, and so the
same for every path: the matmuls of one new token per row, the weights read once per loop and step and the keys of
each row (`model.cost`). MFU is over the device's peak in bf16, MBU over what a copy reaches on it. The peak of
memory is that of the timed tokens, weights included. Where a row does not fit, its figures are None. Paths that
cannot run here are in `left_out`, with the reason.
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
from loopformer.inference.decode import PlainBackend
from loopformer.inference.engine import Engine
from loopformer.inference.fused.backend import unsupported_reason
from loopformer.inference.request import Request
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

DECODE_PATHS = ("naive", "plain", "fused", "transformers")
ENGINE_PATHS = ("plain", "fused")
NAIVE_TOKENS = 4  # of a window; each runs the whole sequence
FIGURES = ("ms_per_step", "tokens_per_second", "bytes", "tflops", "mfu", "gb_per_second", "mbu", "peak_gib")
STOPS = ("\n\n###",)  # looked for in every text
MAX_WAITING = 4096  # requests, which is more than ever wait
WINDOWS = 3  # in which tokens are counted
WARM_UP_TOKENS = 4  # of each request before the windows: by then every graph that is needed was recorded


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
        raise LoopformerError(f"No path of decoding that was asked for can run here ({reasons}); ask for plain.")
    machine, detokenizer, cost = describe(model.device), DummyDetokenizer(), model.cost
    cases = [
        {"path": path, "budget": budget, "batch": batch, "context": context}
        for path in available
        for batch, context, budget in product(
            batches, contexts, budgets if path in ENGINE_PATHS else [max(budgets)]
        )
    ]

    def measure(case: Measurement) -> Measurement:
        path, budget, batch, context = case.values()
        # Our weights lie on the device, too, but are no part of what Transformers' model takes.
        theirs = path == "transformers" and model.device.type == "cuda"
        other_bytes = torch.cuda.memory_allocated(model.device) if theirs else 0
        if path in ENGINE_PATHS:
            steps = engine_steps(
                make_engine(model, detokenizer, path, batch), make_requests(model, [budget] * batch, context)
            )
        else:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(model.config.vocab, (batch, context), generator=generator).to(model.device)
            steps = (len(chosen) for chosen in DECODERS[path](model, budget, ids))
        length = min(tokens, NAIVE_TOKENS) if path == "naive" else tokens
        rate = max(measure_windows(model.device, steps, batch * length), default=None)
        if rate is None:
            return {}
        size, peak = model.tokens.weight.element_size(), machine["peak_tflops"]
        nbytes = cost.decode_bytes(budget, 0, size) + batch * context * cost.kv_bytes(budget, size)  # of a step
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
    if (why := unsupported_reason(model)) is not None:
        needs["fused"] = f"it {why}"
    if find_spec("transformers") is None:
        needs["transformers"] = "it needs Transformers: pip install 'loopformer[hf]'"
    return {path: need for path, need in needs.items() if path in paths}


@torch.no_grad()
def _decode_naively(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
    """Run the whole sequences [B, T] for every token; one token of each row at a time."""
    while ids.shape[1] < model.config.context:
        hidden = model(ids, Trajectory.uniform(budget), logits=False, check=False).hidden[:, -1]
        chosen = model.head(hidden)[:, : model.config.vocab].argmax(-1)
        ids = torch.cat([ids, chosen[:, None]], 1)
        yield chosen.tolist()


@torch.no_grad()
def _decode_with_transformers(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
    """Decode with a GPT-2 of the same compute and its own cache; one token of each row at a time."""
    from transformers import DynamicCache

    reference, cache = gpt2(model.config, budget, model.tokens.weight), DynamicCache()
    for _ in range(model.config.context - ids.shape[1]):
        out = reference(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        yield ids[:, 0].tolist()


# From a model, a budget and prompts [B, T]: the next tokens [B], one step after the other.
DECODERS: dict[str, Callable[[LoopedLM, int, Tensor], Iterator[list[int]]]] = {
    "naive": _decode_naively,
    "transformers": _decode_with_transformers,
}


# Requests through the engine.


class DummyDetokenizer:
    """A detokenizer for any vocabulary, which maps ids to those of a small tokenizer and never ends a text."""

    eot = -1

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.train([Path(str(torch.__file__)).read_text("utf-8")], 2048)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([number % self._tokenizer.vocab_size for number in ids])


def make_engine(model: LoopedLM, detokenizer: DummyDetokenizer, path: str, rows: int) -> Engine:
    """The engine of a path, which shares nothing between prompts."""
    if path == "plain":
        return Engine(model, detokenizer, PlainBackend(model, rows, remember=0), queue=MAX_WAITING)
    from loopformer.inference.fused.batch import SharedBatch
    from loopformer.inference.fused.shared import SharedBackend

    return Engine(model, detokenizer, SharedBackend(SharedBatch(model, rows), remember=0), queue=MAX_WAITING)


def make_requests(model: LoopedLM, budgets: Sequence[int], context: int) -> list[Request]:
    """A request for each budget, with a random prompt of `context` tokens; it runs to the end of the context."""
    rng, room = random.Random(0), model.config.context - context
    return [
        Request(
            tuple(rng.randrange(model.config.vocab) for _ in range(context)),
            Trajectory.uniform(budget),
            max_tokens=room,
            stops=STOPS,
        )
        for budget in budgets
    ]


def engine_steps(engine: Engine, requests: Sequence[Request]) -> Iterator[int]:
    """Step while all requests run: the number of tokens that came. The first step is the warm-up."""
    received = {engine.submit(request): 0 for request in requests}
    while min(received.values()) < WARM_UP_TOKENS and not engine.idle:
        for event in engine.step():
            received[event.ticket] += len(event.choices)
    yield 0
    while engine.running == len(received):
        yield sum(len(event.choices) for event in engine.step())


def measure_windows(device: torch.device, steps: Iterator[int], tokens: int) -> list[float]:
    """Tokens per second in windows in which about so many tokens come; the first step is not counted.

    The end of a request cuts a window short. Such a window counts only if it is the first.
    """
    next(steps)
    reset_peak(device)
    rates: list[float] = []
    while len(rates) < WINDOWS:
        count, started = 0, time.perf_counter()  # no wait for the device: as much is under way now as at the end
        while count < tokens and (new := next(steps, None)) is not None:
            count += new
        if count == 0 or (rates and count < tokens):
            break
        rates.append(count / (time.perf_counter() - started))
    return rates
