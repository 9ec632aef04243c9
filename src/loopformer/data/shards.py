"""Numbers on disk: shards of one dtype that grow at the end, and small files that are replaced whole.

writer = ShardWriter(folder, "stdlib-train", ".bin", np.uint16, shard_items=1 << 27)
writer.append(ids); writer.flush()      # on disk, whatever happens next
writer.finish()                         # [Shard(file="stdlib-train-00000.bin", items=…, sha256=…), …]

Shards are cut after exactly `shard_items` numbers, so what is on disk depends only on what was appended.
A writer that is opened with the `items` and `shards` of an earlier one continues after its last flush.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from loopformer.errors import FileProblem

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Shard:
    """One finished shard, as the index lists it."""

    file: str
    items: int
    sha256: str


class ShardWriter:
    """Appends numbers to `STEM-00000.bin`, `STEM-00001.bin`, …; see the module's docstring."""

    def __init__(
        self,
        folder: Path,
        stem: str,
        suffix: str,
        dtype: npt.DTypeLike,
        shard_items: int,
        items: int = 0,
        shards: Sequence[Shard] = (),
    ) -> None:
        self._folder, self._stem, self._suffix = folder, stem, suffix
        self._dtype, self._shard_items = np.dtype(dtype), shard_items
        self.items = items  # in all shards
        self.shards = list(shards)  # the finished ones
        self._open(items - sum(shard.items for shard in self.shards))

    def append(self, values: npt.NDArray[Any]) -> None:
        while len(values):
            now = values[: self._shard_items - self._in_shard]
            block = now.astype(self._dtype, copy=False).tobytes()
            with writing(self._path):
                self._stream.write(block)
            self._sha.update(block)
            self._in_shard += len(now)
            self.items += len(now)
            values = values[len(now) :]
            if self._in_shard == self._shard_items:
                self._finish_shard()
                self._open(0)

    def flush(self) -> None:
        """Everything appended so far survives a crash."""
        with writing(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish(self) -> list[Shard]:
        """Finish the last shard; all shards, in order."""
        if self._in_shard:
            self._finish_shard()
        else:
            self._stream.close()
            self._path.unlink()
        return self.shards

    def close(self) -> None:
        """Let go of the open file; what was flushed or finished stays."""
        with suppress(OSError):  # a full disk refuses what is still buffered
            self._stream.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}-{len(self.shards):05d}{self._suffix}"

    def _open(self, items: int) -> None:
        """Open the shard after the finished ones and cut off what was not flushed."""
        size = items * self._dtype.itemsize
        self._in_shard = items
        self._sha = hashlib.sha256()
        with writing(self._path):
            self._stream: BinaryIO = self._path.open("r+b" if self._path.exists() else "w+b")
            for block in _blocks(self._stream, size):
                self._sha.update(block)
                size -= len(block)
            if size:
                raise FileProblem(f"{self._path} is shorter than it was; delete the folder and start again.")
            self._stream.seek(items * self._dtype.itemsize)
            self._stream.truncate()

    def _finish_shard(self) -> None:
        self.flush()
        self._stream.close()
        self.shards.append(Shard(self._path.name, self._in_shard, self._sha.hexdigest()))


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file whole: a reader sees the old content or the new, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new and removed names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, a quota, a read-only folder: one sentence."""
    try:
        yield
    except OSError as error:
        raise FileProblem(
            f"Cannot write {path}: {error.strerror or error}; what was finished is safe, "
            "so make room and start again."
        ) from error


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size and (block := file.read(min(size, _BLOCK))):
        yield block
        size -= len(block)
