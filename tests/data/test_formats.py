"""Every format and packing gives the same records, from any record on; damage is one sentence."""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from loopformer.data import formats
from loopformer.data.formats import BadRecord, Meter, Record, format_of
from loopformer.data.splits import MAX_CHARS
from loopformer.errors import FileProblem

TEXTS = [f"text number {number}\nwith ümlauts" for number in range(700)]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read_records(path: Path, field: str, skip: int = 0, **options: Any) -> list[Record]:
    """The records; a bad one is raised."""
    found = []
    for record in formats.read_records(path, field, skip, **options):
        if isinstance(record, BadRecord):
            raise record
        found.append(record)
    return found


def jsonl() -> bytes:
    return "\n\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS).encode()


def parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1] * len(TEXTS)}), out, row_group_size=300)
    return out.getvalue()


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("skip", [0, 1, 299, 300, 699, 700, 900])
@pytest.mark.parametrize(("suffix", "content"), [(".jsonl", jsonl()), (".parquet", parquet())])
def test_records(tmp_path: Path, packing: str, skip: int, suffix: str, content: bytes) -> None:
    path = tmp_path / f"corpus{suffix}{packing}"
    path.write_bytes(PACK[packing](content))
    meter = Meter()
    assert [record["text"] for record in read_records(path, "text", skip, meter=meter)] == TEXTS[skip:]
    assert meter.bytes_read > 0


@pytest.mark.parametrize("packing", PACK)
def test_text_file_is_one_document(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"book.txt{packing}"
    path.write_bytes(PACK[packing]("\ufeffOne.\r\n\r\nTwo.".encode()))
    assert list(read_records(path, "body")) == [{"body": "One.\n\nTwo."}]


def test_long_text_comes_in_documents(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {number}.\n\n" for number in range(200_000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    pieces = [record["text"] for record in read_records(path, "text")]
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(len(piece) <= MAX_CHARS and piece.endswith("\n\n") for piece in pieces)
    assert [record["text"] for record in read_records(path, "text", 2)] == pieces[2:]


def test_several_zstd_frames(tmp_path: Path) -> None:
    path = tmp_path / "two.txt.zst"
    path.write_bytes(b"".join(map(PACK[".zst"], [b"first ", b"", b"second"])))
    assert list(read_records(path, "text")) == [{"text": "first second"}]


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["half", "noise"])
def test_damaged_archive(tmp_path: Path, packing: str, damage: str) -> None:
    whole = PACK[packing](jsonl())
    half = len(whole) // 2
    path = tmp_path / f"broken.jsonl{packing}"
    path.write_bytes(whole[:half] if damage == "half" else whole[:half] + bytes(64) + whole[half + 64 :])
    with pytest.raises(FileProblem, match=r"broken\.jsonl.* (is damaged or cut short|is not JSON|is not UTF-8)"):
        list(read_records(path, "text"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"a\ncaf\xe9", "a.txt line 2 is not UTF-8"),
        ("a.parquet", b"PAR1 no", "a.parquet is not a readable parquet file"),
    ],
)
def test_wrong_content_beside_lines_of_jsonl(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileProblem, match=sentence):
        list(read_records(tmp_path / name, "text"))


def test_formats() -> None:
    assert format_of(Path("a.jsonl.zst")) == ".jsonl"
    assert format_of(Path("a.md")) == ".md"
    assert format_of(Path("a.gz")) is None
    assert format_of(Path("a.pdf")) is None
