"""Whether a pass can be fused here.

A pass through the shared stack with a backward written out by hand: faster, and half the memory.

    stack = FusedStack(model.stack, Numbers(torch.bfloat16))
    out = model(ids, route, stack=stack, logits=False)        # as often as wanted
    loss.backward()                                           # the stack's weights get their gradients

What autograd and a compiler cannot know of a looped model is used here: every pass multiplies with the same
weights, so they are cast once, and the products that make their gradients add up in place over all passes. Between
products there is one kernel (elementwise.py); what it can make again in backward is not kept, except in fp8, where
it is small. The mathematics is that of model/block.py: products in bf16 or fp8, everything else in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loopformer.config import ModelConfig
from loopformer.model.block import Attention, Rotary, Stack
from loopformer.training.fused.ops import (
    add_change,
    add_product,
    columns,
    gelu_backward,
    gelu_forward,
    multiply_fp8,
    norm_forward,
    quantised,
    residual_backward,
    rows_of,
    scaled_product,
)
from loopformer.training.fused.types import Gated, Norm, Numbers, Rows, Sums

LEAST_CAPABILITY_FOR_FP8 = (8, 9)
TOGETHER = 4  # passes whose parts of a weight's gradient are one fp8 product; a product cannot add to what is there


def obstacle(config: ModelConfig, device: torch.device, fp8: bool) -> str | None:
    """What is in the way of fused passes of a model on a device, and what to do; None if nothing is."""
    if device.type not in ("cpu", "cuda"):
        return f"it runs on CUDA and the CPU, not on {device.type}"
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed; install it"
    if not fp8:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY_FOR_FP8:
        return "this GPU has no fp8 products; use bfloat16"
    if any(getattr(config, name) % 16 for name in ("width", "ffn", "context")):
        return "its products need multiples of 16 for model.width, ffn and context; use bfloat16"
    return None


GATE_1, GATE_2, GAIN_1, GAIN_2 = range(4)  # of a block's table [4, D]


class Product:
    """x ↦ x · weightᵀ with weight [out, in], and its two gradients."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, fp8: bool, frozen: bool = False) -> None:
        self.fp8, self.frozen = fp8, frozen
        self._grad: Tensor | None = None
        self._waiting: list[tuple[Rows, Rows]] = []
        if fp8:
            self._forth, self._back = quantised(weight), quantised(weight.t())
        else:
            self._weight = weight.to(dtype)

    def __call__(self, rows: Rows) -> Tensor:
        return scaled_product(rows, self._forth) if self.fp8 else rows.values @ self._weight.t()

    def back(self, dy: Rows) -> Tensor:
        return scaled_product(dy, self._back) if self.fp8 else dy.values @ self._weight

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
        (left, left_scale), (right, right_scale) = columns(*lefts), columns(*rights)
        found = multiply_fp8(left, right.t(), left_scale, right_scale, torch.float32)
        self._grad = found if self._grad is None else self._grad.add_(found)
        self._waiting = []


class FusedStack:
    """The stack for one forward and backward: its weights cast, their gradients gathered.

    Calling it is calling the stack. `recompute` keeps only the state between passes. Gradients of the weights are
    handed over by a backward that reaches them, so one that is asked for something else alone must be the last.
    """

    def __init__(self, stack: Stack, numbers: Numbers, recompute: bool = False) -> None:
        self.stack, self.numbers, self.recompute = stack, numbers, recompute
        weights = [
            weight
            for block in stack.each()
            for weight in (
                block.attention.qkv.weight,
                block.attention.out.weight,
                block.ffn.up.weight,
                block.ffn.down.weight,
            )
        ]
        self.products: list[list[Product]] = []
        apply: Any = _Shared.apply
        self._ticket: Tensor = apply(self, *weights)

    def __call__(self, x: Tensor, modulation: Tensor | None, rotary: Rotary | None, mask: Tensor | None) -> Tensor:
        """One pass: x [B, T, D]; modulation [1, k, 4, D], or None where norms have weights of their own."""
        apply: Any = _Pass.apply
        out: Tensor = apply(x.float(), self._table(modulation), self._ticket, self, rotary, mask)
        return out

    def _table(self, modulation: Tensor | None) -> Tensor:
        """Gates and gains of every block [k, 4, D] in fp32."""
        if modulation is not None:
            assert len(modulation) == 1, "all rows follow one route in training"
            told = modulation[0].float()
            return torch.cat([told[:, :2], 1 + told[:, 2:]], dim=1)
        rows = []
        for block in self.stack.each():
            one, two = block.norm_1.weight, block.norm_2.weight
            assert one is not None
            assert two is not None
            rows.append(torch.stack([torch.ones_like(one), torch.ones_like(two), one, two]))
        return torch.stack(rows).float()


class _Shared(torch.autograd.Function):
    """The weights' place in the graph: every pass hangs on its ticket, so its backward comes after theirs."""

    @staticmethod
    def forward(ctx: Any, fused: FusedStack, *weights: Tensor) -> Tensor:
        numbers = fused.numbers
        products = [
            Product(weight.detach(), numbers.dtype, numbers.fp8, frozen=not learns)
            for weight, learns in zip(weights, ctx.needs_input_grad[1:], strict=True)
        ]
        fused.products = [products[start : start + 4] for start in range(0, len(products), 4)]
        ctx.products = products
        return weights[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(product.gradient() for product in ctx.products)


@dataclass
class _Kept:
    """What a block's backward needs: states, inverse rms, products' results, and attention's own graph.

    `factors` are what went into the four products, kept in fp8 only.
    """

    x_1: Tensor
    inverse_1: Tensor
    qkv: list[Tensor]  # [B, T, D] each, the leaves of attention's graph
    mixed: Tensor  # [B, T, D], its end
    change_1: Tensor
    x_2: Tensor
    inverse_2: Tensor
    u: Tensor
    change_2: Tensor
    factors: tuple[Rows, Rows, Rows, Rows] | None


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        table: Tensor,
        ticket: Tensor,
        fused: FusedStack,
        rotary: Rotary | None,
        mask: Tensor | None,
    ) -> Tensor:
        out, kept = _forward(fused, x, table, rotary, mask)
        ctx.save_for_backward(x, table)
        ctx.fused, ctx.rotary, ctx.mask = fused, rotary, mask
        ctx.kept = None if fused.recompute else kept
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, table = ctx.saved_tensors
        kept = ctx.kept or _forward(ctx.fused, x, table, ctx.rotary, ctx.mask)[1]
        ctx.kept = None
        with torch.autocast(dout.device.type, enabled=False):
            dx, dtable = _backward(ctx.fused, kept, table, dout)
        return dx, dtable, dout.new_zeros(()), None, None, None


@torch.no_grad()
def _forward(
    fused: FusedStack, x: Tensor, table: Tensor, rotary: Rotary | None, mask: Tensor | None
) -> tuple[Tensor, list[_Kept]]:
    """A pass over x [B, T, D] with table [k, 4, D], and what its backward needs."""
    numbers, shape = fused.numbers, x.shape
    x = x.flatten(0, 1).contiguous()  # [N, D]
    change: Tensor | None = None
    gate: Tensor | None = None
    kept = []
    with torch.autocast(x.device.type, enabled=False):
        for block, told, (qkv_of, out_of, up_of, down_of) in zip(
            fused.stack.each(), table, fused.products, strict=True
        ):
            x_1, inverse_1, h_1 = norm_forward(x, change, gate, told[GAIN_1], numbers)
            qkv, mixed = _attend(block.attention, qkv_of(h_1).view(*shape[:2], -1), rotary, mask)
            mixed_rows = rows_of(numbers, mixed.detach().flatten(0, 1))
            change_1 = out_of(mixed_rows)
            x_2, inverse_2, h_2 = norm_forward(x_1, change_1, told[GATE_1], told[GAIN_2], numbers)
            u = up_of(h_2)
            a = gelu_forward(u, numbers)
            change = down_of(a)
            factors = (h_1, mixed_rows, h_2, a) if numbers.fp8 else None
            kept.append(_Kept(x_1, inverse_1, qkv, mixed, change_1, x_2, inverse_2, u, change, factors))
            x, gate = x_2, told[GATE_2]
    assert change is not None
    assert gate is not None
    return add_change(x, change, gate).view(shape), kept


def _attend(
    attention: Attention, qkv: Tensor, rotary: Rotary | None, mask: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The three parts of qkv [B, T, 3D] as leaves, and attention over them [B, T, D] with a graph of its own."""
    with torch.enable_grad():
        q, k, v = (part.detach().requires_grad_() for part in qkv.chunk(3, dim=-1))
        return [q, k, v], attention.mix(q, k, v, rotary, mask, None)


@torch.no_grad()
def _backward(fused: FusedStack, kept: list[_Kept], table: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x [B, T, D] and of the table [k, 4, D]; those of the weights are added to their products."""
    numbers = fused.numbers
    dx = dout.float().flatten(0, 1).contiguous()
    sums = Sums.like(table, len(dx))
    # Where the residual stream goes on below a block: into what its predecessor added, or out of the pass.
    added = [None, *(Gated(kept[n].change_2, table[n, GATE_2], (n, GATE_2)) for n in range(len(kept)))]
    dx, _, dchange = residual_backward(dx, None, added.pop(), sums, numbers)
    for number in range(len(kept) - 1, -1, -1):
        now, told = kept.pop(), table[number]
        qkv_of, out_of, up_of, down_of = fused.products[number]
        a, du = gelu_backward(now.u, down_of.back(dchange), numbers)
        down_of.learn(dchange, now.factors[3] if now.factors else a)
        norm = Norm(up_of.back(du), now.x_2, now.inverse_2, told[GAIN_2], (number, GAIN_2))
        gated = Gated(now.change_1, told[GATE_1], (number, GATE_1))
        dx, h_2, dchange = residual_backward(dx, norm, gated, sums, numbers)
        up_of.learn(du, now.factors[2] if now.factors else h_2)
        dmixed = out_of.back(dchange).view_as(now.mixed)
        out_of.learn(dchange, now.factors[1] if now.factors else Rows(now.mixed.detach().flatten(0, 1)))
        into = rows_of(numbers, *(part.flatten(0, 1) for part in torch.autograd.grad(now.mixed, now.qkv, dmixed)))
        norm = Norm(qkv_of.back(into), now.x_1, now.inverse_1, told[GAIN_1], (number, GAIN_1))
        dx, h_1, dchange = residual_backward(dx, norm, added.pop(), sums, numbers)
        qkv_of.learn(into, now.factors[0] if now.factors else h_1)
    return dx.view_as(dout), sums.total()
