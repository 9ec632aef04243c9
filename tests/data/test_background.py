"""Items prepared ahead come in order; errors and the end reach the reader; nothing is left running."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from loopformer.data.loader import Ahead
from loopformer.errors import LoopformerError


def test_order_and_end() -> None:
    ahead = Ahead(range(100), depth=3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []


def test_error_reaches_the_reader() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    ahead = Ahead(items())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert list(ahead) == []


def test_stays_only_so_far_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    ahead = Ahead(items(), depth=2)
    next(ahead)
    time.sleep(0.2)
    assert len(made) <= 4
    ahead.close()


def test_close_ends_the_thread_and_the_generator() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead = Ahead(items())
    next(ahead)
    ahead.close()
    ahead.close()
    assert closed.is_set()
    assert list(ahead) == []


def test_forgotten_reader_ends_the_thread() -> None:
    before = threading.active_count()
    ahead = Ahead(iter(int, 1))
    next(ahead)
    del ahead
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_depth() -> None:
    with pytest.raises(LoopformerError, match="depth of 1 or more"):
        Ahead([], depth=0)
