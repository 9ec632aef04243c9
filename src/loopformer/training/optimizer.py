"""AdamW with decay on matrices only, and a learning rate that warms up and follows a cosine down.

optimizer = make_optimizer(model, run.training, fused=True)
rate = learning_rate(step, run.training)                  # of optimizer step 1, 2, …
"""

import math

import torch
from torch import nn

from loopformer.config import TrainingConfig


def make_optimizer(model: nn.Module, config: TrainingConfig, fused: bool) -> torch.optim.AdamW:
    """Matrices decay, vectors (norms, biases) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of optimizer step `step`, counted from 1: linear warmup, then a cosine to the minimum."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * cosine
