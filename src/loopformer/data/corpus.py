"""Where text comes from: named sources, files, folders, globs and Hugging Face datasets, each with a weight.

    parse_sources(["stdlib"])                                      # the embedded default
    parse_sources(["books/*.txt=2", "news.jsonl.zst=1"])           # a mixture
    parse_sources(["hf:HuggingFaceFW/fineweb-edu:sample-10BT"])    # hf:DATASET[:config][:split], also a folder
    parse_sources(["pile"])                                        # a preset: pile, fineweb-edu, openwebtext

A source is a list of parts (files or datasets). Reading a part can start at any record, so an interrupted job can
continue. If the connection to the Hub breaks, the stream is reopened at the next record, so no record is lost or
read twice.

The embedded corpus is the documentation of the Python standard library, about 2 MB that every machine has. First
comes one document per module with its docstrings in source order. A docstring that occurs more than once is used
once. Then comes one document per topic of `help()`. Modules are parsed, never imported. The text depends on the
Python version, not on the machine.
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

from loopformer.data.formats import SUPPORTED, BadRecord, Meter, Record, format_of, read_records
from loopformer.data.splits import clean
from loopformer.errors import FileProblem, LoopformerError, import_optional, require
from loopformer.files import sha256_of

T = TypeVar("T")
DEFAULT_VAL_FRACTION = 0.01
_STDLIB_VAL_FRACTION = 0.05  # 100 kB; the loss on less would be noise
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # before each new attempt to reach the Hub
_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "aiohttp", "requests", "urllib3", "fsspec", "huggingface_hub")
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Preset:
    """A well-known dataset with its training and held-out parts.

    The hash of a document decides whether it is held out; `val_fraction` of all documents are. Each split is cut
    after exactly `train_tokens` or `val_tokens`, end tokens included, whatever the tokenizer (default: GPT-2's).
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
    """Where to resume: the index of the part, of the next record in it, and of the next document in that record."""

    part: int = 0
    record: int = 0
    piece: int = 0


@dataclass(frozen=True)
class Part:
    """One file or one dataset: `read(skip, meter)` yields its records after the first `skip`."""

    name: str
    read: Callable[[int, Meter], Iterator[Record | BadRecord]]
    path: Path | None = None  # None if it is not a file
    size: int | None = None  # bytes on disk, if known
    modified_ns: int | None = None  # modification time of the file when it was listed

    def checksum(self, report: Callable[[int], None] | None = None) -> str | None:
        """The SHA-256 of the file; None if it is not a file or has changed since it was listed."""
        if self.path is None:
            return None
        try:
            # The time is compared after hashing, or a write in the meantime would go unnoticed.
            digest = sha256_of(self.path, report)
            return digest if self.path.stat().st_mtime_ns == self.modified_ns else None
        except OSError:
            return None


@dataclass(frozen=True)
class Source:
    """A named list of parts, its weight in a mixture, and how many of its tokens to use."""

    name: str
    given: str  # the spec as the user wrote it; `prepare` stores fields under their names
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
        for part in range(start.part, len(self.parts)):
            skip = start.record if part == start.part else 0
            for next_record, record in enumerate(self.parts[part].read(skip, meter), skip + 1):
                yield Position(part, next_record), record

    def text_of(self, record: Record | BadRecord, field: str, after: Position) -> str | BadRecord:
        """The text of a record, empty if it is only white space, or a `BadRecord` that says what is wrong."""
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
        """Each text that is not empty, with the position after its record. Raises the first bad record."""
        for position, record in self.records(start or Position(), Meter()):
            text = self.text_of(record, field, position)
            if isinstance(text, BadRecord):
                raise text
            if text:
                yield position, text

    def where(self, after: Position) -> str:
        """A name for error messages: the record before a position, or the record that the position is inside."""
        return f"{self.parts[after.part].name} record {after.record + (after.piece > 0)}"


def parse_sources(specs: Sequence[str], field: str = "text", supervised: bool = False) -> tuple[Source, ...]:
    """The sources for specs such as `NAME_OR_PATH[=weight]`. If one has a weight, those without have weight 1."""
    require(bool(specs), "Name at least one source: a file, a folder, hf:DATASET or stdlib.")
    sources: list[Source] = []
    for spec in specs:
        source = _parse_source(spec, field, supervised)
        used = {other.name for other in sources}
        names = (f"{source.name}-{number}" if number > 1 else source.name for number in itertools.count(1))
        sources.append(dataclasses.replace(source, name=next(name for name in names if name not in used)))
    if any(source.weight is not None for source in sources):
        return tuple(dataclasses.replace(source, weight=source.weight or 1.0) for source in sources)
    # Without weights, a file in two sources is a mistake. Weights say that it is repeated on purpose.
    owners: dict[str, str] = {}  # the spec that reads each file or dataset
    for source in sources:
        for part in source.parts:
            name = part.name if part.path is None else os.path.realpath(part.path)
            if name in owners:
                raise LoopformerError(
                    f"{part.path or part.name} would be read twice, for {owners[name]} and for {source.given}; "
                    f"name it once, or give a weight, such as {source.given}=1."
                )
            owners[name] = source.given
    return tuple(sources)


def _parse_source(spec: str, field: str, supervised: bool) -> Source:
    name, weight = _split_weight(spec)
    if name == "stdlib":
        read_stdlib = functools.cache(stdlib_documents)  # parsing takes seconds

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
    """A spec split into its name or path and its weight."""
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
    """A short file name: `wiki` for corpus/wiki.jsonl.zst, `fineweb-edu` for HuggingFaceFW/fineweb-edu."""
    stem = re.sub(r"(\.(txt|md|jsonl|parquet))?(\.(gz|xz|zst))?$", "", Path(name).name or "text")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "text"


def _find_files(given: str) -> tuple[Path, list[Path]]:
    """The root that part names are relative to, and the sorted files of a path, a folder or a glob."""
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
    # Links may lead to the same file. The reverse order makes the first name of a file win.
    files = {os.path.realpath(path): path for path in sorted(entries, reverse=True) if format_of(path)}
    paths = sorted(path for path in files.values() if path.is_file())
    if not paths:
        raise FileProblem(f"{given} holds no file that prepare reads; it reads {SUPPORTED}.")
    return root, paths


def _expand_glob(pattern: str) -> Iterator[Path]:
    """The paths of a glob. A folder below `**` is searched once, so that circular links end."""
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
            # os.walk descends into what is left in `folders`.
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if real not in seen else []
            if real not in seen:
                yield from _expand_glob(os.path.join(glob.escape(folder), *below))
            seen.add(real)


def _dataset_part(dataset: str, config: str, split: str) -> Part:
    name = ":".join(["hf", dataset, config, split])
    return Part(name, lambda skip, meter: read_dataset(dataset, config, split, skip))


def read_dataset(dataset: str, config: str, split: str, skip: int = 0) -> Iterator[Record]:
    """The records after the first `skip` of a Hub dataset or a local dataset folder."""
    return iterate_with_retries(lambda done: _open_dataset(dataset, config, split, done), skip, f"hf:{dataset}")


def iterate_with_retries(
    open_at: Callable[[int], Iterator[T]], skip: int, name: str, waits: tuple[float, ...] = _RETRY_SECONDS
) -> Iterator[T]:
    """The items of `open_at(skip)`. If the network fails, it is reopened at the next item.

    If the network fails before the first item, there is no retry, as the machine is probably offline.
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
                    "start again once the connection is back, and it will continue."
                ) from error
            time.sleep(waits[attempt])
            attempt += 1


def _open_dataset(dataset: str, config: str, split: str, skip: int) -> Iterator[Record]:
    datasets = import_optional("datasets", "A Hugging Face dataset", "data")
    try:
        if any((Path(dataset) / name).is_file() for name in ("dataset_dict.json", "state.json")):  # save_to_disk
            saved = datasets.load_from_disk(dataset)
            stream = (saved[split] if isinstance(saved, dict) else saved).to_iterable_dataset()
        else:
            stream = datasets.load_dataset(dataset, config or None, split=split, streaming=True)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise LoopformerError(f"There is no dataset {dataset!r} that you may read; check its id.") from error
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise LoopformerError(f"hf:{dataset} cannot be opened: {_first_line(error)}") from error
    read_to = skip
    try:
        for record in stream.skip(skip) if skip else stream:
            yield record
            read_to += 1
    except Exception as error:  # `datasets` and its file readers raise many types
        if _is_network(error):
            raise
        raise FileProblem(
            f"hf:{dataset} cannot be read after record {read_to} ({_first_line(error)}); repair it or leave it out."
        ) from error


def _is_network(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | LoopformerError):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stdlib_documents() -> list[str]:
    """The documents of the embedded corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            new_texts = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(new_texts)
            if new_texts:
                documents.append("\n\n".join(new_texts) + "\n")
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
            warnings.simplefilter("ignore")  # about invalid escapes in the strings of other people's modules
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ast.Module([], [])
