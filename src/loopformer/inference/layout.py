"""The memory order of weights that decoding reads fastest.

On the CPU a product with one row is limited by reading the weight, and PyTorch reads a weight [out, in] on all
cores only when it lies in memory by columns (benchmarks/decode_cpu.py). Values, shapes and files stay the same.
"""

import torch
from torch import nn

from loopformer.model import LoopedLM


@torch.no_grad()
def lay_out(model: LoopedLM) -> LoopedLM:
    """Put the weights that every token reads by columns on the CPU, by rows elsewhere; in place."""
    by_columns = model.tokens.weight.device.type == "cpu"
    weights = [model.tokens.weight, *(one.weight for one in model.stack.modules() if isinstance(one, nn.Linear))]
    for weight in weights:
        weight.data = weight.data.t().contiguous().t() if by_columns else weight.data.contiguous()
    return model
