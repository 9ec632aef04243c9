"""Where text comes from: named sources, files, folders, globs and Hugging Face datasets, each with a weight.

    parse_sources(["stdlib"])                                      # the embedded default
    parse_sources(["books/*.txt=2", "news.jsonl.zst=1"])           # a mixture
    parse_sources(["hf:HuggingFaceFW/fineweb-edu:sample-10BT"])    # hf:DATASET[:config][:split], also a folder
    parse_sources(["pile"])                                        # a preset: pile, fineweb-edu, openwebtext

A source is a list of parts (files) that can each be read from any record on; that is what makes an interrupted
job continue. A dataset of the Hub is streamed in an order that a broken connection does not disturb: the stream
is opened again at the record it had reached, so nothing is lost and nothing comes twice.

The embedded corpus is the prose of the Python standard library, found on every machine, about 2 MB: one document
per module, its docstrings in the order of the source, each docstring once in the whole corpus; then one per topic
of `help()`. The modules are parsed, never imported. What comes out depends on the Python version, not on the
machine.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import glob
import itertools
import math
import os
import platform
import re
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loopformer.data.formats import FORMATS, PACKINGS, BadRecord, Meter, Record, format_of, need, read_records
from loopformer.data.splits import clean
from loopformer.errors import FileProblem, LoopformerError
from loopformer.files import DamagedFile, read_json, sha256_of, write_json

T = TypeVar("T")
MARKS_FILE = "sources.json"  # time and checksum of the files that a folder was made of
DEFAULT_VAL_FRACTION = 0.01
_STDLIB_VAL_FRACTION = 0.05  # of 2 MB; less would measure noise
_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before each new attempt to reach the Hub
_NETWORK = ("httpx", "httpx2", "httpcore", "aiohttp", "requests", "urllib3", "fsspec", "huggingface_hub")
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Preset:
    """A well-known dataset with its training and held-out parts.

    A document is held out when its hash says so (`val_fraction` of all). Each part then ends after exactly
    so many tokens, the end token of each document counted; so the counts hold by definition for the
    tokenizer in use, GPT-2's unless another is asked for.
    """

    dataset: str
    config: str
    val_fraction: float
    train_tokens: int
    val_tokens: int = 10_000_000


PRESETS = {
    "pile": Preset("EleutherAI/the_pile_deduplicated", "", 0.001, 25_000_000_000),
    "fineweb-edu": Preset("HuggingFaceFW/fineweb-edu", "sample-10BT", 0.002, 9_500_000_000),
    "openwebtext": Preset("Skylion007/openwebtext", "", 0.002, 8_900_000_000),
}


class Position(NamedTuple):
    """The next record to read: a part of the source, a record in it, and how many documents of it are done."""

    part: int = 0
    record: int = 0
    piece: int = 0


@dataclass(frozen=True)
class Part:
    """One file, or one dataset: `read(skip, meter)` gives its records from number `skip` on."""

    name: str
    size: int | None  # bytes on disk, where known
    read: Callable[[int, Meter], Iterator[Record | BadRecord]]
    changed: int | None = None  # when the file was last written to, in ns
    path: Path | None = None  # of the file

    def checksum(self) -> str | None:
        """Of the file; None where there is none, or where it was written to since it was found."""
        if self.path is None:
            return None
        try:
            digest = sha256_of(self.path)
            return digest if self.path.stat().st_mtime_ns == self.changed else None
        except OSError:
            return None


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

    def records(self, start: Position, meter: Meter) -> Iterator[tuple[Position, Record | BadRecord]]:
        """Each record from `start` on, with the position after it."""
        for number in range(start.part, len(self.parts)):
            skip = start.record if number == start.part else 0
            for record_number, record in enumerate(self.parts[number].read(skip, meter), skip + 1):
                yield Position(number, record_number), record

    def read(self, field: str, start: Position, meter: Meter) -> Iterator[tuple[Position, str | BadRecord]]:
        """The text of each record that has any, or what is wrong with it, with the position after it."""
        for position, record in self.records(start, meter):
            if isinstance(record, BadRecord):
                yield position, record
            elif field not in record:
                known = ", ".join(map(str, itertools.islice(record, 20))) or "it is empty"
                where = self.where(position)
                yield (
                    position,
                    BadRecord(f"{where} has no field {field!r}; choose one with --field: {known[:500]}."),
                )
            elif (text := record[field]) is not None and not isinstance(text, str):
                where = self.where(position)
                yield position, BadRecord(f"Field {field!r} of {where} is not text; choose another with --field.")
            elif text and not text.isspace():
                yield position, clean(text)

    def texts(self, field: str, start: Position, meter: Meter) -> Iterator[tuple[Position, str]]:
        """The text of each record that has any, with the position after it; a bad record is raised."""
        for position, text in self.read(field, start, meter):
            if isinstance(text, BadRecord):
                raise text
            yield position, text

    def where(self, after: Position) -> str:
        """The name of the record before a position, or of the one that it is in."""
        return f"{self.parts[after.part].name} record {after.record + (after.piece > 0)}"


def parse_sources(specs: Sequence[str], field: str = "text", *, supervised: bool = False) -> tuple[Source, ...]:
    """The sources of `NAME_OR_PATH[=weight]` each; weights for all of them or for none."""
    if not specs:
        raise LoopformerError("Name at least one source: a file, a folder, hf:DATASET or stdlib.")
    sources: list[Source] = []
    for spec in specs:
        place, weight = _weight(spec)
        source = _source(place, spec, weight, field, supervised)
        name = _unused(source.name, [other.name for other in sources])
        sources.append(dataclasses.replace(source, name=name))
    if len({source.weight is None for source in sources}) > 1:
        raise LoopformerError("Give every source a weight (news.jsonl=2 books=1), or none of them.")
    if sources[0].weight is None:
        _check_once(sources)
    return tuple(sources)


def _check_once(sources: Sequence[Source]) -> None:
    """Refuse text that two sources have; whoever gives weights may mean it."""
    owners: dict[str, str] = {}
    for source in sources:
        for part in source.parts:
            place = part.name if part.path is None else os.path.realpath(part.path)
            if place in owners:
                raise LoopformerError(
                    f"{part.path or part.name} would be read twice, for {owners[place]} and for {source.given}; "
                    "name it once, or give every source a weight."
                )
            owners[place] = source.given


def _source(place: str, spec: str, weight: float | None, field: str, supervised: bool) -> Source:
    if place == "stdlib":
        documents = functools.cache(stdlib_documents)  # parsing the library takes seconds, and it is read again

        def read(skip: int, meter: Meter) -> Iterator[Record]:
            return ({field: text} for text in itertools.islice(documents(), skip, None))

        part = Part(f"Python {platform.python_version()}", None, read)
        return Source("stdlib", spec, weight, (part,), val_fraction=_STDLIB_VAL_FRACTION)
    if place in PRESETS:
        preset = PRESETS[place]
        part = _dataset(preset.dataset, preset.config, "train")
        limits = (preset.val_fraction, preset.train_tokens, preset.val_tokens)
        return Source(place, spec, weight, (part,), True, *limits)
    if place.startswith("hf:"):
        dataset, config, split, *rest = [*place.removeprefix("hf:").split(":"), "", ""]
        if not dataset or any(rest):
            raise LoopformerError(f"Cannot read {place!r}; write hf:DATASET, hf:DATASET:config or :config:split.")
        remote = not Path(dataset).is_dir()
        return Source(_slug(dataset), spec, weight, (_dataset(dataset, config, split or "train"),), remote)
    root, paths = _files(place)
    parts = []
    for path in paths:
        status = path.stat()
        read_file = functools.partial(_read_file, path, field, supervised)
        name = path.relative_to(root).as_posix()
        parts.append(Part(name, status.st_size, read_file, status.st_mtime_ns, path))
    return Source(_slug(place), spec, weight, tuple(parts))


def mark_files(sources: Sequence[Source], folder: Path) -> None:
    """Note in a folder when each file of the sources was last written to, and its checksum."""
    files = _by_name(sources).items()
    marks = {name: [part.changed, part.checksum()] for name, part in files if part.path is not None}
    if marks:
        write_json(folder / MARKS_FILE, marks)


def rewritten(sources: Sequence[Source], folder: Path) -> Iterator[str]:
    """The files that are not as they were noted; one that was copied has another time and the same content."""
    noted = folder / MARKS_FILE
    marks = read_json(noted) if noted.exists() else {}  # older folders have none
    for name, part in _by_name(sources).items():
        match marks.get(name, [part.changed, None]):
            case [changed, digest]:
                if changed != part.changed and (digest is None or digest != part.checksum()):
                    yield part.name
            case _:
                raise DamagedFile(f"{noted} is damaged; delete it, or prepare the folder again.")


def _by_name(sources: Sequence[Source]) -> dict[str, Part]:
    return {f"{source.name}/{part.name}": part for source in sources for part in source.parts}


def _read_file(path: Path, field: str, supervised: bool, skip: int, meter: Meter) -> Iterator[Record | BadRecord]:
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
        root, entries = path, list(path.rglob("*"))
    elif glob.has_magic(place):
        entries = list(_matches(place))
        root = Path(os.path.commonpath([path.parent for path in entries])) if entries else Path()
    else:
        raise FileProblem(f"There is no file or folder {place}; named sources are stdlib, {', '.join(PRESETS)}.")
    files = {os.path.realpath(path): path for path in sorted(entries, reverse=True) if format_of(path)}
    paths = sorted(path for path in files.values() if path.is_file())
    if not paths:
        raise FileProblem(f"{place} holds no file that prepare reads; it reads {known}.")
    return root, paths


def _matches(pattern: str) -> Iterator[Path]:
    """What a glob stands for, each folder below a `**` looked into once, however many links lead to it."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    place = parts.index("**")
    above, below = Path(*parts[:place]), parts[place + 1 :] or ("*",)
    seen: set[str] = set()
    for top in sorted(glob.glob(str(above))):
        for folder, folders, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if real not in seen else []
            if real not in seen:
                yield from _matches(os.path.join(glob.escape(folder), *below))
            seen.add(real)


def _weight(spec: str) -> tuple[str, float | None]:
    """A spec without its weight, and the weight."""
    place, equals, text = spec.rpartition("=")
    if not equals or Path(spec).exists():
        return spec, None
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


def read_dataset(dataset: str, config: str, split: str, skip: int = 0) -> Iterator[Record]:
    """The records of a dataset by id, or of a local dataset folder, from number `skip` on."""
    return reconnecting(lambda done: _open(dataset, config, split, done), skip, f"hf:{dataset}")


def reconnecting(
    open_at: Callable[[int], Iterator[T]],
    skip: int,
    name: str,
    waits: tuple[float, ...] = _WAITS,
) -> Iterator[T]:
    """The items of `open_at(skip)`; when the network fails, opened again at the item after the last one.

    Where not even the first item comes there is nothing to wait for, and that is an error at once.
    """
    attempt, reached = 0, False
    while True:
        try:
            for item in open_at(skip):
                yield item
                skip += 1
                attempt, reached = 0, True
            return
        except Exception as error:
            if not _is_network(error):
                raise
            if not reached or attempt == len(waits):
                raise FileProblem(
                    f"{name} cannot be reached ({_first_line(error)}); "
                    "start again when the connection is back, it continues."
                ) from error
            time.sleep(waits[attempt])
            attempt += 1


def _open(dataset: str, config: str, split: str, skip: int) -> Iterator[Record]:
    datasets = need("datasets", "A Hugging Face dataset")
    try:
        stream = _stream(datasets, dataset, config, split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise LoopformerError(f"There is no dataset {dataset!r} that you may read; check its id.") from error
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise LoopformerError(f"hf:{dataset} cannot be opened: {_first_line(error)}") from error
    done = skip
    try:
        for record in stream.skip(skip) if skip else stream:
            yield record
            done += 1
    except Exception as error:  # of the library, or of those that it reads files with
        if _is_network(error):
            raise
        raise FileProblem(
            f"hf:{dataset} cannot be read after record {done} ({_first_line(error)}); correct it or leave it out."
        ) from error


def _stream(datasets: Any, dataset: str, config: str, split: str) -> Any:
    folder = Path(dataset)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # by save_to_disk
        saved = datasets.load_from_disk(dataset)
        return (saved[split] if isinstance(saved, dict) else saved).to_iterable_dataset()
    return datasets.load_dataset(dataset, config or None, split=split, streaming=True)


def _is_network(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | LoopformerError):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stdlib_documents() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            if fresh:
                documents.append("\n\n".join(fresh) + "\n")
    return documents + list(dict.fromkeys(_topics(root / "pydoc_data" / "topics.py")))


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _docstrings(path: Path) -> Iterator[str]:
    tree = _parse(path)
    if tree is None:
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield text.strip()


def _topics(path: Path) -> Iterator[str]:
    tree = _parse(path)
    for statement in tree.body if tree else []:
        if isinstance(statement, ast.Assign):
            topics = ast.literal_eval(statement.value)
            yield from (topics[name].strip() + "\n" for name in sorted(topics))
