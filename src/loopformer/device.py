"""Devices and dtypes: choosing, naming and synchronising them, their free memory and peak speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.errors import LoopformerError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
PEAK_BF16_TFLOPS = {"H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362, "4090": 165}


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device with a name that a user gave; `auto` is CUDA, else MPS, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoopformerError(f"{name!r} is not a device; use auto, cpu, cuda or mps.") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise LoopformerError(f"Loopformer does not run on {name!r}; use auto, cpu, cuda or mps.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoopformerError("No CUDA device is available here; choose the device cpu or auto.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise LoopformerError("No MPS device is available here; choose the device cpu or auto.")
    return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name that a user gave."""
    if name not in DTYPES:
        raise LoopformerError(f"There is no dtype {name!r}; {nearest(name, list(DTYPES))}")
    return DTYPES[name]


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_bytes(device: torch.device) -> float:
    """Bytes of free memory on a device; 8 GiB where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch reuses it
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):  # not Linux
        return 8.0 * 2**30


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


def peak_flops(device: torch.device) -> float | None:
    """The bf16 peak of a known GPU, for MFU; None for any other device."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((tflops * 1e12 for key, tflops in PEAK_BF16_TFLOPS.items() if key in name), None)
    return None


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """A context that makes this GPU current, as Triton launches kernels there; a null context for other devices."""
    if device.type != "cuda":
        return nullcontext()
    untyped: Any = torch.cuda.device  # its class has no type annotations
    context: AbstractContextManager[object] = untyped(device)
    return context


def to_device_async(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of numbers on a device, copied from pinned memory so that the CPU does not wait for a busy GPU."""
    if device.type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
