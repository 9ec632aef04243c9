"""`bench decode` and `bench engine`: every path decodes what it should, and each figure is there."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loopformer import LoopedLM, ModelConfig, Trajectory
from loopformer.benchmark.decode import (
    FIGURES,
    LOADS,
    RUNS,
    DummyDetokenizer,
    Load,
    decode,
    engine,
    gpt2,
    left_out,
    make_engine,
)
from loopformer.inference.engine import complete
from loopformer.inference.request import Event, Request
from loopformer.inference.sampling import Choice

GPU = torch.cuda.is_available()
PROMPTS = torch.tensor([[5, 9, 30, 2, 71, 8], [1, 2, 3, 4, 5, 6]])


def test_every_combination_is_measured_and_bytes_and_flops_are_the_cost_models(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny).eval()
    said: list[object] = []
    report = decode(model, [1, 4], [1, 2], [8], tokens=2, paths=["plain"], say=said.append)
    assert [(row["batch"], row["budget"]) for row in report["rows"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert said == report["rows"]
    for row in report["rows"]:
        batch, budget, seconds = row["batch"], row["budget"], row["ms_per_step"] / 1e3
        assert row["bytes"] == model.cost.decode_bytes(budget, 0, 4) + batch * 8 * model.cost.kv_bytes(budget, 4)
        assert row["tokens_per_second"] == pytest.approx(batch / seconds)
        assert row["mbu"] == pytest.approx(row["gb_per_second"] / report["copy_gb_per_second"])
        flops = model.cost.forward_flops(budget, context=8, causal=False)
        assert row["tflops"] == pytest.approx(batch * flops / seconds / 1e12)
        assert (row["mfu"], row["peak_gib"]) == (None, None)  # they are of a GPU


def test_slow_paths_are_measured_at_the_largest_budget(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    report = decode(LoopedLM(tiny).eval(), [2, 4, 1], [1], [8], tokens=6)
    rows = [(row["path"], row["budget"], row["tokens"]) for row in report["rows"]]
    assert rows == [("naive", 4, 4), ("plain", 2, 6), ("plain", 4, 6), ("plain", 1, 6), ("transformers", 4, 6)]
    assert set(report["left_out"]) == {"fused"}
    for row in report["rows"]:
        assert set(row) == {"path", "budget", "batch", "context", "tokens", "bytes", *FIGURES}
        assert min(row["tokens_per_second"], row["tflops"], row["gb_per_second"]) > 0


@pytest.mark.parametrize("budget", [1, 4])
def test_plain_and_naive_choose_the_same_tokens_every_time(tiny: ModelConfig, budget: int) -> None:
    model, detokenizer = LoopedLM(tiny).eval(), DummyDetokenizer()
    naive = RUNS["naive"](model, budget, PROMPTS, 5)
    expected = naive()
    assert expected.shape == (2, 5)
    assert torch.equal(naive(), expected)
    requests = [Request(tuple(ids), Trajectory.uniform(budget), max_tokens=6) for ids in PROMPTS.tolist()]
    results = complete(model, detokenizer, requests, make_engine(model, detokenizer, "plain", 2).backend)
    assert [list(result.ids[1:]) for result in results] == expected.tolist()


@torch.no_grad()
def test_transformers_has_as_many_layers_and_its_cache_goes_back(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    model = LoopedLM(tiny).eval()
    theirs = gpt2(tiny, 3, model.tokens.weight)
    assert (theirs.config.n_layer, theirs.config.n_positions, theirs.training) == (6, 32, False)
    text = PROMPTS
    for _ in range(6):
        text = torch.cat([text, theirs(text).logits[:, -1].argmax(-1, keepdim=True)], 1)
    run = RUNS["transformers"](model, 3, PROMPTS, 5)
    for _ in range(3):
        assert torch.equal(run(), text[:, -5:])


def test_gpt2_takes_the_dtype_of_the_model(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    theirs = gpt2(tiny, 1, torch.empty(0, dtype=torch.bfloat16))
    assert {one.dtype for one in theirs.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_what_does_not_fit_leaves_the_rest(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(RUNS, "naive", too_large)
    report = decode(LoopedLM(tiny).eval(), [4], [1], [8], tokens=2, paths=["naive", "plain"])
    naive, plain = report["rows"]
    assert all(naive[figure] is None for figure in FIGURES)
    assert plain["tokens_per_second"] > 0


def test_what_is_not_installed_is_named(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = LoopedLM(tiny).eval()
    assert "loopformer[hf]" in left_out(model, ["plain", "transformers"])["transformers"]
    report = decode(model, [4], [1], [8], tokens=2, paths=["plain", "transformers"])
    assert [row["path"] for row in report["rows"]] == ["plain"]


def test_one_budget_a_mixture_and_arrivals_are_measured() -> None:
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=16, context=48, vocab=64)
    lines: list[str] = []
    model = LoopedLM(config).eval()
    report = engine(model, 2, (4, 1), 16, 8, ("plain", "fused"), 0.3, lines.append)
    assert report["left_out"] == {"fused": "it needs a CUDA device and Triton"}
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


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_on_a_gpu_every_path_is_measured_with_its_memory(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny).to("cuda", torch.bfloat16).eval()
    report = decode(model, [4], [1, 8], [8], tokens=2)
    assert {"naive", "plain", "fused"} <= {row["path"] for row in report["rows"]}
    assert all(row["peak_gib"] > 0 for row in report["rows"])
    assert report["left_out"] == left_out(model, ["transformers"])


def test_rows_that_cannot_all_run_at_once_have_no_figures(tiny: ModelConfig) -> None:
    report = decode(LoopedLM(tiny).eval(), [4], [1], [tiny.context - 2], tokens=2, paths=["plain"])
    assert all(report["rows"][0][figure] is None for figure in FIGURES)
