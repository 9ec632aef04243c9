"""With Transformers' caches, cached equals uncached: any model, trajectory, padding, cache class, and beams."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inference.models import spread
from options import draw_model
from transformers import DynamicCache, StaticCache

from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.hf import LoopFormerForCausalLM

Case = tuple[ModelConfig, str, list[list[int]], bool, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config, followed = draw_model(draw, context=16)
    rows = draw(st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=1, max_size=4))
    return config, draw(followed), rows, draw(st.booleans()), draw(st.integers(0, 10**6))


@given(cases())
@settings(max_examples=30)
def test_left_padded_and_cached_rows_equal_our_own_uncached_runs(case: Case) -> None:
    config, trajectory, rows, static, seed = case
    ours = spread(config, seed)
    theirs = LoopFormerForCausalLM.wrap(ours, trajectory=trajectory)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    cache: Any = DynamicCache()
    if static:
        cache = StaticCache(config=theirs.config, max_cache_len=longest + 4)
    sequences = [list(row) for row in rows]
    with torch.no_grad():
        for step in range(4):
            got = theirs(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
            expected = torch.stack(
                [ours(torch.tensor([one]), trajectory).logits[0, -1, : config.vocab] for one in sequences]
            )
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            ids = torch.tensor([[(7 * step + row) % 50] for row in range(len(rows))])
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            sequences = [[*one, int(new)] for one, new in zip(sequences, ids, strict=True)]


@pytest.mark.parametrize("trajectory", [{}, {"budget": 1}, {"budget": 2}, {"trajectory": "2-1-1"}])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_every_way_to_generate_gives_the_same_tokens(
    tiny: ModelConfig, trajectory: dict[str, Any], positions: Any
) -> None:
    ours = spread(replace(tiny, positions=positions))
    theirs = LoopFormerForCausalLM.wrap(ours)
    ids = torch.randint(1, tiny.vocab, (3, 6))
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :5] = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **trajectory}

    def greedy(**more: Any) -> torch.Tensor:
        found: torch.Tensor = theirs.generate(ids, attention_mask=mask, **{**options, **more})
        return found

    plain = greedy(use_cache=False)
    assert torch.equal(greedy(), plain)
    assert torch.equal(greedy(cache_implementation="static"), plain)
    for row in range(3):  # a row alone, without its padding
        alone = theirs.generate(ids[row : row + 1, mask[row] == 1], **options)
        assert torch.equal(alone[0, -8:], plain[row, -8:])
    beams = greedy(num_beams=3, num_return_sequences=2, use_cache=False)
    assert torch.equal(greedy(num_beams=3, num_return_sequences=2), beams)
    assert torch.equal(greedy(num_beams=3, num_return_sequences=2, cache_implementation="static"), beams)


@pytest.mark.skipif(not hasattr(DynamicCache, "is_recording_past"), reason="crops only caches that are full")
def test_a_short_trajectory_of_the_same_weights_drafts_for_the_full_one(model: LoopedLM) -> None:
    ids = torch.randint(96, (1, 5))
    full, short = LoopFormerForCausalLM.wrap(model), LoopFormerForCausalLM.wrap(model, budget=1)
    assert short.model is full.model
    plain = full.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(full.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=short), plain)
    assert torch.equal(full.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3), plain)


def test_only_the_passes_of_the_budget_are_kept(model: LoopedLM) -> None:
    cache = LoopFormerForCausalLM.wrap(model)(torch.randint(96, (1, 5)), budget=3).past_key_values
    assert [cache.get_seq_length(layer) for layer in range(8)] == [5] * 6 + [0] * 2  # layer = loop·k + block


def test_a_cache_belongs_to_its_trajectory(model: LoopedLM) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model), torch.randint(96, (1, 5))
    dynamic, static = DynamicCache(config=theirs.config), StaticCache(config=theirs.config, max_cache_len=9)
    with torch.no_grad():
        for cache in (dynamic, static):
            theirs(ids, past_key_values=cache, budget=2)
            for used in (cache, copy.deepcopy(cache)):
                with pytest.raises(LoopformerError, match=r"follows 2, not 2-1-1.*make a new cache"):
                    theirs(ids[:, :1], past_key_values=used, trajectory="2-1-1")
        static.reset()  # empty again, so free to follow another
        theirs(ids, past_key_values=static, trajectory="2-1-1")
        got = theirs(ids[:, :1], past_key_values=static, trajectory="2-1-1").logits[:, -1]
        expected = model(torch.cat([ids, ids[:, :1]], 1), "2-1-1").logits[:, -1]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_cache_belongs_to_its_model(model: LoopedLM) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model), torch.randint(96, (1, 5))
    cache, other = theirs(ids, budget=2).past_key_values, LoopFormerForCausalLM.wrap(spread(model.config, seed=1))
    strange: Any = DynamicCache()
    strange.update(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), 0)
    for asked, used in ((other, cache), (theirs, strange)):
        with pytest.raises(LoopformerError, match="filled by another model; make a new cache"):
            asked(ids, past_key_values=used, budget=2)


@torch.no_grad()
def test_an_emptied_cache_forgets_the_modulations_of_older_weights(model: LoopedLM) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model), torch.randint(96, (1, 5))
    cache = StaticCache(config=theirs.config, max_cache_len=9)
    theirs(ids, past_key_values=cache, budget=2)
    assert model.conditioner is not None
    for parameter in model.conditioner.parameters():
        parameter.add_(0.1)
    cache.reset()
    got = theirs(ids, past_key_values=cache, budget=2).logits
    torch.testing.assert_close(got, theirs(ids, use_cache=False, budget=2).logits, atol=1e-5, rtol=1e-5)


def test_modulations_are_computed_once_per_sequence(model: LoopedLM) -> None:
    theirs, counted = LoopFormerForCausalLM.wrap(model), []
    assert model.conditioner is not None
    model.conditioner.register_forward_hook(lambda *_: counted.append(1))
    theirs.generate(torch.randint(96, (1, 5)), max_new_tokens=8, do_sample=False, budget=2)
    assert len(counted) == 1
