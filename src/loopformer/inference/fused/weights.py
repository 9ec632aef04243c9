"""The weights of a model as the kernels read them. Importable without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from loopformer.model.block import EPSILON
from loopformer.model.looped import LoopedLM


@dataclass(frozen=True)
class Weights:
    """A model's matmul weights [N, K], row by row in memory, as the kernels read them."""

    blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # qkv, out, up and down of each block
    head: Tensor  # [V, D]
    embedding: Tensor  # [V, D], normalised where the model normalises it


def weights_by_rows(model: LoopedLM) -> Weights:
    """The model's weights for the kernels, copied only where they are not stored by rows or are normalised."""
    blocks = []
    for block in model.stack.typed_blocks():
        linears = (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down)
        qkv, out, up, down = (linear.weight.detach().contiguous() for linear in linears)
        blocks.append((qkv, out, up, down))
    tokens = model.tokens.weight.detach().contiguous()
    embedding = F.rms_norm(tokens, tokens.shape[-1:], None, EPSILON) if model.config.start == "normed" else tokens
    return Weights(blocks, tokens, embedding)
