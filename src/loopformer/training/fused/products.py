"""Products with a shared weight: cast once for all passes, its gradient summed over them in fp32.

    product = Product(weight, torch.bfloat16, fp8=False)
    y = product(rows)                    # rows [N, in] → [N, out]
    drows = product.back(dy)             # [N, out] → [N, in]
    product.learn(dy, rows)              # product.grad [out, in] += dyᵀ · rows

In fp8 a product and its way back run on e4m3 values with one scale for each row of either side
(`torch._scaled_mm`); the weight's gradient, whose sum runs over tokens, stays in bf16. Without a GPU, fp8 values
are multiplied in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
SMALLEST_SCALE = 1e-12


class Rows(NamedTuple):
    """Activations [N, K] as products take them: plain, in fp8 with a scale per row, or both."""

    plain: Tensor | None
    fp8: Tensor | None = None
    scales: Tensor | None = None  # [N, 1] in fp32: fp8 · scales is what was meant

    @property
    def values(self) -> Tensor:
        assert self.plain is not None
        return self.plain

    @property
    def scaled(self) -> tuple[Tensor, Tensor]:
        assert self.fp8 is not None
        assert self.scales is not None
        return self.fp8, self.scales


class Product:
    """x ↦ x · weightᵀ with weight [out, in], and its two gradients."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, fp8: bool) -> None:
        self.grad: Tensor | None = None
        self.fp8 = fp8
        if fp8:
            self._forth, self._back = quantised(weight), quantised(weight.t().contiguous())
        else:
            self._weight = weight.to(dtype)

    def __call__(self, rows: Rows) -> Tensor:
        return _scaled(rows, self._forth) if self.fp8 else rows.values @ self._weight.t()

    def back(self, dy: Rows) -> Tensor:
        return _scaled(dy, self._back) if self.fp8 else dy.values @ self._weight

    def learn(self, dy: Rows, rows: Rows) -> None:
        self.grad = add_product(self.grad, dy.values.t(), rows.values)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right in fp32, in place; on a GPU low-precision factors are summed into it as they are."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    found = left.float() @ right.float()
    return found if total is None else total.add_(found)


def quantised(values: Tensor) -> Rows:
    """[N, K] in fp8, with no plain copy."""
    if values.is_cuda:
        from loopformer.training.fused import launch

        return launch.quantised(values)
    scales = row_scales(values.abs().amax(1))
    return Rows(None, to_fp8(values, scales), scales)


def row_scales(bounds: Tensor) -> Tensor:
    """The scales [N, 1] of rows whose values lie within these bounds [N]."""
    return (bounds.float() / LARGEST_FP8).clamp(min=SMALLEST_SCALE)[:, None]


def to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def _scaled(rows: Rows, weight: Rows) -> Tensor:
    """rows · weightᵀ of fp8 values in bf16."""
    (left, left_scales), (right, right_scales) = rows.scaled, weight.scaled
    if left.is_cuda:
        out: Tensor = torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_scales,
            scale_b=right_scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out
    return ((left.float() * left_scales) @ (right.float() * right_scales).t()).bfloat16()
