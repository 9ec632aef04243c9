"""Atomic writes, locks, checksums, and JSON and YAML read within limits.

    write_atomic(path, content)          # a reader sees the old content or the new, also after a crash
    with open_atomic(path) as file: ...  # the same for content that is written bit by bit
    with lock_folder(folder): ...        # make the folder and keep other processes from writing to it
    with open_exclusive(path) as file: ... # the same for a single file, to append to: append_line(file, path, line)
    write_json(path, value)              # as write_atomic
    read_json(path); read_yaml(path)     # a mapping, or one sentence about the file

A problem with a file is a `FileProblem`. If the file can be read but its content is wrong, it is a `DamagedFile`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import lock_descriptor

from loopformer.errors import FileProblem, remedy, unreadable

_READ_BYTES = 1 << 20  # per read
_MAX_YAML_DEPTH = 32
_MAX_NUMBER_CHARS = 100  # in YAML; Python prints no whole number of thousands of digits, and is slow to read it
_MAX_MB = {"JSON": 64, "YAML": 1}  # of a file; settings have a few kilobytes, and parsing YAML takes seconds per MB


class DamagedFile(FileProblem):
    """A file that can be read but has the wrong content."""


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new, also after a crash."""
    with open_atomic(path) as file:
        file.write(content)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path` atomically once the body is done; if the body fails, `path` stays."""
    with explain_write_errors(path):
        try:
            with _temporary(path).open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # before the rename, so that the new name never points to missing content
            os.replace(_temporary(path), path)
        except BaseException:
            _remove(_temporary(path))
            raise
        sync_folder(path.parent)


def write_together(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Replace several files of a folder: all are written to temporary files first, then renamed one after another.

    If writing fails or is interrupted, the folder stays as it was, and a folder that did not exist is removed.
    """
    paths = [folder / name for name in contents]
    parents = sorted({path.parent for path in paths})
    with ExitStack() as stack:
        for parent in parents:
            stack.enter_context(remove_empty_on_failure(parent))
        try:
            with explain_write_errors(folder):
                for path, content in zip(paths, contents.values(), strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write_temporary(path, content)
        except BaseException:
            for path in paths:
                _remove(_temporary(path))
            raise
    with explain_write_errors(folder):
        try:
            for path in paths:
                os.replace(_temporary(path), path)
        finally:  # everything is on disk, so an interruption from here on still finishes the renaming
            for path in paths:
                if _temporary(path).exists():
                    os.replace(_temporary(path), path)
        for parent in parents:
            sync_folder(parent)
    return paths


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_temporary(path: Path, content: bytes) -> None:
    """Write the content to the temporary file and flush it to disk, so that the later rename is safe."""
    with _temporary(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


@contextmanager
def remove_empty_on_failure(folder: Path) -> Iterator[None]:
    """If the body raises, remove `folder` and those of its parents that did not exist before, if they are empty."""
    missing = _missing_folders(folder)
    try:
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _missing_folders(folder: Path) -> list[Path]:
    """Those of the folder and its parents that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was never made, or it is not empty
            folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed files of a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a quota or a read-only folder into one sentence."""
    try:
        yield
    except OSError as error:
        raise FileProblem(
            f"Cannot write {path}: {error.strerror or error}; what was finished is safe, "
            f"so {remedy(error)} and start again."
        ) from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder and lock it against other processes; a process that dies frees its lock.

    If the body fails before it has written anything, no empty folder stays behind.
    """
    missing = _missing_folders(folder)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, f"in {folder}")
        try:
            yield
        except BaseException:
            # Remove it while it is locked: afterwards another process might already work in it.
            _remove_empty(missing)
            raise
    finally:
        os.close(descriptor)


@contextmanager
def open_exclusive(path: Path) -> Iterator[io.FileIO]:
    """Open a file for appending, creating it if necessary, and lock it against other processes."""
    with explain_write_errors(path):
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    with file:
        _lock(file.fileno(), f"on {path}")
        yield file


def _lock(descriptor: int, where: str) -> None:
    # The descriptor itself is locked, not a lock file. So nothing is left in the folder, read-only folders can be
    # locked, and the system frees the lock when the process dies.
    if not lock_descriptor(descriptor, blocking=False):
        raise FileProblem(f"Another process is working {where}; wait for it or choose another --out.")


def append_line(file: io.FileIO, path: Path, content: bytes) -> None:
    """Append all of the content, or nothing if the disk is full or Ctrl-C interrupts."""
    end = file.seek(0, os.SEEK_END)
    with explain_write_errors(path):
        try:
            while content:
                content = content[file.write(content) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise an error early if a folder cannot be written to, so that no work is lost."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileProblem(f"The folder {folder} cannot be written to; choose another with {option}.")


def sha256_of(path: Path, report: Callable[[int], None] | None = None) -> str:
    """The checksum of a file; `report` gets the size of each block after it was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            if report:
                report(len(block))
    return digest.hexdigest()


def json_bytes(value: Any) -> bytes:
    """JSON for a file that people may read; halves of surrogate pairs, which UTF-8 cannot hold, are escaped."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Atomically replace a file with readable JSON."""
    write_atomic(path, json_bytes(value))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    return _read_mapping(path, str(path), "JSON", json.loads)


def read_yaml(file: Traversable | Path, name: str | None = None) -> dict[str, Any]:
    """The YAML mapping of a file; errors call the file `name`."""
    return _read_mapping(file, name or str(file), "YAML", parse_yaml)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; aliases, repeated keys and deep nesting are errors."""
    return yaml.load(text, Loader=_StrictLoader)


class _StrictLoader(yaml.SafeLoader):
    """Refuses aliases, which can expand without bound, repeated keys, deep nesting and long numbers."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases such as *name; write them out")
        nested = self.check_event(yaml.CollectionStartEvent)
        self.depth += nested
        if self.depth > _MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {_MAX_YAML_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= nested
        if isinstance(node, yaml.ScalarNode):
            is_number = node.tag.endswith((":int", ":float"))
            if is_number and len(node.value) > _MAX_NUMBER_CHARS:
                raise yaml.YAMLError(f"{node.value} has more than {_MAX_NUMBER_CHARS} digits")
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if first := lines.get(key.value):  # YAML would silently drop the first value
                    raise yaml.YAMLError(f"{key.value} appears twice, in lines {first} and {line}; keep one")
                lines[key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, ValueError) as error:  # what the library raises depends on the type
            value, kind = repr(node.value), node.tag.rpartition(":")[2]
            raise yaml.YAMLError(f"{value} in line {node.start_mark.line + 1} is no {kind}") from error


def _read_mapping(
    file: Traversable | Path, name: str, language: str, parse: Callable[[str], Any]
) -> dict[str, Any]:
    max_bytes = _MAX_MB[language] << 20
    try:
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(name, error) from error
    if len(content) > max_bytes:
        raise DamagedFile(f"{name} is larger than {_MAX_MB[language]} MB, too large for settings or an index.")
    try:
        value = parse(content.decode("utf-8-sig"))  # Windows editors begin files with a byte order mark
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # a wrong encoding is a ValueError
        reason = " ".join(str(error).split())
        raise DamagedFile(f"{name} is not readable {language} ({reason}).") from error
    if not isinstance(value, dict):
        expected = "a JSON object" if language == "JSON" else "a mapping of settings such as 'model:'"
        raise DamagedFile(f"{name} must hold {expected}.")
    return value
