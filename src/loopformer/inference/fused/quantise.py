"""The weights that kernels read, as they lie in memory, and whether they are still those of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model import LoopedLM
from loopformer.model.block import EPSILON


@dataclass(frozen=True)
class Weights:
    """A model's matmul weights [N, K], in memory by rows, as kernels read them, however the model's own lie."""

    blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # qkv, out, up and down of each block
    head: Tensor  # [V, D]
    embedding: Tensor  # [V, D], normalised where the model normalises it


Fingerprint = list[tuple[int, torch.dtype, int]]


def fingerprint(model: LoopedLM) -> Fingerprint:
    """Where each weight lies and how often it was written; other, when the weights are others."""
    return [
        (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    ]


def weights_by_rows(model: LoopedLM) -> Weights:
    """The model's own weights, copied only where they do not lie by rows or the embedding is normalised."""
    blocks = []
    for block in model.stack.each():
        linears = (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down)
        qkv, out, up, down = (linear.weight.detach().contiguous() for linear in linears)
        blocks.append((qkv, out, up, down))
    tokens = model.tokens.weight.detach().contiguous()
    embedding = F.rms_norm(tokens, tokens.shape[-1:], None, EPSILON) if model.config.start == "normed" else tokens
    return Weights(blocks, tokens, embedding)
