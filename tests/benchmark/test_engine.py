"""`bench engine`: every figure is there, and what cannot run here is left out with a word."""

import pytest

from loopformer import LoopedLM, ModelConfig
from loopformer.benchmark.engine import LOADS, Load, engine
from loopformer.inference.request import Event
from loopformer.inference.sampling import Choice


def test_one_budget_a_mixture_and_arrivals_are_measured() -> None:
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=16, context=48, vocab=64)
    lines: list[str] = []
    model = LoopedLM(config).eval()
    report = engine(model, 2, (4, 1), 16, 8, ("static", "plain", "fused"), 0.3, lines.append)
    assert report["left_out"] == dict.fromkeys(("static", "fused"), "it needs a CUDA device and Triton")
    found = report["plain"]
    assert all(found[name] > 0 for name in ("4", "1", "alone"))
    mixed = found["mixed"]
    assert all(0 < count <= 2 * 2 * 8 for count in mixed["tokens"].values())
    assert {name: len(rates) for name, rates in found["windows"].items()} == dict.fromkeys(
        ("4", "1", "alone", "mixed"), 3
    )
    assert all(
        min(rates) <= found[name] <= max(rates) for name, rates in found["windows"].items() if name != "mixed"
    )
    assert mixed["tokens_per_second"] == pytest.approx(sum(mixed["tokens"].values()) / mixed["seconds"])
    assert [one["load"] for one in found["load"]] == ["full queue", *LOADS, LOADS[0]]
    assert all(one["requests"] > 0 for one in found["load"])
    assert len(lines) == 4 + len(found["load"])


def test_times_are_of_each_request() -> None:
    load = Load(arrived={0: 1.0, 1: 2.0})
    for now, ticket in ((1.5, 0), (2.5, 0), (2.25, 1), (4.5, 0)):
        load.note([Event(ticket, "a", choices=(Choice(1, -1.0),))], now)
    load.note([Event(1, "bc", choices=(Choice(2, -1.0),) * 2)], 3.25)  # the second has waited for nothing
    found = load.summary(2.0)
    assert (found["requests"], found["tokens_per_second"]) == (2, 3.0)
    assert found["first_token_ms"] == {"p50": 250, "p99": 250}
    assert found["between_tokens_ms"] == {"p50": 1000, "p99": 1000}
