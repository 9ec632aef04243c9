"""A small model with a tokenizer, in memory and as a folder."""

from pathlib import Path

import pytest
from inference.models import spread

from loopformer import LM, LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import save_model


@pytest.fixture
def model(tiny: ModelConfig) -> LoopedLM:
    return spread(tiny)


@pytest.fixture(scope="session")
def lm() -> LM:
    tokenizer = Tokenizer.train(["every pass is told its time and its step, naïve café ☕ 日本語"] * 20, 300)
    config = ModelConfig(
        blocks=2,
        loops=4,
        width=32,
        heads=4,
        ffn=64,
        context=64,
        vocab=tokenizer.vocab_size,
        positions="rotary",  # this and the rest as `elastic` has it
        modulator_start="one",
        time_scale=10.0,
        inject="gated",
        start="normed",
    )
    return LM(spread(config), tokenizer)


@pytest.fixture(scope="session")
def folder(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a model folder of ours."""
    place = tmp_path_factory.mktemp("models") / "mine"
    save_model(lm.model, place, source={"run": "runs/mine"})
    lm.need_tokenizer().save(place)
    return place
