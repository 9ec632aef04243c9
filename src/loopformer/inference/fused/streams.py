"""The streams beside the decode stream, and copies to the host.

prompts = SideStream("prompts", device)
with prompts.after_decode(): ...                # runs beside the decode stream, after what is queued there so far
prompts.decode_waits()                          # the decode stream waits for what is queued on the side stream
copy = HostCopy(tokens)                         # copies while the device goes on; copy.has_arrived, copy.wait()

Sequence A decodes alone while the prompt of B runs. Then both decode together. Time goes to the right, and a
number is a wait:

    host     queue A, queue B     (4) A's token, queue A     (4) B's token, queue B's fill, free B's cache
    decode   A ............ A .................... A ......... B's fill, A and B ................ C alone
             |              |                      |                    |                         ^
             | (1)          | (2)                  | (2)                | (3)                     | (5)
             v              v                      v                    v                         |
    prompt   B's prompt, B's token, its copy                            C's prompt ...            |
    copy                    copy of A's token      copy of A's next token ------------------------+

    (1) after_decode: the prompt waits for every fill queued so far, as it may read pages that they write.
    (2) after_decode: the copy waits for the token that it copies. The next token does not wait for the copy.
    (3) wait_for_decode: later prompts wait for B's fill, which reads B's cache. They may be given its memory.
    (4) HostCopy.wait: the host waits. The copy of B's token is the last work queued for B's prompt, so all of the
        prompt is finished then, and B's fill needs no other wait.
    (5) decode_waits: a row that begins to run alone overwrites the tokens of the last one, so it waits for their
        copies. Tokens of rows that run together are copied on the decode stream itself, and need no wait.

The decode stream waits for prompts (decode_waits) only where it uses or gives away what a prompt still works on:
when rows are computed again, when the weights have changed, and when a batch goes back to its pool.

Without CUDA, in Triton's interpreter, there are no streams: everything runs in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from loopformer.cuda_graphs import stream_of


class SideStream:
    """A stream beside the decode stream. In a process, streams of the same purpose and device are the same.

    The decode stream is the current stream of `device` when a method is called, whichever device is the current
    one. All callers must have the same one: the methods order a side stream and this stream, and nothing else.

    A tensor made on one stream may be read on another only after a wait for it. It may be freed only after its own
    stream waits for the reader: PyTorch's allocator gives freed memory to the next work of the stream it was made
    on, and that work would overwrite it too early.
    """

    def __init__(self, purpose: str, device: torch.device) -> None:
        self._purpose, self._device = purpose, device

    @contextmanager
    def after_decode(self) -> Iterator[None]:
        """Run on this stream, after all that is queued on the decode stream.

        This is the only way onto the stream. What runs inside may read all that decoding wrote before, and may use
        memory of this stream that decoding read before.
        """
        self.wait_for_decode()
        with torch.cuda.stream(self._stream()):  # None: the current one
            yield

    def wait_for_decode(self) -> None:
        """Let later work of this stream wait for all that is queued on the decode stream.

        Call it before a tensor of this stream is freed that the decode stream reads. The wait of the next
        `after_decode` is too late for a runner in another thread that shares this stream and is inside one already.
        """
        if (stream := self._stream()) is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def decode_waits(self) -> None:
        """Let later work of the decode stream wait for all that is queued on this stream."""
        if (stream := self._stream()) is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda":
            return None
        # Not the current device: a batch on the second GPU goes back to its pool while the first may be current.
        return stream_of(self._device.index, self._purpose)


class HostCopy:
    """A copy of a tensor to the host, queued on the current stream. Nothing waits for it until `wait`.

    The source may be freed at once, and overwritten by later work of the same stream. Before another stream
    overwrites it, that stream must wait for this one.
    """

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
        """The tensor, once it has arrived. All work queued before it on its stream is finished then, too."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
