"""A small model with a tokenizer, and weights spread out so that every choice shows."""

import pytest
import torch
from torch import nn

from loopformer import LM, LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def lm() -> LM:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["every pass is told its time and its step, naïve café ☕ 日本語"] * 20, 300)
    model = LoopedLM(
        ModelConfig(blocks=1, loops=4, width=32, heads=4, ffn=64, context=64, vocab=tokenizer.vocab_size)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return LM(model.eval(), tokenizer)
