"""What `bench engine` measures: one budget, a mixture, and requests that arrive at random."""

from itertools import count
from types import SimpleNamespace

import pytest

from loopformer import LoopedLM, ModelConfig
from loopformer.benchmark.engine import LOADS, Arrivals, engine
from loopformer.inference.request import Choice, Event


def test_one_budget_a_mixture_and_arrivals_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()  # a millisecond for each look at the clock, so that a slow machine sees as many arrivals
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000, sleep=lambda seconds: None)
    monkeypatch.setattr("loopformer.benchmark.engine.time", clock)
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=16, context=48, vocab=64)
    lines: list[object] = []
    model = LoopedLM(config).eval()
    report = engine(model, 2, (4, 1), 16, 8, ("plain", "fused"), 0.3, lines.append)
    assert report["left_out"] == {"fused": "it needs a CUDA device and Triton"}
    measured = report["plain"]
    names = ("4", "1", "alone", "mixed")
    assert {name: len(rates) for name, rates in measured["windows"].items()} == dict.fromkeys(names, 3)
    assert all(min(rates) <= measured[name] <= max(rates) for name, rates in measured["windows"].items())
    assert [load["load"] for load in measured["load"]] == ["full queue", *LOADS, LOADS[0]]
    assert all(load["requests"] > 0 for load in measured["load"])
    assert len(lines) == len(names) + len(measured["load"])


def test_times_are_of_each_request() -> None:
    arrivals = Arrivals(arrived={0: 1.0, 1: 2.0})
    for now, ticket in ((1.5, 0), (2.5, 0), (2.25, 1), (4.5, 0)):
        arrivals.record([Event(ticket, "a", choices=(Choice(1, -1.0),))], now)
    arrivals.record([Event(1, "bc", choices=(Choice(2, -1.0),) * 2)], 3.25)  # two tokens at once
    summary = arrivals.summarize(2.0)
    assert (summary["requests"], summary["tokens_per_second"]) == (2, 3.0)
    assert summary["first_token_ms"] == {"p50": 250, "p99": 250}
    assert summary["between_tokens_ms"] == {"p50": 1000, "p99": 1000}
