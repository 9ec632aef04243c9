from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options import OPTIONS, Option
from torch import Tensor, nn

from loopformer import LoopedLM, LoopformerError, Trajectory
from loopformer.config import Conditioning, ModelConfig
from loopformer.model.block import EPSILON, RMSNorm, attention_map, rotary_angles
from loopformer.model.conditioning import ZeroLinear
from loopformer.scoring import TrajectoryTree

KINDS = get_args(Conditioning)


def spread(model: LoopedLM) -> LoopedLM:
    """Redraw every weight wide enough that each path shows in the output."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def ids_for(config: ModelConfig, rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(config.vocab, (rows, length))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_budgets_equal_each_alone(tiny: ModelConfig, kind: Conditioning, positions: str) -> None:
    model = spread(LoopedLM(replace(tiny, conditioning=kind, positions=positions)))  # type: ignore[arg-type]
    trajectories = ["4", "1", "2", "3"] if kind in ("none", "index") else ["2-1-1", "1", "4", "1-3"]
    ids = ids_for(tiny, rows=4)
    together = model(ids, trajectories, states=True)
    for row, trajectory in enumerate(trajectories):
        alone = model(ids[row : row + 1], trajectory, states=True)
        torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(together.hidden[row], alone.hidden[0], atol=1e-4, rtol=0)
        for step, state in enumerate(alone.states):
            torch.testing.assert_close(together.states[step][row], state[0], atol=1e-4, rtol=0)


def test_rows_give_the_gradients_of_each_alone(tiny: ModelConfig) -> None:
    model = spread(LoopedLM(tiny))
    ids, trajectories = ids_for(tiny, rows=3), ["1", "2-1-1", "4"]
    model(ids, trajectories).logits.square().sum().backward()
    together = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    for row, trajectory in enumerate(trajectories):
        model(ids[row : row + 1], trajectory).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], atol=1e-2, rtol=1e-4)


def test_a_row_that_is_done_leaves_the_loop(tiny: ModelConfig) -> None:
    model, seen = LoopedLM(tiny), []
    model.stack.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    model(ids_for(tiny, rows=4), ["4", "1", "3", "1"])
    assert seen == [4, 2, 2, 1]


def test_states_are_those_after_each_pass_and_lead_to_the_output(tiny: ModelConfig) -> None:
    model = spread(LoopedLM(tiny))
    out = model(ids_for(tiny), "2-1-1", states=True)
    assert len(out.states) == 3
    torch.testing.assert_close(model.final_norm(out.states[-1]), out.hidden)
    torch.testing.assert_close(model.head(out.hidden), out.logits)
    assert model(ids_for(tiny), logits=False).logits is None


def test_none_means_the_full_uniform_trajectory(tiny: ModelConfig) -> None:
    model, ids = spread(LoopedLM(tiny)), ids_for(tiny)
    expected = model(ids, Trajectory.uniform(4)).logits
    for same in (None, 4, "4", np.int64(4), [None, 4], Trajectory.parse("1/4,1/4,1/4,1/4")):
        assert torch.equal(model(ids, same).logits, expected)


@pytest.mark.parametrize(
    ("kind", "first", "second", "differ"),
    [
        ("trajectory", "1-1-2", "1-2-1", True),
        ("time", "1-1-2", "1-2-1", True),
        ("step", "1-1-2", "1-2-1", True),
        ("step", "1-1-2", "2-1-1", True),
    ],
)
def test_schedules_matter_to_models_that_are_told(
    tiny: ModelConfig, kind: Conditioning, first: str, second: str, differ: bool
) -> None:
    model, ids = spread(LoopedLM(replace(tiny, conditioning=kind, time_scale=10.0))), ids_for(tiny)
    assert torch.allclose(model(ids, first).logits, model(ids, second).logits, atol=1e-3) != differ


def test_time_is_not_told_the_last_step_and_step_is_not_told_the_order_of_time(tiny: ModelConfig) -> None:
    timed = spread(LoopedLM(replace(tiny, conditioning="time")))
    first, second = (modulations(timed, Trajectory.parse(steps))[0] for steps in ("1-1-2", "3-1"))
    assert torch.equal(first, second)
    stepped = spread(LoopedLM(replace(tiny, conditioning="step")))
    forward, backward = (modulations(stepped, Trajectory.parse(steps)) for steps in ("1-3", "3-1"))
    torch.testing.assert_close(forward, backward.flip(0))


def modulations(model: LoopedLM, trajectory: Trajectory) -> Tensor:
    return _some(model.condition(trajectory).modulation)


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def test_table_shape_and_time_scale(tiny: ModelConfig) -> None:
    model = spread(LoopedLM(tiny))
    assert modulations(model, Trajectory.parse("2-1-1")).shape == (3, 2, 4, 32)
    scaled = LoopedLM(replace(tiny, time_scale=30.0))
    scaled.load_state_dict(model.state_dict())
    assert not torch.allclose(
        modulations(scaled, Trajectory.uniform(2)),
        modulations(model, Trajectory.uniform(2)),
    )


@pytest.mark.parametrize("start", ["zero", "normal", "one"])
def test_modulator_starts(tiny: ModelConfig, start: str) -> None:
    model, ids = LoopedLM(replace(tiny, modulator_start=start)), ids_for(tiny)  # type: ignore[arg-type]
    table = modulations(model, Trajectory.uniform(4))
    gates, scales = table[:, :, :2], table[:, :, 2:]
    if start == "zero":
        embedded = model.embed(ids)[0]
        torch.testing.assert_close(model(ids).hidden, model.final_norm(embedded))  # gates at 0: identity
    elif start == "one":
        plain = LoopedLM(replace(tiny, conditioning="none"))
        plain.load_state_dict(model.state_dict() | plain.state_dict() | _shared(model), strict=False)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)  # gates at 1: the unmodulated backbone
        assert torch.equal(gates, torch.ones_like(gates))
        assert torch.equal(scales, torch.zeros_like(scales))
    else:
        modulator = model.state_dict()["conditioner.modulators.0.weight"]
        assert float(modulator.std()) == pytest.approx(0.02, rel=0.1)


def _shared(model: LoopedLM) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "conditioner" not in name}


def test_residual_projections_start_by_k_or_by_k_times_l(tiny: ModelConfig) -> None:
    def std(how: str) -> float:
        config = replace(tiny, width=128, ffn=512, residual_init=how)  # type: ignore[arg-type]
        return float(LoopedLM(config).state_dict()["stack.blocks.0.ffn.down.weight"].std())

    assert std("blocks") == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.05)
    assert std("depth") == pytest.approx(0.02 / (2 * 2 * 4) ** 0.5, rel=0.05)


def test_learned_norms_only_where_nothing_modulates(tiny: ModelConfig) -> None:
    names = {kind: dict(LoopedLM(replace(tiny, conditioning=kind)).named_parameters()) for kind in KINDS}
    assert "stack.blocks.0.norm_1.weight" in names["none"]
    assert all("stack.blocks.0.norm_1.weight" not in names[kind] for kind in KINDS if kind != "none")
    assert all("final_norm.weight" in names[kind] for kind in KINDS)


def test_injection_adds_some_of_the_embedding_before_every_later_pass(tiny: ModelConfig) -> None:
    model, ids = spread(LoopedLM(replace(tiny, inject="gated"))), ids_for(tiny)
    trajectory = Trajectory.parse("2-1-1")
    condition = model.condition(trajectory)
    embedded, rotary, mask, _ = model.embed(ids)
    x = model.stack(embedded, _some(condition.modulation)[:1], rotary, mask)
    for number in (1, 2):
        x = x + _some(condition.injection)[number] * embedded
        x = model.stack(x, _some(condition.modulation)[number : number + 1], rotary, mask)
    torch.testing.assert_close(model(ids, trajectory).hidden, model.final_norm(x))


def starts_at_zero(option: Option) -> bool:
    small = ModelConfig(blocks=1, width=8, heads=1, ffn=8, context=8, vocab=8, **option)
    return any(isinstance(module, ZeroLinear) for module in LoopedLM(small).modules())


@pytest.mark.parametrize("option", [each for each in OPTIONS if starts_at_zero(each)], ids=str)
def test_what_starts_at_zero_starts_as_the_model_without_it(tiny: ModelConfig, option: Option) -> None:
    ids, models = ids_for(tiny), []
    for changes in ({}, option):
        torch.manual_seed(3)
        models.append(LoopedLM(replace(tiny, **changes)))
    plain, other = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.items())
    assert torch.equal(models[0](ids, "2-1-1").logits, models[1](ids, "2-1-1").logits)
    models[1](ids, "2-1-1").logits.square().mean().backward()
    added = [parameter for name, parameter in models[1].named_parameters() if name not in plain]
    assert added
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in added)


RECURRENT_DEPTH: Option = {"conditioning": "none", "norms": "sandwich", "start": "random", "inject": "adapter"}


@pytest.mark.parametrize("conditioning", ["none", "trajectory"])
def test_recurrent_depth_joins_state_and_embedding_in_every_pass(tiny: ModelConfig, conditioning: str) -> None:
    config = replace(tiny, **{**RECURRENT_DEPTH, "conditioning": conditioning})
    model, ids = spread(LoopedLM(config)).eval(), ids_for(tiny)
    embedded, rotary, mask, x = model.embed(ids)
    assert model.adapter is not None
    table = model.condition(Trajectory.uniform(2)).modulation
    for number in range(2):
        modulation = None if table is None else table[number : number + 1]
        rms = (embedded.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        x = model.stack(torch.cat([x, embedded / rms], -1) @ model.adapter.weight.T, modulation, rotary, mask)
    torch.testing.assert_close(model(ids, 2).hidden, model.final_norm(x), atol=1e-4, rtol=1e-4)


def test_sandwich_norms_are_learned_and_come_after_each_sum(tiny: ModelConfig) -> None:
    model = spread(LoopedLM(replace(tiny, conditioning="none", norms="sandwich")))
    block, x = next(iter(model.stack.typed_blocks())), torch.randn(2, 5, 32)
    expected = block.after_1(x + block.attention(block.norm_1(x), None, None, None))
    expected = block.after_2(expected + block.ffn(block.norm_2(expected)))
    torch.testing.assert_close(block(x, None, None, None, None), expected)
    assert isinstance(block.after_2, RMSNorm)
    assert block.after_2.weight is not None
    torch.testing.assert_close(
        (expected / block.after_2.weight).square().mean(-1), torch.ones(2, 5), atol=1e-3, rtol=1e-3
    )


def test_a_random_start_is_fixed_by_position_and_in_training_by_the_row(tiny: ModelConfig) -> None:
    model, ids = spread(LoopedLM(replace(tiny, **RECURRENT_DEPTH))), ids_for(tiny, rows=3)
    ids[2] = ids[0]
    x, positions = torch.zeros(3, 12, 32), torch.arange(12)[None]
    trained = model.initial_state(x, positions, ids)
    assert torch.equal(trained[0], trained[2])  # also when the step is run again
    assert not torch.isclose(trained[0], trained[1]).any()
    with torch.no_grad():  # as in validation
        fixed = model.initial_state(x, positions, ids)
    assert torch.equal(fixed, model.eval().initial_state(x, positions, ids))
    assert torch.equal(fixed, fixed[:1].expand_as(x))
    assert not torch.isclose(fixed, trained).any()
    assert float(fixed[0].std()) == pytest.approx((2 / 5) ** 0.5, rel=0.1)
    assert torch.equal(model.initial_state(x[:, :1], torch.tensor([[7]])), fixed[:, 7:8])


@pytest.mark.parametrize("option", [*OPTIONS, RECURRENT_DEPTH], ids=str)
def test_settings_beyond_the_paper_serve_rows_of_different_budgets(tiny: ModelConfig, option: Option) -> None:
    model, ids = spread(LoopedLM(replace(tiny, **option))).eval(), ids_for(tiny, rows=4)
    trajectories = ["3", "1", "4", "2"] if model.conditioner is None else ["2-1-1", "1", "4", "1-3"]
    together = model(ids, trajectories, states=True)
    tree = dict(TrajectoryTree(model, [Trajectory.parse(each) for each in trajectories]).run(ids))
    for row, trajectory in enumerate(trajectories):
        alone = model(ids[row : row + 1], trajectory, states=True)
        torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(tree[Trajectory.parse(trajectory)][row], alone.hidden[0], atol=1e-4, rtol=1e-4)
        for step, state in enumerate(alone.states):
            torch.testing.assert_close(together.states[step][row], state[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_attention_maps_of_a_sequence_without_a_mask_are_causal(tiny: ModelConfig) -> None:
    stack, x, maps = LoopedLM(tiny).stack, torch.randn(2, 6, tiny.width), list[Tensor]()
    torch.testing.assert_close(stack(x, None, maps=maps), stack(x, None))
    for weights in maps:
        assert weights.triu(1).eq(0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, tiny.heads, 6))
    assert len(maps) == tiny.blocks


def test_causal(tiny: ModelConfig) -> None:
    model, ids = spread(LoopedLM(tiny)), ids_for(tiny)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % tiny.vocab
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@given(cut=st.integers(1, 11))
def test_documents_do_not_see_each_other(positions: str, cut: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        blocks=1,
        loops=2,
        width=32,
        heads=4,
        ffn=40,
        context=16,
        vocab=64,
        positions=positions,  # type: ignore[arg-type]
    )
    model, ids = spread(LoopedLM(config)), ids_for(config, rows=1)
    documents = (torch.arange(12) >= cut).long()[None]
    together = model(ids, "1-1", documents=documents).logits
    apart = torch.cat([model(ids[:, :cut]).logits, model(ids[:, cut:]).logits], dim=1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_follows_fp32(tiny: ModelConfig, kind: Conditioning) -> None:
    model, ids = LoopedLM(replace(tiny, conditioning=kind, modulator_start="one")), ids_for(tiny)
    expected = model(ids).logits
    got = model.to(torch.bfloat16)(ids).logits
    assert got.dtype == torch.bfloat16
    assert float(((got.float() - expected).norm() / expected.norm()).detach()) < 0.03


def test_epsilon_is_the_same_at_every_dtype(tiny: ModelConfig) -> None:
    norm = LoopedLM(tiny).final_norm
    small = torch.full((1, 32), 1e-3)  # rms² = 1e-6: bf16's own epsilon, 0.0078, would shrink it to nothing
    torch.testing.assert_close(norm(small), small / (1e-6 + 1.1920929e-07) ** 0.5)
    assert float(norm.to(torch.bfloat16)(small.bfloat16())[0, 0].detach()) == pytest.approx(0.945, abs=0.01)


@pytest.mark.parametrize(
    ("ids", "trajectory", "said"),
    [
        (torch.zeros(1, 33, dtype=torch.long), None, "33 tokens but the context is 32"),
        (torch.full((1, 4), 96), None, r"0…95, got 96…96"),
        (torch.full((1, 4), -1), None, r"got -1…-1"),
        (torch.zeros(0, 4, dtype=torch.long), None, "empty"),
        (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
        (torch.zeros(4, dtype=torch.long), None, r"\[B, T\]"),
        (torch.zeros(1, 4), None, "tensor of integers"),
        ([[1, 2]], None, "tensor of integers, got list"),
        (torch.zeros(1, 4, dtype=torch.long), 2.5, "whole number"),
        (torch.zeros(1, 4, dtype=torch.long), 10**9, "above the model's 4 loops"),
        (torch.zeros(1, 4, dtype=torch.long), 5, "above the model's 4 loops"),
        (torch.zeros(1, 4, dtype=torch.long), 0, "1 or more"),
        (torch.zeros(2, 4, dtype=torch.long), ["1", "2", "3"], "one per row"),
    ],
)
def test_bad_input_is_one_clear_sentence(tiny: ModelConfig, ids: Tensor, trajectory: object, said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        LoopedLM(tiny)(ids, trajectory)


def test_documents_must_fit(tiny: ModelConfig) -> None:
    with pytest.raises(LoopformerError, match="make them equal"):
        LoopedLM(tiny)(ids_for(tiny), documents=torch.zeros(1, 1, dtype=torch.long))


def test_uniform_only_models_refuse_schedules_and_extrapolation_is_asked_for(tiny: ModelConfig) -> None:
    ids = ids_for(tiny)
    for kind in ("none", "index"):
        with pytest.raises(LoopformerError, match="only follow uniform"):
            LoopedLM(replace(tiny, conditioning=kind))(ids, "2-1-1")
    assert len(LoopedLM(tiny)(ids, 6, beyond=True, states=True).states) == 6


def test_rotary_angles_are_those_of_the_formula(tiny: ModelConfig) -> None:
    positions, width = [[0, 3, 17], [2, 1, 900]], 8
    angles = [[[p / 10_000 ** (2 * i / width) for i in range(width // 2)] for p in row] for row in positions]
    expected = torch.tensor(angles, dtype=torch.float64)[:, None]
    cos, sin = rotary_angles(torch.tensor(positions), width, torch.float64)
    torch.testing.assert_close(cos, expected.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, expected.sin(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_only_learned_positions_are_weights(tiny: ModelConfig, positions: str) -> None:
    weights = LoopedLM(replace(tiny, positions=positions)).state_dict()  # type: ignore[arg-type]
    assert ("places.weight" in weights) == (positions == "learned")


def test_attention_maps_are_the_softmax_over_what_a_mask_allows() -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    allowed = torch.rand(2, 1, 5, 5) < 0.5
    allowed |= torch.eye(5, dtype=torch.bool)
    scores = q @ k.mT / 2
    expected = torch.where(allowed, scores.exp(), 0.0)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(attention_map(q, k, allowed, False), expected)
    added = torch.zeros(2, 1, 5, 5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(attention_map(q, k, added, False), expected)
    causal = attention_map(q, k, None, True)
    torch.testing.assert_close(causal, attention_map(q, k, torch.ones(5, 5, dtype=torch.bool).tril(), False))
    torch.testing.assert_close(attention_map(q, k, None, False), scores.softmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_biases_begin_at_zero_and_gates_at_what_is_set(tiny: ModelConfig, kind: Conditioning) -> None:
    model = LoopedLM(replace(tiny, conditioning=kind))
    biases = {name: weight for name, weight in model.named_parameters() if name.endswith("bias")}
    assert bool(biases) == (kind != "none")
    assert not any(weight.any() for name, weight in biases.items() if "modulator" not in name)
