"""Records out of files: .txt .md (one document), .jsonl and .parquet, each also .gz .xz .zst.

    for record in read_records(Path("news.jsonl.zst"), field="text", skip=1000): record["text"]

Text and JSONL stream within bounds that no file can move: a text file of any size comes in documents of at most a
million characters, cut at paragraph borders; a line and what an archive needs to be unpacked have their limits.
Parquet is read by pyarrow in batches of rows, and its pages are trusted. A record is a mapping; one that cannot be
used comes as a `BadRecord`, which says what is wrong where and can be raised. Where a file cannot be read on, that
is its last. `skip` leaves out the first records, bad ones counted, without parsing them.
"""

from __future__ import annotations

import codecs
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
_BUFFER = 1 << 20
_LINE = 8 << 20  # bytes of a line; what JSON makes of it takes up to 25 times as much
_WINDOW = 128 << 20  # bytes that unpacking may take; xz -9 takes half of it, zstd as much without --long
_PACKED = 1 << 10  # bytes unpacked at a time: zstd makes at most 32 MB of them
_ROWS = 64  # rows of a parquet file in memory at a time, each of which may be as long as a document


class BadRecord(FileProblem):
    """A record that cannot be used, or a file that cannot be read on; other records can."""


@dataclass
class Meter:
    """Bytes read from disk so far, for progress."""

    read: int = 0


def format_of(path: Path) -> str | None:
    """The format by the file's name, `.gz` and such set aside; None for a name that is none of ours."""
    inner = path.with_suffix("") if path.suffix in PACKINGS else path
    return inner.suffix if inner.suffix in FORMATS else None


def read_records(
    path: Path, field: str, skip: int = 0, *, only_field: bool = True, meter: Meter | None = None
) -> Iterator[Record | BadRecord]:
    """The records of one file, from number `skip` on; `only_field` spares parquet its other columns."""
    column = field if only_field else None
    return itertools.islice(_records(path, field, column, skip, meter or Meter()), skip, None)


def _records(path: Path, field: str, column: str | None, skip: int, meter: Meter) -> Iterator[Record | BadRecord]:
    """All records; the first `skip` are empty where that spares work."""
    try:
        raw = io.BufferedReader(_Counted(path, meter), _BUFFER)
        with closing(raw), closing(_unpacked(path, raw)) as stream:
            if format_of(path) == ".parquet":
                yield from _parquet(path, stream, column, skip)
            elif format_of(path) == ".jsonl":
                yield from _jsonl(path, stream, skip)
            else:
                yield from ({field: text} for text in _texts(stream))
    except EOFError as error:
        if "memory" in str(error).lower():
            wrong = f"takes more than {_WINDOW >> 20} MB to unpack; pack it with a smaller window"
        else:
            wrong = "is damaged or cut short and cannot be unpacked; copy or download it again"
        yield BadRecord(f"{path} {wrong}.")
    except UnicodeDecodeError:
        where = f"{path} line {_wrong_line(path)}"
        yield BadRecord(f"{where} is not UTF-8 text; convert the file or leave it out.")
    except OSError as error:
        raise unreadable(path, error) from error


def need(package: str, purpose: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise LoopformerError(
            f"{purpose} needs the package {package.partition('.')[0]}; pip install 'loopformer[data]'."
        ) from error


def _jsonl(path: Path, stream: IO[bytes], skip: int) -> Iterator[Record | BadRecord]:
    passed = 0
    for number, line in enumerate(_lines(stream), 1):
        if line is None or not line.isspace():
            passed += 1
            yield {} if passed <= skip else _parsed(f"{path} line {number}", line)


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines; None for one that is too long."""
    while line := stream.readline(_LINE + 1):
        yield line if len(line) <= _LINE else None
        while len(line) > _LINE and not line.endswith(b"\n") and (rest := stream.readline(_LINE + 1)):
            line = rest


def _parsed(where: str, line: bytes | None) -> Record | BadRecord:
    if line is None:
        return BadRecord(f"{where} is longer than {_LINE >> 20} MB; cut its text into several records.")
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return BadRecord(f"{where} is not UTF-8 text; convert the file or leave it out.")
    except RecursionError:
        return BadRecord(f"{where} is not JSON that can be read: it is nested too deeply.")
    except ValueError as error:  # no JSON, or a number of thousands of digits
        reason = re.split("[:;]", str(error))[0]
        return BadRecord(f"{where} is not JSON ({reason}); correct or remove it.")
    if not isinstance(record, dict):
        return BadRecord(f'{where} must be an object such as {{"text": "…"}}.')
    return record


def _texts(stream: IO[bytes]) -> Iterator[str]:
    """The whole text as one document, or as several where it is longer than LONGEST."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    kept = ""
    while block := text.read(LONGEST):
        kept += block
        if len(kept) > LONGEST:
            *whole, kept = cut(kept, LONGEST // 2, LONGEST)
            yield from whole
    if kept:
        yield kept


def _wrong_line(path: Path) -> int:
    """The first line of a file that is not UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with closing(io.BufferedReader(_Counted(path, Meter()))) as raw, closing(_unpacked(path, raw)) as stream:
        try:
            while block := stream.read(_BUFFER):
                line += decoder.decode(block).count("\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
    return line


def _parquet(path: Path, stream: IO[bytes], column: str | None, skip: int) -> Iterator[Record | BadRecord]:
    arrow, parquet = need("pyarrow", "A parquet file"), need("pyarrow.parquet", "A parquet file")
    try:
        file = parquet.ParquetFile(stream, buffer_size=_BUFFER)
        columns = [column] if column in file.schema_arrow.names else None
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if rows <= skip:
                skip -= rows
                yield from itertools.repeat({}, rows)
                continue
            skip = 0  # from here on every row is read; `read_records` drops those of this group
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                yield from batch.to_pylist()
    except (arrow.ArrowException, UnicodeDecodeError):
        yield BadRecord(f"{path} is no readable parquet file; copy or download it again.")


def _unpacked(path: Path, raw: Any) -> Any:
    if path.suffix not in PACKINGS:
        return raw
    stream = io.BufferedReader(_Unpacking(raw, _decompressor(path.suffix)), _BUFFER)
    return _seekable(stream) if format_of(path) == ".parquet" else stream


def _decompressor(packing: str) -> Callable[[], Any]:
    """What makes an object that unpacks one frame or member, within the window."""
    if packing == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    if packing == ".xz":
        return lambda: lzma.LZMADecompressor(memlimit=_WINDOW)
    zstd = need("zstandard", "A .zst file")
    return lambda: zstd.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


def _seekable(stream: io.BufferedIOBase) -> IO[bytes]:
    """A packed parquet file goes through a temporary file, because it is read from its end."""
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (_records closes it)
    with closing(stream):
        shutil.copyfileobj(stream, unpacked, _BUFFER)
    unpacked.seek(0)
    return unpacked


class _Counted(io.FileIO):
    """A file that counts what is read of it."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self._meter = meter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._meter.read += count
        return count


class _Unpacking(io.RawIOBase):
    """A packed stream a little at a time, frame after frame, which notices when the end of the last is missing."""

    def __init__(self, raw: IO[bytes], decompressor: Callable[[], Any]) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame = decompressor()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._raw.read(_PACKED)
            while self._frame.eof and packed and not (packed := packed.lstrip(b"\0")):  # padding between frames
                packed = self._raw.read(_PACKED)
            if not packed:
                if self._frame.eof:
                    return 0
                raise EOFError("the last frame is incomplete")
            if self._frame.eof:
                self._frame = self._decompressor()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except Exception as error:  # each library has its own
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
