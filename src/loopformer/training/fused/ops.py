"""The operations of fused passes: in PyTorch anywhere, and by one Triton kernel each on a GPU (kernels.py).

    x, inverse_rms, h = norm_forward(x, change, gate, gain, precision)

The PyTorch functions define what the kernels compute, and tests compare the two. `kernel_on_gpu` chooses between
them, here and nowhere else, so that this module imports without Triton.

Matrices have one token per row [N, D]. The residual stream, gains and gates are fp32; operands of matmuls have a
`Precision`. In fp8 (e4m3) every row of an operand has a scale of its own, a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model.block import EPSILON

P = ParamSpec("P")
R = TypeVar("R")

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0  # the largest e4m3 value
MIN_SCALE = 2.0**-100  # of a row of zeros; gradients are small, since losses are divided by a step's tokens
MAX_NEGATIVE_GELU = 0.17  # gelu(u) >= -0.17, so |gelu(u)| <= max(u, 0.17)
MAX_GELU_SLOPE = 1.13  # |gelu'(u)| <= 1.129
PROGRAMS_PER_CORE = 4  # programs that share the rows of a backward pass, for each multiprocessor of a GPU

TableIndex = tuple[int, int]  # of a gain or gate in the table [k, 4, D]: its block, and which of the four


@dataclass(frozen=True)
class Precision:
    """The dtype of matmuls, and whether their operands are quantised to fp8."""

    dtype: torch.dtype
    fp8: bool = False


class Operand(NamedTuple):
    """A matrix [N, K] for a matmul: values in a plain dtype, or in fp8 with a scale per row."""

    values: Tensor
    scales: Tensor | None = None  # [N, 1] in fp32 with fp8: the matrix is values · scales

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def scaled(self) -> tuple[Tensor, Tensor]:
        assert self.scales is not None, "a plain operand has no scales"
        return self.values, self.scales


@dataclass(frozen=True)
class NormBackward:
    """Inputs of a norm's backward: its output's gradient, its input, the inverse rms [N], its gain and index."""

    dh: Tensor
    x: Tensor
    inverse: Tensor
    gain: Tensor
    at: TableIndex


@dataclass(frozen=True)
class GateBackward:
    """Inputs of the backward of x + gate · change: the change, its gate and the gate's index."""

    change: Tensor
    gate: Tensor
    at: TableIndex


def new_modulation_sums(table: Tensor, tokens: int) -> Tensor:
    """Room for the gradients of gains and gates [programs, k, 4, D]; their sum over programs is the gradient.

    Each program of a kernel sums its own rows in fp32, so that no atomics are needed and sums repeat bit by bit.
    """
    if not table.is_cuda:
        return table.new_zeros(1, *table.shape)
    cores = torch.cuda.get_device_properties(table.device).multi_processor_count
    # Left unfilled, because every program writes all of its own sums.
    return table.new_empty(min(tokens, PROGRAMS_PER_CORE * cores), *table.shape)


def kernel_on_gpu(twin: Callable[P, R]) -> Callable[P, R]:
    """The function itself, or the launcher of the same name in kernels.py if its first argument is on a GPU."""

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
    """One matrix, or three side by side, as an operand."""
    return quantise(*parts) if precision.fp8 else Operand(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])


def add_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right in fp32, in place. On a GPU the matmul accumulates low-precision operands into it."""
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
    return _in_fp8(values, values.abs().amax(1))


@kernel_on_gpu
def transposed(*operands: Operand) -> tuple[Tensor, Tensor]:
    """The fp8 operands [N, K] of several passes, transposed and side by side [K, all N] under one scale."""
    parts = [rows.scaled for rows in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    values = torch.cat([values.float() * scales for values, scales in parts])
    return _to_fp8(values, scale).t().contiguous(), scale


def _in_fp8(values: Tensor, bounds: Tensor) -> Operand:
    """Values [N, K] in fp8; no value of a row exceeds its bound [N]."""
    scales = torch.exp2(torch.ceil(torch.log2((bounds.float() / MAX_FP8).clamp(min=MIN_SCALE))))[:, None]
    return Operand(_to_fp8(values, scales), scales)


def _to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-MAX_FP8, MAX_FP8).to(FP8)


def matmul_fp8(rows: Operand, weight: Operand) -> Tensor:
    """rows · weightᵀ of fp8 operands [N, K] and [M, K], in bf16."""
    (left, left_scales), (right, right_scales) = rows.scaled, weight.scaled
    return scaled_matmul(left, right.t(), left_scales, right_scales.t(), torch.bfloat16)


def scaled_matmul(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left · right of fp8 values in the dtype."""
    if not left.is_cuda:
        return ((left.float() * left_scale) @ (right.float() * right_scale)).to(dtype)
    # A result in fp32 is a sum over many tokens, for which the fast accumulator's 14 bits are too few.
    fast = dtype == torch.bfloat16
    out: Tensor = torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
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
    """gelu(u). Its bound follows from u, so that a kernel quantises a row without computing it twice."""
    return _operand(F.gelu(u.float()), precision, u.amax(1).clamp(min=MAX_NEGATIVE_GELU))


@kernel_on_gpu
def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    """gelu(u) again, and the gradient of u. In fp8 forward kept gelu(u), so a kernel does not write it; otherwise
    a kernel overwrites `da` with the gradient."""
    wide = u.float()
    below = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    du = da.float() * (below + wide * density)
    bounds = MAX_GELU_SLOPE * da.float().abs().amax(1)
    return Operand((wide * below).to(precision.dtype)), _operand(du, precision, bounds)


@kernel_on_gpu
def residual_backward(
    dx: Tensor, norm: NormBackward | None, gated: GateBackward | None, sums: Tensor, precision: Precision
) -> tuple[Tensor, Operand, Operand]:
    """Back through a norm into the residual stream's gradient, then on to the change that was added before it.

    Returns the stream's gradient, the norm's output again (not written by a kernel in fp8), and the change's
    gradient. The gradients of gain and gate go to `sums`. Without a norm or a change its result is a placeholder.
    """
    h = dchange = Operand(dx)
    if norm is not None:
        above, normed = norm.dh.float(), norm.x * norm.inverse[:, None]
        sums[0, norm.at[0], norm.at[1]] += (above * normed).sum(0)
        above = above * norm.gain
        dx = dx + norm.inverse[:, None] * (above - normed * (above * normed).mean(-1, keepdim=True))
        h = Operand((normed * norm.gain).to(precision.dtype))
    if gated is not None:
        sums[0, gated.at[0], gated.at[1]] += (dx * gated.change.float()).sum(0)
        through = dx * gated.gate
        dchange = _operand(through, precision, through.abs().amax(1))
    return dx, h, dchange


def _operand(values: Tensor, precision: Precision, bounds: Tensor) -> Operand:
    """Values [N, K] as an operand; no value of a row exceeds its bound [N]."""
    return _in_fp8(values, bounds) if precision.fp8 else Operand(values.to(precision.dtype))
