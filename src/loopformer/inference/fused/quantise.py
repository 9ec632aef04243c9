"""What the matmuls of a decoder read: the model's own weights, or int8 copies with a scale for each output.

weights = plain(model)
weights = quantised(model)        # half the bytes of bf16; benchmarks/int8_perplexity.py measures what it costs

Bytes hold 128 more than the whole number they stand for: unsigned ones turn into floats in fewer instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model import LoopedLM
from loopformer.model.block import EPSILON

ZERO = 128  # the byte that stands for 0
MOST_INT8_ROWS = 4  # beyond, matmuls are not limited by reading the weight


@dataclass(frozen=True)
class Weight:
    """A matmul's weight [N, K] as it is, or as bytes with a scale [N] for each output."""

    values: Tensor
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantised(self) -> Tensor:
        """The weight [N, K] that the bytes stand for."""
        if self.scales is None:
            return self.values
        return (self.values.float() - ZERO) * self.scales[:, None]


@dataclass(frozen=True)
class Weights:
    """Of each block qkv, out, up and down; the head; and the embedding [V, D] that passes start from. All lie in
    memory by rows, as kernels read them, however the model's own lie."""

    blocks: list[tuple[Weight, Weight, Weight, Weight]]
    head: Weight
    embedding: Tensor

    @property
    def int8(self) -> bool:
        return self.head.scales is not None


Fingerprint = list[tuple[int, torch.dtype, int]]


def fingerprint(model: LoopedLM) -> Fingerprint:
    """Where each weight lies and how often it was written; other, when the weights are others."""
    return [
        (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    ]


def plain(model: LoopedLM) -> Weights:
    """The model's own weights, copied where they do not lie by rows; a normalised embedding is a copy."""
    return _each(model, lambda weight: Weight(weight.detach().contiguous()))


def quantised(model: LoopedLM) -> Weights:
    """int8 copies: each row rounded to the nearest of 255 equal steps."""

    def one(weight: Tensor) -> Weight:
        scales = weight.detach().float().abs().amax(1).clamp(min=1e-12) / 127
        whole = (weight.detach().float() / scales[:, None]).round()
        return Weight((whole + ZERO).to(torch.uint8).contiguous(), scales.contiguous())

    return _each(model, one)


def _each(model: LoopedLM, one: Callable[[Tensor], Weight]) -> Weights:
    blocks = []
    for block in model.stack.each():
        attention, ffn = block.attention, block.ffn
        weights = (attention.qkv.weight, attention.out.weight, ffn.up.weight, ffn.down.weight)
        qkv, out, up, down = (one(weight) for weight in weights)
        blocks.append((qkv, out, up, down))
    tokens = model.tokens.weight.detach().contiguous()
    embedding = F.rms_norm(tokens, tokens.shape[-1:], None, EPSILON) if model.config.start == "normed" else tokens
    return Weights(blocks, one(model.tokens.weight), embedding)
