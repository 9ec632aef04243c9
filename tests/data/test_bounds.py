"""Whatever a file holds, preparing it takes little memory and ends, with its text or with one sentence about it."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import zstandard

from loopformer.data.corpus import parse_sources
from loopformer.data.formats import BadRecord, read_records
from loopformer.data.prepare import PrepareProgress, prepare
from loopformer.data.shards import TokenData
from loopformer.data.splits import MAX_CHARS, cut, documents
from loopformer.data.tokenizer import END_TOKEN, Tokenizer, training_pieces
from loopformer.errors import FileProblem, LoopformerError

from .words import document, stopping_at, write_jsonl

MOST = 500  # megabytes, what the docs promise
PARAGRAPHS = "\n\n".join(document(number) for number in range(30))


def long_line(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(json.dumps({"text": PARAGRAPHS}).encode() + b'\n{"text": "')
        for _ in range(200):
            file.write(b"a" * 1_000_000)
        file.write(b'"}\n')


def packed_letters(path: Path) -> None:
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        packed.write(PARAGRAPHS.encode())
        for _ in range(400):
            packed.write(b"a" * 1_000_000)


def line_breaks(path: Path) -> None:
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        packed.write(PARAGRAPHS.encode())
        for _ in range(100):
            packed.write(b"\n" * 1_000_000)
        packed.write(PARAGRAPHS.encode())


def large_window(path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 30}]
    path.write_bytes(lzma.compress(b"a" * 10_000_000, filters=filters))


@pytest.mark.parametrize(
    ("name", "make", "bad"),
    [
        ("line.jsonl.gz", long_line, "line 2 is longer than 8 MB"),
        ("letters.txt.zst", packed_letters, None),
        ("breaks.txt.zst", line_breaks, None),
    ],
)
def test_memory_is_bounded(
    tmp_path: Path, prepared: Path, name: str, make: Callable[[Path], None], bad: str | None
) -> None:
    make(tmp_path / name)
    code = (
        "import json, pathlib, sys\nfrom loopformer.data.prepare import prepare\n"
        "source, out, tokenizer = sys.argv[1:]\n"
        "limits = {'train_tokens': 1_000_000, 'val_fraction': 0}\n"
        "index = prepare([source], out, tokenizer=tokenizer, on_bad='skip', **limits)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"  # getrusage counts the process that started it
        "peak = int(status.partition('VmHWM:')[2].split()[0]) / 1e3\n"
        "print(json.dumps([peak, index['tokens'], index['sources'][0].get('bad_first')]))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / "out"), str(prepared)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, tokens, problems = json.loads(done.stdout)
    assert peak < MOST
    assert tokens["train"] > 1000
    assert bad is None or (len(problems) == 1 and bad in problems[0])


@pytest.mark.parametrize(
    "text",
    [
        "\n" * (5 * MAX_CHARS),
        "word" + " " * (3 * MAX_CHARS),
        "a" * (3 * MAX_CHARS) + "\n" * 5,
    ],
)
def test_white_space_is_cut_and_left_out(text: str) -> None:
    pieces = cut(text, MAX_CHARS // 2, MAX_CHARS)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= MAX_CHARS
    assert not any(piece.isspace() for piece in documents(text))


def test_characters_of_four_bytes_make_shorter_documents() -> None:
    pieces = documents("🙂" * (MAX_CHARS + 7))
    assert "".join(pieces) == "🙂" * (MAX_CHARS + 7)
    assert max(len(piece.encode()) for piece in pieces) <= 2 * MAX_CHARS
    assert documents("a" * MAX_CHARS) == ["a" * MAX_CHARS]


def test_a_window_that_is_too_large(tmp_path: Path) -> None:
    large_window(tmp_path / "a.txt.xz")
    (problem,) = read_records(tmp_path / "a.txt.xz", "text")
    assert isinstance(problem, BadRecord)
    assert "takes more than 128 MB to decompress" in str(problem)


def test_padded_xz(tmp_path: Path) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one ") + bytes(4) + lzma.compress(b"two") + bytes(8))
    assert list(read_records(tmp_path / "a.txt.xz", "text")) == [{"text": "one two"}]


BAD_LINES = {
    b'{"text": ': "line 2 is not JSON",
    b"[" * 100_000: "line 2 is JSON that is nested too deeply; remove it",
    b'{"text": "x", "n": ' + b"7" * 5000 + b"}": "line 2 is not JSON (Exceeds the limit",
    b'{"text": "caf\xe9"}': "line 2 is not UTF-8",
    b"[1]": "line 2 must be an object",
    b'{"body": "x"}': "record 2 has no field 'text'",
    b'{"text": 7}': "Field 'text' of news.jsonl record 2 is not text",
}


def news(path: Path, line: bytes) -> Path:
    lines = [json.dumps({"text": document(number)}).encode() for number in range(20)]
    path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    return path


@pytest.mark.parametrize(("line", "sentence"), BAD_LINES.items())
def test_a_bad_record_stops_or_is_left_out(tmp_path: Path, prepared: Path, line: bytes, sentence: str) -> None:
    options: dict[str, Any] = {"tokenizer": str(prepared), "val_fraction": 0.1}
    path = news(tmp_path / "news.jsonl", line)
    with pytest.raises(LoopformerError) as caught:
        prepare([str(path)], tmp_path / "out", **options)
    assert "news.jsonl" in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    index = prepare([str(path)], tmp_path / "out", on_bad="skip", **options)
    assert index["sources"][0]["bad"] == 1
    assert index["sources"][0]["bad_first"] == [str(caught.value)]
    path.write_bytes(path.read_bytes().replace(line + b"\n", b""))
    clean = prepare([str(path)], tmp_path / "clean", **options)
    assert clean["tokens"] == index["tokens"]
    assert "bad" not in clean["sources"][0]


def test_bad_records_are_counted_once_wherever_it_stops(tmp_path: Path, prepared: Path) -> None:
    lines = [b"{" if number % 3 else json.dumps({"text": document(number)}).encode() for number in range(90)]
    (tmp_path / "news.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines))[:-9])  # its end is missing, too
    options: dict[str, Any] = {"tokenizer": str(prepared), "on_bad": "skip"}
    whole = prepare([str(tmp_path / "news.jsonl.gz")], tmp_path / "whole", **options)
    assert whole["sources"][0]["bad"] == 60, "the last line is lost with the end, which is told in its place"
    assert len(whole["sources"][0]["bad_first"]) == 20

    for stop in range(2, 30, 5):
        out = tmp_path / f"stopped {stop}"
        often: dict[str, Any] = {"batch_bytes": 1, "commit_seconds": 0, "report": stopping_at(stop)}
        with pytest.raises(KeyboardInterrupt):
            prepare([str(tmp_path / "news.jsonl.gz")], out, **often, **options)
        index = prepare([str(tmp_path / "news.jsonl.gz")], out, **options)
        assert index["sources"] == whole["sources"]


def test_bad_records_alone_take_little_memory_and_are_committed(tmp_path: Path, prepared: Path) -> None:
    good = json.dumps({"text": document(1)})
    (tmp_path / "a.jsonl").write_text(good + "\n" + f'{{"{"x" * 1000}"\n' * 5000)
    batches: list[int] = []
    index = prepare(
        [str(tmp_path / "a.jsonl")],
        tmp_path / "out",
        tokenizer=str(prepared),
        val_fraction=0,
        on_bad="skip",
        batch_bytes=50_000,
        report=lambda progress: batches.append(progress.tokens),
    )
    assert index["sources"][0]["bad"] == 5000
    assert len(batches) > 5


def test_a_stop_inside_a_long_record(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopformer.data.splits.MAX_CHARS", 10_000)
    text = "\n\n".join(document(number) for number in range(60))
    assert len(documents(text)) > 3
    write_jsonl(tmp_path / "long.jsonl", [{"text": text}, {"text": document(1)}])
    options: dict[str, Any] = {"tokenizer": str(prepared), "val_fraction": 0.1}
    whole = prepare([str(tmp_path / "long.jsonl")], tmp_path / "whole", **options)
    often: dict[str, Any] = {"batch_bytes": 1, "commit_seconds": 0, "report": stopping_at(4)}
    with pytest.raises(KeyboardInterrupt):
        prepare([str(tmp_path / "long.jsonl")], tmp_path / "out", **often, **options)
    state = json.loads((tmp_path / "out" / "prepare.state.json").read_text())
    assert state["sources"][0]["position"][2] > 0
    assert prepare([str(tmp_path / "long.jsonl")], tmp_path / "out", **options) == whole


def test_examples_cannot_be_cut(tmp_path: Path, prepared: Path) -> None:
    records: list[dict[str, object]] = [{"prompt": f"{n} + 1?", "response": str(n + 1)} for n in range(50)]
    write_jsonl(tmp_path / "a.jsonl", [*records, {"prompt": "a" * 2 * MAX_CHARS, "response": "b"}, {"prompt": 1}])
    options: dict[str, Any] = {"tokenizer": str(prepared), "supervised": True}
    with pytest.raises(LoopformerError, match=r"a.jsonl record 51 has more than a million characters"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", **options)
    index = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", on_bad="skip", **options)
    assert index["sources"][0]["bad"] == 2


def test_a_tokenizer_that_fails_names_the_document(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"loop": 0, "runs": 1, END_TOKEN: 2}, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([END_TOKEN])
    library.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", [{"text": "loop runs"}, {"text": "loop stops"}, {"text": "runs"}])
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "val_fraction": 0}
    with pytest.raises(LoopformerError, match=r"a.jsonl record 2 cannot be used: The tokenizer cannot turn"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", **options)
    index = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", on_bad="skip", **options)
    assert (index["tokens"]["train"], index["sources"][0]["bad"]) == (5, 1)


def test_a_fault_in_compiled_code_is_one_sentence(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    class Library:
        def encode_batch_fast(self, *args: object, **options: object) -> None:
            raise Panic("index out of bounds\nat line 7")

    monkeypatch.setattr(tokenizer, "_tokenizer", Library())
    with pytest.raises(LoopformerError, match=r"cannot turn a text into tokens \(index out of bounds at line 7\)"):
        tokenizer.encode("a")


def test_a_dataset_folder_that_cannot_be_read_on(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    news(tmp_path / "set" / "train.jsonl", b"[" * 100_000)
    with pytest.raises(FileProblem, match=r"hf:.*set cannot be read after record \d+") as caught:
        prepare([f"hf:{tmp_path / 'set'}"], tmp_path / "out", train_tokenizer=300)
    assert "\n" not in str(caught.value)


def test_links_that_lead_back_are_followed_once(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt"):
        (folder / name).write_text(name)
    for name in ("back", "deep/up", "deep/again"):
        os.symlink(folder, folder / name)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.txt").write_text("c")
    os.symlink(tmp_path / "other", folder / "there")
    os.symlink(folder / "a.txt", folder / "deep" / "same.txt")
    for given in (f"{folder}/**/*.txt", f"{tmp_path}/te*/**/*.txt", f"{folder}/**"):
        (source,) = parse_sources([given])
        assert [part.name for part in source.parts] == ["a.txt", "deep/b.txt", "there/c.txt"], given


def test_a_source_that_changes_between_stop_and_continuation(tmp_path: Path, prepared: Path) -> None:
    path = write_jsonl(tmp_path / "news.jsonl", [{"text": document(number)} for number in range(30)])
    options: dict[str, Any] = {"tokenizer": str(prepared), "commit_seconds": 0, "batch_bytes": 1}
    with pytest.raises(KeyboardInterrupt):
        prepare([str(path)], tmp_path / "out", report=stopping_at(4), **options)
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"loop", b"pool"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(
        FileProblem, match=r"news.jsonl has changed since .* put the old file back, or delete .*out"
    ):
        prepare([str(path)], tmp_path / "out", **options)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    prepare([str(path)], tmp_path / "out", **options)
    TokenData.open(tmp_path / "out").verify()


def test_training_a_tokenizer_can_be_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library works in one go, for minutes in the worst case; its process is ended."""

    class Left(Exception):
        pass

    def leave(*_: Any) -> None:
        raise Left

    def start(_: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        code = "import os, signal, sys, time; sys.stdin.buffer.read(); os.kill(os.getppid(), signal.SIGUSR1); "
        started.append(popen([sys.executable, "-c", f"{code}time.sleep(600)"], **options))
        return started[-1]

    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(Left):
            Tokenizer.train_in_subprocess(["some text"] * 100, 300)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_tokenizer_trained_in_a_process_of_its_own_is_the_same() -> None:
    texts = [" ".join(f"{number * 7919 % 1_000_003:x}{n}zyx" for n in range(2000)) for number in range(3)]
    cut_before = training_pieces([text] for text in texts)
    assert Tokenizer.train_in_subprocess(cut_before, 400).hash == Tokenizer.train(texts, 400).hash


def test_a_training_that_dies_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopformer.data.tokenizer._END_OF_TEXTS", b"")
    with pytest.raises(LoopformerError, match="The tokenizer could not be trained"):
        Tokenizer.train_in_subprocess(["some text"] * 100, 300)


def test_words_that_never_come_twice_end_the_training_of_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def train(texts: Any, vocab_size: int) -> Tokenizer:
        given.extend(texts)
        return Tokenizer.train(given, vocab_size)

    monkeypatch.setattr(Tokenizer, "train_in_subprocess", train)
    monkeypatch.setattr("loopformer.data.tokenizer._MAX_WORDS_MEMORY", 1_000_000)
    write_jsonl(tmp_path / "same.jsonl", [{"text": document(0)} for _ in range(2000)])
    prepare([str(tmp_path / "same.jsonl")], tmp_path / "same", train_tokenizer=300, val_fraction=0)
    assert len(given) == 2000
    given.clear()
    records: list[dict[str, object]] = [{"text": f"x{number} {number:x}y " * 9} for number in range(3000)]
    write_jsonl(tmp_path / "new.jsonl", records)
    prepare([str(tmp_path / "new.jsonl")], tmp_path / "new", train_tokenizer=300, val_fraction=0)
    assert 100 < len(given) < 2000


def test_a_tokenizer_that_becomes_smaller_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the loop runs again\n\n" * 50)
    told: list[PrepareProgress] = []
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", train_tokenizer=9000, val_fraction=0, report=told.append)
    phases = [progress.phase for progress in told if progress.source == "tokenizer"]
    assert "instead of 9000" in phases[-1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"val_fraction": 2}, "validation fraction must be"),
        ({"val_fraction": float("nan")}, "validation fraction must be"),
        ({"train_tokenizer": 100}, "has 257 ids or more"),
        ({"on_bad": "ignore"}, "--on-bad is stop or skip"),
    ],
)
def test_options_are_checked_before_the_work(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        prepare([str(tmp_path / "not looked for.txt")], tmp_path / "out", **options)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)  # permissions do not stop every user
    told: list[PrepareProgress] = []
    with pytest.raises(FileProblem, match="cannot be written to; choose another with --out"):
        prepare([str(corpus)], tmp_path / "out", report=told.append)
    assert not told
    assert not (tmp_path / "out").exists()


def test_tokens_outside_the_vocabulary(tmp_path: Path, corpus: Path) -> None:
    from loopformer.data.loader import Loader
    from loopformer.evaluation.text import read_text

    prepare([str(corpus)], tmp_path, train_tokenizer=300, val_fraction=0.1)
    for split in ("train", "val"):
        shard = tmp_path / f"news-{split}-00000.bin"
        shard.write_bytes(b"\xff\xff" * (shard.stat().st_size // 2))
    with pytest.raises(FileProblem, match="has token id 65535 in source news, beyond its vocabulary of 300"):
        Loader(TokenData.open(tmp_path), context=8, batch=2).batch(0)
    with pytest.raises(FileProblem, match="has token id 65535 in source news, beyond its vocabulary of 300"):
        read_text(str(tmp_path), Tokenizer.load(tmp_path))
