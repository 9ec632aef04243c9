"""How fast the engine serves: against static batches, with budgets mixed, and under load.

    report = engine(model, rows=64, budgets=(8, 4, 2), context=512, tokens=64)

    static  a batch of one trajectory through whole-token graphs, without sampling and text: what the device allows
    plain   the engine in PyTorch
    fused   the engine through shared passes

Throughput is that of requests which all run, text and a stop string included, after their prompts and first tokens:
the median of three windows (a static batch: the best of three); `alone` is that of one. `mixed` runs as many
requests of each budget at once; what static batches, one for each budget after the other, would take for the same
tokens is set beside it. Under load requests of mixed budgets and lengths arrive at random (Poisson) at shares of
the rate that a full queue sustains; measured are the time to the first token and between tokens (none between those
that come at once), also while long prompts come in.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from loopformer.benchmark.decode import PATHS as DECODE_PATHS
from loopformer.benchmark.machine import best_of, describe, free_memory
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import require
from loopformer.inference.decode import PlainBackend
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.fused.backend import obstacle
from loopformer.inference.request import Event, Request
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

PATHS = ("static", "plain", "fused")
STOPS = ("\n\n###",)  # looked for in every text
LOADS = (0.5, 0.8, 1.0)
SHORT_PROMPT, LONG_PROMPT = 32, 900  # tokens
QUEUE = 4096  # requests that may wait, which is more than ever do
LONG_EVERY = 0.5  # seconds from one long prompt to the next
WINDOWS = 3  # in which tokens are counted
FIRST_TOKENS = 4  # of each request before that: by then every graph is recorded that is needed at all


class Words:
    """A detokenizer for any vocabulary: that of a small tokenizer, over and over; it never ends a text."""

    eot = -1

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.train([Path(str(torch.__file__)).read_text("utf-8")], 2048)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([number % self._tokenizer.vocab_size for number in ids])


@dataclass(frozen=True)
class TokenWindow:
    """Seconds in which all requests ran, and the tokens of each budget that came."""

    seconds: float
    tokens: dict[int, int]

    @property
    def rate(self) -> float:
        return sum(self.tokens.values()) / self.seconds


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


def engine(
    model: LoopedLM,
    rows: int = 64,
    budgets: Sequence[int] = (8, 4, 2),
    context: int = 512,
    tokens: int = 64,
    paths: Sequence[str] = PATHS,
    seconds: float = 8.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Everything, as plain numbers; without the paths that cannot run here."""
    device, words = model.device, Words()
    why = obstacle(model)
    missing = {} if why is None else dict.fromkeys(("static", "fused"), f"it {why}")
    here = [path for path in paths if path not in missing]
    report: dict[str, Any] = {
        "benchmark": "engine",
        **describe(device),
        "dtype": model.dtype_name,
        "rows": rows,
        "context": context,
        "tokens": tokens,
        "left_out": {path: why for path, why in missing.items() if path in paths},
    }
    static: dict[int, float] = {}
    if "static" in here:
        ids = torch.randint(model.config.vocab, (rows, context), device=device)
        for budget in budgets:
            run = DECODE_PATHS["fused"](model, budget, ids, tokens)
            static[budget] = best_of(3, device, run) / tokens
            del run
            free_memory(device)
            say(f"static   M={budget}: {rows / static[budget]:,.0f} tokens/s")
        report["static"] = {str(budget): rows / step for budget, step in static.items()}
    for path in (path for path in here if path != "static"):
        rates = report[path] = {"windows": {}}
        for budget in budgets:
            requests = _requests(model, [budget] * rows, context)
            windows = _windows(_engine(model, words, path, rows), requests, rows * tokens)
            rate = rates[str(budget)] = _median(windows).rate
            rates["windows"][str(budget)] = [window.rate for window in windows]
            of_static = _share(rate, rows / static[budget] if static else None)
            say(f"{path:8} M={budget}: {rate:,.0f} tokens/s{of_static}")
            free_memory(device)
        requests = _requests(model, budgets[:1], context)
        windows = _windows(_engine(model, words, path, 1), requests, tokens)
        rates["alone"], rates["windows"]["alone"] = _median(windows).rate, [window.rate for window in windows]
        say(f"{path:8} one request of M={budgets[0]}: {rates['alone']:,.0f} tokens/s")
        requests = _requests(model, [budget for budget in budgets for _ in range(rows)], context)
        windows = _windows(_engine(model, words, path, len(requests)), requests, len(requests) * tokens)
        median = _median(windows)
        rates["mixed"] = {**vars(median), "tokens_per_second": median.rate}
        rates["windows"]["mixed"] = [window.rate for window in windows]
        one_by_one = sum(median.tokens[budget] / rows * static[budget] for budget in budgets) if static else None
        if one_by_one is not None:
            rates["mixed"]["static_seconds"] = one_by_one
        of_static = _share(1 / median.seconds, None if one_by_one is None else 1 / one_by_one)
        say(f"{path:8} mixed: {median.rate:,.0f} tokens/s{of_static}")
        free_memory(device)
        rates["load"] = list(_under_load(model, words, path, rows, budgets, context, tokens, seconds, say))
    return report


def _share(rate: float, static: float | None) -> str:
    return "" if static is None else f", {100 * rate / static:.0f} % of static"


def _engine(model: LoopedLM, words: Words, path: str, rows: int) -> Engine:
    if path == "plain":
        return Engine(model, words, queue=QUEUE, backend=PlainBackend(model, rows, remember=0))
    from loopformer.inference.fused.batch import SharedBatch
    from loopformer.inference.fused.shared import SharedBackend

    return Engine(model, words, queue=QUEUE, backend=SharedBackend(SharedBatch(model, rows), remember=0))


def _requests(model: LoopedLM, budgets: Sequence[int], context: int) -> list[Request]:
    """Random prompts of `context` tokens; they go on to the end of the model's context."""
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


def _windows(engine: Engine, requests: Sequence[Request], tokens: int) -> list[TokenWindow]:
    """Some windows in which all requests run and about so many tokens come; one that is cut short by the end of a
    request counts where it is the first."""
    budgets = {engine.submit(request): request.trajectory.budget for request in requests}
    given = dict.fromkeys(budgets, 0)
    while min(given.values()) < FIRST_TOKENS and not engine.idle:
        for event in engine.step():
            given[event.ticket] += len(event.choices)
    require(
        engine.running == len(budgets),
        f"Only {engine.running} of {len(budgets)} requests run at once; ask for fewer --rows or less --context.",
    )
    windows: list[TokenWindow] = []
    while len(windows) < WINDOWS and engine.running == len(budgets):
        each = dict.fromkeys(budgets.values(), 0)
        started = time.perf_counter()  # as much is under way now as at the end
        while engine.running == len(budgets) and sum(each.values()) < tokens:
            for event in engine.step():
                each[budgets[event.ticket]] += len(event.choices)
        window = TokenWindow(time.perf_counter() - started, each)
        if engine.running == len(budgets) or not windows:
            windows.append(window)
    return windows


def _median(windows: Sequence[TokenWindow]) -> TokenWindow:
    return sorted(windows, key=lambda window: window.rate)[(len(windows) - 1) // 2]


def _under_load(
    model: LoopedLM,
    words: Words,
    path: str,
    rows: int,
    budgets: Sequence[int],
    context: int,
    tokens: int,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """First the rate that a full queue sustains, then shares of it, then half of it with long prompts coming in."""
    rng = random.Random(1)

    def draw_request(prompt: int | None = None) -> Request:
        length = prompt or rng.randrange(min(SHORT_PROMPT, context), context + 1)
        ids = tuple(rng.randrange(model.config.vocab) for _ in range(length))
        most = min(rng.randrange(tokens // 2, 2 * tokens), model.config.context - length)
        return Request(ids, Trajectory.uniform(rng.choice(budgets)), max_tokens=most, stops=STOPS)

    engine = _engine(model, words, path, rows)
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
    long = min(LONG_PROMPT, model.config.context - tokens)
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
    """Requests at random times, so many a second; None keeps the queue full. What comes after is not counted."""
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
