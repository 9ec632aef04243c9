"""A stream that breaks goes on at the same record; a local dataset folder comes through the same code."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.corpus import PRESETS, read_dataset, reconnecting
from loopformer.errors import FileProblem, LoopformerError

ROWS = [{"text": f"row {number}"} for number in range(50)]


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 20))
def test_nothing_lost_nothing_twice(breaks: list[int], skip: int) -> None:
    lengths = iter(breaks)

    def open_at(start: int) -> Iterator[int]:
        length = max(1, next(lengths, 1000))
        for number, item in enumerate(range(start, 50)):
            if number == length:
                raise ConnectionResetError("peer went away")
            yield item

    assert list(reconnecting(open_at, skip, "source", waits=(0.0,))) == list(range(skip, 50))


def test_gives_up_after_fruitless_attempts() -> None:
    opened = []

    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        yield from range(start, 3)
        raise TimeoutError("too slow")

    stream = reconnecting(open_at, 0, "source", waits=(0.0, 0.0))
    assert [next(stream), next(stream), next(stream)] == [0, 1, 2]
    with pytest.raises(FileProblem, match=r"source cannot be reached \(too slow\); start again"):
        next(stream)
    assert opened == [0, 3, 3]


def test_no_connection_at_all_is_an_error_at_once() -> None:
    def open_at(start: int) -> Iterator[int]:
        raise ConnectionError("no route")

    with pytest.raises(FileProblem, match="source cannot be reached"):
        next(reconnecting(open_at, 0, "source", waits=(1000.0,)))


def test_other_errors_are_not_retried() -> None:
    def open_at(start: int) -> Iterator[int]:
        yield 1
        raise KeyError("text")

    with pytest.raises(KeyError):
        list(reconnecting(open_at, 0, "source", waits=(1000.0,)))


@pytest.mark.parametrize("kind", ["parquet", "saved", "saved-dict"])
@pytest.mark.parametrize("skip", [0, 17])
def test_local_dataset_folder(tmp_path: Path, kind: str, skip: int) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "set"
    if kind == "parquet":
        folder.mkdir()
        dataset.select(range(20)).to_parquet(folder / "train-00000-of-00002.parquet")
        dataset.select(range(20, 50)).to_parquet(folder / "train-00001-of-00002.parquet")
    elif kind == "saved":
        dataset.save_to_disk(folder)
    else:
        datasets.DatasetDict({"train": dataset}).save_to_disk(folder)
    assert list(read_dataset(str(folder), "", "train", skip)) == ROWS[skip:]


def test_unknown_split_is_one_sentence(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(LoopformerError, match="cannot be opened"):
        list(read_dataset(str(tmp_path), "", "nowhere"))


def test_presets_hold_out_what_they_state() -> None:
    for preset in PRESETS.values():
        expected = preset.val_fraction * preset.train_tokens
        assert expected > preset.val_tokens, "the hash must hold out enough documents for the stated count"
