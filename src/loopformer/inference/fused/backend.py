"""What `lm` decodes with on a GPU: memory and graphs that are lent and used again.

pool = FusedPool(model)                             # obstacle(model) says what is in its way here
with pool.batch(slots=4) as batch:                  # for SharedBackend (shared.py): any budgets, any number of rows
    backend = SharedBackend(batch)

A batch is lent to one at a time, so several texts may be under way at once; what is free again serves the next,
unless the model's weights have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from loopformer.device import available_bytes
from loopformer.inference.fused.quantise import Fingerprint, fingerprint
from loopformer.model import LoopedLM

if TYPE_CHECKING:
    from loopformer.inference.fused.batch import SharedBatch
    from loopformer.inference.fused.decoder import Tuning

MOST_KEPT = 4  # each holds keys for the whole context of its rows
MOST_SLOTS = 256  # of one batch; more requests wait for each other
NO_CERTAINTY = "has no kernels for certainty"
Lent = TypeVar("Lent")


def obstacle(model: LoopedLM, certainty: bool = False) -> str | None:
    """What the kernels lack to run a model here, and if need be to let its tokens settle, as in "it …"; None if
    nothing."""
    if model.config.plain_only is not None:
        return f"has no kernels for model.{model.config.plain_only}"
    if certainty:
        return NO_CERTAINTY
    ready = model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None
    return None if ready else "needs a CUDA device and Triton"


class LendingPool(Generic[Lent]):
    """What may be used again: lent to one at a time; of what is free the last few are kept, if there is room."""

    def __init__(self, has_room: Callable[[Sequence[Lent]], bool] = lambda kept: True) -> None:
        self.free: list[tuple[Hashable, Lent]] = []  # the last used at the end
        self._has_room = has_room
        self._door = Lock()

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Lent]) -> Iterator[Lent]:
        """One of this kind, made if none is free."""
        with self._door:
            at = next((at for at, (kind, _) in enumerate(self.free) if kind == key), None)
            found = None if at is None else self.free.pop(at)[1]
        lent = make() if found is None else found
        try:
            yield lent
        finally:
            with self._door:
                self.free.append((key, lent))
                del self.free[:-MOST_KEPT]
                while self.free and not self._has_room([kept for _, kept in self.free]):
                    del self.free[0]


class FusedPool:
    """The batches of a model, made when they are needed."""

    def __init__(self, model: LoopedLM, tuning: Tuning | None = None) -> None:
        self.model, self._tuning = model, tuning
        self._seen: Fingerprint = []
        self._batches: LendingPool[SharedBatch] = LendingPool(self._has_room)

    @contextmanager
    def batch(self, slots: int) -> Iterator[SharedBatch]:
        """Lend one of so many slots or more, a power of two and MOST_SLOTS at most."""
        from loopformer.inference.fused.batch import SharedBatch

        self._look_at_weights()
        slots = min(MOST_SLOTS, 1 << (slots - 1).bit_length())
        make = partial(SharedBatch, self.model, slots, None, self._tuning)
        with self._batches.lend(slots, make) as batch:
            try:
                yield batch
            finally:
                batch.leave()

    def _look_at_weights(self) -> None:
        """Forget what was made for other weights than those of now: graphs still have them."""
        seen = fingerprint(self.model)
        if seen != self._seen:
            self._seen, self._batches = seen, LendingPool(self._has_room)

    def _has_room(self, kept: Sequence[SharedBatch]) -> bool:
        """Whether as much memory is free as batches keep that nobody uses."""
        nbytes = sum(batch.nbytes for batch in kept)
        return nbytes <= available_bytes(self.model.tokens.weight.device)
