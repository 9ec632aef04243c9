"""A prepared folder, opened: memory-mapped tokens of one split, checked against the index.

data = TokenData.open("data/stdlib", "train")
data.tokens, data.vocab_size, data.tokenizer.decode(data.sources[0].ids.read(0, 100))
data.verify()                     # reads every byte and compares checksums

Opening looks at names, sizes and the tokenizer's hash, which is quick for any corpus.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loopformer.data.ledger import INDEX_FILE, STATE_FILE, read_json
from loopformer.data.shards import Shard, sha256_of
from loopformer.data.tokenizer import FILE as TOKENIZER_FILE
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem


def is_prepared(folder: Path | str) -> bool:
    """Whether a folder was prepared to the end."""
    return (Path(folder) / INDEX_FILE).is_file()


class Sharded:
    """Several files read as one long array."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: npt.DTypeLike) -> None:
        self.shards = tuple(shards)
        self._folder = folder
        self._starts = [0, *accumulate(shard.items for shard in shards)]
        self._maps = [_map(folder / shard.file, shard.items, np.dtype(dtype)) for shard in shards]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """A copy of start:stop, across shard borders."""
        pieces = []
        number = bisect_right(self._starts, start) - 1
        while start < min(stop, len(self)):
            offset = start - self._starts[number]
            pieces.append(self._maps[number][offset : offset + stop - start])
            start += len(pieces[-1])
            number += 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)

    def verify(self) -> None:
        for shard in self.shards:
            path = self._folder / shard.file
            if sha256_of(path) != shard.sha256:
                raise FileProblem(f"{path} has changed since it was made; prepare the folder again.")


@dataclass(frozen=True)
class SourceData:
    """The tokens of one source; `flags` (see supervised.py) only where examples are supervised."""

    name: str
    weight: float | None
    ids: Sharded
    flags: Sharded | None


@dataclass(frozen=True)
class TokenData:
    """One split of a prepared folder."""

    folder: Path
    split: str
    sources: tuple[SourceData, ...]
    vocab_size: int
    eot: int
    index_hash: str

    @classmethod
    def open(cls, folder: Path | str, split: str = "train") -> TokenData:
        folder = Path(folder)
        path = folder / INDEX_FILE
        if not is_prepared(folder):
            unfinished = (folder / STATE_FILE).exists()
            raise FileProblem(
                f"{folder} is not prepared to the end; run the same loopformer prepare again, it continues."
                if unfinished
                else f"{path} is missing; make the folder with loopformer prepare."
            )
        index = read_json(path)
        try:
            sources = tuple(_sources(folder, index, split))
            told = index["tokenizer"]
            data = cls(folder, split, sources, told["vocab_size"], told["end"], _hash(path))
        except (KeyError, TypeError, AttributeError) as error:
            raise FileProblem(f"{path} is damaged; delete the folder and prepare it again.") from error
        if not sources:
            raise FileProblem(f"{folder} has no {split} split; prepare it again with another --val-fraction.")
        tokenizer = folder / TOKENIZER_FILE
        if not tokenizer.is_file() or _hash(tokenizer) != told["sha256"]:
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

    def verify(self) -> None:
        """Read everything and compare with the checksums of the index."""
        for source in self.sources:
            source.ids.verify()
            if source.flags is not None:
                source.flags.verify()


def _sources(folder: Path, index: dict[str, Any], split: str) -> Iterator[SourceData]:
    for source in index["sources"]:
        if split in source["splits"]:
            written = source["splits"][split]
            shards, masks = ([Shard(**shard) for shard in written[kind]] for kind in ("shards", "masks"))
            ids = Sharded(folder, shards, index["dtype"])
            flags = Sharded(folder, masks, np.uint8) if masks else None
            yield SourceData(source["name"], source["weight"], ids, flags)


def _map(path: Path, items: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.is_file():
        raise FileProblem(f"The shard {path} is missing; delete the folder and prepare it again.")
    size = path.stat().st_size
    if size != items * dtype.itemsize:
        raise FileProblem(
            f"The shard {path} has {size} bytes instead of {items * dtype.itemsize}; "
            "it is cut short or damaged, so copy it again or prepare the folder again."
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
