"""Sources: names, paths, globs, weights; what is wrong with them is one sentence."""

from pathlib import Path

import pytest

from loopformer.data.corpus import Position, clean, parse_sources, stdlib_documents
from loopformer.data.formats import Meter
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
    return [text for _, text in source.texts("text", start or Position(), Meter())]


def test_folder_and_glob_are_read_in_order(folder: Path) -> None:
    expected = ["text of a.txt", "text of b.txt", "text of deep/c.md"]
    assert texts(str(folder)) == expected
    assert texts(f"{folder}/**/*.*") == expected
    assert texts(f"{folder}/*.txt") == expected[:2]
    assert texts(f"{folder}/b.txt") == expected[1:2]


def test_continues_at_any_position(folder: Path) -> None:
    (source,) = parse_sources([str(folder)])
    everything = list(source.texts("text", Position(), Meter()))
    for number, (position, _) in enumerate(everything, 1):
        assert list(source.texts("text", position, Meter())) == everything[number:]


def test_weights_and_names(folder: Path) -> None:
    one, two = parse_sources([f"{folder}/a.txt=2", f"{folder}/*.txt=0.5"])
    assert (one.name, one.weight, two.weight) == ("a", 2.0, 0.5)
    same = parse_sources([f"{folder}/a.txt", f"{folder}/a.txt"])
    assert [source.name for source in same] == ["a", "a-2"]
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
        (["{}/a.txt=1", "{}/b.txt"], "Give every source a weight"),
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
        list(source.texts("text", Position(), Meter()))
    with pytest.raises(LoopformerError, match=r"Field 'n' of a.jsonl record 1 is not text"):
        list(source.texts("n", Position(), Meter()))


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="holds no file"):
        parse_sources([str(tmp_path)])


def test_half_a_surrogate_is_replaced() -> None:
    assert clean("a\ud800b") == "a\ufffdb"
    assert clean("a🙂b") == "a🙂b"


def test_stdlib_is_two_megabytes_of_prose() -> None:
    documents = stdlib_documents()
    assert 1_000_000 < sum(map(len, documents)) < 5_000_000
    assert len(set(documents)) == len(documents)
    assert any("JSON" in text for text in documents)
    assert all(text.strip() for text in documents)
