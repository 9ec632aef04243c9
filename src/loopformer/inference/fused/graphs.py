"""CUDA graphs and the streams beside the one that decodes.

graph = record(device, launch, state=[x])          # a CUDA graph of the kernels that `launch` launches
prompts = SideStream("prompts", device)
with prompts.after_decoding(): ...                 # runs beside decoding, after what has been queued for it so far
prompts.join()                                     # decoding waits for what is queued on the side stream
copy = HostCopy(tokens)                            # copies while the device goes on; copy.has_arrived, copy.wait()

A graph launches hundreds of kernels at once, because launching them one by one takes longer than they run. What
differs from replay to replay lies in tensors on the device.

Without CUDA, in Triton's interpreter, side streams do nothing: everything runs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from loopformer.device import device_context

RECORDING = Lock()  # capture streams are process-wide: capture one graph at a time


class SideStream:
    """A stream beside the one that decodes. Streams of the same purpose and device are the same.

    PyTorch's allocator gives freed memory to later work of the same stream at once. So memory may cross between
    streams only where one of them waits for the other; each method says which.
    """

    def __init__(self, purpose: str, device: torch.device) -> None:
        self._purpose, self._device = purpose, device

    @contextmanager
    def after_decoding(self) -> Iterator[None]:
        """Run on this stream, after all that is queued for decoding: it may have written what is read here, or used
        memory that is given to this stream."""
        self.hold_back()
        with torch.cuda.stream(self._stream()):  # None: the current one
            yield

    def hold_back(self) -> None:
        """Let later work of this stream wait for all that is queued for decoding, which may read tensors of this
        stream. Call it before such a tensor is freed: otherwise this stream would overwrite it too early."""
        if (stream := self._stream()) is not None:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let decoding wait for all that is queued on this stream."""
        if (stream := self._stream()) is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda":
            return None
        return _stream_of(torch.cuda.current_device(), self._purpose)


class HostCopy:
    """A tensor on its way to the host. The copy runs on the current stream, and nobody waits for it here."""

    def __init__(self, source: Tensor) -> None:
        self._event: Any = None
        if source.device.type != "cuda":
            self._tensor = source.clone()
            return
        self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._tensor.copy_(source, non_blocking=True)
        make: Any = torch.cuda.Event
        self._event = make()
        self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> Tensor:
        """The tensor, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


@lru_cache
def _stream_of(device: int, purpose: str) -> torch.cuda.Stream:
    """One stream for each purpose, because libraries allocate workspaces for each stream."""
    make: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make(device)
    return stream


def record(
    device: torch.device,
    launch: Callable[[], None],
    state: Sequence[Tensor],
    purpose: str = "decoding",
    pool: Any = None,
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of launches, whose kernels are compiled by running them once.

    `state` is restored afterwards; keys that the run wrote lie beyond the valid length. Graphs that may run at the
    same time need different purposes: a graph uses the library workspaces of the stream it was recorded on. Graphs
    that never run at once may share a `pool` of memory.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING, device_context(device):
        before = [tensor.clone() for tensor in state]
        index = torch.cuda.current_device()
        warm_up = _stream_of(index, "warm-up")
        # The warm-up reads what is queued here, and must be done before the capture begins.
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            launch()
        torch.cuda.current_stream().wait_stream(warm_up)
        stream = _stream_of(index, f"recording of {purpose}")
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):  # other threads go on
            launch()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
    return graph
