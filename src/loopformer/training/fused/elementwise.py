"""What lies between the products of a block: in PyTorch anywhere, in one Triton kernel each on a GPU (launch.py).

Rows are tokens [N, D]; the residual stream and all gains and gates are fp32, what goes into products is `Numbers`.
The PyTorch versions here say what the kernels compute; tests hold one against the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model.block import EPSILON
from loopformer.training.fused.products import Rows, in_fp8, quantised

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
        from loopformer.training.fused import launch

        return launch.norm_forward(x, change, gate, gain, numbers)
    if change is not None and gate is not None:
        x = x + gate * change.float()
    inverse = (x.square().mean(-1) + EPSILON).rsqrt()
    out = x * inverse[:, None] * gain
    return x, inverse, _rows(out, numbers, out.abs().amax(1))


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    """x + gate · change."""
    if x.is_cuda:
        from loopformer.training.fused import launch

        return launch.add_change(x, change, gate)
    return x + gate * change.float()


def gelu_forward(u: Tensor, numbers: Numbers) -> Rows:
    if u.is_cuda:
        from loopformer.training.fused import launch

        return launch.gelu_forward(u, numbers)
    return _rows(F.gelu(u.float()), numbers, u.amax(1).clamp(min=LEAST_GELU))  # it lies below its argument


def gelu_backward(u: Tensor, da: Tensor, numbers: Numbers) -> tuple[Rows, Rows]:
    """gelu(u) once more, if it is plain, and the gradient of u. `da` may be written over."""
    if u.is_cuda:
        from loopformer.training.fused import launch

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
        from loopformer.training.fused import launch

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
