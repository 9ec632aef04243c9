"""What the fused operations pass to one another, in PyTorch (ops.py) as in Triton (kernels.py).

Rows are tokens [N, D]; the residual stream and all gains and gates are fp32, what goes into products is `Numbers`.
In fp8 (e4m3) every row has a scale; scales are powers of two.
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

Place = tuple[int, int]  # of a gain or gate in the table: its block, and which of the four


@dataclass(frozen=True)
class Numbers:
    """What products are made of: a dtype, and whether their factors are fp8."""

    dtype: torch.dtype
    fp8: bool = False


class Rows(NamedTuple):
    """Activations [N, K] as products take them: plain, or in fp8 with a scale per row."""

    plain: Tensor | None = None
    fp8: Tensor | None = None
    scales: Tensor | None = None  # [N, 1] in fp32: fp8 · scales is what was meant

    @property
    def is_cuda(self) -> bool:
        return (self.fp8 if self.plain is None else self.plain).is_cuda  # type: ignore[union-attr]

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
