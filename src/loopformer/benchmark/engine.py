"""Serving speed of the engine: tokens per second at one and at mixed budgets, and latency while requests arrive.

    report = engine(model, rows=64, budgets=(8, 4, 2), context=512, tokens=64)

Tokens per second are the median of three windows in which all requests run. They are measured for `rows` requests
at each budget, for one request alone, and for `mixed`: `rows` requests at each budget, all at once. Then requests
of mixed budgets and lengths arrive at random (Poisson), at shares of the rate that a full queue sustains. Each such
load has the time to the first token and the time between tokens, which is 0 within a step. The last load adds long
prompts. Paths that cannot run here are in `left_out`, with the reason.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any

from loopformer.benchmark.decode import (
    ENGINE_PATHS,
    STOPS,
    DummyDetokenizer,
    engine_steps,
    left_out,
    make_engine,
    make_requests,
    measure_windows,
)
from loopformer.benchmark.machine import check_paths, describe, free_memory
from loopformer.errors import require
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.request import Event, Request
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

LOADS = (0.5, 0.8, 1.0)  # shares of the rate that a full queue sustains
FULL_QUEUE = 8  # requests that always wait in a full queue
SHORT_PROMPT, LONG_PROMPT = 32, 900  # tokens
LONG_EVERY = 0.5  # seconds from one long prompt to the next


def engine(
    model: LoopedLM,
    rows: int = 64,
    budgets: Sequence[int] = (8, 4, 2),
    context: int = 512,
    tokens: int = 64,
    paths: Sequence[str] = ENGINE_PATHS,
    seconds: float = 8.0,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measure every path that can run here; `say` gets a line for each figure."""
    check_paths("the engine", paths, ENGINE_PATHS)
    detokenizer, missing = DummyDetokenizer(), left_out(model, paths)
    report: dict[str, Any] = {"benchmark": "engine", **describe(model.device), "dtype": model.dtype_name}
    report |= {"rows": rows, "context": context, "tokens": tokens, "left_out": missing}
    for path in [path for path in paths if path not in missing]:
        windows: dict[str, list[float]] = {}
        # Requests that run together, by the budget of each.
        groups = {str(budget): [budget] * rows for budget in budgets}
        groups |= {"alone": [budgets[0]], "mixed": [budget for budget in budgets for _ in range(rows)]}
        for name, group in groups.items():
            free_memory(model.device)
            steps = engine_steps(
                make_engine(model, detokenizer, path, len(group)), make_requests(model, group, context)
            )
            windows[name] = measure_windows(model.device, steps, len(group) * tokens)
            require(
                len(windows[name]) > 0,
                f"The {len(group)} requests do not all run at once; ask for fewer --rows or less --context.",
            )
            say(f"{path:8} {name:5} {median_low(windows[name]):,.0f} tokens/s")
        free_memory(model.device)
        loads = _measure_loads(make_engine(model, detokenizer, path, rows), budgets, context, tokens, seconds)
        report[path] = {
            "windows": windows,
            **{name: median_low(rates) for name, rates in windows.items()},
            "load": [],
        }
        for load in loads:
            say(f"{path:8} {_describe(load)}")
            report[path]["load"].append(load)
    return report


@dataclass
class Arrivals:
    """When requests arrived and when their tokens came, in seconds."""

    arrived: dict[int, float] = field(default_factory=dict)
    token_times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: int = 0

    def record(self, events: Sequence[Event], now: float) -> None:
        for event in events:
            self.token_times[event.ticket] += [now] * len(event.choices)
            self.ended += event.result is not None

    def summarize(self, seconds: float) -> dict[str, Any]:
        first = [times[0] - self.arrived[ticket] for ticket, times in self.token_times.items() if times]
        between = [after - before for times in self.token_times.values() for before, after in pairwise(times)]
        return {
            "seconds": seconds,
            "requests": len(self.token_times),
            "ended": self.ended,
            "tokens_per_second": sum(map(len, self.token_times.values())) / seconds,
            "first_token_ms": _percentiles(first),
            "between_tokens_ms": _percentiles(between),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
    return {name: 1e3 * ordered[int(share * (len(ordered) - 1))] for name, share in shares.items()}


def _measure_loads(
    engine: Engine, budgets: Sequence[int], context: int, tokens: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measure a full queue, then arrivals at shares of its rate, then the lowest share with long prompts added."""
    rng, config = random.Random(1), engine.model.config

    def draw_request(prompt: int | None = None) -> Request:
        length = prompt or rng.randrange(min(SHORT_PROMPT, context), context + 1)
        ids = tuple(rng.randrange(config.vocab) for _ in range(length))
        max_tokens = min(rng.randrange(tokens // 2, 2 * tokens), config.context - length)
        return Request(ids, Trajectory.uniform(rng.choice(budgets)), max_tokens=max_tokens, stops=STOPS)

    warm_up(engine, list(budgets))
    full = _run_arrivals(engine, draw_request, None, seconds)
    rate = full["ended"] / seconds
    yield {"load": "full queue", "requests_per_second": rate, **full}
    if rate:  # it is 0 if the run is too short for any request to end
        for share in LOADS:
            yield {"load": share, **_run_arrivals(engine, draw_request, share * rate, seconds)}
        long = min(LONG_PROMPT, config.context - tokens)
        arrivals = _run_arrivals(engine, draw_request, LOADS[0] * rate, seconds, long)
        yield {"load": LOADS[0], "long_prompts": long, **arrivals}


def _run_arrivals(
    engine: Engine,
    draw_request: Callable[..., Request],
    rate: float | None,
    seconds: float,
    long: int | None = None,
) -> dict[str, Any]:
    """Submit `rate` requests per second at random times, or keep the queue full if it is None.

    long  tokens of the long prompts that arrive at fixed intervals besides; None: no long prompts
    """
    rng, arrivals = random.Random(2), Arrivals()
    started = time.perf_counter()
    due = 0.0 if rate is None else rng.expovariate(rate)
    long_due = LONG_EVERY if long is not None else float("inf")
    while (now := time.perf_counter() - started) < seconds:
        while engine.waiting < FULL_QUEUE if rate is None else due <= now:
            # Count from when a request was due: a step of the engine may have delayed its submission.
            arrivals.arrived[engine.submit(draw_request())] = now if rate is None else due
            due += 0.0 if rate is None else rng.expovariate(rate)
        if long_due <= now:
            arrivals.arrived[engine.submit(draw_request(long))] = long_due
            long_due += LONG_EVERY
        if engine.idle:
            time.sleep(max(0.0, min(due, long_due, seconds) - now))
        else:
            arrivals.record(engine.step(), time.perf_counter() - started)
    for ticket in arrivals.arrived:
        engine.cancel(ticket)
    list(engine.run())  # lets the cancelled requests leave, so that the next load finds an idle engine
    return arrivals.summarize(seconds)


def _describe(load: dict[str, Any]) -> str:
    """A line about one load."""
    name = f"{100 * load['load']:.0f} % load" if isinstance(load["load"], float) else load["load"]
    parts = [name + (f", prompts of {load['long_prompts']}" if "long_prompts" in load else "")]
    if "requests_per_second" in load:
        parts.append(f"{load['requests_per_second']:.1f} requests/s")
    parts.append(f"{load['tokens_per_second']:,.0f} tokens/s")
    for key, label in (("first_token_ms", "first token"), ("between_tokens_ms", "between tokens")):
        times = load[key]
        parts.append(f"{label} {times['p50']:.1f} ms (p99 {times['p99']:.1f})" if times else f"{label}: none")
    return ", ".join(parts)
