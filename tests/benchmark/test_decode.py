"""`bench decode`: every path decodes what it should, and each row says what it cost."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loopformer import LoopedLM
from loopformer.benchmark.decode import FIGURES, PATHS, decode, gpt2, left_out
from loopformer.config import ModelConfig

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
    model = LoopedLM(tiny).eval()
    naive, plain = (PATHS[path](model, budget, PROMPTS, 5) for path in ("naive", "plain"))
    expected = naive()
    assert expected.shape == (2, 5)
    for run in (naive, plain, plain):
        assert torch.equal(run(), expected)


@torch.no_grad()
def test_transformers_has_as_many_layers_and_its_cache_goes_back(tiny: ModelConfig) -> None:
    pytest.importorskip("transformers")
    model = LoopedLM(tiny).eval()
    theirs = gpt2(tiny, 3, model.tokens.weight)
    assert (theirs.config.n_layer, theirs.config.n_positions, theirs.training) == (6, 32, False)
    text = PROMPTS
    for _ in range(6):
        text = torch.cat([text, theirs(text).logits[:, -1].argmax(-1, keepdim=True)], 1)
    run = PATHS["transformers"](model, 3, PROMPTS, 5)
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

    monkeypatch.setitem(PATHS, "naive", too_large)
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


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_on_a_gpu_every_path_has_its_memory_and_fused_chooses_the_plain_tokens(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny).to("cuda").eval()
    plain, fused = (PATHS[path](model, 4, PROMPTS.cuda(), 5) for path in ("plain", "fused"))
    for _ in range(2):
        assert torch.equal(fused(), plain())
    report = decode(model.bfloat16(), [4], [1, 8], [8], tokens=2)
    assert {"naive", "plain", "fused"} <= {row["path"] for row in report["rows"]}
    assert all(row["peak_gib"] > 0 for row in report["rows"])
    assert report["left_out"] == left_out(model, ["transformers"])
