"""`bench decode`: every path decodes what it should, and each figure is there."""

import sys
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from loopformer import LoopedLM, ModelConfig, Trajectory
from loopformer.benchmark.decode import (
    DECODERS,
    FIGURES,
    DummyDetokenizer,
    decode,
    left_out,
    make_engine,
    measure_windows,
)
from loopformer.benchmark.machine import gpt2
from loopformer.inference.engine import generate
from loopformer.inference.request import Request

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
    rows = [(row["path"], row["budget"]) for row in report["rows"]]
    assert rows == [("naive", 4), ("plain", 2), ("plain", 4), ("plain", 1), ("transformers", 4)]
    assert set(report["left_out"]) == {"fused", "transformers compiled"}
    for row in report["rows"]:
        assert set(row) == {"path", "budget", "batch", "context", *FIGURES}
        assert min(row["tokens_per_second"], row["tflops"], row["gb_per_second"]) > 0


@pytest.mark.parametrize("budget", [1, 4])
def test_plain_and_naive_choose_the_same_tokens(tiny: ModelConfig, budget: int) -> None:
    model, detokenizer = LoopedLM(tiny).eval(), DummyDetokenizer()
    expected = list(islice(DECODERS["naive"](model, budget, PROMPTS), 6))
    requests = [Request(tuple(ids), Trajectory.uniform(budget), max_tokens=6) for ids in PROMPTS.tolist()]
    events = generate(model, detokenizer, requests, make_engine(model, detokenizer, "plain", 2).runner)
    results = [result for _, result in sorted((event.ticket, event.result) for event in events if event.result)]
    assert [list(result.ids) for result in results] == [list(ids) for ids in zip(*expected, strict=True)]


@torch.no_grad()
def test_transformers_has_as_many_layers_and_its_cache_changes_no_token(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    model = LoopedLM(tiny).eval()
    theirs = gpt2(tiny, 3, model.tokens.weight)
    assert (theirs.config.n_layer, theirs.config.n_positions, theirs.training) == (6, 32, False)
    text = PROMPTS
    for _ in range(6):
        text = torch.cat([text, theirs(text).logits[:, -1].argmax(-1, keepdim=True)], 1)
    chosen = list(islice(DECODERS["transformers"](model, 3, PROMPTS), 6))
    assert torch.tensor(chosen).T.tolist() == text[:, -6:].tolist()


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_static_cache_through_cuda_graphs_changes_no_token(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    model = LoopedLM(tiny).to("cuda").eval()
    expected = list(islice(DECODERS["transformers"](model, 3, PROMPTS.cuda()), 6))
    assert list(islice(DECODERS["transformers compiled"](model, 3, PROMPTS.cuda()), 6)) == expected


def test_gpt2_takes_the_dtype_of_the_model(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    theirs = gpt2(tiny, 1, torch.empty(0, dtype=torch.bfloat16))
    assert {one.dtype for one in theirs.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_what_does_not_fit_leaves_the_rest(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(model: LoopedLM, budget: int, ids: Tensor) -> Iterator[list[int]]:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(DECODERS, "naive", too_large)
    report = decode(LoopedLM(tiny).eval(), [4], [1], [8], tokens=2, paths=["naive", "plain"])
    naive, plain = report["rows"]
    assert all(naive[figure] is None for figure in FIGURES)
    assert plain["tokens_per_second"] > 0


def test_what_is_not_installed_is_named(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = LoopedLM(tiny).eval()
    missing = left_out(model, ["plain", "transformers", "transformers compiled"])
    assert set(missing) == {"transformers", "transformers compiled"}
    assert all("loopformer[hf]" in reason for reason in missing.values())
    report = decode(model, [4], [1], [8], tokens=2, paths=["plain", "transformers"])
    assert [row["path"] for row in report["rows"]] == ["plain"]


def test_windows_have_about_as_many_tokens_as_wanted() -> None:
    steps = iter([9, 2, 2, 2, 2, 2])  # the first is the warm-up
    assert len(measure_windows(torch.device("cpu"), steps, 3)) == 2  # the last one is cut short
    assert measure_windows(torch.device("cpu"), iter([9]), 3) == []


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_on_a_gpu_every_path_is_measured_with_its_memory(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny).to("cuda", torch.bfloat16).eval()
    report = decode(model, [4], [1, 8], [8], tokens=2)
    assert {"naive", "plain", "fused"} <= {row["path"] for row in report["rows"]}
    assert all(row["peak_gib"] > 0 for row in report["rows"])
    assert report["left_out"] == left_out(model, ["transformers", "transformers compiled"])


def test_rows_that_cannot_all_run_at_once_have_no_figures(tiny: ModelConfig) -> None:
    report = decode(LoopedLM(tiny).eval(), [4], [1], [tiny.context - 2], tokens=2, paths=["plain"])
    assert all(report["rows"][0][figure] is None for figure in FIGURES)
