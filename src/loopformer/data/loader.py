"""Batches in a fixed global order, the same for any number of ranks, from any step on at once.

    loader = Loader(TokenData.open("data/stdlib"), context=1024, batch=480, seed=0)
    loader.batch(step=7)                       # the whole global batch
    loader.batch(step=7, start=0, stop=240)    # the rows of one of two ranks
    with closing(loader.prefetch(first_step=7)) as batches: next(batches)

A sample is a window of context + 1 tokens; windows of a source follow one another without overlap (each target
is the next window's first input). Which window comes when is arithmetic: order.py.

A `Prefetcher` makes the next items in a thread while the current one is in use. Order is kept, an error in the
thread is raised again where the items are used, and the thread ends when the items do, when `close` is called, or
when the prefetcher is forgotten.
"""

from __future__ import annotations

import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from loopformer.data.order import Order
from loopformer.data.shards import SourceData, TokenData
from loopformer.data.supervised import LAST, LOSS
from loopformer.errors import LoopformerError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
NO_LOSS = -100  # what torch's cross-entropy leaves out


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: what goes in, what should come out, and where documents change."""

    inputs: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [B, T] int64, NO_LOSS where nothing is to be learned
    documents: torch.Tensor | None  # [B, T] int64: the document of each input, counted from 0 in its window

    def __len__(self) -> int:
        return len(self.inputs)


class Windows:
    """All windows of a split, numbered through: `windows.rows([0, 5])`, `windows.batch(0, 8)`.

    A source shorter than a window has none; what is left over at the end of a source is not seen.
    With `documents`, rows tell their documents apart, and the token after a document's end is no target.
    """

    def __init__(self, data: TokenData, context: int, documents: bool = False, limit: int | None = None) -> None:
        if context < 1:
            raise LoopformerError(f"The context must be 1 token or more, got {context}.")
        self._data, self._context, self._documents = data, context, documents
        self.sizes = tuple((len(source.ids) - 1) // context for source in data.sources)
        if not sum(self.sizes):
            raise _too_short(f"{data.split} split", data.tokens, context)
        self._starts = [0, *accumulate(self.sizes)]
        self._length = min(limit or self._starts[-1], self._starts[-1])

    def __len__(self) -> int:
        return self._length

    def batch(self, start: int, stop: int) -> Batch:
        """Windows start:stop; with a limit these are spread evenly over all."""
        total, length = self._starts[-1], len(self)
        return self.rows(number * total // length for number in range(start, min(stop, length)))

    def rows(self, numbers: Iterable[int]) -> Batch:
        """The windows of these numbers, whatever the limit."""
        import torch

        windows = [self._window(number) for number in numbers]
        shape = (len(windows), self._context + 1)
        ids = np.stack([ids for ids, _ in windows]) if windows else np.zeros(shape, np.int64)
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        flags = np.stack([flags for _, flags in windows]) if windows else np.zeros(shape, np.uint8)
        targets[(flags[:, 1:] & LOSS) == 0] = NO_LOSS
        numbered = None
        if self._documents:
            last = (flags[:, :-1] & LAST) != 0
            targets[last] = NO_LOSS
            numbered = torch.from_numpy(np.cumsum(last, axis=1) - last)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), numbered)

    def _window(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Ids and flags of one window; text without flags is all to be learned."""
        which = bisect_right(self._starts, number) - 1
        start = (number - self._starts[which]) * self._context
        source: SourceData = self._data.sources[which]
        ids = source.ids.read(start, start + self._context + 1).astype(np.int64)
        self._data.check_ids(ids, source.name)  # a wrong one would be an index error in the model
        if source.flags is not None:
            return ids, source.flags.read(start, start + self._context + 1)
        return ids, np.where(ids == self._data.eot, LOSS | LAST, LOSS)


def validation_windows(data: TokenData, context: int, limit: int | None = None, documents: bool = False) -> Windows:
    """The windows of a split in their own order; at most `limit`, spread evenly over all of them."""
    if limit is not None and limit < 1:
        raise LoopformerError(f"Validation needs 1 window or more, got {limit}.")
    return Windows(data, context, documents, limit)


def _too_short(what: str, tokens: int, context: int) -> LoopformerError:
    return LoopformerError(
        f"The {what} has {tokens} tokens, too few for a window of {context} + 1; "
        "prepare more text, raise --val-fraction or lower the context."
    )


class Loader:
    """Training batches by step number. Sources with weights are mixed; without, they are one big source."""

    def __init__(self, data: TokenData, context: int, batch: int, seed: int = 0, documents: bool = False) -> None:
        if batch < 1:
            raise LoopformerError(f"A batch needs 1 row or more, got {batch}.")
        self.batch_size = batch
        self._windows = Windows(data, context, documents)
        weights = [source.weight for source in data.sources]
        mixed = tuple(weight for weight in weights if weight is not None)
        if mixed:
            for source in data.sources:
                if len(source.ids) <= context:
                    raise _too_short(f"{data.split} split of {source.name}", len(source.ids), context)
            self._names = [source.name for source in data.sources]
            self._order = Order(seed, self._windows.sizes, mixed)
        else:
            self._names = [" + ".join(source.name for source in data.sources)]
            self._order = Order(seed, (len(self._windows),))
        self._starts = np.array([0, *accumulate(self._order.sizes)])

    @property
    def samples(self) -> int:
        """Windows in the data."""
        return len(self._windows)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows start:stop of the global batch of a step."""
        first = step * self.batch_size
        rows = range(self.batch_size)[start:stop]
        located = self._order.locate(np.arange(first + rows.start, first + rows.stop))
        return self._windows.rows((self._starts[located.source] + located.sample).tolist())

    def prefetch(
        self, first_step: int = 0, start: int = 0, stop: int | None = None, depth: int = 2
    ) -> Prefetcher[Batch]:
        """Batches from `first_step` on without end, made in a thread; close it when done."""
        return Prefetcher((self.batch(step, start, stop) for step in count(first_step)), depth)

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been gone through before a step."""
        drawn = self._order.drawn(step * self.batch_size)
        return {
            name: number / size for name, number, size in zip(self._names, drawn, self._order.sizes, strict=True)
        }

    def epoch(self, step: int) -> float:
        """Samples drawn before a step, in units of all samples there are."""
        return step * self.batch_size / self.samples


@dataclass(frozen=True)
class _End:
    """After the last item; with what went wrong, if something did."""

    error: BaseException | None = None


class Prefetcher(Iterator[T], Generic[T]):
    """An iterator over `items` that stays up to `depth` of them ahead of its reader."""

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise LoopformerError(f"Prefetching needs a depth of 1 or more, got {depth}.")
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._over = False
        # The thread must not hold `self`, or a forgotten prefetcher would never be collected and stopped.
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
