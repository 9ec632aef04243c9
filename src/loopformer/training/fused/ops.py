"""Products with a shared weight: cast once for all passes, its gradient summed over them in fp32.

    product = Product(weight, torch.bfloat16, fp8=False)
    y = product(rows)                    # rows [N, in] → [N, out]
    drows = product.back(dy)             # [N, out] → [N, in]
    product.learn(dy, rows)              # the weight's gradient += dyᵀ · rows
    product.gradient()                   # [out, in]

In fp8 (e4m3) a product and its way back have one scale for each row of either side (`torch._scaled_mm`). The
weight's gradient sums over tokens, so its factors are turned round and get one scale each; scales are powers of
two, and changing from one to the other loses nothing but what is 2^15 times smaller than the largest. Without a
GPU, fp8 values are multiplied in fp32.

What lies between the products of a block: in PyTorch anywhere, in one Triton kernel each on a GPU (launch.py).

Rows are tokens [N, D]; the residual stream and all gains and gates are fp32, what goes into products is `Numbers`.
The PyTorch versions here say what the kernels compute; tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model.block import EPSILON

FP8 = torch.float8_e4m3fn


LARGEST_FP8 = 448.0  # of e4m3


SMALLEST_SCALE = 2.0**-100  # of a row of zeros; gradients are small, since losses are divided by a step's tokens


TOGETHER = 4  # passes whose parts of a weight's gradient are one fp8 product; a product cannot add to what is there


class Rows(NamedTuple):
    """Activations [N, K] as products take them: plain, or in fp8 with a scale per row."""

    plain: Tensor | None = None
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

    def __init__(self, weight: Tensor, dtype: torch.dtype, fp8: bool, frozen: bool = False) -> None:
        self.fp8, self.frozen = fp8, frozen
        self._grad: Tensor | None = None
        self._waiting: list[tuple[Rows, Rows]] = []
        if fp8:
            self._forth, self._back = quantised([weight]), quantised([weight.t()])
        else:
            self._weight = weight.to(dtype)

    def __call__(self, rows: Rows) -> Tensor:
        return _scaled(rows, self._forth) if self.fp8 else rows.values @ self._weight.t()

    def back(self, dy: Rows) -> Tensor:
        return _scaled(dy, self._back) if self.fp8 else dy.values @ self._weight

    def learn(self, dy: Rows, rows: Rows) -> None:
        """Add dyᵀ · rows to the weight's gradient: at once, or in fp8 with those of the next passes."""
        if self.frozen:
            return
        if not self.fp8:
            self._grad = add_product(self._grad, dy.values.t(), rows.values)
            return
        self._waiting.append((dy, rows))
        if len(self._waiting) == TOGETHER:
            self._settle()

    def gradient(self) -> Tensor | None:
        """The weight's gradient [out, in] in fp32, once; None where nothing was learnt."""
        if self._waiting:
            self._settle()
        found, self._grad = self._grad, None
        return found

    def _settle(self) -> None:
        lefts, rights = zip(*self._waiting, strict=True)
        (left, left_scale), (right, right_scale) = columns(lefts), columns(rights)
        found = _multiply(left, right.t(), left_scale, right_scale, torch.float32)
        self._grad = found if self._grad is None else self._grad.add_(found)
        self._waiting = []


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right in fp32, in place; on a GPU low-precision factors are summed into it as they are."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    found = left.float() @ right.float()
    return found if total is None else total.add_(found)


def quantised(parts: Sequence[Tensor]) -> Rows:
    """One matrix [N, K] in fp8, or three side by side."""
    if parts[0].is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.quantised(parts)
    values = torch.cat(list(parts), dim=-1)
    return in_fp8(values, values.abs().amax(1))


def columns(several: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """fp8 rows of several passes turned round and put side by side [K, all N], under one scale."""
    parts = [rows.scaled for rows in several]
    scale = torch.cat([scales for _, scales in parts]).amax()
    if scale.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.columns(parts, scale), scale
    values = torch.cat([values.float() * scales for values, scales in parts])
    return to_fp8(values, scale).t().contiguous(), scale


def in_fp8(values: Tensor, bounds: Tensor) -> Rows:
    """Rows whose values lie within these bounds [N]."""
    scales = torch.exp2(torch.ceil(torch.log2((bounds.float() / LARGEST_FP8).clamp(min=SMALLEST_SCALE))))[:, None]
    return Rows(None, to_fp8(values, scales), scales)


def to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def _scaled(rows: Rows, weight: Rows) -> Tensor:
    """rows · weightᵀ of fp8 values in bf16."""
    (left, left_scales), (right, right_scales) = rows.scaled, weight.scaled
    return _multiply(left, right.t(), left_scales, right_scales.t(), torch.bfloat16)


def _multiply(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
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


LEAST_GELU = 0.17  # gelu(u) >= -0.17


MOST_SLOPE = 1.13  # |gelu'(u)| <= 1.129


PROGRAMS_PER_CORE = 4  # that share the rows of a backward pass


Place = tuple[int, int]  # of a gain or gate in the table: its block, and which of the four


@dataclass(frozen=True)
class Numbers:
    """What products are made of: a dtype, and whether their factors are fp8."""

    dtype: torch.dtype
    fp8: bool = False

    def rows(self, *parts: Tensor) -> Rows:
        """Values as products take them: one matrix, or three side by side."""
        if self.fp8:
            return quantised(parts)
        return Rows(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))


@dataclass(frozen=True)
class Sums:
    """Where the gradients of gains and gates are summed, by each program for itself: [programs, k, 4, D]."""

    partial: Tensor

    @classmethod
    def like(cls, table: Tensor, tokens: int) -> Sums:
        if not table.is_cuda:
            return cls(table.new_zeros(1, *table.shape))
        cores = torch.cuda.get_device_properties(table.device).multi_processor_count
        # Not filled: every program writes all of its own.
        return cls(table.new_empty(min(tokens, PROGRAMS_PER_CORE * cores), *table.shape))

    def total(self) -> Tensor:
        return self.partial.sum(0)


@dataclass(frozen=True)
class Norm:
    """A norm on the way back: the gradient of its output, its input, the inverse rms [N], its gain and where."""

    dh: Tensor
    x: Tensor
    inverse: Tensor
    gain: Tensor
    at: Place


@dataclass(frozen=True)
class Gated:
    """A change that was added to the residual stream through a gate, and where the gate is."""

    change: Tensor
    gate: Tensor
    at: Place


def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Rows]:
    """x + gate · change, the inverse of its rms [N], and it divided by the rms times gain, for a product."""
    if x.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.norm_forward(x, change, gate, gain, numbers)
    if change is not None and gate is not None:
        x = x + gate * change.float()
    inverse = (x.square().mean(-1) + EPSILON).rsqrt()
    out = x * inverse[:, None] * gain
    return x, inverse, _rows(out, numbers, out.abs().amax(1))


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    """x + gate · change."""
    if x.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.add_change(x, change, gate)
    return x + gate * change.float()


def gelu_forward(u: Tensor, numbers: Numbers) -> Rows:
    if u.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.gelu_forward(u, numbers)
    return _rows(F.gelu(u.float()), numbers, u.amax(1).clamp(min=LEAST_GELU))  # it lies below its argument


def gelu_backward(u: Tensor, da: Tensor, numbers: Numbers) -> tuple[Rows, Rows]:
    """gelu(u) once more, if it is plain, and the gradient of u. `da` may be written over."""
    if u.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.gelu_backward(u, da, numbers)
    wide = u.float()
    below = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    du = da.float() * (below + wide * density)
    bounds = MOST_SLOPE * da.float().abs().amax(1)
    return Rows((wide * below).to(numbers.dtype)), _rows(du, numbers, bounds)


def residual_backward(
    dx: Tensor, norm: Norm | None, gated: Gated | None, sums: Sums, numbers: Numbers
) -> tuple[Tensor, Rows, Rows]:
    """Back through a norm into the residual stream's gradient, then on to the change that was added before it.

    Gives the stream's gradient, the norm's output once more, if it is plain, and the change's gradient; those of
    gain and gate are added to `sums`. Where there is no norm or no change, what stands for it means nothing.
    """
    if dx.is_cuda:
        from loopformer.training.fused import kernels as launch

        return launch.residual_backward(dx, norm, gated, sums, numbers)
    h = dchange = Rows(dx)
    if norm is not None:
        above, normed = norm.dh.float(), norm.x * norm.inverse[:, None]
        sums.partial[0, norm.at[0], norm.at[1]] += (above * normed).sum(0)
        above = above * norm.gain
        dx = dx + norm.inverse[:, None] * (above - normed * (above * normed).mean(-1, keepdim=True))
        h = Rows((normed * norm.gain).to(numbers.dtype))
    if gated is not None:
        sums.partial[0, gated.at[0], gated.at[1]] += (dx * gated.change.float()).sum(0)
        through = dx * gated.gate
        dchange = _rows(through, numbers, through.abs().amax(1))
    return dx, h, dchange


def _rows(values: Tensor, numbers: Numbers, bounds: Tensor) -> Rows:
    """Values as products take them, rows within these bounds [N]."""
    return in_fp8(values, bounds) if numbers.fp8 else Rows(values.to(numbers.dtype))
