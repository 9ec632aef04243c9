"""Weights packed for decoding on a CPU: int8 or bfloat16, in the layout that its instructions read fastest.

    layer = Linear(512, 1536)
    layer.packed = PackedWeight(torch.int8)      # under torch.no_grad() it multiplies by int8 weights now

A matmul of few rows takes as long as its weight takes to read, so a quarter of the bytes is a quarter of the time.
Activations are rounded to bfloat16 for the matmul. The residual stream, norms and attention keep their dtype. An
int8 weight has a scale for each output.

The weights themselves stay. Their packed copies serve inference on a CPU alone: where gradients are recorded, or on
another device, a layer multiplies by its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_INT8 = 127
MAX_INT8_ROWS = 16  # PyTorch's int8 kernel is made for few rows; with more, the weight is widened first


class PackedWeight:
    """A packed copy of a weight [out, in], made when it is first used and whenever the weight was written."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: torch.int8 or torch.bfloat16."""
        self.dtype = dtype
        self._made_of: tuple[int, int] | None = None  # the address and version of the weight
        self._values: Tensor
        self._scales: Tensor | None = None  # [out], of int8

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in] times the weight → [..., out], in the dtype of x."""
        version = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if version != self._made_of:
            self._pack(weight.detach())
            self._made_of = version
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        if self._scales is None:
            out = torch.ops.mkldnn._linear_pointwise(rows, self._values, None, "none", [], "")
        elif len(rows) <= MAX_INT8_ROWS:
            out = torch._weight_int8pack_mm(rows, self._values, self._scales)
        else:  # as exact: bf16 has all integers of int8
            out = F.linear(rows, self._values.bfloat16()) * self._scales.float()
        product: Tensor = out.to(x.dtype).view(*x.shape[:-1], -1)
        return product

    def _pack(self, weight: Tensor) -> None:
        if self.dtype == torch.bfloat16:
            self._values = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), 1)
            return
        # The kernel reads scales in bf16. Round them before the weight is divided by them, or whole rows would be
        # too large or too small. Round them up, or the largest values would not fit.
        largest = weight.float().abs().amax(1).clamp(min=1e-30)
        self._scales = (largest / MAX_INT8 * (1 + 2**-8)).bfloat16()
        self._values = (weight.float() / self._scales.float()[:, None]).round().to(torch.int8)


class Linear(nn.Linear):
    """nn.Linear without a bias, whose weight may be packed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.packed)


def multiply(x: Tensor, weight: Tensor, packed: PackedWeight | None) -> Tensor:
    """x [..., in] times a weight [out, in] → [..., out]."""
    if packed is None or torch.is_grad_enabled() or weight.device.type != "cpu":
        return F.linear(x, weight)
    return packed.multiply(x, weight)


def can_pack_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16. On others float32 is faster."""
    ops = torch.ops.mkldnn
    return hasattr(ops, "_linear_pointwise") and bool(ops._is_mkldnn_bf16_supported())
