"""Reads records from .txt, .md, .jsonl and .parquet files, also when compressed as .gz, .xz or .zst.

    for record in read_records(Path("news.jsonl.zst"), field="text", skip=1000): record["text"]

A record is a mapping. A record that cannot be used comes as a `BadRecord`, an exception that says what is wrong and
where. If the rest of a file cannot be read, its last record is a `BadRecord`. The first `skip` records are not
parsed, and bad ones count among them.

Memory is bounded. A text file is one document, or several of at most a million characters, cut between paragraphs.
The length of a JSONL line and the memory for decompression are limited. Parquet is the exception: pyarrow reads it
in batches of rows, but nothing limits the size of a page.
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
from pathlib import Path
from typing import IO, Any

from loopformer.data.splits import MAX_CHARS, cut
from loopformer.errors import FileProblem, import_optional, unreadable

Record = dict[str, Any]
FORMATS = (".txt", ".md", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
SUPPORTED = f"{', '.join(FORMATS)}, each also with {', '.join(COMPRESSIONS)}"  # for error messages
_BUFFER = 1 << 20  # bytes
_MAX_LINE = 8 << 20  # bytes; parsed, JSON takes up to 25 times as much memory
_MAX_WINDOW = 128 << 20  # bytes of memory for a decompressor; zstd without --long needs all of it, xz -9 half
_COMPRESSED_CHUNK = 1 << 10  # bytes decompressed at a time; in zstd they become at most 32 MB
_PARQUET_ROWS = 64  # rows in memory at a time, each of which may be as long as a document


class BadRecord(FileProblem):
    """A record that cannot be used, or the rest of a file that cannot be read."""


@dataclass
class Meter:
    """How much was read from disk so far, for progress."""

    bytes_read: int = 0


def format_of(path: Path) -> str | None:
    """The format by the file's suffix, without that of its compression; None if it is not supported."""
    inner = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return inner.suffix if inner.suffix in FORMATS else None


def read_records(
    path: Path, field: str, skip: int = 0, meter: Meter | None = None, *, only_field: bool = True
) -> Iterator[Record | BadRecord]:
    """The records of a file from number `skip` on; with `only_field` no other columns of parquet are read."""
    return itertools.islice(_read_all(path, field, skip, meter or Meter(), only_field), skip, None)


def _read_all(path: Path, field: str, skip: int, meter: Meter, only_field: bool) -> Iterator[Record | BadRecord]:
    """All records. The first `skip`, which the caller drops, may be empty, which saves parsing them."""
    before = meter.bytes_read
    try:
        with path.open("rb", _BUFFER) as raw, closing(_decompress(path, raw)) as stream:
            records: Iterator[Record | BadRecord] = ({field: text} for text in _read_texts(stream))
            if format_of(path) == ".jsonl":
                records = _read_jsonl(path, stream, skip)
            elif format_of(path) == ".parquet":
                records = _read_parquet(path, stream, field if only_field else None, skip)
            for record in records:
                meter.bytes_read = before + raw.tell()
                yield record
    except EOFError as error:  # from _decompress_chunks; a library names its memory limit only in words
        if "memory" in str(error).lower():
            wrong = f"takes more than {_MAX_WINDOW >> 20} MB to decompress; compress it with a smaller window"
        else:
            wrong = "is damaged or cut short and cannot be decompressed; copy or download it again"
        yield BadRecord(f"{path} {wrong}.")
    except UnicodeDecodeError:
        where = f"{path} line {_first_wrong_line(path)}"
        yield BadRecord(f"{where} is not UTF-8 text; convert the file or leave it out.")
    except OSError as error:
        raise unreadable(path, error) from error


def _read_texts(stream: IO[bytes]) -> Iterator[str]:
    """The text as a single document, or as several if it is longer than MAX_CHARS characters."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    rest = ""
    while block := text.read(MAX_CHARS):
        rest += block
        if len(rest) > MAX_CHARS:
            *documents, rest = cut(rest, MAX_CHARS // 2, MAX_CHARS)
            yield from documents
    if rest:
        yield rest


def _first_wrong_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as raw, closing(_decompress(path, raw)) as stream:
        try:
            while block := stream.read(_BUFFER):
                line += decoder.decode(block).count("\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
    return line


def _read_jsonl(path: Path, stream: IO[bytes], skip: int) -> Iterator[Record | BadRecord]:
    records = 0
    for number, line in enumerate(_read_lines(stream), 1):
        if line is None or not line.isspace():
            records += 1
            yield {} if records <= skip else _parse_line(f"{path} line {number}", line)


def _read_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines; None for a line that is too long."""
    while line := stream.readline(_MAX_LINE + 1):
        yield line if len(line) <= _MAX_LINE else None
        # Read on to the end of a long line, and forget it.
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
        return BadRecord(f"{where} is JSON that is nested too deeply; remove it.")
    except ValueError as error:  # not JSON, or a number of thousands of digits
        reason = re.split("[:;]", str(error))[0]
        return BadRecord(f"{where} is not JSON ({reason}); correct or remove it.")
    return record if isinstance(record, dict) else BadRecord(f'{where} must be an object such as {{"text": "…"}}.')


def _read_parquet(path: Path, stream: IO[bytes], column: str | None, skip: int) -> Iterator[Record | BadRecord]:
    arrow = import_optional("pyarrow", "A parquet file", "data")
    parquet = import_optional("pyarrow.parquet", "A parquet file", "data")
    try:
        file = parquet.ParquetFile(stream, buffer_size=_BUFFER)
        # Without the column all are read, so that an error can name those that exist.
        columns = [column] if column in file.schema_arrow.names else None
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if rows <= skip:
                skip -= rows
                yield from itertools.repeat({}, rows)
                continue
            skip = 0  # rows from here on are all read; `read_records` drops those that it skips in this group
            for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=columns):
                yield from batch.to_pylist()
    except (arrow.ArrowException, UnicodeDecodeError):
        yield BadRecord(f"{path} is not a readable parquet file; copy or download it again.")


def _decompress(path: Path, compressed: IO[bytes]) -> IO[bytes]:
    """The decompressed content of an open file."""
    if path.suffix not in COMPRESSIONS:
        return compressed
    make_decompressor: Callable[[], Any] = functools.partial(zlib.decompressobj, wbits=31)  # 31 means gzip
    if path.suffix == ".xz":
        make_decompressor = functools.partial(lzma.LZMADecompressor, memlimit=_MAX_WINDOW)
    elif path.suffix == ".zst":
        zstd = import_optional("zstandard", "A .zst file", "data")
        make_decompressor = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj
    stream = io.BufferedReader(_ChunkReader(_decompress_chunks(compressed, make_decompressor)), _BUFFER)
    if format_of(path) != ".parquet":
        return stream
    # Parquet has its index at the end, so it needs a file that can seek.
    decompressed = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    with closing(stream):
        shutil.copyfileobj(stream, decompressed, _BUFFER)
    decompressed.seek(0)
    return decompressed


def _decompress_chunks(compressed: IO[bytes], make_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress frame after frame, a little at a time; raise EOFError for data that is damaged or cut short."""
    frame, rest = make_decompressor(), b""
    while chunk := rest or compressed.read(_COMPRESSED_CHUNK):
        rest = b""
        if frame.eof:
            chunk = chunk.lstrip(b"\0")  # padding between frames
            if not chunk:
                continue
            frame = make_decompressor()
        try:
            decompressed = frame.decompress(chunk)
        except Exception as error:  # each library has an exception class of its own
            raise EOFError(str(error)) from error
        yield decompressed
        rest = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the last frame is incomplete")


class _ChunkReader(io.RawIOBase):
    """A readable file over an iterator of chunks."""

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
