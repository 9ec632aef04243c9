"""Launches of the kernels, with the signatures of elementwise.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from loopformer.model.block import EPSILON
from loopformer.training.fused import kernels
from loopformer.training.fused.elementwise import LEAST_GELU, MOST_SLOPE, Gated, Norm, Numbers, Sums
from loopformer.training.fused.products import FP8, Rows

PIECE = 1024  # of a long row at a time
TILE = 128  # of a matrix that is turned round


def norm_forward(
    x: Tensor, change: Tensor | None, gate: Tensor | None, gain: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Rows]:
    tokens, width = x.shape
    new_x = x if change is None else torch.empty_like(x)
    inverse = x.new_empty(tokens)
    h = x if numbers.fp8 else torch.empty_like(x, dtype=numbers.dtype)
    h8, scales = _fp8_rows(x, numbers)
    kernels.norm_forward_kernel[(tokens,)](
        x,
        x if change is None else change,
        x if gate is None else gate,
        gain,
        new_x,
        inverse,
        h,
        h8,
        scales,
        width,
        EPSILON=EPSILON,
        BLOCK_D=triton.next_power_of_2(width),
        ADD=change is not None,
        FP8=numbers.fp8,
        num_warps=4,
    )
    return new_x, inverse, Rows(None, h8, scales) if numbers.fp8 else Rows(h)


def add_change(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.add_change_kernel[(len(x),)](
        x, change, gate, out, x.shape[1], BLOCK_D=triton.next_power_of_2(x.shape[1]), num_warps=4
    )
    return out


def gelu_forward(u: Tensor, numbers: Numbers) -> Rows:
    a = u if numbers.fp8 else torch.empty_like(u)
    a8, scales = _fp8_rows(u, numbers)
    kernels.gelu_forward_kernel[(len(u),)](
        u, a, a8, scales, u.shape[1], LEAST=LEAST_GELU, BLOCK=PIECE, FP8=numbers.fp8, num_warps=4
    )
    return Rows(None, a8, scales) if numbers.fp8 else Rows(a)


def gelu_backward(u: Tensor, da: Tensor, numbers: Numbers) -> tuple[Rows, Rows]:
    a = u if numbers.fp8 else torch.empty_like(u)
    du8, scales = _fp8_rows(u, numbers)
    kernels.gelu_backward_kernel[(len(u),)](
        u, da, a, da, du8, scales, u.shape[1], SLOPE=MOST_SLOPE, BLOCK=PIECE, FP8=numbers.fp8, num_warps=4
    )
    return Rows(a), Rows(None, du8, scales) if numbers.fp8 else Rows(da)


def residual_backward(
    dx: Tensor, norm: Norm | None, gated: Gated | None, sums: Sums, numbers: Numbers
) -> tuple[Tensor, Rows, Rows]:
    tokens, width = dx.shape
    norm_of = norm or Norm(dx, dx, dx, dx, (0, 0))
    gated_of = gated or Gated(dx, dx, (0, 0))
    plain = not numbers.fp8
    new_dx = torch.empty_like(dx) if norm else dx
    h = torch.empty_like(dx, dtype=numbers.dtype) if norm and plain else dx
    dchange = torch.empty_like(dx, dtype=numbers.dtype) if gated and plain else dx
    dchange8, scales = _fp8_rows(dchange, numbers) if gated else (dx, dx)
    kernels.residual_backward_kernel[(len(sums.partial),)](
        norm_of.dh,
        norm_of.x,
        norm_of.inverse,
        norm_of.gain,
        dx,
        gated_of.change,
        gated_of.gate,
        new_dx,
        h,
        dchange,
        dchange8,
        scales,
        sums.partial[0, norm_of.at[0], norm_of.at[1]],
        sums.partial[0, gated_of.at[0], gated_of.at[1]],
        tokens,
        width,
        sums.partial.stride(0),
        BLOCK_D=triton.next_power_of_2(width),
        NORM=norm is not None,
        GATE=gated is not None,
        FP8=numbers.fp8,
        num_warps=16,
    )
    return new_dx, Rows(h), Rows(dchange) if plain else Rows(None, dchange8, scales)


def quantised(parts: Sequence[Tensor]) -> Rows:
    parts = [part.contiguous() for part in parts]
    tokens, width = parts[0].shape
    values8 = parts[0].new_empty(tokens, len(parts) * width, dtype=FP8)
    scales = parts[0].new_empty(tokens, 1, dtype=torch.float32)
    kernels.quantise_kernel[(tokens,)](
        *(parts * 3)[:3], values8, scales, width, PARTS=len(parts), BLOCK=PIECE, num_warps=4
    )
    return Rows(None, values8, scales)


def columns(parts: Sequence[tuple[Tensor, Tensor]], scale: Tensor) -> Tensor:
    total, width = sum(len(values) for values, _ in parts), parts[0][0].shape[1]
    turned = parts[0][0].new_empty(width, total)
    start = 0
    for values, scales in parts:
        rows = len(values)
        kernels.columns_kernel[(triton.cdiv(rows, TILE), triton.cdiv(width, TILE))](
            values, scales, scale, turned[:, start:], rows, width, total, TILE=TILE, num_warps=4
        )
        start += rows
    return turned


def _fp8_rows(like: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Room for fp8 values and scales; without fp8 something that is not written."""
    if not numbers.fp8:
        return like, like
    return torch.empty_like(like, dtype=FP8), like.new_empty(len(like), 1, dtype=torch.float32)
