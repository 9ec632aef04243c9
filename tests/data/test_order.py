"""The order is a bijection in every epoch, mixes in the right shares and depends only on the position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.order import BLOCK, Order, permute, shares
from loopformer.errors import LoopformerError


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
    assert order.drawn(start) == [block * share for share in order.shares]


def test_mixture_goes_through_each_source_in_epochs() -> None:
    order = Order(3, (50, 7), (3, 1))
    located = order.locate(np.arange(3 * BLOCK))
    for source, size in enumerate(order.sizes):
        own = located.source == source
        pairs = list(zip(located.epoch[own].tolist(), located.sample[own].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) == order.drawn(3 * BLOCK)[source]
        assert set(pairs) == {divmod(number, size) for number in range(len(pairs) // size * size)} | {
            pair for pair in pairs if pair[0] == len(pairs) // size
        }


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
def test_shares_sum_to_the_whole(weights: list[float], total: int) -> None:
    parts = shares(weights, total)
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
