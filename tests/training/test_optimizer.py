import copy

import pytest
import torch

from loopformer import LoopedLM
from loopformer.config import ModelConfig, TrainingConfig
from loopformer.training.optimizer import (
    MOMENTS,
    MOMENTUM,
    BlockMuon,
    ModelOptimizer,
    learning_rate,
    orthogonalise,
)


def test_rate_warms_up_and_follows_a_cosine() -> None:
    config = TrainingConfig()
    assert learning_rate(1, config) == pytest.approx(6e-4 / 4000)
    assert learning_rate(4000, config) == pytest.approx(6e-4)
    assert learning_rate(27_000, config) == pytest.approx((6e-4 + 6e-5) / 2)
    assert learning_rate(50_000, config) == pytest.approx(6e-5)
    assert learning_rate(1, TrainingConfig(warmup=0)) == pytest.approx(6e-4, rel=1e-4)


def test_matrices_decay_and_vectors_do_not(tiny: ModelConfig) -> None:
    optimizer = ModelOptimizer(LoopedLM(tiny), TrainingConfig(), fused=False)
    decay, none = optimizer.adamw.param_groups
    assert optimizer.muon is None
    assert decay["weight_decay"] == 0.2
    assert none["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim < 2 for parameter in none["params"])


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny)
    optimizer = ModelOptimizer(model, TrainingConfig(optimizer="muon"), fused=False)
    assert optimizer.muon is not None
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    matrices = {names[parameter]: parts for parameter, parts in optimizer.muon.parts.items()}
    kinds = ("attention.qkv", "attention.out", "ffn.up", "ffn.down")
    assert matrices == {
        f"stack.blocks.{block}.{kind}.weight": 3 if kind == "attention.qkv" else 1
        for block in range(tiny.blocks)
        for kind in kinds
    }
    rest = {names[p] for group in optimizer.adamw.param_groups for p in group["params"]}
    assert rest | matrices.keys() == set(names.values())
    assert not rest & matrices.keys()
    optimizer.set_rate(3e-4)
    assert optimizer.muon.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizer_with_the_state_of_another_goes_on_as_it_does(tiny: ModelConfig, kind: str) -> None:
    config = TrainingConfig(optimizer=kind)  # type: ignore[arg-type]
    model = LoopedLM(tiny)
    optimizer = ModelOptimizer(model, config, fused=False)

    def update(step: int, model: LoopedLM, optimizer: ModelOptimizer) -> None:
        torch.manual_seed(step)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            if name != "final_norm.weight" or step > 1:  # which has no gradient at first
                parameter.grad = torch.randn_like(parameter)
        optimizer.set_rate(learning_rate(step, config))
        optimizer.step()

    for step in (1, 2, 3):
        update(step, model, optimizer)
    state = optimizer.tensors(model)
    matrices = optimizer.muon.parts if optimizer.muon is not None else {}
    kinds = {name: MOMENTS if p not in matrices else (MOMENTUM,) for name, p in model.named_parameters()}
    assert state.keys() == {f"{kind}.{name}" for name, each in kinds.items() for kind in each}
    copied = copy.deepcopy(model)
    other = ModelOptimizer(copied, config, fused=False)
    for name, tensor in other.tensors(copied).items():
        assert not tensor.any()
        tensor.copy_(state[name])
    other.set_updates(3)
    before = copy.deepcopy(model.state_dict())
    for step in (4, 5):
        update(step, model, optimizer)
        update(step, copied, other)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in copied.state_dict().items())
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_is_torchs_and_takes_stacked_matrices_apart(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(3 * shape[0], shape[1]), torch.randn(4, 3 * shape[0], shape[1])
    together, apart = start.clone().requires_grad_(), [one.clone().requires_grad_() for one in start.chunk(3)]
    ours = BlockMuon({together: 3}, lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(apart, lr=0.02, weight_decay=0.1)
    for gradient in gradients:
        together.grad = gradient.clone()
        for one, part in zip(apart, gradient.chunk(3), strict=True):
            one.grad = part.clone()
        ours.step()
        theirs.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(together.detach(), torch.cat([one.detach() for one in apart]), atol=2e-3, rtol=0)
    assert (together - start).norm() > 0.1


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    settings = torch.optim.Muon([torch.zeros(1, 1)]).param_groups[0]
    matrices = [torch.randn(16, 48).bfloat16(), torch.randn(48, 16).bfloat16(), torch.randn(16, 48).bfloat16()]
    for matrix, turned in zip(matrices, orthogonalise(matrices, settings), strict=True):
        assert turned.shape == matrix.shape
        values = torch.linalg.svdvals(turned.float())
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_a_gradient_only_what_decays_changes(tiny: ModelConfig, kind: str) -> None:
    """Every matrix with AdamW, only the matrices of the blocks with Muon, and never a vector."""
    config = TrainingConfig(optimizer=kind, learning_rate=0.1, matrix_learning_rate=0.05, weight_decay=0.5)  # type: ignore[arg-type]
    model = LoopedLM(tiny)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # so that a decay would show in each
            parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ModelOptimizer(model, config, fused=False).step()
    factors = {"adamw": 1 - 0.1 * 0.5, "muon": 1 - 0.05 * 0.5}
    for name, parameter in model.named_parameters():
        is_in_block = name.startswith("stack.") and parameter.ndim == 2
        decays = parameter.ndim == 2 if kind == "adamw" else is_in_block
        expected = before[name] * factors[kind] if decays else before[name]
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=0, msg=name)
