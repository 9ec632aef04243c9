"""Weights packed for a CPU: near the exact product, renewed after a write, and out of the way of training."""

import pytest
import torch
from torch import Tensor, nn

import loopformer
from loopformer import LM, LoopedLM, LoopformerError, ModelConfig, Trajectory
from loopformer.model.packed import MAX_INT8_ROWS, Linear, PackedWeight, can_pack_bfloat16

BF16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(not can_pack_bfloat16(), reason="this CPU does not multiply bfloat16")
)
DTYPES = [torch.int8, BF16]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, MAX_INT8_ROWS, MAX_INT8_ROWS + 1, 70])
@torch.no_grad()
def test_a_packed_product_is_near_the_exact_one(dtype: torch.dtype, rows: int) -> None:
    """A step of int8 is 1/127 of a row's largest weight, which rounds a product by 0.5 %. bf16 has 8 bits."""
    layer, x = Linear(48, 80), torch.randn(2, rows, 48)
    layer.weight *= torch.logspace(-4, 4, 80)[:, None]  # each output has a scale of its own
    layer.weight[7] = 0
    exact = layer(x)
    layer.packed = PackedWeight(dtype)
    found = layer(x)
    assert found.shape == exact.shape
    assert found.dtype == x.dtype
    sizes = exact.norm(dim=(0, 1)).clamp(min=1e-30)  # compared by output, because their scales differ
    assert relative(found / sizes, exact / sizes) < (0.012 if dtype == torch.int8 else 0.006)
    assert not found[..., 7].any()


@torch.no_grad()
def test_int8_gives_the_same_for_few_rows_and_many() -> None:
    layer, x = Linear(48, 80), torch.randn(2 * MAX_INT8_ROWS, 48)
    layer.packed = PackedWeight(torch.int8)
    torch.testing.assert_close(layer(x[:3]), layer(x)[:3], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_copy_follows_the_weight_and_leaves_training_alone(dtype: torch.dtype) -> None:
    layer, x = Linear(48, 80), torch.randn(5, 48)
    layer.packed = PackedWeight(dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight)), "where gradients are recorded"
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(3)
        assert relative(layer(x), 3 * before) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_decodes_with_packed_weights_and_goes_back(dtype: torch.dtype, tiny: ModelConfig) -> None:
    torch.manual_seed(0)
    lm = LM(LoopedLM(tiny).eval())
    ids = torch.randint(tiny.vocab, (2, 9))
    state = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    with torch.no_grad():
        exact = lm.model(ids, 2).logits
        packed = lm.to("cpu", dtype).model(ids, 2).logits
    assert lm.model.dtype_name == str(dtype).removeprefix("torch.")
    assert 0 < relative(packed.float(), exact) < 0.05
    if dtype == torch.int8:
        assert lm.to("cpu").model.dtype_name == "int8", "as it was, unless a dtype is given"
        assert lm.to("cpu", torch.float32).model.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in lm.model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(lm.model(ids, 2).logits, exact)


def test_int8_on_a_gpu_is_refused(tiny: ModelConfig) -> None:
    with pytest.raises(LoopformerError, match="int8 decodes on a CPU only; on a GPU use bfloat16"):
        LM(LoopedLM(tiny)).to("cuda", torch.int8)


def test_the_bundled_model_writes_in_int8() -> None:
    lm, texts = loopformer.load("box"), ["The history of the city begins in the middle ages."]
    exact = lm.score(texts, budget=4)[0].perplexity
    assert lm.to("cpu", torch.int8).score(texts, budget=4)[0].perplexity == pytest.approx(exact, rel=0.05)
    engine = lm.engine(rows=2)
    for request in lm.requests(["The city", "The history of"], budget=2, max_tokens=5):
        engine.submit(request)
    results = [event.result for event in engine.run() if event.result is not None]
    assert [(result.reason, result.trajectory) for result in results] == [("length", Trajectory.uniform(2))] * 2
    lm.to("cpu", torch.float32)
    with pytest.raises(LoopformerError, match="moved while this engine has it"):
        engine.step()
