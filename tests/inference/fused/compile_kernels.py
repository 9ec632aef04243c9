"""Compiles every launch of decoding and training for an H100, without one: `python compile_kernels.py`.

Triton's interpreter runs a kernel as Python, so it accepts what the compiler refuses. Here a launch compiles its
kernel instead of running it, with the types and constants that the launch gives it. Prints the kernels.
"""

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from loopformer import LoopedLM, ModelConfig, Trajectory
from loopformer.inference.fused.launch import DecodeBatch
from loopformer.training.fused import kernels
from loopformer.training.fused.ops import GateBackward, NormBackward, Precision

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
}
OPTIONS = ("num_warps", "launch_pdl")
compiled: set[tuple[object, ...]] = set()


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of `JITFunction.run`."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert values.keys() == set(kernel.arg_names), f"{kernel.__name__}: {values.keys() ^ set(kernel.arg_names)}"
    constants = {parameter.name: values[parameter.name] for parameter in kernel.params if parameter.is_constexpr}

    def type_of(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"*{TYPES[value.dtype]}"
        return "fp32" if isinstance(value, float) else "i32"

    types = {name: "constexpr" if name in constants else type_of(values[name]) for name in kernel.arg_names}
    key = (kernel.__name__, *types.values(), *constants.values(), *options.values())
    if key not in compiled:
        compile(ASTSource(kernel, types, constexprs=constants), target=HOPPER, options=options)
        compiled.add(key)


def launch_decoding(dtype: torch.dtype, **options: Any) -> None:
    """Every launch of shared rows and of a single row."""
    config = ModelConfig(blocks=1, loops=2, width=128, heads=2, ffn=256, context=128, vocab=90, **options)
    model = LoopedLM(config).eval().to(dtype)
    batch = DecodeBatch(model, slots=256, memory=1 << 26)
    table = model.condition(Trajectory.uniform(2))
    kv = model.cache(2, 1, 3)
    model.extend(torch.tensor([[1, 2, 3]]), kv)
    for slot in range(256):
        batch.fill(slot, [0, 1, 2, 3], kv.read(0), 3, table)
    batch.set_tokens_from_host({0: (4, 3)})
    for rows in (2, 256):  # with and without splits of the keys
        batch.run(range(rows), 1)
        batch.next_tokens(range(rows), range(rows))
    for overlap in ({"PDL": False}, {"PDL": True, "launch_pdl": True}):
        batch._single_row = None
        batch._single_rows.clear()
        batch._load_single_row(0, 2)._launch = overlap
        batch.single_row_greedy(0, 2, 3)
        batch.single_row_sampled(0, 2)


def launch_training(precision: Precision) -> None:
    x, change, gain = torch.zeros(4, 128), torch.zeros(4, 128, dtype=precision.dtype), torch.zeros(128)
    _, inverse, h = kernels.norm_forward(x, None, None, gain, precision)
    kernels.norm_forward(x, change, gain, gain, precision)
    kernels.add_change(x, change, gain)
    kernels.gelu_forward(change, precision)
    kernels.gelu_backward(change, change.clone(), precision)
    norm, gated = NormBackward(change, x, inverse, gain, (0, 2)), GateBackward(change, gain, (0, 0))
    sums = torch.zeros(2, 1, 4, 128)
    kernels.residual_backward(x, norm, gated, sums, precision)
    kernels.residual_backward(x, norm, None, sums, precision)
    kernels.residual_backward(x, None, gated, sums, precision)
    if precision.fp8:
        kernels.quantise(change)
        kernels.quantise(change, change, change)
        kernels.transpose_fp8(h, h)
    for scale in (None, 0.5):
        kernels.cross_entropy_(torch.zeros(4, 90, dtype=precision.dtype), torch.zeros(4).long(), scale, -100)


if __name__ == "__main__":
    JITFunction.run = compile_launch
    with torch.no_grad():
        launch_decoding(torch.bfloat16, positions="learned")
        launch_decoding(torch.bfloat16, positions="rotary", inject="gated")
        launch_decoding(torch.float32, positions="rotary", conditioning="none")
        for precision in (Precision(torch.bfloat16), Precision(torch.bfloat16, fp8=True)):
            launch_training(precision)
    print(*sorted({str(name) for name, *_ in compiled}))
