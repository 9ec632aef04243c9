"""Opening a prepared folder: reads across shards, and every kind of damage is one sentence with the file's name."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.shards import ShardedArray, ShardWriter, TokenData
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem
from loopformer.files import sha256_of


@pytest.fixture
def folder(tmp_path: Path, prepared: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


@given(start=st.integers(0, 4000), length=st.integers(0, 2500))
def test_reads_cross_shards(prepared: Path, start: int, length: int) -> None:
    shards = sorted(prepared.glob("news-train-*.bin"))
    stream = np.concatenate([np.fromfile(path, np.uint16) for path in shards])
    assert len(shards) > 2
    ids = TokenData.open(prepared).sources[0].ids
    assert np.array_equal(ids.read(start, start + length), stream[start : start + length])


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 150))
def test_a_writer_goes_on_after_its_last_flush(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], stop: int, lost: int
) -> None:
    """What was appended after it is cut off; numbers and checksums are those of a writer that never stopped."""
    folder = tmp_path_factory.mktemp("shards")
    values = np.arange(sum(lengths), dtype=np.uint16)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    writer = ShardWriter(folder, "news", ".bin", np.uint16, 64, 0, [])
    for number, part in enumerate(parts):
        writer.append(part)
        assert writer.items == sum(lengths[: number + 1])
        if number == stop:
            writer.flush()
            items, shards = writer.items, list(writer.shards)
            writer.append(np.zeros(lost, np.uint16))
            writer.close()
            writer = ShardWriter(folder, "news", ".bin", np.uint16, 64, items, shards)
    writer.finish()
    if not lost:  # shards that were begun after the flush stay until their numbers come
        assert sorted(path.name for path in folder.iterdir()) == [shard.file for shard in writer.shards]
    assert [shard.items for shard in writer.shards] == [
        min(64, len(values) - at) for at in range(0, len(values), 64)
    ]
    assert all(sha256_of(folder / shard.file) == shard.sha256 for shard in writer.shards)
    array = ShardedArray(folder, writer.shards, np.uint16)
    assert np.array_equal(array.read(0, len(values)), values)


def test_what_it_tells(folder: Path, prepared: Path) -> None:
    data = TokenData.open(folder)
    index = json.loads((folder / "index.json").read_text())
    assert data.tokens == index["tokens"]["train"]
    assert data.vocab_size == data.tokenizer.vocab_size
    assert data.eot == data.tokenizer.eot
    assert data.index_hash == TokenData.open(prepared).index_hash
    data.verify()
    assert not (folder / "verified.json").exists()


def test_much_to_read_is_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    TokenData.open(folder).verify(say=said.append)
    assert not said
    size = sum(path.stat().st_size for path in folder.glob("news-train-*.bin"))
    monkeypatch.setattr("loopformer.data.shards._MIN_ANNOUNCED_BYTES", size)
    TokenData.open(folder).verify(say=said.append)
    assert said == [f"comparing {size / 1e9:.1f} GB of shards in {folder} with their checksums"]


def test_no_index(folder: Path, tmp_path: Path) -> None:
    (folder / "index.json").unlink()
    (tmp_path / "a.txt").touch()
    with pytest.raises(FileProblem, match=r"a.txt is a file; prepare it with `loopformer prepare .*a.txt --out"):
        TokenData.open(tmp_path / "a.txt", "train")
    with pytest.raises(FileProblem, match=r"index.json is missing; make the folder with loopformer prepare"):
        TokenData.open(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"sources": [{}]}'])
def test_damaged_index(folder: Path, content: str) -> None:
    (folder / "index.json").write_text(content)
    with pytest.raises(FileProblem, match=r"index.json is damaged"):
        TokenData.open(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 500', '"vocab_size": "300"'),
        ('"vocab_size": 500', '"vocab_size": 0'),
        ('"end": 0', '"end": null'),
        ('"sha256"', '"sha"'),
        ('"weight": null', '"weight": "much"'),
        ('"weight": null', '"weight": -1'),
        ('"weight": null', '"weight": NaN'),
        ('"items": 1000', '"items": 1000.0'),
        ('"items": 1000', '"items": -1000'),
        ('"dtype": "uint16"', '"dtype": "\\ud800"'),
        ('"dtype": "uint16"', '"dtype": 1'),
    ],
)
def test_wrong_types_in_an_index(folder: Path, old: str, new: str) -> None:
    index = (folder / "index.json").read_text()
    assert old in index
    (folder / "index.json").write_text(index.replace(old, new))
    with pytest.raises(FileProblem, match=r"index.json is damaged; delete the folder and prepare it again"):
        TokenData.open(folder)


def test_truncated_shard(folder: Path) -> None:
    shard = folder / "news-train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(FileProblem, match=r"news-train-00001.bin has 1998 bytes instead of 2000"):
        TokenData.open(folder)


def test_missing_shard(folder: Path) -> None:
    (folder / "news-train-00001.bin").unlink()
    with pytest.raises(FileProblem, match=r"news-train-00001.bin is missing"):
        TokenData.open(folder)


def test_changed_shard(folder: Path) -> None:
    shard = folder / "news-val-00000.bin"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    data = TokenData.open(folder, "val")
    with pytest.raises(FileProblem, match=r"news-val-00000.bin has changed"):
        data.verify()
    TokenData.open(folder).verify()


def test_shards_are_read_once_per_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: Path) -> str:
        if path.suffix == ".bin":
            read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("loopformer.data.shards.sha256_of", counted)
    names = sorted(path.name for path in folder.glob("news-train-*.bin"))
    shard = folder / names[1]
    TokenData.open(folder).verify(changed_only=True)
    TokenData.open(folder).verify(changed_only=True)
    assert sorted(read) == names
    os.utime(shard, ns=(7, 7))
    TokenData.open(folder).verify(changed_only=True)
    TokenData.open(folder).verify(changed_only=True)
    assert sorted(read) == sorted([*names, shard.name])
    TokenData.open(folder).verify()
    assert sorted(read) == sorted([*names, shard.name, *names]), "asked for all, it reads all"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FileProblem, match=rf"{shard.name} has changed since it was made"):
        TokenData.open(folder).verify(changed_only=True)


@pytest.mark.parametrize("note", ["{", "[]", '{"news-train-00000.bin": 3}', None])
def test_a_note_that_is_no_use_is_no_error(folder: Path, note: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if note is None:  # a folder that cannot be written to; file permissions do not stop every user

        def refuse(path: Path, value: object) -> None:
            raise FileProblem("read-only")

        monkeypatch.setattr("loopformer.data.shards.write_json", refuse)
    else:
        (folder / "verified.json").write_text(note)
    TokenData.open(folder).verify(changed_only=True)
    TokenData.open(folder).verify(changed_only=True)
    assert (folder / "verified.json").exists() == (note is not None)


def test_other_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    Tokenizer.train(["something else"], 300).save(folder)
    with pytest.raises(FileProblem, match=r"tokenizer.json is not the tokenizer that made these shards"):
        TokenData.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileProblem, match=r"tokenizer.json is missing; restore it"):
        TokenData.open(folder)


def test_unknown_split(folder: Path) -> None:
    with pytest.raises(FileProblem, match="has no test split"):
        TokenData.open(folder, "test")


def test_the_first_id_beyond_the_vocabulary_is_refused(prepared: Path) -> None:
    data = TokenData.open(prepared)
    data.check_ids(np.array([], np.uint16), "news")
    data.check_ids(np.array([0, data.vocab_size - 1], np.uint16), "news")
    said = f"has token id {data.vocab_size} in source news, beyond its vocabulary of {data.vocab_size}; prepare"
    with pytest.raises(FileProblem, match=said):
        data.check_ids(np.array([0, data.vocab_size], np.uint16), "news")
