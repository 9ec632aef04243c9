"""Records out of files: .txt .md (one document), .jsonl and .parquet, each also .gz .xz .zst.

    for record in read_records(Path("news.jsonl.zst"), field="text", skip=1000): record["text"]

Text and JSONL are streamed within fixed bounds of memory. A text file of any size comes in documents of at most a
million characters, cut at paragraph borders. The length of a line and the memory for unpacking are limited.
Parquet is read by pyarrow in batches of rows, and its pages are trusted. A record is a mapping. One that cannot be
used comes as a `BadRecord`, which says what is wrong and where, and can be raised. If the rest of a file cannot be
read, its last record is a `BadRecord`. The first `skip` records, bad ones included, are left out without being
parsed.
"""

from __future__ import annotations

import codecs
import functools
import io
import itertools
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from loopformer.data.splits import LONGEST, cut
from loopformer.errors import FileProblem, LoopformerError, unreadable

Record = dict[str, Any]
FORMATS = (".txt", ".md", ".jsonl", ".parquet")
PACKINGS = (".gz", ".xz", ".zst")
READABLE = f"{', '.join(FORMATS)}, each also with {', '.join(PACKINGS)}"  # for error messages
_BUFFER = 1 << 20
_MAX_LINE = 8 << 20  # bytes; the parsed JSON takes up to 25 times as much
_MAX_WINDOW = 128 << 20  # bytes that unpacking may take; xz -9 takes half of it, zstd as much without --long
_PACKED_CHUNK = 1 << 10  # bytes unpacked at a time: zstd makes at most 32 MB of them
_PARQUET_ROWS = 64  # rows in memory at a time, each of which may be as long as a document


class BadRecord(FileProblem):
    """A record that cannot be used, or the rest of a file that cannot be read."""


@dataclass
class Meter:
    """Bytes read from disk so far, for progress."""

    read: int = 0


def format_of(path: Path) -> str | None:
    """The format by the file's name without its packing; None if the name has no known ending."""
    inner = path.with_suffix("") if path.suffix in PACKINGS else path
    return inner.suffix if inner.suffix in FORMATS else None


def import_optional(package: str, purpose: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise LoopformerError(
            f"{purpose} needs the package {package.partition('.')[0]}; pip install 'loopformer[data]'."
        ) from error


def read_records(
    path: Path, field: str, skip: int = 0, meter: Meter | None = None, *, only_field: bool = True
) -> Iterator[Record | BadRecord]:
    """The records of a file from number `skip` on; with `only_field` other columns of parquet are not read."""
    return itertools.islice(_read_all(path, field, skip, meter or Meter(), only_field), skip, None)


def _read_all(path: Path, field: str, skip: int, meter: Meter, only_field: bool) -> Iterator[Record | BadRecord]:
    """All records; the first `skip` may be empty, to save parsing them."""
    before = meter.read
    try:
        with path.open("rb", _BUFFER) as packed, closing(_unpack(path, packed)) as stream:
            records: Iterator[Record | BadRecord] = ({field: text} for text in _read_texts(stream))
            if format_of(path) == ".jsonl":
                records = _read_jsonl(path, stream, skip)
            elif format_of(path) == ".parquet":
                records = _read_parquet(path, stream, field if only_field else None, skip)
            for record in records:
                meter.read = before + packed.tell()
                yield record
    except EOFError as error:
        if "memory" in str(error).lower():
            wrong = f"takes more than {_MAX_WINDOW >> 20} MB to unpack; pack it with a smaller window"
        else:
            wrong = "is damaged or cut short and cannot be unpacked; copy or download it again"
        yield BadRecord(f"{path} {wrong}.")
    except UnicodeDecodeError:
        where = f"{path} line {_first_wrong_line(path)}"
        yield BadRecord(f"{where} is not UTF-8 text; convert the file or leave it out.")
    except OSError as error:
        raise unreadable(path, error) from error


def _read_texts(stream: IO[bytes]) -> Iterator[str]:
    """The text as one document, or as several if it is longer than LONGEST."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    rest = ""
    while block := text.read(LONGEST):
        rest += block
        if len(rest) > LONGEST:
            *documents, rest = cut(rest, LONGEST // 2, LONGEST)
            yield from documents
    if rest:
        yield rest


def _first_wrong_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as packed, closing(_unpack(path, packed)) as stream:
        try:
            while block := stream.read(_BUFFER):
                line += decoder.decode(block).count("\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
    return line


def _read_jsonl(path: Path, stream: IO[bytes], skip: int) -> Iterator[Record | BadRecord]:
    passed = 0
    for number, line in enumerate(_read_lines(stream), 1):
        if line is None or not line.isspace():
            passed += 1
            yield {} if passed <= skip else _parse_line(f"{path} line {number}", line)


def _read_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines; None for a line that is too long."""
    while line := stream.readline(_MAX_LINE + 1):
        yield line if len(line) <= _MAX_LINE else None
        while len(line) > _MAX_LINE and not line.endswith(b"\n") and (rest := stream.readline(_MAX_LINE + 1)):
            line = rest


def _parse_line(where: str, line: bytes | None) -> Record | BadRecord:
    if line is None:
        return BadRecord(f"{where} is longer than {_MAX_LINE >> 20} MB; cut its text into several records.")
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return BadRecord(f"{where} is not UTF-8 text; convert the file or leave it out.")
    except RecursionError:
        return BadRecord(f"{where} is not JSON that can be read: it is nested too deeply.")
    except ValueError as error:  # not JSON, or a number of thousands of digits
        reason = re.split("[:;]", str(error))[0]
        return BadRecord(f"{where} is not JSON ({reason}); correct or remove it.")
    return record if isinstance(record, dict) else BadRecord(f'{where} must be an object such as {{"text": "…"}}.')


def _read_parquet(path: Path, stream: IO[bytes], column: str | None, skip: int) -> Iterator[Record | BadRecord]:
    arrow = import_optional("pyarrow", "A parquet file")
    parquet = import_optional("pyarrow.parquet", "A parquet file")
    try:
        file = parquet.ParquetFile(stream, buffer_size=_BUFFER)
        columns = [column] if column in file.schema_arrow.names else None
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if rows <= skip:
                skip -= rows
                yield from itertools.repeat({}, rows)
                continue
            skip = 0  # every row from here on is read; `read_records` drops the first ones of this group
            for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=columns):
                yield from batch.to_pylist()
    except (arrow.ArrowException, UnicodeDecodeError):
        yield BadRecord(f"{path} is no readable parquet file; copy or download it again.")


def _unpack(path: Path, packed: IO[bytes]) -> IO[bytes]:
    """The unpacked content of an open file."""
    if path.suffix not in PACKINGS:
        return packed
    make_decompressor: Callable[[], Any] = functools.partial(zlib.decompressobj, wbits=31)
    if path.suffix == ".xz":
        make_decompressor = functools.partial(lzma.LZMADecompressor, memlimit=_MAX_WINDOW)
    elif path.suffix == ".zst":
        zstd = import_optional("zstandard", "A .zst file")
        make_decompressor = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj
    stream = io.BufferedReader(_ChunkReader(_unpack_chunks(packed, make_decompressor)), _BUFFER)
    if format_of(path) != ".parquet":
        return stream
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it); parquet is read from its end
    with closing(stream):
        shutil.copyfileobj(stream, unpacked, _BUFFER)
    unpacked.seek(0)
    return unpacked


def _unpack_chunks(packed: IO[bytes], make_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """The content frame after frame, a little at a time; an EOFError if it is damaged or cut short."""
    frame, rest = make_decompressor(), b""
    while chunk := rest or packed.read(_PACKED_CHUNK):
        rest = b""
        if frame.eof:
            chunk = chunk.lstrip(b"\0")  # padding between frames
            if not chunk:
                continue
            frame = make_decompressor()
        try:
            unpacked = frame.decompress(chunk)
        except Exception as error:  # each library has its own
            raise EOFError(str(error)) from error
        yield unpacked
        rest = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the last frame is incomplete")


class _ChunkReader(io.RawIOBase):
    """A file that is read from chunks of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
