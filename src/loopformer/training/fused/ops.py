"""What fused passes compute: in PyTorch anywhere, by one Triton kernel each on a GPU (kernels.py).

    x, inverse_rms, h = norm_forward(x, change, gate, gain, precision)

The PyTorch versions say what the kernels compute; tests hold one against the other. `kernel_on_gpu` chooses
between them, here and nowhere else, so that everything imports without Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model.block import EPSILON
from loopformer.training.fused.types import (
    FP8,
    LARGEST_FP8,
    LEAST_GELU,
    MOST_SLOPE,
    SMALLEST_SCALE,
    GateBackward,
    ModulationGradient,
    NormBackward,
    Operand,
    Precision,
)

P = ParamSpec("P")
R = TypeVar("R")


def kernel_on_gpu(twin: Callable[P, R]) -> Callable[P, R]:
    """The function itself, or the launcher of the same name in kernels.py where its first argument is on a GPU."""

    @wraps(twin)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if not first.is_cuda:
            return twin(*args, **kwargs)
        from loopformer.training.fused import kernels

        launcher: Callable[P, R] = getattr(kernels, twin.__name__)
        return launcher(*args, **kwargs)

    return chosen


def operand(precision: Precision, *parts: Tensor) -> Operand:
    """One matrix, or three side by side, as matmuls take them."""
    if precision.fp8:
        return quantise(*parts)
    return Operand(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))


def add_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right in fp32, in place; on a GPU low-precision operands are summed into it as they are."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    result = left.float() @ right.float()
    return result if total is None else total.add_(result)


@kernel_on_gpu
def quantise(*parts: Tensor) -> Operand:
    """One matrix [N, K] in fp8, or three side by side."""
    values = torch.cat(parts, dim=-1)
    return in_fp8(values, values.abs().amax(1))


@kernel_on_gpu
def transposed(*operands: Operand) -> tuple[Tensor, Tensor]:
    """fp8 operands [N, K] of several passes, transposed and put side by side [K, all N], under one scale."""
    parts = [rows.scaled for rows in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    values = torch.cat([values.float() * scales for values, scales in parts])
    return to_fp8(values, scale).t().contiguous(), scale


def in_fp8(values: Tensor, bounds: Tensor) -> Operand:
    """Values [N, K] in fp8; each row lies within its bound [N]."""
    scales = torch.exp2(torch.ceil(torch.log2((bounds.float() / LARGEST_FP8).clamp(min=SMALLEST_SCALE))))[:, None]
    return Operand(None, to_fp8(values, scales), scales)


def to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def matmul_fp8(rows: Operand, weight: Operand) -> Tensor:
    """rows · weightᵀ of fp8 operands [N, K] and [M, K], in bf16."""
    (left, left_scales), (right, right_scales) = rows.scaled, weight.scaled
    return scaled_matmul(left, right.t(), left_scales, right_scales.t(), torch.bfloat16)


def scaled_matmul(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left · right of fp8 values. What is wanted in fp32 is a long sum: not for the fast accumulator's 14 bits."""
    if not left.is_cuda:
        return ((left.float() * left_scale) @ (right.float() * right_scale)).to(dtype)
    out: Tensor = torch._scaled_mm(
        left,
        right,
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=dtype,
        use_fast_accum=dtype == torch.bfloat16,
    )
    return out


@kernel_on_gpu
def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, precision: Precision
) -> tuple[Tensor, Tensor, Operand]:
    """x + gate · change, the inverse of its rms [N], and it divided by the rms times gain, for a matmul."""
    if change is not None and gate is not None:
        x = x + gate * change.float()
    inverse = (x.square().mean(-1) + EPSILON).rsqrt()
    out = x * inverse[:, None] * gain
    return x, inverse, _operand(out, precision, out.abs().amax(1))


@kernel_on_gpu
def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    """x + gate · change."""
    return x + gate * change.float()


@kernel_on_gpu
def gelu_forward(u: Tensor, precision: Precision) -> Operand:
    return _operand(F.gelu(u.float()), precision, u.amax(1).clamp(min=LEAST_GELU))  # it lies below its argument


@kernel_on_gpu
def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    """gelu(u) once more, if it is plain, and the gradient of u. `da` may be written over."""
    wide = u.float()
    below = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    du = da.float() * (below + wide * density)
    bounds = MOST_SLOPE * da.float().abs().amax(1)
    return Operand((wide * below).to(precision.dtype)), _operand(du, precision, bounds)


@kernel_on_gpu
def residual_backward(
    dx: Tensor,
    norm: NormBackward | None,
    gated: GateBackward | None,
    sums: ModulationGradient,
    precision: Precision,
) -> tuple[Tensor, Operand, Operand]:
    """Back through a norm into the residual stream's gradient, then on to the change that was added before it.

    Gives the stream's gradient, the norm's output once more, if it is plain, and the change's gradient; those of
    gain and gate are added to `sums`. Where there is no norm or no change, what stands for it means nothing.
    """
    h = dchange = Operand(dx)
    if norm is not None:
        above, normed = norm.dh.float(), norm.x * norm.inverse[:, None]
        sums.partial[0, norm.at[0], norm.at[1]] += (above * normed).sum(0)
        above = above * norm.gain
        dx = dx + norm.inverse[:, None] * (above - normed * (above * normed).mean(-1, keepdim=True))
        h = Operand((normed * norm.gain).to(precision.dtype))
    if gated is not None:
        sums.partial[0, gated.at[0], gated.at[1]] += (dx * gated.change.float()).sum(0)
        through = dx * gated.gate
        dchange = _operand(through, precision, through.abs().amax(1))
    return dx, h, dchange


def _operand(values: Tensor, precision: Precision, bounds: Tensor) -> Operand:
    """Values [N, K] as matmuls take them; each row lies within its bound [N]."""
    return in_fp8(values, bounds) if precision.fp8 else Operand(values.to(precision.dtype))
