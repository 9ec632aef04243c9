"""Loops through the shared stack with a hand-written backward, which is faster and takes half the memory.

    stack = FusedStack(model.stack, Precision(torch.bfloat16))
    out = model(ids, trajectory, stack=stack, logits=False)   # any number of times
    loss.backward()                                           # gives the stack's weights their gradients

Neither autograd nor a compiler knows that every loop multiplies by the same weights. Here they are cast once, and
the matmuls that compute their gradients accumulate in place over all loops. Between two matmuls lies one kernel
(ops.py), or attention and a kernel that rotates queries and keys in place. Backward recomputes the outputs of the
other kernels, except in fp8, where they are small enough to keep.
The mathematics is that of model/block.py: matmuls in bf16 or fp8, everything else in fp32.

In fp8 (e4m3) a matmul and the gradient of its input have one scale for each row of either operand
(`torch._scaled_mm`). A weight's gradient sums over tokens, so its operands are transposed and get one scale each.
Scales are powers of two, so rescaling is exact except for values 2^15 times smaller than the largest. Without a
GPU, fp8 values are multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loopformer.config import ModelConfig
from loopformer.model.block import Rotary, Stack
from loopformer.training.fused import ops
from loopformer.training.fused.ops import GateBackward, NormBackward, Operand, Precision

MIN_FP8_CAPABILITY = (8, 9)
FP8_LOOPS_PER_GRADIENT = 4  # loops that share one fp8 matmul for a weight's gradient: scaled_mm cannot accumulate
GATE_1, GATE_2, GAIN_1, GAIN_2 = range(4)  # the vectors of a block in a table [B or 1, k, 4, D]


def unsupported_reason(config: ModelConfig, device: torch.device, fp8: bool) -> str | None:
    """Why a model cannot use the fused kernels on a device, and what to do; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return f"it runs on CUDA and the CPU, not on {device.type}"
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed; install it"
    if config.norms == "sandwich":
        return "its kernels have no norms after residual sums; leave model.norms at pre"
    if not fp8:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
        return "this GPU has no fp8 matmuls; use bfloat16"
    if any(getattr(config, name) % 16 for name in ("width", "ffn", "context")):
        return "its matmuls need multiples of 16 for model.width, ffn and context; use bfloat16"
    return None


class SharedLinear:
    """x · weightᵀ with a weight [out, in] that is cast once for all loops and sums its gradient over them."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, fp8: bool, frozen: bool = False) -> None:
        self.fp8, self.frozen = fp8, frozen
        self._grad: Tensor | None = None
        self._pending: list[tuple[Operand, Operand]] = []
        if fp8:
            self._weight_fp8, self._transposed_fp8 = ops.quantise(weight), ops.quantise(weight.t())
        else:
            self._weight = weight.to(dtype)

    def __call__(self, rows: Operand) -> Tensor:
        return ops.matmul_fp8(rows, self._weight_fp8) if self.fp8 else rows.values @ self._weight.t()

    def input_gradient(self, dy: Operand) -> Tensor:
        return ops.matmul_fp8(dy, self._transposed_fp8) if self.fp8 else dy.values @ self._weight

    def add_weight_gradient(self, dy: Operand, rows: Operand) -> None:
        """Add dyᵀ · rows to the weight's gradient. In fp8, several loops are added by one matmul."""
        if self.frozen:
            return
        if not self.fp8:
            self._grad = ops.add_matmul(self._grad, dy.values.t(), rows.values)
            return
        self._pending.append((dy, rows))
        if len(self._pending) == FP8_LOOPS_PER_GRADIENT:
            self._flush()

    def weight_gradient(self) -> Tensor | None:
        """Return the weight's gradient [out, in] in fp32 and release it. None if the weight has no gradient."""
        if self._pending:
            self._flush()
        gradient, self._grad = self._grad, None
        return gradient

    def _flush(self) -> None:
        lefts, rights = zip(*self._pending, strict=True)
        (left, left_scale), (right, right_scale) = ops.transpose_fp8(*lefts), ops.transpose_fp8(*rights)
        gradient = ops.scaled_matmul(left, right.t(), left_scale, right_scale, torch.float32)
        self._grad = gradient if self._grad is None else self._grad.add_(gradient)
        self._pending = []


class FusedStack:
    """A drop-in for `model.stack`, made anew for every forward and backward.

    `recompute` keeps only the state between loops. Run exactly one backward, through the weights:
    every loop adds to their gradients, which are returned once, after the last loop.
    """

    def __init__(self, stack: Stack, precision: Precision, recompute: bool = False) -> None:
        self.stack, self.precision, self.recompute = stack, precision, recompute
        layers = [
            (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down)
            for block in stack.typed_blocks()
        ]
        self.linears: list[list[SharedLinear]] = []  # [k][4], set by _SharedWeights.forward just below
        apply: Any = _SharedWeights.apply
        # A dummy input of every loop, so that autograd runs _SharedWeights.backward after that of all loops.
        self._anchor: Tensor = apply(self, *(layer.weight for block in layers for layer in block))

    def __call__(self, x: Tensor, modulation: Tensor | None, rotary: Rotary | None, mask: Tensor | None) -> Tensor:
        """One loop: x [B, T, D]; modulation [B or 1, k, 4, D], or None if the norms have learned weights."""
        apply: Any = _FusedLoop.apply
        out: Tensor = apply(x.float(), self._table(modulation), self._anchor, self, rotary, mask)
        return out

    def _table(self, modulation: Tensor | None) -> Tensor:
        """Gates and gains of every block [B or 1, k, 4, D] in fp32."""
        if modulation is not None:
            gates, scales = modulation.float().chunk(2, dim=2)
            return torch.cat([gates, 1 + scales], dim=2)
        rows = []
        for block in self.stack.typed_blocks():
            gain_1, gain_2 = block.norm_1.weight, block.norm_2.weight
            assert gain_1 is not None
            assert gain_2 is not None
            rows.append(torch.stack([torch.ones_like(gain_1), torch.ones_like(gain_2), gain_1, gain_2]))
        return torch.stack(rows)[None].float()


class _SharedWeights(torch.autograd.Function):
    """Casts the weights in forward, and returns their summed gradients in backward."""

    @staticmethod
    def forward(ctx: Any, fused: FusedStack, *weights: Tensor) -> Tensor:
        precision = fused.precision
        linears = [
            SharedLinear(weight.detach(), precision.dtype, precision.fp8, frozen=not learns)
            for weight, learns in zip(weights, ctx.needs_input_grad[1:], strict=True)
        ]
        fused.linears = [linears[start : start + 4] for start in range(0, len(linears), 4)]
        ctx.linears = linears
        return weights[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(linear.weight_gradient() for linear in ctx.linears)


@dataclass
class _SavedBlock:
    """What a block's backward needs. N = B · T tokens."""

    x_1: Tensor  # [N, D] fp32, the residual stream before the first norm
    inverse_1: Tensor  # [N], the inverse rms
    qkv: list[Tensor]  # [B, T, D] each, rotated: the leaves of attention's graph
    attended: Tensor  # [B, T, D], the result of attention's graph
    change_1: Tensor  # [N, D], attention's output before its gate
    x_2: Tensor
    inverse_2: Tensor
    u: Tensor  # [N, F], before GELU
    change_2: Tensor  # [N, D], the FFN's output before its gate
    operands: tuple[Operand, Operand, Operand, Operand] | None  # of the four matmuls, in fp8 only


class _FusedLoop(torch.autograd.Function):
    """One loop, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        table: Tensor,
        anchor: Tensor,
        fused: FusedStack,
        rotary: Rotary | None,
        mask: Tensor | None,
    ) -> Tensor:
        out, saved = _forward(fused, x, table, rotary, mask)
        ctx.save_for_backward(x, table)
        ctx.fused, ctx.rotary, ctx.mask = fused, rotary, mask
        ctx.saved_blocks = None if fused.recompute else saved
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, table = ctx.saved_tensors
        saved = ctx.saved_blocks or _forward(ctx.fused, x, table, ctx.rotary, ctx.mask)[1]
        ctx.saved_blocks = None
        with torch.autocast(dout.device.type, enabled=False):
            dx, dtable = _backward(ctx.fused, saved, table, dout, ctx.rotary)
        return dx, dtable, dout.new_zeros(()), None, None, None


@torch.no_grad()
def _forward(
    fused: FusedStack, x: Tensor, table: Tensor, rotary: Rotary | None, mask: Tensor | None
) -> tuple[Tensor, list[_SavedBlock]]:
    """One loop over x [B, T, D] with table [B or 1, k, 4, D]. Returns its output and what its backward needs.

    The output of a block's FFN is added by the kernel of the next block's norm, or by `add_change` after the last
    block. This saves a kernel per block.
    """
    precision, shape = fused.precision, x.shape
    x = x.flatten(0, 1).contiguous()  # [N, D]
    change: Tensor | None = None
    gate: Tensor | None = None
    saved = []
    with torch.autocast(x.device.type, enabled=False):
        for block, modulation, (qkv_linear, out_linear, up_linear, down_linear) in zip(
            fused.stack.typed_blocks(), table.unbind(1), fused.linears, strict=True
        ):
            gate_1, gate_2, gain_1, gain_2 = modulation.unbind(1)  # each [B or 1, D]
            x_1, inverse_1, h_1 = ops.norm_forward(x, change, gate, gain_1, precision)
            qkv = qkv_linear(h_1).view(*shape[:2], -1)  # [B, T, 3D]
            if rotary is not None:
                ops.rotate_(qkv[..., : 2 * shape[-1]], rotary)  # queries and keys
            with torch.enable_grad():  # attention has a separate graph for its backward
                q, k, v = (part.detach().requires_grad_() for part in qkv.chunk(3, dim=-1))
                attended = block.attention.attend(q, k, v, None, mask, None)  # [B, T, D]
            attended_operand = ops.operand(precision, attended.detach().flatten(0, 1))
            change_1 = out_linear(attended_operand)
            x_2, inverse_2, h_2 = ops.norm_forward(x_1, change_1, gate_1, gain_2, precision)
            u = up_linear(h_2)
            a = ops.gelu_forward(u, precision)
            change = down_linear(a)
            operands = (h_1, attended_operand, h_2, a) if precision.fp8 else None
            saved.append(
                _SavedBlock(x_1, inverse_1, [q, k, v], attended, change_1, x_2, inverse_2, u, change, operands)
            )
            x, gate = x_2, gate_2
    assert change is not None
    assert gate is not None
    return ops.add_change(x, change, gate).view(shape), saved


@torch.no_grad()
def _backward(
    fused: FusedStack, saved: list[_SavedBlock], table: Tensor, dout: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x [B, T, D] and the table [B or 1, k, 4, D]. Those of weights go to `fused.linears`."""
    precision = fused.precision
    dx = dout.float().flatten(0, 1).contiguous()
    sums = ops.new_modulation_sums(table, len(dx))
    # The FFN output that each block's first norm adds: that of the block before, so None for the first block.
    ffn_gates = [
        None,
        *(GateBackward(block.change_2, table[:, n, GATE_2], (n, GATE_2)) for n, block in enumerate(saved)),
    ]
    dx, _, dchange = ops.residual_backward(dx, None, ffn_gates.pop(), sums, precision)
    for number in range(len(saved) - 1, -1, -1):
        block, modulation = saved.pop(), table[:, number]  # popped, so that tensors are freed block by block
        qkv_linear, out_linear, up_linear, down_linear = fused.linears[number]
        a, du = ops.gelu_backward(block.u, down_linear.input_gradient(dchange), precision)
        down_linear.add_weight_gradient(dchange, block.operands[3] if block.operands else a)
        norm = NormBackward(
            up_linear.input_gradient(du), block.x_2, block.inverse_2, modulation[:, GAIN_2], (number, GAIN_2)
        )
        gated = GateBackward(block.change_1, modulation[:, GATE_1], (number, GATE_1))
        dx, h_2, dchange = ops.residual_backward(dx, norm, gated, sums, precision)
        up_linear.add_weight_gradient(du, block.operands[2] if block.operands else h_2)
        dattended = out_linear.input_gradient(dchange).view_as(block.attended)
        out_linear.add_weight_gradient(
            dchange, block.operands[1] if block.operands else Operand(block.attended.detach().flatten(0, 1))
        )
        dqkv = _attention_backward(block, dattended, rotary, precision)
        norm = NormBackward(
            qkv_linear.input_gradient(dqkv), block.x_1, block.inverse_1, modulation[:, GAIN_1], (number, GAIN_1)
        )
        dx, h_1, dchange = ops.residual_backward(dx, norm, ffn_gates.pop(), sums, precision)
        qkv_linear.add_weight_gradient(dqkv, block.operands[0] if block.operands else h_1)
    return dx.view_as(dout), sums.sum(1)


def _attention_backward(
    block: _SavedBlock, dattended: Tensor, rotary: Rotary | None, precision: Precision
) -> Operand:
    """The gradient of queries, keys and values side by side [N, 3D], from that of attention's output [B, T, D]."""
    gradients = torch.autograd.grad(block.attended, block.qkv, dattended)
    if rotary is not None:
        for gradient in gradients[:2]:
            ops.rotate_(gradient, rotary, inverse=True)
    return ops.operand(precision, *(gradient.flatten(0, 1) for gradient in gradients))
