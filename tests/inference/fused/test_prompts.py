"""Prompts as graphs give what the model gives, wherever in a text they begin and whatever ran before."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopformer import LoopedLM, LoopformerError, ModelConfig

from ..models import spread

pytest.importorskip("triton")
from loopformer.inference.fused.prompts import PromptGraphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=4), budget=st.sampled_from(["1", "2-1", "1-2", "3"])
)
@settings(max_examples=15, deadline=None)
def test_pieces_of_any_length_equal_the_models_own(graphs: PromptGraphs, pieces: list[int], budget: str) -> None:
    model = graphs.model
    if model.config.conditioning != "trajectory" and "-" in budget:
        budget = "2"
    ours, theirs = (model.cache(model.resolve(budget), 1) for _ in range(2))
    for number, count in enumerate(pieces):
        if ours.lengths[0] + count > model.config.context:
            with pytest.raises(LoopformerError, match="do not fit"):
                graphs.extend(torch.ones(1, count, dtype=torch.long, device=DEVICE), ours)
            return
        ids = (torch.arange(count, device=DEVICE)[None] * 7 + number) % 30
        found, expected = graphs.extend(ids, ours), model.extend(ids, theirs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert ours.lengths == theirs.lengths == [sum(pieces)]
    for loop in range(model.resolve(budget).budget):
        for block in range(model.config.blocks):
            for one, other in zip(ours.tensors(loop, block), theirs.tensors(loop, block), strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_is_no_number_leaves_nothing_behind() -> None:
    model: LoopedLM = spread(BASE, std=0.15).to(DEVICE)
    graphs = PromptGraphs(model)
    with torch.no_grad():
        model.tokens.weight[29] = math.nan
    ids = torch.tensor([[1, 2, 29, 4, 5, 6]], device=DEVICE)
    assert graphs.extend(ids, model.cache(3, 1))[0, -1].isnan().all()
    assert graphs.extend(ids[:, :2], model.cache(3, 1)).isfinite().all()
