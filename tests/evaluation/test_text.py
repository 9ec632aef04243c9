"""Whatever is read, the documents, their tokens and their hash are those of the text."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from loopformer.config import load_run, run_to_yaml
from loopformer.data.corpus import PRESETS, Preset
from loopformer.data.prepare import prepare
from loopformer.data.splits import survey
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.evaluation.text import default_text, read_text

DOCUMENTS = [f"document {i}: its time, its step\n\nnaïve ☕ {i * i}" for i in range(60)]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({field: document}) + "\n" for document in documents)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def sha256(documents: list[str]) -> str:
    return hashlib.sha256(b"\0".join(document.encode() for document in documents)).hexdigest()


def test_a_file_of_text_is_one_document_with_its_own_hash(file: Path, tokenizer: Tokenizer) -> None:
    text = read_text(str(file), tokenizer)
    assert [ids.tolist() for ids in text.documents] == [tokenizer.encode(file.read_text())]
    assert text.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (text.name, text.part) == (str(file), "all of it")


def test_packed_records_of_another_field(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", [*DOCUMENTS, "", "  "], field="body")
    text = read_text(str(path), tokenizer, field="body")
    assert [tokenizer.decode(ids.tolist()) for ids in text.documents] == DOCUMENTS
    assert text.sha256 == sha256(DOCUMENTS)
    assert text.tokens == sum(len(tokenizer.encode(document)) for document in DOCUMENTS)


def test_borders_of_documents_are_in_the_hash(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = read_text(str(write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])), tokenizer)
    other = read_text(str(write_jsonl(tmp_path / "b.jsonl", ["a", "bc"])), tokenizer)
    assert one.sha256 != other.sha256


def test_reading_stops_when_there_is_enough(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    said: list[int] = []
    text = read_text(str(path), tokenizer, max_tokens=50, report=lambda _, done, total: said.append(done))
    assert text.tokens > 50
    assert text.tokens - len(text.documents[-1]) <= 50
    assert said[-1] == text.tokens
    assert text.sha256 == sha256(DOCUMENTS[: len(text.documents)])


def test_a_prepared_folder_gives_its_held_out_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    tokenizer.save(tmp_path)
    prepare([path], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3)
    splitter = survey(lambda: iter(DOCUMENTS), 0.3, path)
    held = [piece for text in DOCUMENTS for split, piece in splitter.split(text) if split == "val"]
    text = read_text(str(tmp_path / "data"), tokenizer)
    assert [tokenizer.decode(ids.tolist()) for ids in text.documents] == held
    assert (text.part, text.sha256) == ("validation split", sha256(held))
    other = Tokenizer.train(DOCUMENTS, 400)  # a model with another tokenizer gets the same text in its own tokens
    again = read_text(str(tmp_path / "data"), other)
    assert [ids.tolist() for ids in again.documents] == other.encode_batch(held)
    assert again.sha256 == text.sha256


def test_a_preset_is_what_prepare_holds_out_of_it(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", DOCUMENTS)
    monkeypatch.setitem(PRESETS, "pile", Preset(str(tmp_path / "set"), "", 0.4, 10_000, 150))
    tokenizer.save(tmp_path)
    index = prepare(["pile"], tmp_path / "data", tokenizer=str(tmp_path))
    assert index["tokens"]["val"] == 150
    text, prepared = read_text("pile", tokenizer), read_text(str(tmp_path / "data"), tokenizer)
    assert [ids.tolist() for ids in text.documents] == [ids.tolist() for ids in prepared.documents]
    assert text.sha256 == prepared.sha256
    assert text.part == "held out: 40.0% of the documents, by hash; the first 150 tokens"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("fineweb_edu", "There is no file, folder or text fineweb_edu; did you mean fineweb-edu"),
        ("nothing.txt", "no file, folder or text nothing.txt; named texts are stdlib, pile"),
        ("none/*.txt", "holds no file that prepare reads"),
        ("stdlib=2", "A weight, as in 'stdlib=2', is for training"),
    ],
)
def test_what_is_not_there(given: str, sentence: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        read_text(given, tokenizer)


def test_empty_text_and_limits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(LoopformerError, match=r"empty\.txt holds no text"):
        read_text(str(empty), tokenizer)
    with pytest.raises(LoopformerError, match="--max-tokens must be 1 or more, got 0"):
        read_text(str(empty), tokenizer, max_tokens=0)


def test_supervised_examples_are_no_plain_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "response": "its time"}) + "\n" for i in range(60)))
    tokenizer.save(tmp_path)
    prepare([str(path)], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3, supervised=True)
    with pytest.raises(LoopformerError, match="holds supervised examples"):
        read_text(str(tmp_path / "data"), tokenizer)


def test_a_run_has_its_own_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    assert default_text(tmp_path) is None
    (run / "checkpoints").mkdir(parents=True)
    settings, _ = load_run("demo", [f"data.path={data}"])
    (run / "run.yaml").write_text(run_to_yaml(settings))
    assert default_text(run) is None
    tokenizer.save(tmp_path)
    prepare([str(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))], data, tokenizer=str(tmp_path))
    assert default_text(run) == str(data)
