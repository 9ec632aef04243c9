"""Prepare the next items in a thread while the current one is in use.

with closing(Ahead(batches(), depth=2)) as ahead:
    for batch in ahead: ...

Order is kept, an error in the thread is raised again where the items are used, and the thread ends when the
items do, when `close` is called, or when the `Ahead` is forgotten.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from loopformer.errors import LoopformerError

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


class Ahead(Iterator[T], Generic[T]):
    """An iterator over `items` that stays up to `depth` of them ahead of its reader."""

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise LoopformerError(f"Prefetching needs a depth of 1 or more, got {depth}.")
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._over = False
        # The thread must not hold `self`, or a forgotten Ahead would never be collected and stopped.
        self._thread = threading.Thread(target=_fill, args=(items, self._queue, self._stop), daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._over = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it a little; calling twice does no harm."""
        self._over = True
        self._stop.set()
        self._thread.join(timeout=5)  # it may hang in a network call; it is a daemon


def _fill(items: Iterable[T], out: queue.Queue[T | _End], stop: threading.Event) -> None:
    try:
        iterator = iter(items)
        try:
            for item in iterator:
                if not _put(item, out, stop):
                    return
        finally:
            if close := getattr(iterator, "close", None):  # a generator still has files open
                close()
        _put(_End(), out, stop)
    except BaseException as error:
        _put(_End(error), out, stop)


def _put(item: T | _End, out: queue.Queue[T | _End], stop: threading.Event) -> bool:
    """Wait for room; False when the reader has gone."""
    while not stop.is_set():
        try:
            out.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
