"""Where text comes from: named sources, files, folders, globs and Hugging Face datasets, each with a weight.

    parse_sources(["stdlib"])                                      # the embedded default
    parse_sources(["books/*.txt=2", "news.jsonl.zst=1"])           # a mixture
    parse_sources(["hf:HuggingFaceFW/fineweb-edu:sample-10BT"])    # hf:DATASET[:config][:split], also a folder
    parse_sources(["pile"])                                        # a preset: pile, fineweb-edu, openwebtext

A source is a list of parts (files), each of which can be read from any record on, so an interrupted job can
continue. A dataset of the Hub is streamed in an order that a broken connection does not disturb: the stream is
opened again at the next record, so nothing is lost and nothing comes twice.

The embedded corpus is the prose of the Python standard library, about 2 MB that every machine has. It has one
document per module with its docstrings in the order of the source, each docstring once in the whole corpus, then
one document per topic of `help()`. The modules are parsed, never imported. The text depends on the Python version,
not on the machine.
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
from typing import NamedTuple, TypeVar

from loopformer.data.formats import SUPPORTED, BadRecord, Meter, Record, format_of, import_optional, read_records
from loopformer.data.splits import clean
from loopformer.errors import FileProblem, LoopformerError, require
from loopformer.files import sha256_of

T = TypeVar("T")
DEFAULT_VAL_FRACTION = 0.01
_STDLIB_VAL_FRACTION = 0.05  # of 2 MB; less would measure noise
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # before each new attempt to reach the Hub
_NETWORK = ("httpx", "httpx2", "httpcore", "aiohttp", "requests", "urllib3", "fsspec", "huggingface_hub")
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Preset:
    """A well-known dataset with its training and held-out parts.

    A document is held out if its hash says so (`val_fraction` of all). Each part ends after exactly so many tokens,
    counting the end token of each document, so the counts hold by definition for any tokenizer; GPT-2's is the
    default.
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
    """The next record to read: its part of the source, its number there, and how many of its documents are done."""

    part: int = 0
    record: int = 0
    piece: int = 0


@dataclass(frozen=True)
class Part:
    """One file or one dataset: `read(skip, meter)` gives its records from number `skip` on."""

    name: str
    read: Callable[[int, Meter], Iterator[Record | BadRecord]]
    path: Path | None = None  # None if it is not a file
    size: int | None = None  # bytes on disk, if known
    changed: int | None = None  # when the file was last written to, in ns

    def checksum(self, report: Callable[[int], None] | None = None) -> str | None:
        """The SHA-256 of the file; None if it is not a file or was written to since it was found."""
        if self.path is None:
            return None
        try:
            digest = sha256_of(self.path, report)
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
        """Bytes on disk of all parts, if known."""
        sizes = [part.size for part in self.parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def records(self, start: Position, meter: Meter) -> Iterator[tuple[Position, Record | BadRecord]]:
        """Each record from `start` on, with the position after it."""
        for number in range(start.part, len(self.parts)):
            skip = start.record if number == start.part else 0
            for record_number, record in enumerate(self.parts[number].read(skip, meter), skip + 1):
                yield Position(number, record_number), record

    def text_of(self, record: Record | BadRecord, field: str, after: Position) -> str | BadRecord:
        """The text of a record, empty if there is only white space; or what is wrong with it."""
        if isinstance(record, BadRecord):
            return record
        text, where = record.get(field), self.where(after)
        if field not in record:
            known = ", ".join(map(str, itertools.islice(record, 20))) or "it is empty"
            return BadRecord(f"{where} has no field {field!r}; choose one with --field: {known[:500]}.")
        if text is not None and not isinstance(text, str):
            return BadRecord(f"Field {field!r} of {where} is not text; choose another with --field.")
        return clean(text) if text and not text.isspace() else ""

    def texts(self, field: str, start: Position | None = None) -> Iterator[tuple[Position, str]]:
        """The text of each record that has any, with the position after it; a bad record is raised."""
        for position, record in self.records(start or Position(), Meter()):
            text = self.text_of(record, field, position)
            if isinstance(text, BadRecord):
                raise text
            if text:
                yield position, text

    def where(self, after: Position) -> str:
        """The name of the record that ends at a position, or that the position is in."""
        return f"{self.parts[after.part].name} record {after.record + (after.piece > 0)}"


def parse_sources(specs: Sequence[str], field: str = "text", supervised: bool = False) -> tuple[Source, ...]:
    """The source of each `NAME_OR_PATH[=weight]`; all of them have a weight, or none."""
    require(bool(specs), "Name at least one source: a file, a folder, hf:DATASET or stdlib.")
    sources: list[Source] = []
    for spec in specs:
        source = _parse_source(spec, field, supervised)
        used = {other.name for other in sources}
        names = (f"{source.name}-{number}" if number > 1 else source.name for number in itertools.count(1))
        sources.append(dataclasses.replace(source, name=next(name for name in names if name not in used)))
    with_weight = [source for source in sources if source.weight is not None]
    if with_weight:
        require(
            len(with_weight) == len(sources), "Give every source a weight (news.jsonl=2 books=1), or none of them."
        )
        return tuple(sources)
    owners: dict[str, str] = {}  # text that is in two sources is an error, unless weights say that it is meant
    for source in sources:
        for part in source.parts:
            name = part.name if part.path is None else os.path.realpath(part.path)
            if name in owners:
                raise LoopformerError(
                    f"{part.path or part.name} would be read twice, for {owners[name]} and for {source.given}; "
                    "name it once, or give every source a weight."
                )
            owners[name] = source.given
    return tuple(sources)


def _parse_source(spec: str, field: str, supervised: bool) -> Source:
    name, weight = _split_weight(spec)
    if name == "stdlib":
        read_stdlib = functools.cache(stdlib_documents)  # parsing takes seconds, and it is read several times

        def read(skip: int, meter: Meter) -> Iterator[Record]:
            return ({field: text} for text in itertools.islice(read_stdlib(), skip, None))

        part = Part(f"Python {platform.python_version()}", read)
        return Source("stdlib", spec, weight, (part,), val_fraction=_STDLIB_VAL_FRACTION)
    if name in PRESETS:
        preset = PRESETS[name]
        part = _dataset_part(preset.dataset, preset.config, "train")
        limits = (preset.val_fraction, preset.train_tokens, preset.val_tokens)
        return Source(name, spec, weight, (part,), True, *limits)
    if name.startswith("hf:"):
        dataset, config, split, *rest = [*name.removeprefix("hf:").split(":"), "", ""]
        if not dataset or any(rest):
            raise LoopformerError(f"Cannot read {name!r}; write hf:DATASET, hf:DATASET:config or :config:split.")
        part = _dataset_part(dataset, config, split or "train")
        return Source(_slug(dataset), spec, weight, (part,), remote=not Path(dataset).is_dir())
    root, paths = _find_files(name)
    parts = []
    for path in paths:
        status = path.stat()
        read_file = functools.partial(read_records, path, field, only_field=not supervised)
        parts.append(Part(path.relative_to(root).as_posix(), read_file, path, status.st_size, status.st_mtime_ns))
    return Source(_slug(name), spec, weight, tuple(parts))


def _split_weight(spec: str) -> tuple[str, float | None]:
    """A source without its weight, and the weight."""
    name, equals, text = spec.rpartition("=")
    if not equals or Path(spec).exists():
        return spec, None
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf or not name:
        raise LoopformerError(f"The weight {text!r} of {name!r} must be a positive number, such as news.jsonl=2.")
    return name, weight


def _slug(name: str) -> str:
    """A short name for files: `corpus/wiki.jsonl.zst` is wiki, `HuggingFaceFW/fineweb-edu` fineweb-edu."""
    stem = re.sub(r"(\.(txt|md|jsonl|parquet))?(\.(gz|xz|zst))?$", "", Path(name).name or "text")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "text"


def _find_files(given: str) -> tuple[Path, list[Path]]:
    """The files that a path, a folder or a glob stands for, in a fixed order, and the folder to name them from."""
    path = Path(given)
    if path.is_file():
        if format_of(path) is None:
            raise FileProblem(f"{given} has an unknown ending; prepare reads {SUPPORTED}.")
        return path.parent, [path]
    if path.is_dir():
        root, entries = path, list(path.rglob("*"))
    elif glob.has_magic(given):
        entries = list(_expand_glob(given))
        root = Path(os.path.commonpath([path.parent for path in entries])) if entries else Path()
    else:
        raise FileProblem(f"There is no file or folder {given}; named sources are stdlib, {', '.join(PRESETS)}.")
    # A file is read once, under its first name, however many links lead to it.
    files = {os.path.realpath(path): path for path in sorted(entries, reverse=True) if format_of(path)}
    paths = sorted(path for path in files.values() if path.is_file())
    if not paths:
        raise FileProblem(f"{given} holds no file that prepare reads; it reads {SUPPORTED}.")
    return root, paths


def _expand_glob(pattern: str) -> Iterator[Path]:
    """The paths of a glob; each folder below a `**` is searched once, however many links lead to it."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    stars = parts.index("**")
    above, below = Path(*parts[:stars]), parts[stars + 1 :] or ("*",)
    seen: set[str] = set()
    for top in sorted(glob.glob(str(above))):
        for folder, folders, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if real not in seen else []
            if real not in seen:
                yield from _expand_glob(os.path.join(glob.escape(folder), *below))
            seen.add(real)


def _dataset_part(dataset: str, config: str, split: str) -> Part:
    name = ":".join(["hf", dataset, config, split])
    return Part(name, lambda skip, meter: read_dataset(dataset, config, split, skip))


def read_dataset(dataset: str, config: str, split: str, skip: int = 0) -> Iterator[Record]:
    """The records of a dataset by id, or of a local dataset folder, from number `skip` on."""
    return iterate_with_retries(lambda done: _open_dataset(dataset, config, split, done), skip, f"hf:{dataset}")


def iterate_with_retries(
    open_at: Callable[[int], Iterator[T]], skip: int, name: str, waits: tuple[float, ...] = _RETRY_SECONDS
) -> Iterator[T]:
    """The items of `open_at(skip)`; if the network fails, it is opened again at the item after the last one.

    If not even the first item comes, that is an error at once, without waiting.
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


def _open_dataset(dataset: str, config: str, split: str, skip: int) -> Iterator[Record]:
    datasets = import_optional("datasets", "A Hugging Face dataset")
    try:
        if any((Path(dataset) / name).is_file() for name in ("dataset_dict.json", "state.json")):  # by save_to_disk
            saved = datasets.load_from_disk(dataset)
            stream = (saved[split] if isinstance(saved, dict) else saved).to_iterable_dataset()
        else:
            stream = datasets.load_dataset(dataset, config or None, split=split, streaming=True)
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


def _is_network(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | LoopformerError):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stdlib_documents() -> list[str]:
    """The documents of the embedded corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            if fresh:
                documents.append("\n\n".join(fresh) + "\n")
    topics: list[str] = []
    for statement in _parse_module(root / "pydoc_data" / "topics.py").body:
        if isinstance(statement, ast.Assign):
            texts = ast.literal_eval(statement.value)
            topics += [texts[name].strip() + "\n" for name in sorted(texts)]
    return documents + list(dict.fromkeys(topics))


def _docstrings(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(_parse_module(path)) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield text.strip()


def _parse_module(path: Path) -> ast.Module:
    """The syntax tree of a module; an empty one if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ast.Module([], [])
