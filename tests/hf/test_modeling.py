"""The wrapper gives the same logits, losses and gradients as the model, also with the caches of Transformers."""

import copy
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from inference.models import spread
from options import draw_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_layers import GradientCheckpointingLayer

import loopformer.hf
from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.config import Conditioning
from loopformer.hf import LoopFormerConfig, LoopFormerForCausalLM
from loopformer.loading import load_model, save_model


def as_options(trajectory: str) -> dict[str, Any]:
    return {"budget": int(trajectory)} if trajectory.isdigit() else {"trajectory": trajectory}


@pytest.mark.parametrize("kind", get_args(Conditioning))
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_logits_states_and_gradients_are_ours(tiny: ModelConfig, kind: Conditioning, positions: Any) -> None:
    ours = spread(replace(tiny, conditioning=kind, positions=positions, padded_vocab=128))
    theirs = LoopFormerForCausalLM.wrap(ours)
    ids = torch.randint(tiny.vocab, (2, 9))
    for trajectory in ["1", "2", "4"] + ([] if kind in ("none", "index") else ["2-1-1"]):
        expected = ours(ids, trajectory, states=True)
        expected_loss = F.cross_entropy(expected.logits[:, :-1, : tiny.vocab].flatten(0, 1), ids[:, 1:].flatten())
        expected_gradient = torch.autograd.grad(expected_loss, ours.tokens.weight)[0]
        for use_cache in (False, True):
            got = theirs(ids, labels=ids, output_hidden_states=True, use_cache=use_cache, **as_options(trajectory))
            assert torch.equal(got.logits, expected.logits[..., : tiny.vocab])
            assert len(got.hidden_states) == 1 + tiny.blocks * len(expected.states)  # one per layer of the cache
            assert all(map(torch.equal, got.hidden_states[:: tiny.blocks][1:], expected.states))
            torch.testing.assert_close(got.loss, expected_loss)
            gradient = torch.autograd.grad(got.loss, ours.tokens.weight)[0]
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4)


def test_logits_to_keep_tuples_and_embeddings(model: LoopedLM) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model), torch.randint(96, (2, 7))
    whole = theirs(ids, budget=2)
    torch.testing.assert_close(theirs(ids, budget=2, logits_to_keep=3).logits, whole.logits[:, -3:])
    chosen = torch.tensor([1, 4])
    torch.testing.assert_close(theirs(ids, budget=2, logits_to_keep=chosen).logits, whole.logits[:, chosen])
    assert torch.equal(theirs(ids, budget=2, return_dict=False)[0], whole.logits)
    assert torch.equal(theirs(inputs_embeds=model.tokens(ids), budget=2).logits, whole.logits)
    assert theirs.get_input_embeddings() is model.tokens


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_attention_maps_are_what_each_block_of_each_pass_looked_at(tiny: ModelConfig, positions: Any) -> None:
    model = spread(replace(tiny, positions=positions))
    plain, eager = (LoopFormerForCausalLM.wrap(model, attn_implementation=kind) for kind in ("sdpa", "eager"))
    ids, mask = torch.randint(96, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in model.stack.typed_blocks():
        block.attention.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    expected = plain(ids, attention_mask=mask, budget=3)
    attended = seen[:]
    got = eager(ids, attention_mask=mask, budget=3, output_attentions=True)
    real = mask.bool()  # the output of padding means nothing
    torch.testing.assert_close(got.logits[real], expected.logits[real])
    assert [one.shape for one in got.attentions] == [(2, 4, 7, 7)] * 6  # layer = loop·k + block
    for number, (weights, (x, output)) in enumerate(zip(got.attentions, attended, strict=True)):
        attention = list(model.stack.typed_blocks())[number % 2].attention
        v = attention.qkv(x).chunk(3, dim=-1)[2].view(2, 7, 4, 8).transpose(1, 2)
        mixed = attention.out((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed[real], output[real])
    assert got.attentions[0][1, :, 2:, :2].eq(0).all()  # nobody looks at padding

    last = torch.ones(2, 1, dtype=torch.long)
    longer = {"input_ids": torch.cat([ids, last], 1), "attention_mask": torch.cat([mask, last], 1)}
    whole = eager(**longer, budget=3, output_attentions=True).attentions
    static = StaticCache(config=eager.config, max_cache_len=10)
    eager(ids, attention_mask=mask, budget=3, past_key_values=static)
    for cache in (got.past_key_values, static):
        step = {"attention_mask": longer["attention_mask"], "past_key_values": cache, "output_attentions": True}
        for one, all_rows in zip(eager(last, **step, budget=3).attentions, whole, strict=True):
            torch.testing.assert_close(one[..., :8], all_rows[:, :, -1:])

    added = torch.zeros(2, 1, 7, 7).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    got = eager(ids, attention_mask=added, output_attentions=True)
    torch.testing.assert_close(got.logits, plain(ids, attention_mask=added).logits)
    assert plain(ids, output_attentions=True).attentions is None  # as in Transformers, with a warning


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("padding", [None, 0, 2])
@torch.no_grad()
def test_eager_attention_does_not_see_the_next_token(
    tiny: ModelConfig, positions: Any, padding: int | None
) -> None:
    eager = LoopFormerForCausalLM.wrap(spread(replace(tiny, positions=positions)), attn_implementation="eager")
    ids, mask = torch.randint(96, (2, 7)), None
    if padding is not None:
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, :padding] = 0
    real = (
        torch.ones(2, 7, dtype=torch.bool) if mask is None else mask.bool()
    )  # the output of padding means nothing
    for use_cache in (False, True):
        for maps in (False, True):
            options = {"attention_mask": mask, "budget": 3, "use_cache": use_cache, "output_attentions": maps}
            out = eager(ids, **options)
            for weights in out.attentions or ():
                weights = weights.transpose(1, 2)[real]  # [tokens, H, keys]
                keys, queries = torch.arange(7), torch.arange(7).expand(2, 7)[real]
                assert weights[(keys > queries[:, None])[:, None].expand_as(weights)].eq(0).all()
                torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            for last in range(2, 7):
                changed = ids.clone()
                changed[:, last] = (changed[:, last] + 1) % 96
                logits = eager(changed, **options).logits
                assert torch.equal(logits[:, :last][real[:, :last]], out.logits[:, :last][real[:, :last]])
                assert not torch.equal(logits[:, last], out.logits[:, last])


def test_recomputing_the_passes_changes_no_gradient(model: LoopedLM) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model).train(), torch.randint(96, (2, 7))
    assert any(isinstance(module, GradientCheckpointingLayer) for module in theirs.modules())
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        theirs.zero_grad()
        if options is not None:
            theirs.gradient_checkpointing_enable(options)
        counted: list[int] = []
        hook = model.stack.register_forward_pre_hook(lambda *_, seen=counted: seen.append(1))
        out = theirs(ids, labels=ids, output_hidden_states=True)
        assert len(out.hidden_states) == 9
        (out.loss + out.hidden_states[3].square().mean()).backward()
        hook.remove()
        assert len(counted) == (4 if options is None else 8)  # forward, and once more in backward
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for each in zip(*gradients, strict=True):
        for other in each[1:]:
            torch.testing.assert_close(each[0], other)


def test_settings_choose_the_default(model: LoopedLM) -> None:
    ids = torch.randint(96, (1, 5))
    theirs = LoopFormerForCausalLM.wrap(model, trajectory="2-1-1")
    assert torch.equal(theirs(ids).logits, model(ids, "2-1-1").logits)
    assert torch.equal(theirs(ids, budget=1).logits, model(ids, 1).logits)
    theirs.config.trajectory, theirs.config.budget = None, 2
    assert torch.equal(theirs(ids).logits, model(ids, 2).logits)


def test_settings_say_what_tools_ask_for(tiny: ModelConfig) -> None:
    config = LoopFormerConfig(model=replace(tiny, padded_vocab=128), budget=2)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (8, 32, 80)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 8)
    assert (config.vocab_size, config.max_position_embeddings) == (96, 32)
    again = LoopFormerConfig.from_dict(config.to_dict())
    assert (again.settings, again.budget) == (config.settings, 2)
    assert LoopFormerConfig.from_dict(config.to_dict(), trajectory="1-1").budget is None


def test_a_fresh_model_has_our_weights(tiny: ModelConfig) -> None:
    torch.manual_seed(3)
    ours = LoopedLM(replace(tiny, modulator_start="one")).state_dict()
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(LoopFormerConfig(model=replace(tiny, modulator_start="one")))
    assert all(torch.equal(theirs.model.state_dict()[name], tensor) for name, tensor in ours.items())


def test_saved_and_loaded(model: LoopedLM, tmp_path: Path) -> None:
    ids = torch.randint(96, (1, 6))
    LoopFormerForCausalLM.wrap(model, budget=4).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert (
        sum(tensor.numel() for tensor in saved.values()) == model.cost.parameters.total
    )  # the head is not there twice
    assert AutoConfig.from_pretrained(tmp_path).settings == model.config
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, trajectory="2-1-1"
    )  # takes the place of the file's budget
    assert isinstance(loaded, LoopFormerForCausalLM)
    assert torch.equal(loaded(ids).logits, model(ids, "2-1-1").logits)
    assert torch.equal(load_model(tmp_path)(ids).logits, model(ids).logits)  # ours reads it too
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16


def test_a_model_folder_of_ours_loads_as_it_is(model: LoopedLM, tmp_path: Path) -> None:
    ids = torch.randint(96, (1, 6))
    save_model(model, tmp_path)
    assert torch.equal(LoopFormerForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_what_a_file_lacks_is_named_and_starts_as_in_a_new_model(tiny: ModelConfig, tmp_path: Path) -> None:
    model, lacking = spread(replace(tiny, modulator_start="one")), "model.conditioner.modulators.0.bias"
    LoopFormerForCausalLM.wrap(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = LoopFormerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {lacking}
    found = loaded.state_dict()
    assert found.pop(lacking).tolist() == [1.0] * 64 + [0.0] * 64
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    with pytest.raises(LoopformerError, match="modulators"):  # ours takes whole files only
        load_model(tmp_path)


def test_an_import_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, said in ((None, "not installed; run: pip install"), (ModuleType("transformers"), "'AutoConfig'")):
        monkeypatch.setitem(sys.modules, "transformers", module)
        with pytest.raises(LoopformerError, match=said):
            runpy.run_path(loopformer.hf.__file__)


def test_mistakes_are_one_clear_sentence(model: LoopedLM, tmp_path: Path) -> None:
    theirs, ids = LoopFormerForCausalLM.wrap(model), torch.randint(96, (1, 5))
    theirs.save_pretrained(tmp_path)
    unconditioned = LoopFormerForCausalLM.wrap(spread(replace(model.config, conditioning="none")))
    cases: list[tuple[Any, str]] = [
        (lambda: theirs(ids, budget=0), "1 or more; got 0"),
        (lambda: theirs.generate(ids, budget=5), "above the model's 4 loops"),
        (lambda: theirs(ids, budget=[1, 2]), "A budget is a whole number of loops"),
        (lambda: theirs(ids, trajectory="fast"), "Cannot read 'fast' as a trajectory"),
        (lambda: theirs(ids, budget=1, trajectory="2-1"), "a budget or a trajectory, not both"),
        (lambda: unconditioned(ids, trajectory="2-1"), "can only follow uniform"),
        (lambda: AutoModelForCausalLM.from_pretrained(tmp_path, budget=9), "Budget 9 is above"),
        (lambda: AutoModelForCausalLM.from_pretrained(tmp_path, budget=1, trajectory="2-1"), "not both"),
        (lambda: LoopFormerForCausalLM.wrap(model, trajectory="x"), "Cannot read 'x'"),
        (lambda: LoopFormerConfig(model={"wdith": 3}), "did you mean model.width"),
        (lambda: LoopFormerConfig(version=9), "of version 9"),
        (lambda: LoopFormerConfig(tie_word_embeddings=False), "leave tie_word_embeddings true"),
        (lambda: theirs(torch.full((1, 3), 96)), "is this the model's own tokenizer"),
        (lambda: theirs(torch.zeros(1, 33, dtype=torch.long)), "context is 32"),
        (lambda: theirs.generate(ids, max_new_tokens=40), "33 tokens but the context is 32"),
        (lambda: theirs(ids, attention_mask=torch.ones(1, 4)), r"attention_mask has shape \[1, 4\]"),
        (lambda: theirs(), "Give input_ids or inputs_embeds"),
        (lambda: theirs.resize_token_embeddings(100), "has 96 tokens and cannot be resized to 100"),
    ]
    for make, said in cases:
        with pytest.raises(LoopformerError, match=said):
            make()


# Caches.

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
