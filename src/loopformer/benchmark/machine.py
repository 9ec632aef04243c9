"""What all benchmarks share: facts about the machine, the loop over cases, GPT-2 for comparison, the report.

machine = describe(device)                  # names, versions, commit, and the memory bandwidth that a copy reaches
rows = measure_rows(device, cases, FIGURES, measure, say)
"""

from __future__ import annotations

import gc
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.config.model import ModelConfig
from loopformer.device import device_name, peak_flops, synchronise
from loopformer.errors import LoopformerError, nearest, require

Measurement = dict[str, Any]  # a row of a report: the case and its figures, which are None if memory ran out
Say = Callable[[Measurement], object]


def describe(device: torch.device) -> dict[str, Any]:
    """Names and versions, the bf16 peak if it is known, and the measured copy bandwidth."""
    return {
        "device": device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": source_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "peak_tflops": (peak / 1e12) if (peak := peak_flops(device)) else None,
        "copy_gb_per_second": copy_bandwidth(device) / 1e9,
    }


def source_commit() -> str | None:
    """`git describe` of the source tree; None where the package is not part of a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # An installed package may lie in a folder that belongs to another repository.
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        described = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.decode().strip()


def check_paths(work: str, paths: Sequence[str], known: Sequence[str]) -> None:
    """Refuse paths that do not exist, and none at all."""
    require(len(paths) > 0, f"Name a path of {work} to measure: {', '.join(known)}.")
    for path in paths:
        if path not in known:
            raise LoopformerError(f"There is no path {path!r} of {work}; {nearest(path, list(known))}")


def measure_rows(
    device: torch.device,
    cases: Iterable[Measurement],
    figures: Sequence[str],
    measure: Callable[[Measurement], Measurement],
    say: Say,
) -> list[Measurement]:
    """A row for each case with its figures, which are None if memory ran out; `say` gets each row at once."""
    rows = []
    for case in cases:
        free_memory(device)
        try:
            measured = measure(case)
        except torch.OutOfMemoryError:
            measured = {}
        rows.append({**case, **dict.fromkeys(figures), **measured})
        say(rows[-1])
    return rows


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of peak GPU memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device, other_bytes: int = 0) -> float | None:
    """The peak of GPU memory since reset_peak, less `other_bytes`; None without a GPU."""
    return (torch.cuda.max_memory_allocated(device) - other_bytes) / 2**30 if device.type == "cuda" else None


def gpt2(config: ModelConfig, budget: int, like: Tensor) -> Any:
    """A GPT-2 with random weights and the blocks of `budget` loops, on the device and in the dtype of `like`."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=config.vocab_rows,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.blocks * budget,
        n_head=config.heads,
        n_inner=config.ffn,
        bos_token_id=0,
        eos_token_id=0,
    )
    with like.device:
        return AutoModelForCausalLM.from_config(shape, dtype=like.dtype).eval()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor far larger than any cache: the fastest of 5 copies."""
    size = 2**28
    if device.type == "cuda":  # a model may be in memory, so the two tensors share half of what is free
        free_memory(device)
        size = max(size, min(2**31, torch.cuda.mem_get_info(device)[0] // 4))
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / min(seconds)


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()  # first: tensors in reference cycles still hold memory, which empty_cache could not return
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
