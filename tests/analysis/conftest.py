"""A small model with a tokenizer, and prompts for it."""

import pytest
import torch
from torch import nn

from loopformer import LM, LoopedLM, ModelConfig
from loopformer.analysis.dynamics import Prompts
from loopformer.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def lm() -> LM:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 20, 280)
    config = ModelConfig(
        blocks=1, loops=4, width=24, heads=4, ffn=48, context=32, vocab=tokenizer.vocab_size, padded_vocab=320
    )
    model = LoopedLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return LM(model.eval(), tokenizer)


@pytest.fixture
def prompts(lm: LM) -> Prompts:
    return Prompts(torch.randint(lm.model.config.vocab, (7, 12)), "chance", "all of it", 7)
