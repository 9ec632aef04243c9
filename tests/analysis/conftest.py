"""A small model with a tokenizer, and prompts for it."""

import pytest
import torch
from inference.models import spread

from loopformer import LM, ModelConfig
from loopformer.analysis.dynamics import Prompts
from loopformer.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def lm() -> LM:
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 20, 280)
    config = ModelConfig(
        blocks=1, loops=4, width=24, heads=4, ffn=48, context=32, vocab=tokenizer.vocab_size, padded_vocab=320
    )
    return LM(spread(config, std=0.3), tokenizer)


@pytest.fixture
def prompts(lm: LM) -> Prompts:
    return Prompts(torch.randint(lm.model.config.vocab, (7, 12)), "chance", "all of it", 7)
