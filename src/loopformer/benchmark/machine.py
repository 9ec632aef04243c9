"""The machine that a benchmark runs on, its clock, and how its report is published.

machine = describe(device)                  # names, versions, and the memory bandwidth that a copy reaches here
seconds = best_of(3, device, run)
publish(report, out)                        # the last line is JSON
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from loopformer.device import device_name, peak_flops, synchronise

Measurement = dict[str, Any]  # a row of a report: what was measured and its figures, None where it did not fit


def describe(device: torch.device) -> dict[str, Any]:
    """Names and versions, the bf16 peak where it is known, and the measured copy bandwidth."""
    return {
        "device": device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "peak_tflops": (peak / 1e12) if (peak := peak_flops(device)) else None,
        "copy_gb_per_second": copy_bandwidth(device) / 1e9,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor far larger than any cache."""
    size = 2**28
    if device.type == "cuda":  # both tensors in half of what is free, as a model may be there
        free_memory(device)
        size = max(size, min(2**31, torch.cuda.mem_get_info(device)[0] // 4))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.fill_(1)
    return 2 * size / best_of(5, device, lambda: target.copy_(source))


def best_of(times: int, device: torch.device, run: Callable[[], object]) -> float:
    """The shortest of some runs in seconds, after one that does not count."""
    run()
    seconds = []
    for _ in range(times):
        synchronise(device)
        started = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def publish(report: dict[str, Any], out: Path | None) -> None:
    """A benchmark's report as JSON: on the last line, and in a file if one is named."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
