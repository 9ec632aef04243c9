"""A small model with a tokenizer, and weights spread out so that every choice shows."""

import pytest

from loopformer import LM, ModelConfig
from loopformer.data.tokenizer import Tokenizer

from .models import spread


@pytest.fixture(scope="session")
def lm() -> LM:
    tokenizer = Tokenizer.train(["every pass is told its time and its step, naïve café ☕ 日本語"] * 20, 300)
    config = ModelConfig(blocks=1, loops=4, width=32, heads=4, ffn=64, context=64, vocab=tokenizer.vocab_size)
    return LM(spread(config, std=0.3), tokenizer)
