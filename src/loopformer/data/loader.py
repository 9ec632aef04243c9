"""Batches in a fixed global order: the same for any number of ranks, and available at any step without replay.

    loader = Loader(TokenData.open("data/stdlib"), context=1024, batch=480, seed=0)
    loader.batch(step=7)                       # the whole global batch
    loader.batch(step=7, rows=range(240))      # the rows of one of two ranks
    with closing(Prefetcher(loader.batch(step) for step in count(7))) as batches: next(batches)

A sample is a window of context + 1 tokens. The windows of a source do not overlap: the last target of a window is
the first input of the next.

The order of windows is computed, not stored. Each epoch of a source is a random permutation of its windows, made
by a Feistel network. A mixture of sources is a series of equal blocks of positions. Each source has the same share
of every block, and each block is shuffled differently. So any position is equally cheap to look up, and neither
resuming nor dividing a batch among ranks can change the order.

A `Prefetcher` makes the next items in a thread while the current one is in use. It keeps their order. An error in
the thread is raised again where the items are used. The thread ends after the last item, on `close`, or when the
prefetcher is garbage-collected.
"""

from __future__ import annotations

import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from loopformer.data.shards import TokenData
from loopformer.data.tokenizer import LAST, LOSS
from loopformer.errors import LoopformerError, require

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
IGNORE_INDEX = -100  # the target that torch's cross-entropy ignores
UInt64s = npt.NDArray[np.uint64]

BLOCK = 4096  # positions in a block of a mixture; the smallest share of a source is one of them
_FEISTEL_ROUNDS = 6
_BLOCK_STREAM = 2**32  # the random stream that shuffles blocks; stream i below it shuffles source i


@dataclass(frozen=True)
class Batch:
    """Input tokens, their targets, and the document of each token."""

    inputs: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [B, T] int64, IGNORE_INDEX where there is no loss
    documents: torch.Tensor | None  # [B, T] int64: index of the document within its window

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.inputs, self.targets, self.documents) if tensor is not None]

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with `fn` applied to each tensor."""
        documents = None if self.documents is None else fn(self.documents)
        return Batch(fn(self.inputs), fn(self.targets), documents)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; copies from pinned memory do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


class TrainingBatches(Protocol):
    """The training batches of a run, by step."""

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """The global batch of a step, or some of its rows."""

    def epoch(self, step: int) -> float:
        """How often the data has been seen before a step."""


class ValidationBatches(Protocol):
    """Numbered rows for validation."""

    def __len__(self) -> int: ...

    def batch(self, start: int, stop: int) -> Batch:
        """Rows start:stop."""


class Windows:
    """All windows of a split, numbered across its sources: `windows.rows([0, 5])`, `windows.batch(0, 8)`.

    Tokens at the end of a source that do not fill a window are not used. With `documents`, batches say
    which document each token belongs to, and the last token of a document has no target. `limit` is the
    maximum number of windows in `batch`, spread evenly over all of them, for validation.
    """

    def __init__(self, data: TokenData, context: int, limit: int | None = None, documents: bool = False) -> None:
        require(context >= 1, f"The context must be 1 token or more, got {context}.")
        require(limit is None or limit >= 1, f"Validation needs 1 window or more, got {limit}.")
        self._data, self._context, self._documents = data, context, documents
        self.sizes = tuple(max(0, len(source.ids) - 1) // context for source in data.sources)
        self._starts = [0, *accumulate(self.sizes)]  # the first window of each source
        if not self._starts[-1]:
            raise _too_short_error(f"{data.split} split", data.tokens, context)
        self._length = min(limit or self._starts[-1], self._starts[-1])

    def __len__(self) -> int:
        return self._length

    def batch(self, start: int, stop: int) -> Batch:
        """Windows start:stop, of those that the limit leaves."""
        total, length = self._starts[-1], len(self)
        return self.rows(number * total // length for number in range(start, min(stop, length)))

    def rows(self, numbers: Iterable[int]) -> Batch:
        """The windows with these numbers; the limit does not apply."""
        import torch

        numbers = list(numbers)
        ids = np.empty((len(numbers), self._context + 1), np.int64)  # [B, T + 1]
        flags = np.empty_like(ids, np.uint8)
        for row, number in enumerate(numbers):
            ids[row], flags[row] = self._window(number)
        targets = np.where(flags[:, 1:] & LOSS, ids[:, 1:], IGNORE_INDEX)
        documents = None
        if self._documents:
            is_last = (flags[:, :-1] & LAST) != 0
            targets[is_last] = IGNORE_INDEX
            documents = torch.from_numpy(np.cumsum(is_last, axis=1) - is_last)
        return Batch(torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets), documents)

    def _window(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Ids and flags of one window, both [T + 1]; every token of plain text has loss."""
        index = bisect_right(self._starts, number) - 1
        source = self._data.sources[index]
        start = (number - self._starts[index]) * self._context
        ids = source.ids.read(start, start + self._context + 1).astype(np.int64)
        self._data.check_ids(ids, source.name)  # an id out of range would only fail later, in the embedding
        if source.flags is not None:
            return ids, source.flags.read(start, start + self._context + 1)
        return ids, np.where(ids == self._data.eot, LOSS | LAST, LOSS)


def _too_short_error(name: str, tokens: int, context: int) -> LoopformerError:
    return LoopformerError(
        f"The {name} has {tokens} tokens, too few for a window of {context} + 1; "
        "prepare more text, raise --val-fraction or lower the context."
    )


class Loader:
    """Training batches by step number. Sources with weights are mixed; sources without are concatenated."""

    def __init__(self, data: TokenData, context: int, batch: int, seed: int = 0, documents: bool = False) -> None:
        require(batch >= 1, f"A batch needs 1 row or more, got {batch}.")
        self.batch_size = batch
        self._windows = Windows(data, context, documents=documents)
        weights = tuple(source.weight for source in data.sources if source.weight is not None)
        for source in data.sources if weights else ():
            if len(source.ids) <= context:
                raise _too_short_error(f"{data.split} split of {source.name}", len(source.ids), context)
        self._order = Order(seed, self._windows.sizes, weights) if weights else Order(seed, (len(self._windows),))
        self._starts = np.array([0, *accumulate(self._order.sizes)])

    @property
    def samples(self) -> int:
        """Windows in the data."""
        return len(self._windows)

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """The global batch of a step, or some of its rows."""
        numbers = np.arange(self.batch_size) if rows is None else np.array(rows, np.int64)
        located = self._order.locate(step * self.batch_size + numbers)
        return self._windows.rows((self._starts[located.source] + located.sample).tolist())

    def epoch(self, step: int) -> float:
        """Samples drawn before a step, divided by the number of samples in the data."""
        return step * self.batch_size / self.samples


class Located(NamedTuple):
    """For each position: the source, the sample in it, and the epoch of that source (from 0)."""

    source: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """A seeded order over sources of `sizes` samples, drawn in proportion to `weights`."""

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        is_complete = len(self.sizes) == len(self.weights) and min(self.sizes, default=0) >= 1
        require(is_complete, "An order needs at least one sample and a weight for every source.")
        require(self.seed >= 0, f"A seed must be 0 or more, got {self.seed}.")
        problem = f"The smallest weight {min(self.weights):g} is under 1/{BLOCK} of the mixture"
        require(min(self.shares) > 0, f"{problem}; raise it or drop the source.")

    @property
    def shares(self) -> tuple[int, ...]:
        """How many positions of a block belong to each source."""
        return apportion(BLOCK, self.weights) if len(self.sizes) > 1 else (BLOCK,)

    def locate(self, positions: npt.ArrayLike) -> Located:
        """The sample at each position."""
        numbers = np.asarray(positions, dtype=np.uint64)
        block, slot = np.divmod(numbers, np.uint64(BLOCK))
        if len(self.sizes) > 1:  # a mixture shuffles each block with its own key
            slot = permute(slot, BLOCK, stream_key(self.seed, _BLOCK_STREAM, block))
        ends = np.cumsum(self.shares)
        source = np.searchsorted(ends, slot, side="right")
        sample, epoch = np.empty_like(numbers), np.empty_like(numbers)
        for number, (size, share, end) in enumerate(zip(self.sizes, self.shares, ends, strict=True)):
            in_source = source == number
            # Earlier positions of this source: its share of every earlier block, and its earlier slots in this one.
            before = block[in_source] * np.uint64(share) + slot[in_source] - np.uint64(end - share)
            epoch[in_source], inside = np.divmod(before, np.uint64(size))
            sample[in_source] = permute(inside, size, stream_key(self.seed, number, epoch[in_source]))
        return Located(source.astype(np.int64), sample.astype(np.int64), epoch.astype(np.int64))


def permute(index: UInt64s, size: int, key: UInt64s) -> UInt64s:
    """The index of each element after a random permutation of 0 … size-1, one permutation per key."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [mix(key + np.uint64(number)) for number in range(_FEISTEL_ROUNDS)]
    result = index.astype(np.uint64)
    # The network permutes 0 … 4^half-1, which may exceed size. Results outside 0 … size-1 go through it again until
    # they land inside (cycle walking). Wrapping them with a modulo instead would repeat samples.
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], half, [key[outside] for key in keys])
        outside = outside[result[outside] >= size]
    return result


def _feistel(value: UInt64s, half: int, keys: Sequence[UInt64s]) -> UInt64s:
    """A bijection of 0 … 4^half-1: each round mixes one half with a hash of the other."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Integers that sum to `total`, in proportion to the weights (largest-remainder method)."""
    exact = [Fraction(weight) for weight in weights]
    wanted = [weight * total / sum(exact) for weight in exact]
    parts = [int(part) for part in wanted]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - wanted[i], i))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return tuple(parts)


def stream_key(seed: int, stream: int, number: UInt64s) -> UInt64s:
    """A random key for each number of a random stream."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(stream)
    return mix(mix(start) + number)


def mix(value: UInt64s) -> UInt64s:
    """SplitMix64, a hash of 64 bits to 64 bits; the integer overflow is intended."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class _End:
    """Queued after the last item, with the error that ended the iteration, if any."""

    error: BaseException | None = None


class Prefetcher(Iterator[T], Generic[T]):
    """An iterator over `items` that a thread computes up to `depth` items ahead."""

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        require(depth >= 1, f"Prefetching needs a depth of 1 or more, got {depth}.")
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._is_exhausted = False
        # The thread must not reference `self`, or an unclosed prefetcher would never be collected and stopped.
        self._thread = threading.Thread(target=_fill_queue, args=(items, self._queue, self._stop), daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __next__(self) -> T:
        if self._is_exhausted:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._is_exhausted = True
        raise StopIteration if item.error is None else item.error

    def close(self) -> None:
        """Stop the thread and wait up to five seconds for it; calling twice does no harm."""
        self._is_exhausted = True
        self._stop.set()
        self._thread.join(timeout=5)  # it may hang in a network call; it is a daemon


def _fill_queue(items: Iterable[T], out: queue.Queue[T | _End], stop: threading.Event) -> None:
    """Put items into the queue until they end or `stop` is set; this is the body of the prefetching thread."""

    def put(item: T | _End) -> bool:
        """Wait for room; False once `stop` is set."""
        while not stop.is_set():
            with suppress(queue.Full):
                out.put(item, timeout=0.1)
                return True
        return False

    try:
        iterator = iter(items)
        try:
            for item in iterator:
                if not put(item):
                    return
        finally:
            if close := getattr(iterator, "close", None):  # a generator may hold open files
                close()
        put(_End())
    except BaseException as error:
        put(_End(error))
