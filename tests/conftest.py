"""What all tests share: one thread each, quick hypothesis runs, small models."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from loopformer.config import ModelConfig

settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    derandomize="CI" in os.environ,  # new cases are for people to find, not for a build to fail on
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> ModelConfig:
    """A LoopFormer 2⊗4 that runs in milliseconds; gates spread out, so that every path shows in the output."""
    return ModelConfig(
        blocks=2,
        loops=4,
        width=32,
        heads=4,
        ffn=80,
        context=32,
        vocab=96,
        padded_vocab=96,
        modulator_start="normal",
    )
