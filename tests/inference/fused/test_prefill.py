"""Graphs of prompts and of single rows compute what the model computes."""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopformer import LM, LoopedLM, LoopformerError, ModelConfig, Trajectory

from ..models import spread

pytest.importorskip("triton")
from loopformer.inference.fused import launch, single_row
from loopformer.inference.fused.launch import DecodeBatch
from loopformer.inference.fused.prefill import PromptGraphs
from loopformer.inference.kv_cache import page_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
BASE = ModelConfig(
    blocks=2, loops=3, width=32, heads=2, ffn=48, context=80, vocab=30, positions="rotary", modulator_start="one"
)
KINDS: dict[str, dict[str, Any]] = {
    "injected": {"inject": "gated"},
    "unconditioned": {"positions": "learned", "conditioning": "none", "modulator_start": "zero"},
    "index": {"conditioning": "index", "positions": "learned"},
}


@pytest.fixture(scope="module", params=KINDS)
def graphs(request: pytest.FixtureRequest) -> PromptGraphs:
    torch.set_float32_matmul_precision("highest")
    return PromptGraphs(spread(replace(BASE, **KINDS[request.param]), std=0.15).to(DEVICE))


@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=4), budget=st.sampled_from(["1", "2-1", "1-2", "3"])
)
@settings(max_examples=15, deadline=None)
def test_chunks_of_any_length_equal_the_model(graphs: PromptGraphs, chunks: list[int], budget: str) -> None:
    model = graphs.model
    if model.config.conditioning != "trajectory" and "-" in budget:
        budget = "2"
    by_graph, by_model = (model.cache(model.resolve(budget), 1) for _ in range(2))
    for number, count in enumerate(chunks):
        if by_graph.lengths[0] + count > model.config.context:
            with pytest.raises(LoopformerError, match="do not fit"):
                graphs.extend(torch.ones(1, count, dtype=torch.long, device=DEVICE), by_graph)
            return
        ids = (torch.arange(count, device=DEVICE)[None] * 7 + number) % 30
        hidden, expected = graphs.extend(ids, by_graph), model.extend(ids, by_model)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    assert by_graph.lengths == by_model.lengths == [sum(chunks)]
    for loop in range(model.resolve(budget).budget):
        for block in range(model.config.blocks):
            for ours, expected in zip(by_graph.loops[loop][block], by_model.loops[loop][block], strict=True):
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_nan_does_not_reach_the_next_one() -> None:
    model: LoopedLM = spread(BASE, std=0.15).to(DEVICE)
    graphs = PromptGraphs(model)
    with torch.no_grad():
        model.tokens.weight[29] = math.nan
    ids = torch.tensor([[1, 2, 29, 4, 5, 6]], device=DEVICE)
    assert graphs.extend(ids, model.cache(3, 1))[0, -1].isnan().all()
    assert graphs.extend(ids[:, :2], model.cache(3, 1)).isfinite().all()


def single_row_model(**options: Any) -> LoopedLM:
    config = ModelConfig(
        blocks=2, loops=4, width=48, heads=3, ffn=80, context=80, vocab=90, padded_vocab=96, **options
    )
    return spread(config).to(DEVICE)


def plain_logits(model: LoopedLM, ids: list[int], trajectory: Trajectory) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=DEVICE), trajectory).logits
    assert logits is not None
    last: torch.Tensor = logits[0, -1, : model.config.vocab]
    return last


@torch.no_grad()
def start_single_row(batch: DecodeBatch, text: list[int], trajectory: Trajectory) -> None:
    """Fill slot 0 with a text, and append its most likely next token, which runs next."""
    model = batch.model
    cache = model.cache(trajectory, 1, len(text))
    hidden = model.extend(torch.tensor([text], device=DEVICE), cache)
    pages = range(2 * trajectory.budget)
    batch.fill(0, pages, cache.read(0), len(text), model.condition(trajectory))
    text.append(int(model.head(hidden[0, -1])[: model.config.vocab].argmax()))
    batch.set_tokens_from_host({0: (text[-1], len(text) - 1)})


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    torch.set_float32_matmul_precision("highest")
    if INTERPRETED:
        monkeypatch.setattr(single_row, "OUTPUTS_PER_PROGRAM", dict.fromkeys(single_row.WARPS, 32))
        monkeypatch.setattr(single_row, "SPLITS", 4)
        monkeypatch.setattr(single_row, "MAX_BLOCK_K", 32)


@pytest.mark.cuda
@KERNELS
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({"positions": "learned"}, "2-1-1"),
        ({"positions": "rotary", "inject": "gated", "start": "normed"}, "4"),
        ({"positions": "rotary", "conditioning": "none"}, "2"),
        ({"positions": "learned", "conditioning": "index"}, "3"),
    ],
    ids=["learned", "injected", "unconditioned", "index"],
)
def test_tokens_of_a_single_row_equal_the_plain_path(options: dict[str, Any], schedule: str) -> None:
    model = single_row_model(**options)
    trajectory, budget = model.resolve(schedule), model.resolve(schedule).budget
    batch = DecodeBatch(model, 1, 20 * page_bytes(model, launch.GPU_PAGE_TOKENS))
    for length in (3, 40):  # the slot is filled twice
        text = [(7 * position) % 90 for position in range(length)]
        start_single_row(batch, text, trajectory)
        logits = batch.single_row_logits(0, budget)[0]
        expected = plain_logits(model, text, trajectory)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        batch.set_tokens_from_device([0], logits.argmax(-1, keepdim=True))
        text.append(int(logits.argmax()))
        for _ in range(3 if INTERPRETED else 6):
            token, logprob = batch.single_row_greedy(0, budget, len(text) - 1).wait()[0].tolist()
            expected = plain_logits(model, text, trajectory)
            assert expected[int(token)] > expected.max() - 1e-3
            assert logprob == pytest.approx(float(expected.log_softmax(-1)[int(token)]), abs=1e-4)
            text.append(int(token))


@pytest.mark.parametrize(("conditioning", "expected"), [("index", torch.bfloat16), ("none", torch.float32)])
def test_a_single_row_reads_modulations_as_narrow_as_they_are(conditioning: str, expected: torch.dtype) -> None:
    """They come on top of the weights that it reads; only norm weights less 1 need more than bf16."""
    model = single_row_model(positions="learned", conditioning=conditioning).to(torch.bfloat16)
    batch = DecodeBatch(model, 1, 20 * page_bytes(model, launch.GPU_PAGE_TOKENS))
    row = single_row.SingleRow(model, 2, batch._weights, batch._scratch, batch._kv_pages)
    assert row._modulations.dtype == expected


@pytest.mark.cuda
@KERNELS
@pytest.mark.usefixtures("few_programs")
def test_weights_may_be_stored_by_columns() -> None:
    """As `load` lays them out for a CPU, and as they stay when a model is moved by hand."""
    model = single_row_model(positions="learned")

    def logits() -> torch.Tensor:
        batch = DecodeBatch(model, 1, 20 * page_bytes(model, launch.GPU_PAGE_TOKENS))
        start_single_row(batch, [5, 9, 2], model.resolve("2"))
        return batch.single_row_logits(0, 2).clone()

    expected = logits()
    for weight in [
        model.tokens.weight,
        *(linear.weight for linear in model.modules() if isinstance(linear, nn.Linear)),
    ]:
        weight.data = weight.data.t().contiguous().t()
    torch.testing.assert_close(logits(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_texts_equal_plain_ones(lm: LM) -> None:
    quick = LM(lm.model, lm.tokenizer).to("cuda")
    try:
        prompts = ["every pass", "its", "time and step and time", "told", "naïve"]
        several: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"max_tokens": 60}]
        for options in several:
            call: dict[str, Any] = {
                "max_tokens": 20,
                "trajectory": ["2-1-1", "2-1-1", "4", "2-1-1", "4"],
                **options,
            }
            plain = quick.generate(prompts, fast=False, **call)
            fast = quick.generate(prompts, fast=True, **call)
            assert [result.text for result in fast] == [result.text for result in plain]
            assert [result.reason for result in fast] == [result.reason for result in plain]
        assert "".join(quick.stream("told", fast=True)) == quick.generate("told", fast=False).text
    finally:
        quick.to("cpu")
