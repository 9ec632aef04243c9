"""Reusable decode batches. Importable without Triton.

pool = BatchPool(model)                  # if unsupported_reason(model) is None
with pool.batch(slots=4) as batch:
    runner = FusedRunner(batch)          # runner.py

Several runs may decode at once, each in a batch of its own. A batch that comes back serves the next run, unless the
model's weights have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

from loopformer.device import available_bytes
from loopformer.model.looped import LoopedLM

if TYPE_CHECKING:
    from loopformer.inference.fused.launch import DecodeBatch

MAX_IDLE_BATCHES = 4  # each keeps the memory of all its pages
MAX_SLOTS = 256  # of one batch; further sequences wait


def unsupported_reason(model: LoopedLM) -> str | None:
    """Why fused kernels cannot run this model here, as a clause after "it"; None if they can."""
    if model.config.fused_unsupported is not None:
        return f"has no kernels for model.{model.config.fused_unsupported}"
    ready = model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None
    return None if ready else "needs a CUDA device and Triton"


class BatchPool:
    """The batches of a model, each lent to one run at a time and kept for the next, as recording graphs takes long.

    All borrowers must have the same current stream, such as the default one. Nothing else orders the decode work
    of one borrower before that of the next, which uses the same slots and pages.
    """

    def __init__(self, model: LoopedLM) -> None:
        self.model = model
        self._free: list[DecodeBatch] = []  # least recently used first
        self._lock = Lock()

    @contextmanager
    def batch(self, slots: int) -> Iterator[DecodeBatch]:
        """Lend a batch of at least so many slots, a power of two, but of MAX_SLOTS at most."""
        from loopformer.inference.fused.launch import DecodeBatch  # needs Triton

        slots = min(MAX_SLOTS, 1 << (slots - 1).bit_length())
        with self._lock:
            self._free = [batch for batch in self._free if batch.is_current]
            batch = next((batch for batch in self._free if batch.slots == slots), None)
            if batch is not None:
                self._free.remove(batch)
        batch = batch or DecodeBatch(self.model, slots)
        try:
            yield batch
        finally:
            batch.wait_for_prompts()  # first: after this another run may fill its pages, or its memory may be freed
            with self._lock:
                self._free.append(batch)
                del self._free[:-MAX_IDLE_BATCHES]
                # Keep idle batches only while their pages take less than the free GPU memory.
                while sum(kept.nbytes for kept in self._free) > available_bytes(self.model.device):
                    del self._free[0]
