"""Early exit: parity with stored outputs and with a decoder that is written out, and that decoder's FLOPs."""

from dataclasses import replace

import pytest
import torch
from inference.models import spread
from options import OPTIONS, Option
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.evaluation.early_exit import early_exit, early_exit_flops
from loopformer.model.block import rotate
from loopformer.model.cache import KVCache
from loopformer.model.cost import Cost

SMALL = ModelConfig(blocks=2, loops=4, width=32, heads=2, ffn=64, context=24, vocab=20)
SETTINGS: list[Option] = [{}, *OPTIONS, {"conditioning": "none"}]
# Of early exit as it ran inside the model's own loop: option, trajectory, threshold, the loops of 3 rows of 10
# positions, and the sums of the top log-probabilities, of the predictions and of the hidden states' sizes.
STORED = [
    ({}, "4", 0.1, "3411111112 1111141414 3111111131", -64.9451, 295, 157.351),
    ({}, "2-1-1", 0.15, "3333333333 3323233333 3333333333", -65.9963, 268, 153.953),
    ({}, 6, 0.12, "6626661113 1116266666 6166616161", -64.6619, 332, 155.155),
    ({"inject": "gated"}, "4", 0.1, "1211414111 1111112114 1234111122", -66.1266, 274, 157.052),
    ({"inject": "gated"}, "2-1-1", 0.15, "3333333323 2333333333 3333133233", -63.3626, 266, 163.112),
    ({"inject": "adapter"}, 6, 0.12, "6661216162 1161666661 1666616316", -67.6167, 234, 146.035),
    (
        {"inject": "adapter", "start": "random"},
        "4",
        0.1,
        "2112211412 1322444234 2222242231",
        -66.5376,
        146,
        146.723,
    ),
    ({"norms": "sandwich"}, "2-1-1", 0.15, "3333111111 1313313313 3133113133", -61.0259, 428, 149.611),
    ({"conditioning": "none"}, 6, 0.12, "1121112133 1211211211 2111126515", -56.6957, 324, 215.245),
]


def model_with(option: Option) -> LoopedLM:
    """A model whose positions differ in how sure they are, and when."""
    return spread(replace(SMALL, **option), std=0.3)


def some_ids() -> Tensor:
    return torch.randint(20, (3, 10), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("option", "trajectory", "threshold", "loops", "logprobs", "predictions", "size"), STORED, ids=str
)
def test_outputs_are_those_that_were_stored(
    option: Option,
    trajectory: str | int,
    threshold: float,
    loops: str,
    logprobs: float,
    predictions: int,
    size: float,
) -> None:
    model = model_with(option)
    out = early_exit(model, some_ids(), threshold, trajectory, beyond=True)
    top, tokens = model.head(out.hidden).detach()[..., :20].log_softmax(-1).max(-1)
    assert ["".join(map(str, row)) for row in out.loops.tolist()] == loops.split()
    assert float(top.sum()) == pytest.approx(logprobs, abs=1e-3)
    assert int(tokens.sum()) == predictions
    assert float(out.hidden.abs().sum()) == pytest.approx(size, abs=1e-2)


@torch.no_grad()
def decode(model: LoopedLM, ids: Tensor, cache: KVCache, threshold: float) -> tuple[Tensor, int]:
    """A decoder with early exit: one token [1, 1] on top of a cache; its hidden state [1, 1, D] and its loops.

    After it has exited, a token leaves only its keys and values in the remaining loops.
    """
    positions, mask = cache.positions_and_mask(1)
    embedded, rotary = model.add_positions(model.tokens(ids), positions)
    x, taken, exited = model.initial_state(embedded, positions), 0, False
    for number, condition in enumerate(cache.plan.conditions):
        state = model.inject(x, embedded, condition, number)
        for index, (block, layer) in enumerate(zip(model.stack.typed_blocks(), cache.layers(number), strict=True)):
            modulation = None if condition.modulation is None else condition.modulation[:, index]
            if not exited:
                state = block(state, modulation, rotary, mask, layer)
                continue
            normed = block.norm_1(state)
            normed = normed if modulation is None else normed * (1 + modulation[:, 2, None])
            keys_values = F.linear(normed, block.attention.qkv.weight[model.config.width :])
            k, v = keys_values.view(1, 1, 2, model.config.heads, -1).transpose(1, 3).unbind(2)  # [1, H, 1, D/H]
            layer.store(k if rotary is None else rotate(k, *rotary), v)
        if not exited:
            x, taken = state, taken + 1
            if number + 1 < len(cache.plan.conditions):
                logits = model.head(model.final_norm(x))[..., : model.config.vocab]
                exited = float(logits.softmax(-1).amax()) > threshold
    cache.advance([1])
    return model.final_norm(x), taken


@pytest.mark.parametrize("option", SETTINGS, ids=str)
def test_it_is_what_a_decoder_with_early_exit_does_and_computes(option: Option) -> None:
    model = spread(replace(SMALL, **option), std=0.7)
    ids = torch.randint(20, (1, 24))
    out = early_exit(model, ids, 0.3)
    cache, hidden, loops = model.cache(None, 1), [], []
    for position in range(24):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            state, taken = decode(model, ids[:, position, None], cache, 0.3)
            model.head(state)
        expected = early_exit_flops(model.cost, taken, context=position + 1, causal=False)
        assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)
        hidden.append(state)
        loops.append(taken)
    assert out.loops.tolist() == [loops]
    assert len(set(loops)) > 1
    torch.testing.assert_close(torch.cat(hidden, dim=1), out.hidden, atol=1e-3, rtol=1e-3)


def test_the_ends_of_the_range() -> None:
    model, ids = model_with({}), some_ids()
    never, at_once = early_exit(model, ids, 1.0), early_exit(model, ids, 1e-6)
    assert torch.equal(never.hidden, model(ids).hidden)
    assert set(never.loops.flatten().tolist()) == {4}
    torch.testing.assert_close(at_once.hidden, model.final_norm(model(ids, states=True).states[0]))
    assert set(at_once.loops.flatten().tolist()) == {1}
    for wrong in (0.0, 1.1, float("nan"), -1, "0.5"):
        with pytest.raises(LoopformerError, match=r"certainty must lie in \(0, 1\], got"):
            early_exit(model, ids, wrong)  # type: ignore[arg-type]


def test_flops_are_those_that_were_stored() -> None:
    cost = Cost(ModelConfig())
    assert [early_exit_flops(cost, taken, 8) for taken in (1, 3, 4, 8)] == [
        1003487232.0,
        1793064960.0,
        2187853824.0,
        3560964096.0,
    ]
    assert early_exit_flops(cost, 8, 8) == cost.forward_flops(8) + 7 * 2 * cost.head_matmul_params


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(LoopformerError, match=r"ids must lie in 0…19"):
        early_exit(spread(SMALL), torch.tensor([[1, 20]]), 0.5)
