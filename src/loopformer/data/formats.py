"""Records out of files: .txt .md (one document), .jsonl and .parquet, each also .gz .xz .zst.

    for record in read_records(Path("news.jsonl.zst"), field="text", skip=1000): record["text"]

Everything streams: a text file of any size comes in documents of at most a million characters, cut at
paragraph borders. A record is a mapping; `skip` leaves out the first records without parsing them.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from loopformer.data.splits import LONGEST, cut
from loopformer.errors import FileProblem, LoopformerError

Record = dict[str, Any]
FORMATS = (".txt", ".md", ".jsonl", ".parquet")
PACKINGS = (".gz", ".xz", ".zst")
_BUFFER = 1 << 20
_ROWS = 256  # rows of a parquet file in memory at a time


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
) -> Iterator[Record]:
    """The records of one file, from number `skip` on; `only_field` spares parquet its other columns."""
    try:
        raw = io.BufferedReader(_Counted(path, meter or Meter()), _BUFFER)
        with closing(raw), closing(_unpacked(path, raw)) as stream:
            if format_of(path) == ".parquet":
                yield from _parquet(path, stream, field if only_field else None, skip)
            elif format_of(path) == ".jsonl":
                yield from _jsonl(path, stream, skip)
            else:
                yield from ({field: text} for text in itertools.islice(_texts(stream), skip, None))
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise FileProblem(
            f"{path} is damaged or cut short and cannot be unpacked; copy or download it again."
        ) from error
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not UTF-8 text; convert it or leave it out.") from error
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}.") from error


def need(package: str, purpose: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise LoopformerError(
            f"{purpose} needs the package {package.partition('.')[0]}; pip install 'loopformer[data]'."
        ) from error


def _jsonl(path: Path, stream: IO[bytes], skip: int) -> Iterator[Record]:
    number = 0
    for line_number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        number += 1
        if number <= skip:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise FileProblem(f"{path} line {line_number} is not JSON; correct or remove it.") from error
        if not isinstance(record, dict):
            raise FileProblem(f'{path} line {line_number} must be an object such as {{"text": "…"}}.')
        yield record


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


def _parquet(path: Path, stream: IO[bytes], column: str | None, skip: int) -> Iterator[Record]:
    arrow, parquet = need("pyarrow", "A parquet file"), need("pyarrow.parquet", "A parquet file")
    try:
        file = parquet.ParquetFile(stream)
        columns = file.schema_arrow.names
        if column is not None:
            columns = [name for name in columns if name == column] or columns
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                continue
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns):
                yield from itertools.islice(batch.to_pylist(), min(skip, len(batch)), None)
                skip = max(0, skip - len(batch))
    except arrow.ArrowException as error:
        raise FileProblem(f"{path} is no readable parquet file; copy or download it again.") from error


def _unpacked(path: Path, raw: Any) -> Any:
    if path.suffix not in PACKINGS:
        return raw
    if path.suffix == ".gz":
        stream: Any = gzip.GzipFile(fileobj=raw)
    elif path.suffix == ".xz":
        stream = lzma.LZMAFile(raw)  # noqa: SIM115 (read_records closes it)
    else:
        stream = io.BufferedReader(_Zstd(raw), _BUFFER)
    return _seekable(stream) if format_of(path) == ".parquet" else stream


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """A packed parquet file goes through a temporary file, because it is read from its end."""
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (read_records closes it)
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


class _Zstd(io.RawIOBase):
    """A zstd stream that, unlike the package's own reader, notices when its end is missing."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._zstd = need("zstandard", "A .zst file")
        self._raw = raw
        self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._raw.read(_BUFFER // 8)
            if not packed:
                if self._frame.eof:
                    return 0
                raise EOFError("the last zstd frame is incomplete")
            if self._frame.eof:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
