"""The backward written out by hand against autograd's."""

from dataclasses import replace
from statistics import median

import pytest
import torch
from options import OPTIONS, Option
from torch import Tensor, nn

from loopformer import LoopedLM, Trajectory
from loopformer.config import ModelConfig, ObjectiveConfig
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import FusedStack, unsupported_reason
from loopformer.training.objective import Objective
from loopformer.training.packing import pack_rows

PLAIN = Precision(torch.float32)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LENGTH = 16  # fp8 matmuls on a GPU need multiples of 16 tokens
WAYS = ["trajectory", "none", "time", "index"]


def model_of(tiny: ModelConfig, seed: int = 0, **changes: object) -> LoopedLM:
    torch.manual_seed(seed)
    model = LoopedLM(replace(tiny, **changes))  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def gradients(model: LoopedLM) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def run(
    model: LoopedLM, precision: Precision | None, documents: Tensor | None = None, **settings: bool
) -> list[Tensor]:
    """Loss terms and every gradient, with both routes."""
    ids = torch.randint(model.config.vocab, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    objective = Objective(model, ObjectiveConfig(chunk=8), fused=precision, **settings)
    inputs, targets, device = ids[:, :-1], ids[:, 1:], model.tokens.weight.device
    trajectories = [
        dict.fromkeys(range(4), Trajectory.uniform(model.config.loops)),
        {1: Trajectory.uniform(2), 3: Trajectory.uniform(1)},
    ]
    packed = pack_rows(model.config, trajectories).to(device)
    losses = objective(inputs.to(device), targets.to(device), documents, packed, [4.0 * LENGTH, 2.0 * LENGTH])
    losses.total.backward()
    found = [losses.terms, *gradients(model)]
    model.zero_grad()
    return found


@pytest.mark.parametrize("conditioning", WAYS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_gradients_are_autograds(tiny: ModelConfig, conditioning: str, positions: str) -> None:
    model = model_of(tiny, conditioning=conditioning, positions=positions)
    for mine, theirs in zip(run(model, PLAIN), run(model, None), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def fusible(option: Option) -> bool:
    return unsupported_reason(ModelConfig(**option), torch.device("cpu"), fp8=False) is None


@pytest.mark.parametrize("option", [each for each in OPTIONS if fusible(each)], ids=str)
def test_settings_beyond_the_paper_train_alike(tiny: ModelConfig, option: Option) -> None:
    model = model_of(tiny, **option)
    for checkpoint_loops in (False, True):
        fused, plain = (run(model, way, checkpoint_loops=checkpoint_loops) for way in (PLAIN, None))
        for mine, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_what_the_kernels_lack_is_named(tiny: ModelConfig) -> None:
    why = unsupported_reason(replace(tiny, norms="sandwich"), torch.device("cpu"), fp8=False)
    assert why == "its kernels have no norms after residual sums; leave model.norms at pre"


def test_documents_are_kept_apart(tiny: ModelConfig) -> None:
    documents = torch.tensor([0] * 6 + [1] * 8 + [2] * 2).expand(4, LENGTH)
    model = model_of(tiny)
    for mine, theirs in zip(run(model, PLAIN, documents), run(model, None, documents), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_recomputing_passes_changes_no_bit(tiny: ModelConfig) -> None:
    model = model_of(tiny)
    for kept, again in zip(run(model, PLAIN), run(model, PLAIN, checkpoint_loops=True), strict=True):
        assert torch.equal(kept, again)


def test_gates_at_zero_still_learn(tiny: ModelConfig) -> None:
    """The paper's start: products of zeros, but the modulators get a gradient."""
    torch.manual_seed(0)
    model = LoopedLM(tiny)
    for mine, theirs in zip(run(model, PLAIN), run(model, None), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_backward_twice_gives_the_same_twice(tiny: ModelConfig) -> None:
    model = model_of(tiny)
    stack = FusedStack(model.stack, PLAIN)
    total = model(torch.arange(8)[None], stack=stack).logits.square().mean()
    total.backward(retain_graph=True)
    once = gradients(model)
    total.backward()
    for first, both in zip(once, gradients(model), strict=True):
        torch.testing.assert_close(both, 2 * first)


def far(found: list[Tensor], exact: list[Tensor]) -> float:
    """The distance of all gradients together, relative to their size."""
    wrong = sum((mine - theirs).square().sum() for mine, theirs in zip(found, exact, strict=True))
    return float((wrong / sum(theirs.square().sum() for theirs in exact)) ** 0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])])
@pytest.mark.parametrize(
    ("positions", "inject", "start"),
    [
        ("learned", "none", "embedding"),
        ("rotary", "none", "embedding"),
        ("rotary", "gated", "embedding"),
        ("rotary", "gated", "normed"),  # as `elastic` has it
    ],
)
def test_low_precision_stays_near(tiny: ModelConfig, positions: str, inject: str, start: str, device: str) -> None:
    """In bf16 as far from the exact gradients as autocast, in fp8 a few times as far: medians of nine models."""
    low, lower = [], []
    for seed in range(9):
        shape = {"width": 32, "ffn": 64, "positions": positions, "inject": inject, "start": start}
        model = model_of(tiny, seed, **shape).to(device)
        exact = run(model, None)
        with torch.autocast(device, torch.bfloat16):
            usual = far(run(model, None), exact)
            low.append(far(run(model, Precision(torch.bfloat16)), exact) / usual)
            lower.append(far(run(model, Precision(torch.bfloat16, fp8=True)), exact) / usual)
    assert median(low) < 1.25  # a single model has 0.3 to 4.7
    assert median(low) < median(lower) < 10


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])])
@pytest.mark.parametrize("precision", [Precision(torch.bfloat16), Precision(torch.bfloat16, fp8=True)])
def test_what_is_not_a_number_is_not_hidden(tiny: ModelConfig, precision: Precision, device: str) -> None:
    """fp8 is clamped, but a step that went wrong must be seen."""
    model = model_of(tiny, width=32, ffn=64).to(device)
    with torch.no_grad():
        next(iter(model.stack.typed_blocks())).attention.qkv.weight[3, 5] = torch.nan
    assert not torch.stack([gradient.norm() for gradient in run(model, precision)]).isfinite().all()


def test_frozen_weights_learn_nothing_and_the_rest_does(tiny: ModelConfig) -> None:
    model = model_of(tiny)
    expected = dict(zip([name for name, _ in model.named_parameters()], run(model, None)[1:], strict=True))
    frozen = "stack.blocks.0.ffn.up.weight"
    model.get_parameter(frozen).requires_grad_(False)
    found = run(model, PLAIN)[1:]
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert set(expected) - set(learning) == {frozen}
    for name, mine in zip(learning, found, strict=True):
        torch.testing.assert_close(mine, expected[name], atol=1e-5, rtol=1e-4)


def test_small_gradients_keep_their_precision(tiny: ModelConfig) -> None:
    """Losses are divided by all tokens of a step; scales of fp8 go as low."""
    model = model_of(tiny, width=32, ffn=64)
    stack = FusedStack(model.stack, Precision(torch.bfloat16, fp8=True))
    states = model(torch.arange(8)[None], stack=stack, states=True).states[-1]
    (states.square().mean() * 2.0**-40).backward()
    small = gradients(model)
    model.zero_grad()
    stack = FusedStack(model.stack, Precision(torch.bfloat16, fp8=True))
    model(torch.arange(8)[None], stack=stack, states=True).states[-1].square().mean().backward()
    for mine, theirs in zip(small, gradients(model), strict=True):
        torch.testing.assert_close(mine * 2.0**40, theirs, rtol=1e-5, atol=1e-9)


def test_an_expanded_gradient_is_read_right(tiny: ModelConfig) -> None:
    model = model_of(tiny)
    ids = torch.arange(8)[None]
    model(ids, stack=FusedStack(model.stack, PLAIN), states=True).states[-1].sum().backward()
    mine = gradients(model)
    model.zero_grad()
    model(ids, states=True).states[-1].sum().backward()
    for one, two in zip(mine, gradients(model), strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_a_second_derivative_is_refused(tiny: ModelConfig) -> None:
    model = model_of(tiny)
    loss = model(torch.arange(8)[None], stack=FusedStack(model.stack, PLAIN)).logits.square().mean()
    (slope,) = torch.autograd.grad(loss, [model.tokens.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(slope.square().sum())
