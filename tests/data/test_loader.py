"""Batches: the right tokens in an order that never depends on how a batch is cut, and items read ahead."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.loader import (
    BLOCK,
    IGNORE_INDEX,
    Loader,
    Order,
    Prefetcher,
    Windows,
    apportion,
    permute,
)
from loopformer.data.prepare import prepare
from loopformer.data.shards import ShardedArray, TokenData
from loopformer.errors import LoopformerError

from .words import write_jsonl

CONTEXT = 48


@pytest.fixture(scope="module")
def data(prepared: Path) -> TokenData:
    return TokenData.open(prepared)


def every(data: TokenData) -> Any:
    return data.sources[0].ids.read(0, data.tokens).astype(np.int64)


def test_one_epoch_has_every_window_once(data: TokenData) -> None:
    loader = Loader(data, CONTEXT, batch=7, seed=1)
    stream = every(data)
    count = (data.tokens - 1) // CONTEXT
    assert loader.samples == count
    windows = {tuple(stream[i * CONTEXT : (i + 1) * CONTEXT + 1]) for i in range(count)}
    rows = []
    for step in range(count // 7 + 1):
        batch = loader.batch(step)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape == (7, CONTEXT)
        assert batch.documents is None
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        rows += [
            (*inputs.tolist(), targets[-1].item())
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
        ]
    assert len(windows) == count, "the corpus has no two equal windows"
    assert set(rows[:count]) == windows


@given(step=st.integers(0, 10**9), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_ranks_see_the_same_global_batch(data: TokenData, step: int, cuts: list[int]) -> None:
    loader = Loader(data, CONTEXT, batch=12, seed=2, documents=True)
    whole = loader.batch(step)
    edges = [0, *sorted(cuts), 12]
    pieces = [loader.batch(step, range(start, stop)) for start, stop in itertools.pairwise(edges)]
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), whole.inputs)
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), whole.targets)
    assert whole.documents is not None
    assert torch.equal(
        torch.cat([piece.documents for piece in pieces if piece.documents is not None]), whole.documents
    )


def test_documents(data: TokenData) -> None:
    loader = Loader(data, CONTEXT, batch=50, documents=True)
    batch = loader.batch(0)
    assert batch.documents is not None
    ends = batch.inputs == data.eot
    assert ends.any()
    assert torch.equal(batch.documents[:, 0], torch.zeros(50, dtype=torch.int64))
    assert torch.equal(batch.documents[:, 1:] - batch.documents[:, :-1], ends[:, :-1].long())
    assert torch.equal(batch.targets == IGNORE_INDEX, ends)
    assert not (Loader(data, CONTEXT, batch=50).batch(0).targets == IGNORE_INDEX).any()


def test_prefetch_gives_the_same_batches(data: TokenData) -> None:
    loader = Loader(data, CONTEXT, batch=6, seed=3)
    with closing(Prefetcher(loader.batch(step, range(2, 4)) for step in itertools.count(5))) as batches:
        for step in range(5, 12):
            assert torch.equal(next(batches).inputs, loader.batch(step, range(2, 4)).inputs)
    assert list(batches) == []


def test_prefetch_leaves_no_thread(data: TokenData) -> None:
    loader = Loader(data, CONTEXT, batch=2)
    batches = Prefetcher(loader.batch(step) for step in itertools.count())
    assert torch.equal(next(batches).inputs, loader.batch(0).inputs)
    assert batches._thread.is_alive()
    batches.close()
    batches._thread.join(240)  # `close` itself waits for five seconds at most
    assert not batches._thread.is_alive()


def test_epochs_are_counted(data: TokenData) -> None:
    loader = Loader(data, CONTEXT, batch=loader_size(data))
    assert loader.epoch(0) == 0
    assert loader.epoch(3) == 3


def loader_size(data: TokenData) -> int:
    return (data.tokens - 1) // CONTEXT


def two_sources(folder: Path, tokenizer: Path, weights: tuple[str, str]) -> TokenData:
    """Sources that can be told apart by their words."""
    given = []
    for name, word, weight in zip(("left", "right"), ("the loop", "depth grows"), weights, strict=True):
        path = write_jsonl(folder / f"{name}.jsonl", [{"text": f"{word} {n} " * 20} for n in range(100)])
        given.append(f"{path}{weight}")
    prepare(given, folder / "out", tokenizer=str(tokenizer), val_fraction=0.1)
    return TokenData.open(folder / "out")


def test_mixture_by_weight(tmp_path: Path, prepared: Path) -> None:
    data = two_sources(tmp_path, prepared, ("=3", "=1"))
    loader = Loader(data, 16, batch=4096)
    texts = [data.tokenizer.decode(row.tolist()) for row in loader.batch(0).inputs]
    assert sum("depth" in text or "grow" in text for text in texts) == 1024


def test_source_shorter_than_a_window(tmp_path: Path, prepared: Path) -> None:
    data = two_sources(tmp_path, prepared, ("=3", "=1"))
    short, long = sorted(data.sources, key=lambda source: len(source.ids))
    assert len(Windows(data, len(short.ids))) == (len(long.ids) - 1) // len(short.ids) > 0
    with pytest.raises(LoopformerError, match=rf"train split of {short.name} has {len(short.ids)} tokens, too few"):
        Loader(data, len(short.ids), 1)


def test_an_empty_source_takes_no_windows_from_the_next(tmp_path: Path, prepared: Path) -> None:
    data = two_sources(tmp_path, prepared, ("", ""))
    empty = replace(data.sources[0], ids=ShardedArray(tmp_path, [], np.uint16))
    windows = Windows(replace(data, sources=(empty, data.sources[1])), 16)
    assert windows.sizes == (0, (len(data.sources[1].ids) - 1) // 16)


def test_without_weights_sources_are_one(tmp_path: Path, prepared: Path) -> None:
    data = two_sources(tmp_path, prepared, ("", ""))
    total = sum((len(source.ids) - 1) // 16 for source in data.sources)
    loader = Loader(data, 16, batch=total)
    windows = Windows(data, 16)
    assert len(windows) == total == loader.samples

    def rows(inputs: torch.Tensor) -> list[list[int]]:
        return sorted(inputs.tolist())

    assert rows(loader.batch(0).inputs) == rows(windows.batch(0, total).inputs) == rows(loader.batch(4).inputs)


def test_validation_windows_are_in_order(prepared: Path) -> None:
    data = TokenData.open(prepared, "val")
    stream = every(data)
    windows = Windows(data, CONTEXT)
    batch = windows.batch(0, len(windows))
    length = len(windows) * CONTEXT
    assert batch.inputs.flatten().tolist() == stream[:length].tolist()
    assert batch.targets.flatten().tolist() == stream[1 : length + 1].tolist()
    few = Windows(data, CONTEXT, limit=3)
    assert len(few) == 3
    assert few.batch(0, 99).inputs[0].tolist() == batch.inputs[0].tolist()
    assert len(few.batch(3, 3)) == 0
    assert len(Windows(data, CONTEXT, limit=10**6)) == len(windows)


def test_the_last_window_may_end_with_the_data(prepared: Path) -> None:
    data = TokenData.open(prepared, "val")
    (source,) = data.sources
    for parts in (1, 2):
        context = (len(source.ids) - 1) // parts
        windows = Windows(data, context)
        assert len(windows) == (len(source.ids) - 1) // context >= parts
    assert len(Windows(data, len(source.ids) - 1)) == 1


def test_wrong_use(data: TokenData) -> None:
    with pytest.raises(LoopformerError, match=r"train split has \d+ tokens, too few for a window"):
        Loader(data, 10**6, 1)
    with pytest.raises(LoopformerError, match="batch needs 1 row"):
        Loader(data, 8, 0)
    with pytest.raises(LoopformerError, match="context must be 1"):
        Loader(data, 0, 1)
    with pytest.raises(LoopformerError, match="1 window or more"):
        Windows(data, 8, limit=0)


def test_order_and_end() -> None:
    ahead = Prefetcher(range(100), depth=3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []


def test_error_reaches_the_reader() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    ahead = Prefetcher(items())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert list(ahead) == []


def test_stays_only_so_far_ahead() -> None:
    made, taken, most_ahead = 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal made, most_ahead
        for number in range(100):
            made += 1
            most_ahead = max(most_ahead, made - taken)
            yield number

    ahead = Prefetcher(items(), depth=2)
    for _ in ahead:
        # Two in the queue, and one that the thread holds until there is room for it.
        while made < min(taken + 3, 100):
            time.sleep(0.001)
        taken += 1
    assert taken == 100
    assert most_ahead <= 4


def test_close_ends_the_thread_and_the_generator() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead = Prefetcher(items())
    next(ahead)
    ahead.close()
    ahead.close()
    assert closed.wait(240)  # `close` itself waits for five seconds at most
    assert list(ahead) == []


def test_forgotten_reader_ends_the_thread() -> None:
    ahead = Prefetcher(iter(int, 1))
    next(ahead)
    thread = ahead._thread
    del ahead
    gc.collect()
    thread.join(240)
    assert not thread.is_alive()


def test_depth() -> None:
    with pytest.raises(LoopformerError, match="depth of 1 or more"):
        Prefetcher([], depth=0)


def keys(key: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.full(count, key, dtype=np.uint64)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, keys(key, size))
    assert sorted(image.tolist()) == list(range(size))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_permutation_of_any_size_stays_inside(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    image = permute(np.array(index, dtype=np.uint64), size, keys(key, len(index)))
    assert max(image.tolist()) < size
    assert len(set(image.tolist())) == len(index)


def test_permutation_looks_random() -> None:
    size = 10_000
    image = permute(np.arange(size, dtype=np.uint64), size, keys(1, size)).astype(float)
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.05
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
    other = permute(np.arange(size, dtype=np.uint64), size, keys(2, size)).astype(float)
    assert abs(np.corrcoef(image, other)[0, 1]) < 0.05


@given(st.integers(1, 500), st.integers(0, 2**70), st.integers(0, 5))
def test_every_sample_once_per_epoch(size: int, seed: int, epoch: int) -> None:
    order = Order(seed, (size,))
    located = order.locate(np.arange(epoch * size, (epoch + 1) * size))
    assert sorted(located.sample.tolist()) == list(range(size))
    assert set(located.epoch.tolist()) == {epoch}


def test_epochs_and_seeds_differ() -> None:
    def once(seed: int, epoch: int) -> bytes:
        return Order(seed, (100,)).locate(np.arange(epoch * 100, epoch * 100 + 100)).sample.tobytes()

    assert len({once(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_that_of_every_version() -> None:
    """Runs go on in the order that they began with."""
    orders = {size: Order(7, (size,)).locate(np.arange(size)).sample.tolist() for size in (1, 2, 3, 5, 17)}
    assert orders == {
        1: [0],
        2: [0, 1],
        3: [0, 2, 1],
        5: [0, 4, 3, 1, 2],
        17: [16, 13, 8, 5, 0, 7, 12, 1, 11, 15, 4, 6, 2, 9, 3, 10, 14],
    }
    mixed = Order(7, (5, 3), (2, 1)).locate(np.arange(BLOCK - 4, BLOCK + 6))
    assert mixed.source.tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 1, 0]
    assert mixed.sample.tolist() == [1, 2, 2, 3, 2, 2, 3, 4, 2, 2]
    assert mixed.epoch.tolist() == [157, 84, 524, 509, 728, 556, 785, 935, 486, 857]


def test_the_smallest_share_is_one_position_of_a_block() -> None:
    assert Order(0, (5, 5), (BLOCK - 1, 1)).shares == (BLOCK - 1, 1)
    with pytest.raises(LoopformerError, match="smallest weight 1 is under"):
        Order(0, (5, 5), (10 * BLOCK, 1))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.01, 10)), min_size=2, max_size=4),
    st.integers(0, 2**32),
    st.integers(0, 10**12),
)
def test_mixture(parts: list[tuple[int, float]], seed: int, block: int) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = Order(seed, sizes, weights)
    start = block * BLOCK
    located = order.locate(np.arange(start, start + BLOCK))
    counts = np.bincount(located.source, minlength=len(sizes))
    assert counts.tolist() == list(order.shares)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) < 1


def test_mixture_goes_through_each_source_in_epochs() -> None:
    order = Order(3, (50, 7), (3, 1))
    located = order.locate(np.arange(3 * BLOCK))
    for source, size in enumerate(order.sizes):
        own = located.source == source
        pairs = list(zip(located.epoch[own].tolist(), located.sample[own].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) == 3 * order.shares[source]
        assert set(pairs) == {divmod(number, size) for number in range(len(pairs) // size * size)} | {
            pair for pair in pairs if pair[0] == len(pairs) // size
        }


def test_each_block_and_each_source_of_a_mixture_is_shuffled_differently() -> None:
    order = Order(3, (BLOCK, BLOCK), (1, 1))  # an epoch of each source takes two blocks
    blocks = [order.locate(np.arange(block * BLOCK, (block + 1) * BLOCK)) for block in range(6)]
    assert len({block.source.tobytes() for block in blocks}) == len(blocks)
    # The first block of an epoch has the first half of its permutation: another half for each source and epoch.
    halves = {
        frozenset(block.sample[block.source == source].tolist()) for block in blocks[::2] for source in (0, 1)
    }
    assert [len(half) for half in halves] == [BLOCK // 2] * 6


def test_epochs_of_a_single_source_longer_than_a_block_are_shuffled_differently() -> None:
    size = BLOCK + 5
    samples = Order(3, (size,)).locate(np.arange(4 * size)).sample.reshape(4, size)
    assert len({epoch.tobytes() for epoch in samples}) == 4
    # A block is no unit of a single source: equal offsets in its blocks have nothing in common.
    assert np.mean(samples[0, :BLOCK] == samples[1, :BLOCK]) < 0.01


@given(st.integers(0, 10**15), st.integers(1, 200), st.integers(0, 200))
def test_a_position_does_not_depend_on_its_neighbours(start: int, count: int, cut: int) -> None:
    order = Order(5, (123, 45, 6), (5, 3, 1))
    together = order.locate(np.arange(start, start + count))
    cut = min(cut, count)
    apart = [order.locate(np.arange(start, start + cut)), order.locate(np.arange(start + cut, start + count))]
    for field in ("source", "sample", "epoch"):
        pieces = np.concatenate([getattr(piece, field) for piece in apart])
        assert np.array_equal(getattr(together, field), pieces)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=10), st.integers(1, 10_000))
def test_apportioned_parts_sum_to_the_total(weights: list[float], total: int) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert all(
        abs(part - total * weight / sum(weights)) < 1.001 for part, weight in zip(parts, weights, strict=True)
    )


@pytest.mark.parametrize(
    ("seed", "sizes", "weights", "sentence"),
    [
        (0, (0,), (1.0,), "at least one sample"),
        (0, (), (), "at least one sample"),
        (0, (1, 2), (1.0,), "a weight for every source"),
        (-1, (1,), (1.0,), "seed must be 0 or more"),
        (0, (5, 5), (1.0, 1e-6), "smallest weight 1e-06 is under"),
    ],
)
def test_impossible_orders(seed: int, sizes: tuple[int, ...], weights: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        Order(seed, sizes, weights)
