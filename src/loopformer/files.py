"""Files that are replaced whole, locks, checksums, and JSON and YAML read within limits.

    write_atomic(path, content)          # a reader sees the old content or the new, also after a crash
    with locked(folder): ...             # make the folder, keep other processes from writing to it
    with opened_alone(path) as file: ... # the same for one file that grows: append(file, path, line)
    write_json(path, value)              # as write_atomic
    read_json(path); read_yaml(path)     # a mapping, or one sentence about the file

What is wrong with a file is a `FileProblem`; where it can be read and its content is wrong, a `DamagedFile`.
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
from typing import Any

import yaml
from filelock import lock_descriptor

from loopformer.errors import FileProblem, remedy, unreadable

_BLOCK = 1 << 20
_DEEPEST = 32  # of YAML
_LARGEST = 64 << 20  # bytes of JSON or YAML; ours have some kilobytes


class DamagedFile(FileProblem):
    """A file that can be read and does not hold what it should."""


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file whole: a reader sees the old content or the new, also after a crash."""
    with writing(path):
        try:
            os.replace(_write_aside(path, content), path)
        except BaseException:
            _remove(_aside(path))
            raise
        sync_folder(path.parent)


def write_together(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Replace several files of a folder: all are written aside, then put in place one right after another.

    Whatever fails or interrupts the writing leaves the folder as it was, and no folder where there was none.
    """
    paths = [folder / name for name in contents]
    parents = sorted({path.parent for path in paths})
    with ExitStack() as stack:
        for parent in parents:
            stack.enter_context(no_empty_folder(parent))
        try:
            with writing(folder):
                for path, content in zip(paths, contents.values(), strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write_aside(path, content)
        except BaseException:
            for path in paths:
                _remove(_aside(path))
            raise
    with writing(folder):
        try:
            for path in paths:
                os.replace(_aside(path), path)
        finally:  # all is on disk, so an interruption that comes now finds it finished
            for path in paths:
                if _aside(path).exists():
                    os.replace(_aside(path), path)
        for parent in parents:
            sync_folder(parent)
    return paths


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _write_aside(path: Path, content: bytes) -> Path:
    """Write what is to take a file's place, safe on disk; where it lies."""
    with _aside(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return _aside(path)


@contextmanager
def no_empty_folder(folder: Path) -> Iterator[None]:
    """If what is inside fails or is stopped, remove the folders that it made for `folder` and left empty."""
    missing = _missing(folder)
    try:
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that are not there, from the inside outwards."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or something is in it
            folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Make new and removed names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, a quota, a read-only folder: one sentence."""
    try:
        yield
    except OSError as error:
        raise FileProblem(
            f"Cannot write {path}: {error.strerror or error}; what was finished is safe, "
            f"so {remedy(error)} and start again."
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes from writing to it; a process that dies lets go of it.

    Work that fails before it has written anything leaves no empty folder behind.
    """
    missing = _missing(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, f"in {folder}")
        try:
            yield
        except BaseException:
            _remove_empty(missing)  # before another process can get hold of it
            raise
    finally:
        os.close(descriptor)


def check_writable(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be written to before the work is done."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileProblem(f"The folder {folder} cannot be written to; choose another with {option}.")


def _lock(descriptor: int, where: str) -> None:
    # The lock belongs to the descriptor, not to a file of its own: nothing is left in the folder, a folder that is
    # read-only can be locked, and the system frees the lock when the process dies.
    if not lock_descriptor(descriptor, blocking=False):
        raise FileProblem(f"Another process is at work {where}; wait for it or choose another --out.")


@contextmanager
def opened_alone(path: Path) -> Iterator[io.FileIO]:
    """Open a file to append to, made if it is not there, and keep other processes from doing so."""
    with writing(path):
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    with file:
        _lock(file.fileno(), f"on {path}")
        yield file


def append(file: io.FileIO, path: Path, content: bytes) -> None:
    """Add to the end of a file all of it or nothing, as far as a full disk or Ctrl-C can be answered."""
    end = file.seek(0, os.SEEK_END)
    with writing(path):
        try:
            while content:
                content = content[file.write(content) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


def sha256_of(path: Path, report: Callable[[int], None] | None = None) -> str:
    """The checksum of a file; `report` gets the number of bytes of each block that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if report:
                report(len(block))
    return digest.hexdigest()


def json_bytes(value: Any) -> bytes:
    """JSON for a file that people may look into; half of a surrogate pair, which UTF-8 has not, as an escape."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Replace a file by such JSON, whole."""
    write_atomic(path, json_bytes(value))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    return _read_mapping(path, str(path), "JSON", json.loads)


def read_yaml(file: Traversable | Path, name: str | None = None) -> dict[str, Any]:
    """The YAML mapping of a file, which errors call by `name`."""
    return _read_mapping(file, name or str(file), "YAML", parse_yaml)


def parse_yaml(text: str) -> Any:
    """A value of YAML that says what it looks like: no aliases, no key twice, not nested without end."""
    return yaml.load(text, Loader=_StrictLoader)


class _StrictLoader(yaml.SafeLoader):
    """Refuses what YAML would expand, forget or follow without end."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases such as *name; write them out")
        nested = self.check_event(yaml.CollectionStartEvent)
        self.depth += nested
        if self.depth > _DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {_DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= nested
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if first := lines.get(key.value):  # YAML would forget the first value
                    raise yaml.YAMLError(f"{key.value} stands twice, in line {first} and in line {line}; keep one")
                lines[key.value] = line
        return node


def _read_mapping(
    file: Traversable | Path, name: str, language: str, parse: Callable[[str], Any]
) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST + 1)
    except OSError as error:
        raise unreadable(name, error) from error
    if len(content) > _LARGEST:
        raise DamagedFile(f"{name} is larger than {_LARGEST >> 20} MB, too large for settings or an index.")
    try:
        value = parse(content.decode())
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # a wrong encoding is a ValueError
        reason = " ".join(str(error).split())
        raise DamagedFile(f"{name} is not readable {language} ({reason}).") from error
    if not isinstance(value, dict):
        wanted = "a JSON object" if language == "JSON" else "a mapping of settings such as 'model:'"
        raise DamagedFile(f"{name} must hold {wanted}.")
    return value
