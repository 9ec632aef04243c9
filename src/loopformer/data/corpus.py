"""Where text comes from: named sources, files, folders, globs and Hugging Face datasets, each with a weight.

parse_sources(["stdlib"])                                      # the embedded default
parse_sources(["books/*.txt=2", "news.jsonl.zst=1"])           # a mixture
parse_sources(["hf:HuggingFaceFW/fineweb-edu:sample-10BT"])    # hf:DATASET[:config][:split], also a folder
parse_sources(["pile"])                                        # a preset: pile, fineweb-edu, openwebtext

A source is a list of parts (files) that can each be read from any record on; that is what makes an
interrupted job continue.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loopformer.data.files import FORMATS, PACKINGS, Meter, Record, format_of, read_records
from loopformer.data.hub import PRESETS, read_dataset
from loopformer.data.stdlib import stdlib_documents
from loopformer.errors import FileProblem, LoopformerError

DEFAULT_VAL_FRACTION = 0.01
_STDLIB_VAL_FRACTION = 0.05  # of 2 MB; less would measure noise


class Position(NamedTuple):
    """The next record to read: a part of the source and a record in it."""

    part: int = 0
    record: int = 0


@dataclass(frozen=True)
class Part:
    """One file, or one dataset: `read(skip, meter)` gives its records from number `skip` on."""

    name: str
    size: int | None  # bytes on disk, where known
    read: Callable[[int, Meter], Iterator[Record]]


@dataclass(frozen=True)
class Source:
    """A named list of parts, its share of a mixture, and how much of it to take."""

    name: str
    given: str  # as the user wrote it
    weight: float | None
    parts: tuple[Part, ...]
    remote: bool = False
    val_fraction: float = DEFAULT_VAL_FRACTION
    train_tokens: int | None = None
    val_tokens: int | None = None

    @property
    def size(self) -> int | None:
        """Bytes on disk of all parts, where known."""
        sizes = [part.size for part in self.parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def records(self, start: Position, meter: Meter) -> Iterator[tuple[Position, Record]]:
        """Each record from `start` on, with the position after it."""
        for number in range(start.part, len(self.parts)):
            skip = start.record if number == start.part else 0
            for record_number, record in enumerate(self.parts[number].read(skip, meter), skip + 1):
                yield Position(number, record_number), record

    def texts(self, field: str, start: Position, meter: Meter) -> Iterator[tuple[Position, str]]:
        """The text of each record that has any, with the position after it."""
        for position, record in self.records(start, meter):
            if field not in record:
                raise LoopformerError(
                    f"{self.parts[position.part].name} record {position.record} has no field {field!r}; "
                    f"choose one with --field: {', '.join(map(str, record)) or 'it is empty'}."
                )
            text = record[field]
            if text is not None and not isinstance(text, str):
                raise LoopformerError(
                    f"Field {field!r} of {self.parts[position.part].name} record {position.record} "
                    "is not text; choose another with --field."
                )
            if text and not text.isspace():
                yield position, clean(text)


def clean(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def parse_sources(given: Sequence[str], field: str = "text", *, supervised: bool = False) -> tuple[Source, ...]:
    """The sources of `NAME_OR_PATH[=weight]` each; weights for all of them or for none."""
    if not given:
        raise LoopformerError("Name at least one source: a file, a folder, hf:DATASET or stdlib.")
    sources: list[Source] = []
    for text in given:
        place, weight = _weight(text)
        source = _source(place, text, weight, field, supervised)
        name = _unused(source.name, [other.name for other in sources])
        sources.append(dataclasses.replace(source, name=name))
    if len({source.weight is None for source in sources}) > 1:
        raise LoopformerError("Give every source a weight (news.jsonl=2 books=1), or none of them.")
    return tuple(sources)


def _source(place: str, given: str, weight: float | None, field: str, supervised: bool) -> Source:
    if place == "stdlib":
        documents = functools.cache(stdlib_documents)  # parsing the library takes seconds, and it is read again

        def read(skip: int, meter: Meter) -> Iterator[Record]:
            return ({field: text} for text in itertools.islice(documents(), skip, None))

        part = Part(f"Python {platform.python_version()}", None, read)
        return Source("stdlib", given, weight, (part,), val_fraction=_STDLIB_VAL_FRACTION)
    if place in PRESETS:
        preset = PRESETS[place]
        part = _dataset(preset.dataset, preset.config, "train")
        limits = (preset.val_fraction, preset.train_tokens, preset.val_tokens)
        return Source(place, given, weight, (part,), True, *limits)
    if place.startswith("hf:"):
        dataset, config, split, *rest = [*place.removeprefix("hf:").split(":"), "", ""]
        if not dataset or any(rest):
            raise LoopformerError(f"Cannot read {place!r}; write hf:DATASET, hf:DATASET:config or :config:split.")
        remote = not Path(dataset).is_dir()
        return Source(_slug(dataset), given, weight, (_dataset(dataset, config, split or "train"),), remote)
    root, paths = _files(place)
    parts = tuple(
        Part(
            path.relative_to(root).as_posix(),
            path.stat().st_size,
            functools.partial(_read_file, path, field, supervised),
        )
        for path in paths
    )
    return Source(_slug(place), given, weight, parts)


def _read_file(path: Path, field: str, supervised: bool, skip: int, meter: Meter) -> Iterator[Record]:
    return read_records(path, field, skip, only_field=not supervised, meter=meter)


def _dataset(dataset: str, config: str, split: str) -> Part:
    name = ":".join(["hf", dataset, config, split])
    return Part(name, None, lambda skip, meter: read_dataset(dataset, config, split, skip))


def _files(place: str) -> tuple[Path, list[Path]]:
    """The files a path, a folder or a glob stands for, in a fixed order, and the folder to name them from."""
    path = Path(place)
    known = f"{', '.join(FORMATS)}, each also with {', '.join(PACKINGS)}"
    if path.is_file():
        if format_of(path) is None:
            raise FileProblem(f"{place} has an unknown ending; prepare reads {known}.")
        return path.parent, [path]
    if path.is_dir():
        root, found = path, list(path.rglob("*"))
    elif glob.has_magic(place):
        found = [Path(name) for name in glob.glob(place, recursive=True)]
        root = Path(os.path.commonpath([path.parent for path in found])) if found else Path()
    else:
        raise FileProblem(f"There is no file or folder {place}; named sources are stdlib, {', '.join(PRESETS)}.")
    paths = sorted(path for path in found if path.is_file() and format_of(path))
    if not paths:
        raise FileProblem(f"{place} holds no file that prepare reads; it reads {known}.")
    return root, paths


def _weight(given: str) -> tuple[str, float | None]:
    place, equals, text = given.rpartition("=")
    if not equals or Path(given).exists():
        return given, None
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf or not place:
        raise LoopformerError(f"The weight {text!r} of {place!r} must be a positive number, such as news.jsonl=2.")
    return place, weight


def _slug(place: str) -> str:
    """A short name for files: `corpus/wiki.jsonl.zst` is wiki, `HuggingFaceFW/fineweb-edu` fineweb-edu."""
    name = re.sub(r"(\.(gz|xz|zst))?$", "", Path(place).name or "text")
    name = re.sub(r"\.(txt|md|jsonl|parquet)$", "", name)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "text"


def _unused(name: str, taken: list[str]) -> str:
    return next(
        new for new in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2))) if new not in taken
    )
