"""What prepare writes, that no crash, full disk or batch size can change a byte of it, and its command."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import typer
from cli.process import press_control_c, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from loopformer.cli.prepare import prepare as prepare_command
from loopformer.data.prepare import PrepareProgress, prepare
from loopformer.data.shards import STATE_FILE, TokenData
from loopformer.data.splits import Splitter
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError

from .words import document, stopping_at, write_jsonl


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sources: one with enough documents to stay whole, one of two files."""
    folder = tmp_path_factory.mktemp("sources")
    many = write_jsonl(folder / "many.jsonl", [{"text": document(n, 1)} for n in range(1200)])
    (folder / "books").mkdir()
    for number in (0, 1):
        (folder / "books" / f"{number}.txt").write_text(document(number, 150), encoding="utf-8")
    return [f"{many}=3", f"{folder / 'books'}=1"]


OPTIONS: dict[str, Any] = {"train_tokenizer": 400, "val_fraction": 0.05, "shard_tokens": 9000}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("reference") / "data"
    prepare(sources, out, **OPTIONS)
    return contents(out)


def test_tokens_are_the_documents(prepared: Path, documents: list[str]) -> None:
    """Every document is there once, in order, cut between the splits, with an end token after each part."""
    tokenizer = Tokenizer.load(prepared)
    index = json.loads((prepared / "index.json").read_text())
    splitter = Splitter(**index["sources"][0]["splitter"])
    for split in ("train", "val"):
        data = TokenData.open(prepared, split)
        ids = data.sources[0].ids.read(0, data.tokens)
        ends = np.flatnonzero(ids == tokenizer.eot)
        found = [tokenizer.decode(part[part != tokenizer.eot].tolist()) for part in np.split(ids, ends + 1)]
        expected = [text for one in documents for own, text in splitter.split(one) if own == split]
        assert found == [*expected, ""]
        assert index["tokens"][split] == data.tokens > 0
        assert index["sources"][0]["splits"][split]["documents"] == len(expected)
        assert index["sources"][0]["splits"][split]["text_bytes"] == len("".join(expected).encode())
        data.verify()


def test_splits_do_not_overlap(prepared: Path) -> None:
    pieces = {}
    for split in ("train", "val"):
        data = TokenData.open(prepared, split)
        text = data.tokenizer.decode(data.sources[0].ids.read(0, data.tokens).tolist(), special=True)
        pieces[split] = {part.strip() for part in text.replace("<|endoftext|>", "\n\n").split("\n\n")} - {""}
    assert pieces["train"]
    assert pieces["val"]
    assert not pieces["train"] & pieces["val"]


def test_index_and_shards(reference: dict[str, bytes]) -> None:
    index = json.loads(reference["index.json"])
    assert [source["weight"] for source in index["sources"]] == [3, 1]
    assert [source["splitter"]["piece"] for source in index["sources"]] == [0, 64]
    listed = {
        shard["file"]
        for source in index["sources"]
        for split in source["splits"].values()
        for shard in split["shards"]
    }
    assert listed == set(reference) - {"index.json", "sources.json", "tokenizer.json"}
    assert all(len(reference[name]) <= 9000 * 2 for name in listed)
    assert "many-train-00001.bin" in listed


@pytest.mark.parametrize("batch_bytes", [1, 10_000])
def test_batches_do_not_matter(
    tmp_path: Path, sources: list[str], reference: dict[str, bytes], batch_bytes: int
) -> None:
    prepare(sources, tmp_path / "out", batch_bytes=batch_bytes, **OPTIONS)
    assert contents(tmp_path / "out") == reference


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(stops=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_interrupted_anywhere_ends_the_same(
    tmp_path_factory: pytest.TempPathFactory, sources: list[str], reference: dict[str, bytes], stops: list[int]
) -> None:
    out = tmp_path_factory.mktemp("stops") / "data"
    for stop in stops:
        try:
            prepare(sources, out, batch_bytes=3000, commit_seconds=0, report=stopping_at(stop), **OPTIONS)
        except KeyboardInterrupt:
            assert (out / STATE_FILE).exists()
            with pytest.raises(FileProblem, match="is only partly prepared"):
                TokenData.open(out)
    prepare(sources, out, **OPTIONS)
    assert contents(out) == reference


# Kills itself at the so-manyth call of a function, of Python or C, after so many batches.
_DIE = """
import os, signal, sys
from loopformer.data.prepare import prepare
batches, calls = {batches}, {calls}
def count(frame, event, argument):
    global calls
    calls -= 1
    if not calls:
        os.kill(os.getpid(), signal.SIGKILL)
def report(progress):
    global batches
    batches -= progress.phase == "tokenizing"
    if not batches:
        sys.setprofile(count)
prepare({sources!r}, {out!r}, report=report, batch_bytes=1000, commit_seconds=0, **{options!r})
"""


def test_killed_at_random_points_ends_the_same(
    tmp_path: Path, sources: list[str], reference: dict[str, bytes]
) -> None:
    rng = random.Random(0)
    out = tmp_path / "out"
    progress = []
    for _ in range(6):
        moment = {"batches": rng.randrange(3, 15), "calls": rng.randrange(1, 20_000)}
        code = _DIE.format(**moment, sources=sources, out=str(out), options=OPTIONS)
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        progress.append((out / STATE_FILE).read_bytes())
    assert len(set(progress)) == 6, "every start went further than the one before"
    prepare(sources, out, **OPTIONS)
    assert contents(out) == reference


def test_full_disk_is_one_sentence_and_harms_nothing(
    tmp_path: Path, sources: list[str], reference: dict[str, bytes]
) -> None:
    """A limit on file size stands in for a full disk: the kernel refuses the write in the same way."""
    out = tmp_path / "out"
    code = (
        "import sys\nfrom loopformer.data.prepare import prepare\nfrom loopformer.errors import FileProblem\n"
        f"try: prepare({sources!r}, {str(out)!r}, commit_seconds=0, batch_bytes=5000, **{OPTIONS!r})\n"
        "except FileProblem as error: sys.exit(str(error))"
    )
    smallest = max(len(content) for name, content in reference.items() if not name.endswith(".bin"))
    process = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, smallest)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "Cannot write" in process.stderr
    assert "make room and start again" in process.stderr
    assert process.stderr.count("\n") == 1
    prepare(sources, out, **OPTIONS)
    assert contents(out) == reference


def test_finished_folder_is_left_alone(tmp_path: Path, corpus: Path) -> None:
    index = prepare([str(corpus)], tmp_path, train_tokenizer=300)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert prepare([str(corpus)], tmp_path, train_tokenizer=300) == index
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_other_settings_in_the_same_folder(tmp_path: Path, corpus: Path) -> None:
    prepare([str(corpus)], tmp_path, train_tokenizer=300)
    before = contents(tmp_path)
    with pytest.raises(FileProblem, match=r"was begun with other settings or files \(tokenizer\)"):
        prepare([str(corpus)], tmp_path, train_tokenizer=301)
    with pytest.raises(FileProblem, match=r"\(sources\)"):
        prepare([str(corpus)], tmp_path, train_tokenizer=300, val_fraction=0.2)
    assert contents(tmp_path) == before


def test_a_finished_folder_refuses_a_file_that_was_written_to_since(tmp_path: Path, corpus: Path) -> None:
    path, out = tmp_path / "news.jsonl", tmp_path / "out"
    path.write_bytes(corpus.read_bytes())
    index = prepare([str(path)], out, train_tokenizer=300)
    os.utime(path, ns=(0, 0))
    assert prepare([str(path)], out, train_tokenizer=300) == index, "a copy has another time"
    path.write_bytes(corpus.read_bytes().replace(b"loop", b"pool"))
    with pytest.raises(FileProblem, match=r"news.jsonl has changed since .*out was made of it; put the old file"):
        prepare([str(path)], out, train_tokenizer=300)
    (out / "sources.json").write_text('{"news/news.jsonl": 3}')
    with pytest.raises(FileProblem, match=r"sources.json is damaged; delete it"):
        prepare([str(path)], out, train_tokenizer=300)
    (out / "sources.json").unlink()
    assert prepare([str(path)], out, train_tokenizer=300) == index, "a folder of an earlier version has no times"


def test_a_file_that_was_written_to_while_it_was_read_is_refused_later(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(corpus.read_bytes())
    prepare([str(path)], tmp_path / "out", train_tokenizer=300, report=lambda _: os.utime(path, ns=(0, 0)))
    with pytest.raises(FileProblem, match=r"news.jsonl has changed since"):
        prepare([str(path)], tmp_path / "out", train_tokenizer=300)


def test_a_file_whose_name_is_no_text(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "in").mkdir()
    path = os.fsencode(tmp_path / "in") + b"/news-\xff.jsonl"
    try:
        Path(os.fsdecode(path)).write_bytes(corpus.read_bytes())
    except OSError:
        pytest.skip("this file system has names of text only")
    index = prepare([str(tmp_path / "in")], tmp_path / "out", train_tokenizer=300)
    assert prepare([str(tmp_path / "in")], tmp_path / "out", train_tokenizer=300) == index
    Path(os.fsdecode(path)).write_bytes(corpus.read_bytes() + b"{\n")
    index = prepare([str(tmp_path / "in")], tmp_path / "bad", train_tokenizer=300, on_bad="skip")
    assert index["sources"][0]["bad"] == 1


def test_folder_of_something_else(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileProblem, match="is not empty and was not made by prepare"):
        prepare([str(corpus)], tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_token_limits_are_exact(tmp_path: Path, corpus: Path, prepared: Path) -> None:
    options: dict[str, Any] = {"tokenizer": str(prepared), "val_fraction": 0.1}
    whole = prepare([str(corpus)], tmp_path / "whole", **options)
    index = prepare([str(corpus)], tmp_path / "cut", train_tokens=1234, val_tokens=77, **options)
    assert index["tokens"] == {"train": 1234, "val": 77}
    assert whole["tokens"]["train"] > 1234
    prepare([str(corpus)], tmp_path / "same", train_tokens=1234, val_tokens=77, batch_bytes=1, **options)
    assert contents(tmp_path / "same") == contents(tmp_path / "cut")
    for split in ("train", "val"):
        short, full = (TokenData.open(tmp_path / name, split).sources[0].ids for name in ("cut", "whole"))
        assert np.array_equal(short.read(0, len(short)), full.read(0, len(short)))


def test_records_without_text_leave_no_document(tmp_path: Path, prepared: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("", "one", None, " \n", "two")])
    index = prepare([str(path)], tmp_path / "out", tokenizer=str(prepared), val_fraction=0)
    assert index["sources"][0]["splits"]["train"]["documents"] == 2


def test_large_vocabulary_takes_uint32(tmp_path: Path, corpus: Path, prepared: Path) -> None:
    tokenizer = json.loads((prepared / "tokenizer.json").read_text())
    token = {"id": 70_000, "content": "<|far|>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(token | {"normalized": False, "special": True})
    tokenizer["model"]["vocab"]["<|far|>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    index = prepare([str(corpus)], tmp_path / "out", tokenizer=str(tmp_path), val_fraction=0)
    assert index["dtype"] == "uint32"
    data, small = TokenData.open(tmp_path / "out"), TokenData.open(prepared)
    assert data.vocab_size == 70_001
    assert data.tokenizer.decode(data.sources[0].ids.read(0, 50).tolist()).startswith("Document 0")
    assert small.sources[0].ids.read(0, 1).dtype == np.uint16
    with pytest.raises(FileProblem, match="has no val split"):
        TokenData.open(tmp_path / "out", "val")


def test_dataset_folder_as_a_source(tmp_path: Path, documents: list[str]) -> None:
    datasets.Dataset.from_list([{"body": text} for text in documents]).to_parquet(
        tmp_path / "set" / "train.parquet"
    )
    write_jsonl(tmp_path / "same.jsonl", [{"body": text} for text in documents])
    folders = []
    for number, source in enumerate([f"hf:{tmp_path / 'set'}", str(tmp_path / "same.jsonl")]):
        folders.append(tmp_path / f"out{number}")
        prepare([source], folders[-1], field="body", train_tokenizer=300)
    one, two = (TokenData.open(folder) for folder in folders)
    assert one.tokens == two.tokens
    assert np.array_equal(one.sources[0].ids.read(0, one.tokens), two.sources[0].ids.read(0, two.tokens))


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ("", {}, "holds no text"),
        ('{"text": ""}\n{"text": null}\n', {}, "holds no text"),
        ('{"body": "x"}\n', {}, "has no field 'text'"),
        ('{"text": "short"}\n', {}, "has too little text"),
        ('{"text": "short"}\n', {"tokenizer": "x", "train_tokenizer": 300}, "not both"),
        ('{"text": "short"}\n', {"tokenizer": "nowhere"}, "There is no tokenizer nowhere"),
        ('{"text": "short"}\n', {"train_tokens": 0}, "--train-tokens must be 1 or more"),
        ('{"text": "short"}\n', {"workers": 0}, "--workers must be 1 or more"),
        ('{"text": "short"}\n', {"supervised": True}, "has neither prompt and response nor messages"),
    ],
)
def test_wrong_input(tmp_path: Path, content: str, options: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(LoopformerError, match=sentence) as caught:
        prepare([str(path)], tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists(), "the mistake can be corrected"


def test_who_meets_a_bad_record_is_told_how_to_leave_it_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\nno JSON\n')
    done = CliRunner().invoke(app, [str(path), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, FileProblem)
    assert str(done.exception).endswith("correct or remove it. Or leave such records out, with --on-bad skip.")


def test_two_at_once(tmp_path: Path, corpus: Path) -> None:
    def report(progress: PrepareProgress) -> None:
        with pytest.raises(FileProblem, match="Another process is working in"):
            prepare([str(corpus)], tmp_path, train_tokenizer=300)

    prepare([str(corpus)], tmp_path, train_tokenizer=300, report=report)
    TokenData.open(tmp_path).verify()


def test_state_that_lacks_something(tmp_path: Path, corpus: Path, prepared: Path) -> None:
    options: dict[str, Any] = {"tokenizer": str(prepared), "commit_seconds": 0, "batch_bytes": 1}
    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus)], tmp_path, report=stopping_at(4), **options)
    whole = json.loads((tmp_path / STATE_FILE).read_text())
    changes: list[dict[str, Any]] = [{"changed": []}, {"changed": [{}]}, {"sources": [{}]}, {"sources": [3]}]
    for change in changes:
        (tmp_path / STATE_FILE).write_text(json.dumps(whole | change))
        with pytest.raises(FileProblem, match=r"prepare.state.json is damaged; delete the folder"):
            prepare([str(corpus)], tmp_path, **options)


@pytest.mark.parametrize("content", ["{", '{"settings": {}}'])
def test_damaged_state(tmp_path: Path, corpus: Path, content: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(FileProblem, match=r"is damaged; delete the folder|was begun with other settings"):
        prepare([str(corpus)], tmp_path, train_tokenizer=300)


def test_missing_corpus(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="There is no file or folder"):
        prepare([str(tmp_path / "nothing.txt")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


app = typer.Typer()
app.command()(prepare_command)


def test_prepare_prints_what_it_made(tmp_path: Path, corpus: Path) -> None:
    arguments = [str(corpus), "--out", str(tmp_path), "--train-tokenizer", "300", "--val-fraction", "0.1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "training and" in result.stdout
    data = TokenData.open(tmp_path)
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert told["tokens"]["train"] == data.tokens
    assert told["tokenizer"]["vocab_size"] == 300
    assert told["sources"][0]["name"] == "news"


def test_bad_records_are_told(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "news.jsonl"
    path.write_bytes(corpus.read_bytes() + b"{\n" * 23)
    words = [str(path), "--out", str(tmp_path / "out"), "--train-tokenizer", "300", "--on-bad"]
    assert isinstance(CliRunner().invoke(app, [*words, "stop"]).exception, LoopformerError)
    told = CliRunner().invoke(app, [*words, "skip"]).stdout
    assert "news: 23 bad records left out" in told
    assert f"{path} line 61 is not JSON" in told
    assert "and 3 more" in told


def test_a_mistake_is_our_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "nothing.txt"), "--out", str(tmp_path)])
    assert isinstance(result.exception, LoopformerError)


@pytest.mark.parametrize(
    ("function", "call", "advice"),
    [("reconcile", 1, "starts from the beginning"), ("_encode", 2, "the same command continues")],
)
def test_control_c_then_continue(tmp_path: Path, function: str, call: int, advice: str) -> None:
    """While the sources are looked through, and while text is tokenized."""
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out"
    corpus.write_text("\n\n".join(document(n, 2) * 10 for n in range(1500)), encoding="utf-8")
    words = ["prepare", str(corpus), "--out", str(out), "--train-tokenizer", "300"]
    assert advice in press_control_c(f"loopformer.data.prepare.{function}", call, *words)
    assert "training and" in run(*words).stdout
    TokenData.open(out).verify()


def test_checksums_at_the_end_show_progress(tmp_path: Path, corpus: Path) -> None:
    seen: list[PrepareProgress] = []
    prepare([str(corpus)], tmp_path, train_tokenizer=300, report=seen.append)
    last = seen[-1]
    assert (last.source, last.phase, last.fraction) == ("news", "checksums", 1.0)
    assert last.text_bytes == corpus.stat().st_size
