"""CUDA graphs: hundreds of kernels in one launch, because launching them one by one takes longer than they run.

    graph = record(device, launch, state=[x])       # a graph of the kernels that `launch` launches
    graph.replay()

What differs from replay to replay lies in tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from loopformer.device import device_context

RECORDING = Lock()  # capture streams are process-wide: capture one graph at a time
STREAMS = Lock()  # otherwise two threads could get two streams for one purpose, and wait for the wrong one


def stream_of(device: int, purpose: str) -> torch.cuda.Stream:
    """One stream for each purpose, because libraries allocate workspaces for each stream."""
    with STREAMS:
        return _make_stream(device, purpose)


@lru_cache
def _make_stream(device: int, purpose: str) -> torch.cuda.Stream:
    make: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make(device)
    return stream


def record(
    device: torch.device,
    launch: Callable[[], None],
    state: Sequence[Tensor],
    purpose: str = "decoding",
    memory: Any = None,
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of launches, whose kernels are compiled by running them once.

    `launch` runs once for real, and `state` is restored afterwards. Everything else that it writes must be memory
    that nobody reads before the graph writes it again, such as the keys of a token that has not been run.

    Graphs that may run at the same time need different purposes: a graph uses the library workspaces of the stream
    it was recorded on. Graphs that never run at the same time may share their `memory`, a graph pool handle.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING, device_context(device):
        before = [tensor.clone() for tensor in state]
        index = torch.cuda.current_device()
        warm_up = stream_of(index, "warm-up")
        # The warm-up reads what is queued here, and must be finished before the capture begins.
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            launch()
        torch.cuda.current_stream().wait_stream(warm_up)
        stream = stream_of(index, f"recording of {purpose}")
        # thread_local: other threads may go on with calls that a capture forbids.
        with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
            launch()
        # The capture has run nothing, so this undoes the warm-up alone.
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
    return graph
