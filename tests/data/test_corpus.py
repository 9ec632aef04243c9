"""Sources: names, paths, globs, weights, datasets; what is wrong with them is one sentence."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.corpus import (
    PRESETS,
    Position,
    iterate_with_retries,
    parse_sources,
    read_dataset,
    stdlib_documents,
)
from loopformer.errors import FileProblem, LoopformerError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.md"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "notes.pdf").write_text("not ours")
    (tmp_path / "empty.txt").write_text(" \n")
    return tmp_path


def texts(given: str, start: Position | None = None) -> list[str]:
    (source,) = parse_sources([given])
    return [text for _, text in source.texts("text", start)]


def test_folder_and_glob_are_read_in_order(folder: Path) -> None:
    expected = ["text of a.txt", "text of b.txt", "text of deep/c.md"]
    assert texts(str(folder)) == expected
    assert texts(f"{folder}/**/*.*") == expected
    assert texts(f"{folder}/*.txt") == expected[:2]
    assert texts(f"{folder}/b.txt") == expected[1:2]


def test_continues_at_any_position(folder: Path) -> None:
    (source,) = parse_sources([str(folder)])
    everything = list(source.texts("text"))
    for number, (position, _) in enumerate(everything, 1):
        assert list(source.texts("text", position)) == everything[number:]


def test_weights_and_names(folder: Path) -> None:
    one, two = parse_sources([f"{folder}/a.txt=2", f"{folder}/*.txt=0.5"])
    assert (one.name, one.weight, two.weight) == ("a", 2.0, 0.5)
    same = parse_sources([f"{folder}/a.txt=1", f"{folder}/a.txt=1"])
    assert [source.name for source in same] == ["a", "a-2"]
    mixed = parse_sources([f"{folder}/a.txt=2", f"{folder}/b.txt", f"{folder}/deep=0.5"])
    assert [source.weight for source in mixed] == [2.0, 1.0, 0.5]
    odd = folder / "k=v.txt"
    odd.write_text("equals")
    assert parse_sources([str(odd)])[0].weight is None
    assert parse_sources([f"{odd}=3"])[0].weight == 3


def test_presets_and_datasets() -> None:
    pile, edu, own = parse_sources(["pile", "fineweb-edu", "hf:some/set:config:validation"])
    assert pile.train_tokens == 25_000_000_000
    assert pile.val_tokens == 10_000_000
    assert edu.parts[0].name == "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"
    assert own.parts[0].name == "hf:some/set:config:validation"
    assert own.remote


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "Name at least one source"),
        (["{}/missing.txt"], "There is no file or folder .*missing.txt"),
        (["{}/missing"], "There is no file or folder"),
        (["stlib"], "named sources are stdlib"),
        (["{}/notes.pdf"], "notes.pdf has an unknown ending"),
        (["{}/*.csv"], "holds no file that prepare reads"),
        (["{}/a.txt=heavy"], "The weight 'heavy' of .* must be a positive number"),
        (["{}/a.txt=0"], "must be a positive number"),
        (["{}/a.txt=-1"], "must be a positive number"),
        (["{}/a.txt=inf"], "must be a positive number"),
        (["{0}/a.txt", "{0}/a.txt"], r"a.txt would be read twice, for .*a.txt and for .*a.txt; name it once"),
        (["{0}/deep/../*.txt", "{0}"], r"a.txt would be read twice, .* or give a weight"),
        (["stdlib", "stdlib"], "Python .* would be read twice, for stdlib and for stdlib; .* such as stdlib=1"),
        (["hf:"], "Cannot read 'hf:'"),
        (["hf:a:b:c:d"], "Cannot read"),
    ],
)
def test_wrong_sources(folder: Path, given: list[str], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence) as caught:
        parse_sources([text.format(folder) for text in given])
    assert "\n" not in str(caught.value)


def test_wrong_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "n": 3}\n')
    (source,) = parse_sources([str(path)], field="text")
    with pytest.raises(LoopformerError, match=r"a.jsonl record 1 has no field 'text'; choose .* --field: body, n"):
        list(source.texts("text"))
    with pytest.raises(LoopformerError, match=r"Field 'n' of a.jsonl record 1 is not text"):
        list(source.texts("n"))


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="holds no file"):
        parse_sources([str(tmp_path)])


def test_stdlib_is_two_megabytes_of_prose() -> None:
    documents = stdlib_documents()
    assert 1_000_000 < sum(map(len, documents)) < 5_000_000
    assert len(set(documents)) == len(documents)
    assert any("JSON" in text for text in documents)
    assert all(text.strip() for text in documents)


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

    assert list(iterate_with_retries(open_at, skip, "source", waits=(0.0,))) == list(range(skip, 50))


def test_gives_up_after_fruitless_attempts() -> None:
    opened = []

    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        yield from range(start, 3)
        raise TimeoutError("too slow")

    stream = iterate_with_retries(open_at, 0, "source", waits=(0.0, 0.0))
    assert [next(stream), next(stream), next(stream)] == [0, 1, 2]
    with pytest.raises(FileProblem, match=r"source cannot be reached \(too slow\); start again"):
        next(stream)
    assert opened == [0, 3, 3]


def test_no_connection_at_all_is_an_error_at_once() -> None:
    def open_at(start: int) -> Iterator[int]:
        raise ConnectionError("no route")

    with pytest.raises(FileProblem, match="source cannot be reached"):
        next(iterate_with_retries(open_at, 0, "source", waits=(1000.0,)))


def test_other_errors_are_not_retried() -> None:
    def open_at(start: int) -> Iterator[int]:
        yield 1
        raise KeyError("text")

    with pytest.raises(KeyError):
        list(iterate_with_retries(open_at, 0, "source", waits=(1000.0,)))


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
