"""The operations of fused passes: in PyTorch anywhere, and by one Triton kernel each on a GPU (kernels.py).

    x, inverse_rms, h = norm_forward(x, change, gate, gain, precision)

The PyTorch functions define what the kernels compute, and tests compare the two. `kernel_on_gpu` chooses between
them, here and nowhere else, so that this module imports without Triton.

Matrices have one token per row [N, D]. The residual stream, gains and gates are fp32; operands of matmuls have a
`Precision`. In fp8 (e4m3) every row of an operand has a scale of its own, a power of two.

Gains and gates are [S, D]: a vector for each of S sequences, which have N / S tokens each and lie one after
another. With S = 1 all tokens share one vector.
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

from loopformer.model.block import EPSILON, Rotary, rotate

P = ParamSpec("P")
R = TypeVar("R")

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0  # the largest e4m3 value
# The scale of a row of zeros. It must lie far below that of real gradients, which are tiny: the loss of a token is
# divided by the number of tokens in a step.
MIN_SCALE = 2.0**-100
MAX_NEGATIVE_GELU = 0.17  # gelu(u) >= -0.17, so |gelu(u)| <= max(u, 0.17)
MAX_GELU_SLOPE = 1.13  # |gelu'(u)| <= 1.129
PROGRAMS_PER_SM = 4  # programs of a backward kernel per streaming multiprocessor; together they share the rows

TableIndex = tuple[int, int]  # (block, which of its four vectors): a gain or gate in the table [S, k, 4, D]


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
    def values_and_scales(self) -> tuple[Tensor, Tensor]:
        """Both parts of an fp8 operand."""
        assert self.scales is not None, "a plain operand has no scales"
        return self.values, self.scales


@dataclass(frozen=True)
class NormBackward:
    """Inputs of the backward of a norm h = x · inverse · gain."""

    dh: Tensor  # [N, D], the gradient of h
    x: Tensor  # [N, D]
    inverse: Tensor  # [N], 1 / rms(x)
    gain: Tensor  # [S, D]
    index: TableIndex  # of the gain


@dataclass(frozen=True)
class GateBackward:
    """Inputs of the backward of x + gate · change."""

    change: Tensor  # [N, D]
    gate: Tensor  # [S, D]
    index: TableIndex  # of the gate


def new_modulation_sums(table: Tensor, tokens: int) -> Tensor:
    """A buffer [S, P, k, 4, D] for the gradients of gains and gates in a table [S, k, 4, D]: its sums over P.

    P programs of a kernel share the tokens of a sequence, and each sums over its own in fp32. Atomic adds to a
    shared sum would have no fixed order, so results would differ in their last bits from run to run.
    """
    sequences, *shape = table.shape
    if not table.is_cuda:
        return table.new_zeros(sequences, 1, *shape)
    multiprocessors = torch.cuda.get_device_properties(table.device).multi_processor_count
    programs = max(1, min(tokens, PROGRAMS_PER_SM * multiprocessors) // sequences)
    # It may stay uninitialised, because every program overwrites all of its sums.
    return table.new_empty(sequences, programs, *shape)


def kernel_on_gpu(reference: Callable[P, R]) -> Callable[P, R]:
    """Decorate a PyTorch function to call the launcher of the same name in kernels.py for arguments on a GPU."""

    @wraps(reference)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if not first.is_cuda:
            return reference(*args, **kwargs)
        from loopformer.training.fused import kernels

        launcher: Callable[P, R] = getattr(kernels, reference.__name__)
        return launcher(*args, **kwargs)

    return dispatch


def operand(precision: Precision, *parts: Tensor) -> Operand:
    """A matrix as an operand, or three side by side, such as the gradients of q, k and v."""
    return quantise(*parts) if precision.fp8 else Operand(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])


def add_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right in fp32; `total` is overwritten, and None stands for zero.

    On a GPU, operands in bf16 are not converted: the matmul itself accumulates into fp32.
    """
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    result = left.float() @ right.float()
    return result if total is None else total.add_(result)


@kernel_on_gpu
def quantise(*parts: Tensor) -> Operand:
    """A matrix [N, K] in fp8, or three side by side, with a scale per row."""
    values = torch.cat(parts, dim=-1)
    return _quantise_rows(values, values.abs().amax(1))


@kernel_on_gpu
def transpose_fp8(*operands: Operand) -> tuple[Tensor, Tensor]:
    """The fp8 operands [N, K] of several loops, transposed and side by side [K, sum of N], and their scale.

    A weight's gradient sums over these rows, so all of them need the same scale. The largest avoids overflow.
    """
    parts = [rows.values_and_scales for rows in operands]
    scale = torch.cat([scales for _, scales in parts]).amax()
    values = torch.cat([values.float() * scales for values, scales in parts])
    return _cast_to_fp8(values, scale).t().contiguous(), scale


def _quantise_rows(values: Tensor, bounds: Tensor) -> Operand:
    """Values [N, K] in fp8; no value of a row exceeds its bound [N]."""
    # Powers of two: dividing by them is exact, and so is `transpose_fp8`'s change of scale, except for underflow.
    scales = torch.exp2(torch.ceil(torch.log2((bounds.float() / MAX_FP8).clamp(min=MIN_SCALE))))[:, None]
    return Operand(_cast_to_fp8(values, scales), scales)


def _cast_to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-MAX_FP8, MAX_FP8).to(FP8)


def matmul_fp8(rows: Operand, weight: Operand) -> Tensor:
    """rows · weightᵀ of fp8 operands [N, K] and [M, K], in bf16."""
    (left, left_scales), (right, right_scales) = rows.values_and_scales, weight.values_and_scales
    return scaled_matmul(left, right.t(), left_scales, right_scales.t(), torch.bfloat16)


def scaled_matmul(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left · right of fp8 values, each times its scales; the result has the given dtype."""
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
    """The new x = x + gate · change [N, D], its 1 / rms [N], and x / rms · gain as the next matmul's operand."""
    if change is not None and gate is not None:
        x = x + _per_token(gate, x) * change.float()
    inverse = (x.square().mean(-1) + EPSILON).rsqrt()
    out = x * inverse[:, None] * _per_token(gain, x)
    return x, inverse, _bounded_operand(out, precision, out.abs().amax(1))


@kernel_on_gpu
def rotate_(x: Tensor, rotary: Rotary, inverse: bool = False) -> None:
    """Rotate the heads of queries and keys [B, T, …] in place by the angles of their positions, or back."""
    cos, sin = rotary
    heads = x.view(*x.shape[:2], -1, 2 * cos.shape[-1]).transpose(1, 2)  # [B, H, T, D/H]
    heads.copy_(rotate(heads, cos, -sin if inverse else sin))


@kernel_on_gpu
def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    """x + gate · change."""
    return x + _per_token(gate, x) * change.float()


@kernel_on_gpu
def gelu_forward(u: Tensor, precision: Precision) -> Operand:
    """gelu(u) as an operand. The bound of a row comes from u, or a kernel would have to compute GELU twice."""
    return _bounded_operand(F.gelu(u.float()), precision, u.amax(1).clamp(min=MAX_NEGATIVE_GELU))


@kernel_on_gpu
def gelu_backward(u: Tensor, da: Tensor, precision: Precision) -> tuple[Operand, Operand]:
    """gelu(u), recomputed, and the gradient of u.

    With fp8 a kernel leaves gelu(u) unwritten, because forward has kept it. Without fp8 it writes the gradient over
    `da`, so `da` must not be read afterwards.
    """
    wide = u.float()
    cdf = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))  # of the standard normal distribution
    density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    du = da.float() * (cdf + wide * density)
    bounds = MAX_GELU_SLOPE * da.float().abs().amax(1)
    return Operand((wide * cdf).to(precision.dtype)), _bounded_operand(du, precision, bounds)


@kernel_on_gpu
def residual_backward(
    dx: Tensor, norm: NormBackward | None, gated: GateBackward | None, sums: Tensor, precision: Precision
) -> tuple[Tensor, Operand, Operand]:
    """Backward through h = norm(x), then through the x = … + gate · change before it.

    Returns the gradient of x, h recomputed, and the gradient of the change. The gradients of gain and gate go
    into `sums`. Without `norm` the second result is a placeholder, and without `gated` the third. With fp8 a kernel
    leaves h unwritten, because forward has kept it.
    """
    h = dchange = Operand(dx)
    if norm is not None:
        dh, normed = norm.dh.float(), norm.x * norm.inverse[:, None]
        sums[:, 0, norm.index[0], norm.index[1]] += _sum_tokens(dh * normed, len(sums))
        gain = _per_token(norm.gain, dx)
        dnormed = dh * gain
        dx = dx + norm.inverse[:, None] * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
        h = Operand((normed * gain).to(precision.dtype))
    if gated is not None:
        sums[:, 0, gated.index[0], gated.index[1]] += _sum_tokens(dx * gated.change.float(), len(sums))
        gated_dx = dx * _per_token(gated.gate, dx)
        dchange = _bounded_operand(gated_dx, precision, gated_dx.abs().amax(1))
    return dx, h, dchange


def _per_token(vectors: Tensor, tokens: Tensor) -> Tensor:
    """A vector for each of S sequences [S, D] → one for each of N tokens, or for all of them: [N or 1, D]."""
    return vectors if len(vectors) == 1 else vectors.repeat_interleave(len(tokens) // len(vectors), 0)


def _sum_tokens(values: Tensor, sequences: int) -> Tensor:
    """The sum over the tokens of each sequence: [N, D] → [S, D]."""
    return values.view(sequences, -1, values.shape[1]).sum(1)


def _bounded_operand(values: Tensor, precision: Precision, bounds: Tensor) -> Operand:
    """Values [N, K] as an operand; no value of a row exceeds its bound [N]."""
    return _quantise_rows(values, bounds) if precision.fp8 else Operand(values.to(precision.dtype))
