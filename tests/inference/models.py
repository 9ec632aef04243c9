"""Models whose weights are spread out, so that every path shows in the output."""

import torch
from torch import nn

from loopformer import LoopedLM, ModelConfig


def spread(config: ModelConfig, seed: int = 0, std: float = 0.2) -> LoopedLM:
    torch.manual_seed(seed)
    model = LoopedLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model.eval()
