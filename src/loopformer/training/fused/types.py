"""What the fused operations pass to one another, in PyTorch (ops.py) as in Triton (kernels.py).

Rows are tokens [N, D]. The residual stream, gains and gates are fp32; what goes into matmuls has a `Precision`.
In fp8 (e4m3) every row of an operand has a scale of its own, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0  # of e4m3
SMALLEST_SCALE = 2.0**-100  # of a row of zeros; gradients are small, since losses are divided by a step's tokens
LEAST_GELU = 0.17  # gelu(u) >= -0.17
MOST_SLOPE = 1.13  # |gelu'(u)| <= 1.129
PROGRAMS_PER_CORE = 4  # that share the rows of a backward pass

TableIndex = tuple[int, int]  # of a gain or gate in the table [k, 4, D]: its block, and which of the four


@dataclass(frozen=True)
class Precision:
    """What matmuls run in: a dtype, and whether their operands are quantised to fp8."""

    dtype: torch.dtype
    fp8: bool = False


class Operand(NamedTuple):
    """A matrix [N, K] as matmuls take it: plain, or in fp8 with a scale per row."""

    plain: Tensor | None = None
    fp8: Tensor | None = None
    scales: Tensor | None = None  # [N, 1] in fp32: the matrix is fp8 · scales

    @property
    def is_cuda(self) -> bool:
        return self.scaled[0].is_cuda if self.plain is None else self.plain.is_cuda

    @property
    def values(self) -> Tensor:
        assert self.plain is not None
        return self.plain

    @property
    def scaled(self) -> tuple[Tensor, Tensor]:
        assert self.fp8 is not None
        assert self.scales is not None
        return self.fp8, self.scales


@dataclass(frozen=True)
class ModulationGradient:
    """The gradients of gains and gates, summed by each program of a kernel for itself: [programs, k, 4, D]."""

    partial: Tensor

    @classmethod
    def like(cls, table: Tensor, tokens: int) -> ModulationGradient:
        if not table.is_cuda:
            return cls(table.new_zeros(1, *table.shape))
        cores = torch.cuda.get_device_properties(table.device).multi_processor_count
        # Not filled: every program writes all of its own.
        return cls(table.new_empty(min(tokens, PROGRAMS_PER_CORE * cores), *table.shape))

    def total(self) -> Tensor:
        return self.partial.sum(0)


@dataclass(frozen=True)
class NormBackward:
    """What a norm's backward needs: its output's gradient, its input, the inverse rms [N], its gain and where."""

    dh: Tensor
    x: Tensor
    inverse: Tensor
    gain: Tensor
    at: TableIndex


@dataclass(frozen=True)
class GateBackward:
    """What the backward of x + gate · change needs: the change that was added, its gate and where that is."""

    change: Tensor
    gate: Tensor
    at: TableIndex
