"""Cached equals uncached: any budget, schedule, kind of model, mix of lengths and trajectories."""

from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference.models import spread
from options import draw_model

from loopformer import LoopedLM, LoopformerError
from loopformer.config import Conditioning, ModelConfig


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, list[str], list[list[int]], int]:
    config, followed = draw_model(draw, context=24)
    rows = draw(st.integers(1, 4))
    trajectories = [draw(followed) for _ in range(rows)]
    prompts = [draw(st.lists(st.integers(0, 49), min_size=1, max_size=9)) for _ in range(rows)]
    return config, trajectories, prompts, draw(st.integers(0, 10**6))


@given(cases())
def test_cached_rows_equal_their_own_uncached_runs(
    case: tuple[ModelConfig, list[str], list[list[int]], int],
) -> None:
    config, trajectories, prompts, seed = case
    model = spread(config, seed)
    cache = model.cache(trajectories, len(prompts))
    counts = [len(prompt) for prompt in prompts]
    padded = torch.tensor([prompt + [0] * (max(counts) - len(prompt)) for prompt in prompts])
    hidden = model.extend(padded, cache, counts)
    got = [[hidden[row, count - 1]] for row, count in enumerate(counts)]
    sequences = [list(prompt) for prompt in prompts]
    for step in range(4):
        new = torch.tensor([[(7 * step + row) % 50] for row in range(len(prompts))])
        hidden = model.extend(new, cache)
        for row in range(len(prompts)):
            sequences[row].append(int(new[row]))
            got[row].append(hidden[row, 0])
    for row, (sequence, trajectory) in enumerate(zip(sequences, trajectories, strict=True)):
        with torch.no_grad():
            expected = model(torch.tensor([sequence]), trajectory).hidden[0, counts[row] - 1 :]
        torch.testing.assert_close(torch.stack(got[row]), expected, atol=1e-4, rtol=1e-4)
    assert cache.lengths == [len(sequence) for sequence in sequences]


def test_a_prompt_may_come_in_pieces(tiny: ModelConfig) -> None:
    model = spread(tiny)
    ids = torch.randint(tiny.vocab, (2, 12))
    cache = model.cache("2-1-1", 2)
    pieces = [model.extend(part, cache) for part in torch.split(ids, [5, 4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids, "2-1-1").hidden, atol=1e-4, rtol=1e-4)


def test_cost_is_the_sum_of_the_budgets(tiny: ModelConfig) -> None:
    model, seen = spread(tiny), []
    model.stack.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    cache = model.cache([1, 4, 2, 1], 4)
    model.extend(torch.zeros(4, 3, dtype=torch.long), cache)
    assert sum(seen) == 1 + 4 + 2 + 1
    whole = 4 * model.cost.kv_bytes(1, value_bytes=4) * tiny.context
    assert cache.bytes == whole * (1 + 4 + 2 + 1) / 4


def test_mistakes_are_one_clear_sentence(tiny: ModelConfig) -> None:
    model = spread(tiny)
    cache = model.cache(2, 1, capacity=4)
    cases: list[tuple[Any, str]] = [
        (lambda: model.cache(9, 1), "above the model's 4 loops"),
        (lambda: model.cache(1, 1, capacity=33), r"1 to 32 tokens \(the context\)"),
        (lambda: model.extend(torch.zeros(1, 5, dtype=torch.long), cache), "do not fit the cache of 4"),
        (lambda: cache.write(0, model.cache(3, 1).read(0), 0), "Row 0 of this cache follows 2, not 3"),
        (lambda: spread(tiny, 1).extend(torch.zeros(1, 1, dtype=torch.long), cache), "made for another model"),
        (lambda: deepcopy(model).extend(torch.zeros(1, 1, dtype=torch.long), cache), "made for another model"),
        (lambda: model.extend(torch.zeros(2, 1, dtype=torch.long), cache), "2 rows were given to a cache of 1"),
        (lambda: model.extend(torch.zeros(1, 2, dtype=torch.long), cache, [3]), "counts must be 1 numbers"),
        (lambda: model.extend(torch.zeros(1, 2, dtype=torch.long), cache, [1, 1]), "counts must be 1 numbers"),
        (lambda: model.extend(torch.full((1, 2), 96), cache), "ids must lie in"),
    ]
    for make, said in cases:
        with pytest.raises(LoopformerError, match=said):
            make()


@pytest.mark.parametrize("kind", get_args(Conditioning))
def test_bf16_caches_are_bf16(tiny: ModelConfig, kind: Conditioning) -> None:
    model = LoopedLM(replace(tiny, conditioning=kind, modulator_start="one")).to(torch.bfloat16)
    cache = model.cache(None, 1)
    assert model.extend(torch.zeros(1, 3, dtype=torch.long), cache).dtype == torch.bfloat16
    assert cache.bytes == model.cost.kv_bytes() * tiny.context


def test_a_cache_holds_one_token_to_a_context(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny)
    for capacity in (1, tiny.context):
        assert model.cache("1", 1, capacity=capacity).capacity == capacity
    for capacity in (-1, tiny.context + 1):
        with pytest.raises(LoopformerError, match="A cache holds 1 to"):
            model.cache("1", 1, capacity=capacity)
