"""Decoding speed: what a token takes on every path, and what the engine serves.

    report = decode(model, budgets=(1, 2, 4, 8), batches=(1, 64), contexts=(512,))
    report = engine(model, rows=64, budgets=(8, 4, 2), context=512, tokens=64)

    naive         the whole sequence again for every token, without a cache, as the authors' code does
    plain         the engine in PyTorch
    fused         the engine through our kernels, on a GPU
    transformers  Transformers' GPT-2 of as many blocks as the budget applies, through its own cache

Decoding is greedy, from random prompts. On `plain` and `fused` requests run through the engine, with their text and
a stop string. Time is taken in windows in which all of them run, after their prompts and first tokens.

`decode` measures each path, budget, batch and context. The fastest of three windows counts, or of three runs where
there is no engine. The naive path is timed over few tokens, and it and Transformers' GPT-2 at the largest budget
alone. FLOPs and bytes are what a token takes with a cache, and so the same for every path: the matmuls of one new
token per row, the weights read once per loop and step and the keys of each row (`model.cost`). MFU is over the
device's peak in bf16, MBU over what a copy reaches on it. The peak of memory is that of the timed tokens, weights
included. Where a row does not fit, its figures are None. Paths that cannot run here are in `left_out`, with the
reason.

`engine` measures tokens per second, the median of three windows: at one budget, of one request alone, and `mixed`,
with as many requests of each budget at once. Then requests of mixed budgets and lengths arrive at random (Poisson),
at shares of the rate that a full queue sustains. The time to the first token and between tokens (none between those
that come at once) is measured, also while long prompts come in.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.benchmark.machine import Measurement, best_of, describe, free_memory
from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, nearest, require
from loopformer.inference.decode import PlainBackend
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.fused.backend import unsupported_reason
from loopformer.inference.request import Event, Request
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

DecodeRun = Callable[[], Tensor]  # the tokens [B, tokens] after the first one of each prompt, the same every time

DECODE_PATHS = ("naive", "plain", "fused", "transformers")
ENGINE_PATHS = ("plain", "fused")
NAIVE_TOKENS = 4  # each runs the whole sequence
FIGURES = ("ms_per_step", "tokens_per_second", "tflops", "mfu", "gb_per_second", "mbu", "peak_gib")
STOPS = ("\n\n###",)  # looked for in every text
LOADS = (0.5, 0.8, 1.0)
SHORT_PROMPT, LONG_PROMPT = 32, 900  # tokens
MAX_WAITING = 4096  # requests, which is more than ever wait
LONG_EVERY = 0.5  # seconds from one long prompt to the next
WINDOWS = 3  # in which tokens are counted
WARM_UP_TOKENS = 4  # of each request before the windows: by then every graph that is needed was recorded


# Time per token.


def decode(
    model: LoopedLM,
    budgets: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int = 32,
    paths: Sequence[str] = DECODE_PATHS,
    say: Callable[[Measurement], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every combination by every path that can run here; `say` gets each row as it comes."""
    missing = left_out(model, paths)
    for path in paths:
        if path not in DECODE_PATHS:
            raise LoopformerError(f"There is no path {path!r} of decoding; {nearest(path, list(DECODE_PATHS))}")
    available = [path for path in dict.fromkeys(paths) if path not in missing]
    if not available:
        reasons = "; ".join(f"{path}: {need}" for path, need in missing.items())
        raise LoopformerError(f"No path of decoding that was asked for can run here ({reasons}); ask for plain.")
    machine, detokenizer = describe(model.device), DummyDetokenizer()
    rows: list[Measurement] = []
    for path in available:
        timed = min(tokens, NAIVE_TOKENS) if path == "naive" else tokens
        measured = budgets if path in ENGINE_PATHS else [max(budgets)]
        for batch, context, budget in product(batches, contexts, measured):
            cost, size = model.cost, model.tokens.weight.element_size()
            nbytes = cost.decode_bytes(budget, 0, size) + batch * context * cost.kv_bytes(budget, size)
            row: Measurement = {"path": path, "budget": budget, "batch": batch, "context": context, "tokens": timed}
            row |= {"bytes": nbytes, **dict.fromkeys(FIGURES)}
            try:
                if path in ENGINE_PATHS:
                    figures = _time_engine(model, detokenizer, path, budget, batch, context, timed)
                else:
                    figures = _time_run(model, path, budget, batch, context, timed)
                if figures is not None:
                    row |= figures
                    row |= _rates(model, row, machine)
            except torch.OutOfMemoryError:
                pass
            rows.append(row)
            say(row)
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


def _time_engine(
    model: LoopedLM,
    detokenizer: DummyDetokenizer,
    path: str,
    budget: int,
    batch: int,
    context: int,
    tokens: int,
) -> Measurement | None:
    """Milliseconds of a step through the engine and its peak of memory; None if not all rows run at once."""
    free_memory(model.device)
    engine = make_engine(model, detokenizer, path, batch)
    budgets = start_requests(engine, make_requests(model, [budget] * batch, context))
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    windows = measure_windows(engine, budgets, batch * tokens)
    if not windows:
        return None
    return {"ms_per_step": 1e3 * batch / max(window.rate for window in windows), "peak_gib": _peak_gib(model)}


def _time_run(model: LoopedLM, path: str, budget: int, batch: int, context: int, tokens: int) -> Measurement:
    """Milliseconds of a step without an engine, and its peak of memory."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab, (batch, context), generator=generator).to(device)
    free_memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run = RUNS[path](model, budget, ids, tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_of(3, device, run)
    # Our weights lie there, too, but are no part of what Transformers' model takes.
    return {
        "ms_per_step": seconds / tokens * 1e3,
        "peak_gib": _peak_gib(model, before if path == "transformers" else 0),
    }


def _peak_gib(model: LoopedLM, other_bytes: int = 0) -> float | None:
    if model.device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(model.device) - other_bytes) / 2**30


def _rates(model: LoopedLM, row: Measurement, machine: dict[str, Any]) -> Measurement:
    """Tokens, FLOPs and bytes a second, and their shares of what the device can do."""
    seconds, peak = row["ms_per_step"] / 1e3, machine["peak_tflops"]
    flops = row["batch"] * model.cost.forward_flops(row["budget"], row["context"], causal=False)
    tflops, bandwidth = flops / seconds / 1e12, row["bytes"] / seconds / 1e9
    return {
        "tokens_per_second": row["batch"] / seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak and model.dtype_name == "bfloat16" else None,
        "gb_per_second": bandwidth,
        "mbu": bandwidth / machine["copy_gb_per_second"],
    }


@torch.no_grad()
def _naive(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> DecodeRun:
    trajectory = Trajectory.uniform(budget)

    def append_token(text: Tensor) -> Tensor:
        """Run the whole sequence [B, T] for one more token."""
        hidden = model(text, trajectory, logits=False, check=False).hidden[:, -1]
        return torch.cat([text, model.head(hidden)[:, : model.config.vocab].argmax(-1, keepdim=True)], 1)

    start = append_token(ids)

    @torch.no_grad()
    def run() -> Tensor:
        text = start
        for _ in range(tokens):
            text = append_token(text)
        return text[:, -tokens:]

    return run


@torch.no_grad()
def _transformers(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> DecodeRun:
    from transformers import DynamicCache

    reference, cache = gpt2(model.config, budget, model.tokens.weight), DynamicCache()

    def next_token(ids: Tensor) -> Tensor:
        """The most likely token [B, 1] after new ones [B, T]."""
        out = reference(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return best

    first = next_token(ids)

    @torch.no_grad()
    def run() -> Tensor:
        chosen = [first]
        for _ in range(tokens):
            chosen.append(next_token(chosen[-1]))
        cache.crop(-tokens)  # back to the prompt: a negative number says how many tokens to drop
        return torch.cat(chosen[1:], 1)

    return run


def gpt2(config: ModelConfig, budget: int, like: Tensor) -> Any:
    """A GPT-2 of the same compute and random weights, on the device and in the dtype of a tensor."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=config.vocab_rows,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.blocks * budget,
        n_head=config.heads,
        n_inner=config.ffn,
        bos_token_id=0,
        eos_token_id=0,
    )
    with like.device:
        return AutoModelForCausalLM.from_config(shape, dtype=like.dtype).eval()


RUNS: dict[str, Callable[[LoopedLM, int, Tensor, int], DecodeRun]] = {  # model, budget, prompts [B, T], tokens
    "naive": _naive,
    "transformers": _transformers,
}


# Requests through the engine.


class DummyDetokenizer:
    """A detokenizer for any vocabulary, which maps ids to those of a small tokenizer and never ends a text."""

    eot = -1

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.train([Path(str(torch.__file__)).read_text("utf-8")], 2048)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([number % self._tokenizer.vocab_size for number in ids])


@dataclass(frozen=True)
class TokenWindow:
    """Seconds in which all requests ran, and how many tokens of each budget they got."""

    seconds: float
    tokens: dict[int, int]

    @property
    def rate(self) -> float:
        return sum(self.tokens.values()) / self.seconds


def make_engine(model: LoopedLM, detokenizer: DummyDetokenizer, path: str, rows: int) -> Engine:
    """The engine of a path, which shares nothing between prompts."""
    if path == "plain":
        return Engine(model, detokenizer, PlainBackend(model, rows, remember=0), queue=MAX_WAITING)
    from loopformer.inference.fused.batch import SharedBatch
    from loopformer.inference.fused.shared import SharedBackend

    backend = SharedBackend(SharedBatch(model, rows), remember=0)
    return Engine(model, detokenizer, backend, queue=MAX_WAITING)


def make_requests(model: LoopedLM, budgets: Sequence[int], context: int) -> list[Request]:
    """A request for each budget, with a random prompt of `context` tokens; it runs to the end of the context."""
    rng = random.Random(0)
    return [
        Request(
            tuple(rng.randrange(model.config.vocab) for _ in range(context)),
            Trajectory.uniform(budget),
            max_tokens=model.config.context - context,
            stops=STOPS,
        )
        for budget in budgets
    ]


def start_requests(engine: Engine, requests: Sequence[Request]) -> dict[int, int]:
    """Run requests until each has its first tokens: the budget of each ticket."""
    budgets = {engine.submit(request): request.trajectory.budget for request in requests}
    received = dict.fromkeys(budgets, 0)
    while min(received.values()) < WARM_UP_TOKENS and not engine.idle:
        for event in engine.step():
            received[event.ticket] += len(event.choices)
    return budgets


def measure_windows(engine: Engine, budgets: dict[int, int], tokens: int) -> list[TokenWindow]:
    """Windows in which all requests run and about so many tokens come; none if not all of them run at once.

    The end of a request cuts a window short. Such a window counts only if it is the first.
    """
    windows: list[TokenWindow] = []
    while len(windows) < WINDOWS and engine.running == len(budgets):
        counts = dict.fromkeys(budgets.values(), 0)
        started = time.perf_counter()  # as much is under way now as at the end
        while engine.running == len(budgets) and sum(counts.values()) < tokens:
            for event in engine.step():
                counts[budgets[event.ticket]] += len(event.choices)
        window = TokenWindow(time.perf_counter() - started, counts)
        if engine.running == len(budgets) or not windows:
            windows.append(window)
    return windows


# What the engine serves.


def engine(
    model: LoopedLM,
    rows: int = 64,
    budgets: Sequence[int] = (8, 4, 2),
    context: int = 512,
    tokens: int = 64,
    paths: Sequence[str] = ENGINE_PATHS,
    seconds: float = 8.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Everything, as plain numbers; without the paths that cannot run here."""
    detokenizer, missing = DummyDetokenizer(), left_out(model, paths)
    report: dict[str, Any] = {
        "benchmark": "engine",
        **describe(model.device),
        "dtype": model.dtype_name,
        "rows": rows,
        "context": context,
        "tokens": tokens,
        "left_out": missing,
    }

    def median_window(path: str, batch: Sequence[int], name: str) -> TokenWindow:
        """The median window of requests of these budgets, all at once; the report gets the rates of all windows."""
        free_memory(model.device)
        engine = make_engine(model, detokenizer, path, len(batch))
        started = start_requests(engine, make_requests(model, batch, context))
        windows = measure_windows(engine, started, len(batch) * tokens)
        require(
            len(windows) > 0,
            f"Only {engine.running} of {len(batch)} requests run at once; ask for fewer --rows or less --context.",
        )
        report[path]["windows"][name] = [window.rate for window in windows]
        return sorted(windows, key=lambda window: window.rate)[(len(windows) - 1) // 2]

    for path in [path for path in paths if path not in missing]:
        rates = report[path] = {"windows": {}}
        for budget in budgets:
            rates[str(budget)] = median_window(path, [budget] * rows, str(budget)).rate
            say(f"{path:8} M={budget}: {rates[str(budget)]:,.0f} tokens/s")
        rates["alone"] = median_window(path, budgets[:1], "alone").rate
        say(f"{path:8} one request of M={budgets[0]}: {rates['alone']:,.0f} tokens/s")
        median = median_window(path, [budget for budget in budgets for _ in range(rows)], "mixed")
        rates["mixed"] = {**vars(median), "tokens_per_second": median.rate}
        say(f"{path:8} mixed: {median.rate:,.0f} tokens/s")
        free_memory(model.device)
        loads = _measure_loads(
            make_engine(model, detokenizer, path, rows), path, budgets, context, tokens, seconds, say
        )
        rates["load"] = list(loads)
    return report


@dataclass
class Load:
    """When the tokens of requests came, in seconds."""

    arrived: dict[int, float] = field(default_factory=dict)
    ended: int = 0
    came: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, events: Sequence[Event], now: float) -> None:
        for event in events:
            self.came[event.ticket] += [now] * len(event.choices)
            self.ended += event.result is not None

    def summary(self, seconds: float) -> dict[str, Any]:
        first = [times[0] - self.arrived[ticket] for ticket, times in self.came.items() if times]
        between = [after - before for times in self.came.values() for before, after in pairwise(times)]
        tokens = sum(map(len, self.came.values()))
        return {
            "requests": len(self.came),
            "ended": self.ended,
            "tokens_per_second": tokens / seconds,
            "first_token_ms": _percentiles(first),
            "between_tokens_ms": _percentiles(between),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {name: 1e3 * ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}


def _measure_loads(
    engine: Engine,
    path: str,
    budgets: Sequence[int],
    context: int,
    tokens: int,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Measure the rate that a full queue sustains, then shares of it, then half of it as long prompts come in."""
    rng, config = random.Random(1), engine.model.config

    def draw_request(prompt: int | None = None) -> Request:
        length = prompt or rng.randrange(min(SHORT_PROMPT, context), context + 1)
        ids = tuple(rng.randrange(config.vocab) for _ in range(length))
        max_tokens = min(rng.randrange(tokens // 2, 2 * tokens), config.context - length)
        return Request(ids, Trajectory.uniform(rng.choice(budgets)), max_tokens=max_tokens, stops=STOPS)

    warm_up(engine, budgets)
    full = _arrivals(engine, draw_request, None, seconds)
    rate = full["ended"] / full["seconds"]
    say(f"{path:8} sustains {rate:.1f} requests/s, {full['tokens_per_second']:,.0f} tokens/s")
    yield {"load": "full queue", "requests_per_second": rate, **full}
    if not rate:
        say(f"{path:8} ended no request in {seconds:g} s; give it more --seconds")
        return
    for share in LOADS:
        arrivals = _arrivals(engine, draw_request, share * rate, seconds)
        say(f"{path:8} at {100 * share:.0f} %: " + _times(arrivals))
        yield {"load": share, **arrivals}
    long = min(LONG_PROMPT, config.context - tokens)
    arrivals = _arrivals(engine, draw_request, LOADS[0] * rate, seconds, long)
    say(f"{path:8} at {100 * LOADS[0]:.0f} % and prompts of {long}: " + _times(arrivals))
    yield {"load": LOADS[0], "long_prompts": long, **arrivals}


def _times(arrivals: dict[str, Any]) -> str:
    parts = [f"{arrivals['tokens_per_second']:,.0f} tokens/s"]
    for name, label in (("first_token_ms", "first token"), ("between_tokens_ms", "between tokens")):
        times = arrivals[name]
        parts.append(f"{label} {times['p50']:.1f} ms (p99 {times['p99']:.1f})" if times else f"{label}: too few")
    return f"{parts[0]}\n{'':9}{', '.join(parts[1:])}"


def _arrivals(
    engine: Engine, make: Callable[..., Request], rate: float | None, seconds: float, long: int | None = None
) -> dict[str, Any]:
    """Submit requests at random times, `rate` a second; None keeps the queue full. Later tokens do not count."""
    rng, load = random.Random(2), Load()
    started = time.perf_counter()
    due = 0.0 if rate is None else rng.expovariate(rate)
    long_due = LONG_EVERY if long is not None else float("inf")
    while (now := time.perf_counter() - started) < seconds:
        while engine.waiting < 8 if rate is None else due <= now:
            load.arrived[engine.submit(make())] = now if rate is None else due
            due += 0.0 if rate is None else rng.expovariate(rate)
        if long_due <= now:
            load.arrived[engine.submit(make(long))] = long_due
            long_due += LONG_EVERY
        if engine.idle:
            time.sleep(max(0.0, min(due, long_due, seconds) - now))
            continue
        load.note(engine.step(), time.perf_counter() - started)
    for ticket in load.arrived:
        engine.cancel(ticket)
    list(engine.run())
    return {"seconds": seconds, **load.summary(seconds)}
