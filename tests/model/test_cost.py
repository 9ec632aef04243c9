from dataclasses import replace
from typing import get_args

import pytest
import torch
from options import OPTIONS, Option
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from loopformer import LoopedLM, Trajectory
from loopformer.config import Conditioning, ModelConfig
from loopformer.model.cost import Cost

PAPER = Cost(ModelConfig())


@pytest.mark.parametrize("kind", get_args(Conditioning))
@pytest.mark.parametrize("budget", [1, 3])
def test_forward_flops_are_what_torch_counts(tiny: ModelConfig, kind: Conditioning, budget: int) -> None:
    model = LoopedLM(replace(tiny, conditioning=kind))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randint(tiny.vocab, (3, 20)), budget)
    expected = 3 * 20 * model.cost.forward_flops(budget, context=20, causal=False) + model.cost.table_flops(budget)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.cost.parameters.total


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_settings_beyond_the_paper_are_counted(tiny: ModelConfig, option: Option) -> None:
    model, budget = LoopedLM(replace(tiny, **option)), 3
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randint(tiny.vocab, (3, 20)), budget)
    expected = 3 * 20 * model.cost.forward_flops(budget, context=20, causal=False) + model.cost.table_flops(budget)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.001)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.cost.parameters.total
    cache = model.cache(budget, 1)
    assert cache.bytes == model.cost.kv_bytes(budget, value_bytes=4) * tiny.context


def test_the_papers_numbers() -> None:
    assert PAPER.training_flops() == pytest.approx(6.36e9, rel=1e-3)
    assert PAPER.training_flops(budgets=[8, 4]) == pytest.approx(9.84e9, rel=1e-3)
    assert PAPER.training_overhead() == pytest.approx(1.55, abs=0.005)
    assert PAPER.kv_bytes() == 192 * 1024
    assert [PAPER.decode_bytes(m) / 1e9 for m in (8, 4, 2)] == pytest.approx([2.02, 1.11, 0.66], abs=0.005)


def test_overhead_is_the_papers_formula() -> None:
    io, loop = 2 * PAPER.head_matmul_params, PAPER.loop_flops()
    assert PAPER.training_overhead() == pytest.approx((2 * io + 1.5 * 8 * loop) / (io + 8 * loop))


def test_kv_adds_to_what_a_token_reads() -> None:
    assert PAPER.decode_bytes(4, context=512) - PAPER.decode_bytes(4) == 512 * PAPER.kv_bytes(4)
    assert PAPER.kv_bytes(4, value_bytes=4) == PAPER.kv_bytes(8)


@pytest.mark.parametrize("kind", get_args(Conditioning))
def test_a_decoded_token_reads_the_stack_and_its_modulation_in_every_loop(
    tiny: ModelConfig, kind: Conditioning
) -> None:
    model = LoopedLM(replace(tiny, conditioning=kind))
    modulation = model.condition(Trajectory.uniform(3)).modulation
    read = 3 * sum(parameter.numel() for parameter in model.stack.parameters())
    read += 0 if modulation is None else modulation.numel()
    read += model.tokens.weight.numel() + sum(parameter.numel() for parameter in model.final_norm.parameters())
    assert model.cost.decode_bytes(3, value_bytes=4) == 4 * read


def test_a_prefill_computes_logits_once() -> None:
    for tokens, budget in ((1, 8), (100, 3)):
        forward = PAPER.forward_flops(budget, context=tokens)
        more = (tokens - 1) * (forward - 2 * PAPER.head_matmul_params)
        assert PAPER.prefill_flops(tokens, budget) == pytest.approx(forward + more)
