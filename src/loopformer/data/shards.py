"""A prepared folder on disk: how its shards of token ids are written, and how they are read.

    data = TokenData.open("data/stdlib", "train")
    data.tokens, data.vocab_size, data.tokenizer.decode(data.sources[0].ids.read(0, 100))
    data.verify()                           # reads every byte and compares checksums; `train` does, once

    writer = ShardWriter(folder, "stdlib-train", ".bin", np.uint16, shard_items=1 << 27, items=0, shards=[])
    writer.append(ids); writer.flush()      # on disk, whatever happens next
    writer.finish(); writer.shards          # [Shard(file="stdlib-train-00000.bin", items=…, sha256=…), …]

A shard ends after exactly `shard_items` numbers of one dtype, so the files depend only on what was appended. A
writer with the `items` and `shards` of an earlier writer continues after its last flush. A folder is finished once
it has its `index.json`; until then `prepare.state.json` says how far the work has come. Opening a folder checks
names, sizes and the tokenizer's hash, which is quick for any corpus. Tokens are memory-mapped.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from loopformer.config.model import check_settings
from loopformer.data.tokenizer import TOKENIZER_FILE as TOKENIZER_FILE
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem
from loopformer.files import DamagedFile, explain_write_errors, read_json, sha256_of, write_json

INDEX_FILE = "index.json"
STATE_FILE = "prepare.state.json"
VERIFIED_FILE = "verified.json"  # size, time and checksum of each shard that was verified
_MIN_ANNOUNCED_BYTES = 1 << 30  # verifying this much takes long enough to tell the user
_READ_BYTES = 1 << 20  # per read


@dataclass(frozen=True)
class Shard:
    """One finished shard, as the index lists it."""

    file: str
    items: int = field(metadata={"minimum": 1})
    sha256: str

    def __post_init__(self) -> None:
        check_settings(self, "shard")


class ShardWriter:
    """Appends numbers to `STEM-00000.bin`, `STEM-00001.bin`, … in a folder.

    `shards` lists the finished shards and grows. `items` counts the numbers in all shards, including the open one.
    To resume, pass the `items` and `shards` of the last flush: anything written after it is cut off.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        suffix: str,
        dtype: npt.DTypeLike,
        shard_items: int,
        items: int,
        shards: list[Shard],
    ) -> None:
        self._folder, self._stem, self._suffix = folder, stem, suffix
        self._dtype, self._shard_items = np.dtype(dtype), shard_items
        self.items, self.shards = items, shards
        self._open(items - sum(shard.items for shard in shards))

    def append(self, values: npt.NDArray[Any]) -> None:
        while len(values):
            part = values[: self._shard_items - self._in_shard]
            block = part.astype(self._dtype, copy=False).tobytes()
            with explain_write_errors(self._path):
                self._stream.write(block)
            self._sha.update(block)
            self._in_shard += len(part)
            self.items += len(part)
            values = values[len(part) :]
            if self._in_shard == self._shard_items:
                self._finish_shard()
                self._open(0)

    def flush(self) -> None:
        """Make everything appended so far survive a crash."""
        with explain_write_errors(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish(self) -> None:
        """Finish the last shard; an empty one is removed."""
        if self._in_shard:
            self._finish_shard()
        else:
            self._stream.close()
            self._path.unlink()

    def close(self) -> None:
        """Close the open file; what was flushed or finished stays."""
        with suppress(OSError):  # a full disk refuses what is still buffered
            self._stream.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}-{len(self.shards):05d}{self._suffix}"

    def _open(self, items: int) -> None:
        """Open the shard after the finished ones, and cut off everything after its first `items`."""
        size = items * self._dtype.itemsize
        self._in_shard = items
        self._sha = hashlib.sha256()
        with explain_write_errors(self._path):
            self._stream: BinaryIO = self._path.open("r+b" if self._path.exists() else "w+b")
            while size and (block := self._stream.read(min(size, _READ_BYTES))):
                self._sha.update(block)
                size -= len(block)
            if size:
                raise FileProblem(f"{self._path} is shorter than recorded; delete the folder and start again.")
            self._stream.seek(items * self._dtype.itemsize)
            self._stream.truncate()

    def _finish_shard(self) -> None:
        self.flush()
        self._stream.close()
        self.shards.append(Shard(self._path.name, self._in_shard, self._sha.hexdigest()))


def read_index(path: Path) -> dict[str, Any]:
    """The index of a finished folder, or the state of an unfinished one."""
    try:
        return read_json(path)
    except DamagedFile as error:
        raise damaged_folder_error(path) from error


def damaged_folder_error(path: Path) -> FileProblem:
    return FileProblem(f"{path} is damaged; delete the folder and prepare it again.")


def is_prepared(folder: Path | str) -> bool:
    """Whether the preparation of a folder is complete: the index is written last."""
    return (Path(folder) / INDEX_FILE).is_file()


class ShardedArray:
    """Several files read as one long array."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: npt.DTypeLike) -> None:
        self.shards = tuple(shards)
        self._starts = [0, *accumulate(shard.items for shard in shards)]
        self._maps = [_map_shard(folder / shard.file, shard.items, np.dtype(dtype)) for shard in shards]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """A copy of start:stop, across shard boundaries."""
        pieces = []
        number = bisect_right(self._starts, start) - 1
        while start < min(stop, len(self)):
            offset = start - self._starts[number]
            pieces.append(self._maps[number][offset : offset + stop - start])
            start += len(pieces[-1])
            number += 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)


@dataclass(frozen=True)
class SourceData:
    """The tokens of one source; `flags` (LOSS, LAST of tokenizer.py) only if its examples are supervised."""

    name: str
    weight: float | None = field(metadata={"above": 0})
    ids: ShardedArray
    flags: ShardedArray | None

    def __post_init__(self) -> None:
        check_settings(self, "source")


@dataclass(frozen=True)
class TokenData:
    """One split of a prepared folder."""

    folder: Path
    split: str
    sources: tuple[SourceData, ...]
    vocab_size: int = field(metadata={"minimum": 1})
    eot: int
    index_hash: str

    def __post_init__(self) -> None:
        check_settings(self, "data")

    @classmethod
    def open(cls, folder: Path | str, split: str = "train") -> TokenData:
        """A split of a finished folder; sizes and the tokenizer are checked, checksums of shards are not."""
        folder = Path(folder)
        path = folder / INDEX_FILE
        if folder.is_file():
            raise FileProblem(
                f"{folder} is a file; prepare it with `loopformer prepare {folder} --out FOLDER` first."
            )
        if not is_prepared(folder):
            raise FileProblem(
                f"{folder} is only partly prepared; run the same loopformer prepare command again to finish it."
                if (folder / STATE_FILE).exists()
                else f"{path} is missing; make the folder with loopformer prepare."
            )
        index = read_index(path)
        sources = []
        try:
            for source in index["sources"]:
                if files := source["splits"].get(split):
                    shards, masks = ([Shard(**shard) for shard in files[kind]] for kind in ("shards", "masks"))
                    ids = ShardedArray(folder, shards, index["dtype"])
                    flags = ShardedArray(folder, masks, np.uint8) if masks else None
                    sources.append(SourceData(source["name"], source["weight"], ids, flags))
            stored = index["tokenizer"]
            tokenizer_hash = stored["sha256"]
            data = cls(folder, split, tuple(sources), stored["vocab_size"], stored["end"], sha256_of(path))
        except FileProblem:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # ValueError: a wrong type or bound
            raise damaged_folder_error(path) from error
        if not sources:
            raise FileProblem(f"{folder} has no {split} split; prepare it again with another --val-fraction.")
        tokenizer = folder / TOKENIZER_FILE
        if not tokenizer.is_file():
            raise FileProblem(f"{tokenizer} is missing; restore it or prepare the folder again.")
        if sha256_of(tokenizer) != tokenizer_hash:
            raise FileProblem(
                f"{tokenizer} is not the tokenizer that made these shards; restore it or prepare the folder again."
            )
        return data

    @property
    def tokens(self) -> int:
        """Tokens in all sources of this split."""
        return sum(len(source.ids) for source in self.sources)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    def check_ids(self, ids: npt.NDArray[Any], source: str) -> None:
        """Raise an error if an id is outside the vocabulary."""
        if len(ids) and (highest := int(ids.max())) >= self.vocab_size:
            raise FileProblem(
                f"{self.folder} has token id {highest} in source {source}, beyond its vocabulary of "
                f"{self.vocab_size}; prepare it again."
            )

    def verify(self, *, changed_only: bool = False, say: Callable[[str], None] | None = None) -> None:
        """Read every shard and compare it with the checksum of the index.

        With `changed_only`, skip shards with the size and time that they had when they were last verified. A file
        in the folder records these, unless the folder is read-only. `say` gets a sentence if there is much to read.
        """
        record = self.folder / VERIFIED_FILE
        verified: dict[str, Any] = {}  # stamp of each verified shard, by file name
        if changed_only:
            with suppress(FileProblem):  # there is no record yet, or it is damaged
                verified = read_json(record)
        arrays = [array for source in self.sources for array in (source.ids, source.flags) if array is not None]
        stamps: dict[Shard, list[Any]] = {}  # size, time and checksum
        for shard in (shard for array in arrays for shard in array.shards):
            status = (self.folder / shard.file).stat()
            stamps[shard] = [status.st_size, status.st_mtime_ns, shard.sha256]
        unverified = [shard for shard, stamp in stamps.items() if verified.get(shard.file) != stamp]
        size = sum(stamps[shard][0] for shard in unverified)
        if say and size >= _MIN_ANNOUNCED_BYTES:
            say(f"comparing {size / 1e9:.1f} GB of shards in {self.folder} with their checksums")
        paths = [self.folder / shard.file for shard in unverified]
        with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases the GIL
            for shard, path, digest in zip(unverified, paths, pool.map(sha256_of, paths), strict=True):
                if digest != shard.sha256:
                    raise FileProblem(f"{path} has changed since it was made; prepare the folder again.")
        if changed_only and unverified:
            verified |= {shard.file: stamp for shard, stamp in stamps.items()}
            with suppress(FileProblem):  # the folder is read-only
                write_json(record, verified)


def _map_shard(path: Path, items: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.is_file():
        raise FileProblem(f"The shard {path} is missing; delete the folder and prepare it again.")
    size = path.stat().st_size
    if size != items * dtype.itemsize:
        raise FileProblem(
            f"The shard {path} has {size} bytes instead of {items * dtype.itemsize}; "
            "it is truncated or damaged, so copy it again or prepare the folder again."
        )
    return np.memmap(path, dtype=dtype, mode="r")
