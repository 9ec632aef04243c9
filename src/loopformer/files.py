"""Files that are replaced whole, checksums, locks, JSON: what every part of the package writes and reads with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from loopformer.errors import FileProblem

_BLOCK = 1 << 20


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


def write_together(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Replace several files of a folder: all are written aside, then put in place one right after another.

    Whatever fails or interrupts the writing leaves the folder as it was, and no folder where there was none.
    """
    made, temporaries = list[Path](), dict[Path, Path]()
    try:
        with writing(folder):
            for name, content in contents.items():
                path = folder / name
                for parent in reversed([one for one in (path.parent, *path.parent.parents) if not one.exists()]):
                    made.append(parent)
                    parent.mkdir()
                temporaries[path] = path.with_name(path.name + ".tmp")
                with temporaries[path].open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
    except BaseException:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        raise
    with writing(folder):
        try:
            for path, temporary in temporaries.items():
                os.replace(temporary, path)
        finally:  # all is on disk, so an interruption that comes now finds it finished
            for path, temporary in temporaries.items():
                if temporary.exists():
                    os.replace(temporary, path)
        for parent in {path.parent for path in temporaries}:
            sync_folder(parent)
    return list(temporaries)


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


def blocks_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size and (block := file.read(min(size, _BLOCK))):
        yield block
        size -= len(block)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes from writing to it; a process that dies lets go of it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise FileProblem(
            f"Another process is at work in {folder}; wait for it or choose another --out."
        ) from error
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FileProblem(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise FileProblem(f"{path} must hold a JSON object.")
    return value
