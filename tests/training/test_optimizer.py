import pytest

from loopformer import LoopedLM
from loopformer.config import ModelConfig, TrainingConfig
from loopformer.training.optimizer import learning_rate, make_optimizer


def test_rate_warms_up_and_follows_a_cosine() -> None:
    config = TrainingConfig()
    assert learning_rate(1, config) == pytest.approx(6e-4 / 4000)
    assert learning_rate(4000, config) == pytest.approx(6e-4)
    assert learning_rate(27_000, config) == pytest.approx((6e-4 + 6e-5) / 2)
    assert learning_rate(50_000, config) == pytest.approx(6e-5)
    assert learning_rate(1, TrainingConfig(warmup=0)) == pytest.approx(6e-4, rel=1e-4)


def test_matrices_decay_and_vectors_do_not(tiny: ModelConfig) -> None:
    optimizer = make_optimizer(LoopedLM(tiny), TrainingConfig(), fused=False)
    decay, none = optimizer.param_groups
    assert decay["weight_decay"] == 0.2
    assert none["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim < 2 for parameter in none["params"])
