"""How far a prepared folder has come, on disk: `prepare.state.json` while it is made, `index.json` at the end.

with alone_in(folder):
    ledger = Ledger(folder, settings)
    index = ledger.begin()       # the index of a finished folder, or None: go on with ledger.sources
    ledger.commit()              # after the shards were flushed
    index = ledger.finish(…)

Both files are replaced whole. The state is written only when what it describes is safe on disk, so it is always
true; whatever the shards hold beyond it is cut off when the work continues.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopformer.data.corpus import Position
from loopformer.data.shards import Shard, sync_folder, write_atomic, writing
from loopformer.data.splits import SPLITS, Split, Splitter
from loopformer.errors import FileProblem

INDEX_FILE = "index.json"
STATE_FILE = "prepare.state.json"


@dataclass
class Written:
    """What one split of one source has on disk; `masks` lie parallel to `shards` for supervised examples."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    shards: list[Shard] = field(default_factory=list)
    masks: list[Shard] = field(default_factory=list)


@dataclass
class SourceState:
    """How far one source has come."""

    splitter: Splitter
    position: Position = field(default_factory=Position)
    done: bool = False
    splits: dict[Split, Written] = field(default_factory=lambda: {split: Written() for split in SPLITS})


@dataclass
class Ledger:
    """The settings of a folder and the state of each source that was begun."""

    folder: Path
    settings: dict[str, Any]
    sources: list[SourceState] = field(default_factory=list)

    def begin(self) -> dict[str, Any] | None:
        """Begin or go on: the index if the folder is finished, else None and `sources` as they were."""
        index, state = self.folder / INDEX_FILE, self.folder / STATE_FILE
        if index.exists():
            found = read_json(index)
            self._compare(found.get("settings"))
            state.unlink(missing_ok=True)
            return found
        if state.exists():
            found = read_json(state)
            self._compare(found.get("settings"))
            try:
                self.sources = [_source_state(source) for source in found["sources"]]
            except (KeyError, TypeError) as error:
                raise _damaged(state) from error
            return None
        if any(path.name != f"{STATE_FILE}.tmp" for path in self.folder.iterdir()):
            raise FileProblem(
                f"{self.folder} is not empty and was not made by prepare; choose another --out folder."
            )
        return None

    def commit(self) -> None:
        """Record how far the work has come; the shards must be on disk by now."""
        sources = [dataclasses.asdict(source) for source in self.sources]
        write_atomic(self.folder / STATE_FILE, _json({"settings": self.settings, "sources": sources}))

    def finish(self, index: dict[str, Any]) -> dict[str, Any]:
        """Write the index, after which the folder can be used."""
        write_atomic(self.folder / INDEX_FILE, _json({"settings": self.settings, **index}))
        (self.folder / STATE_FILE).unlink()
        sync_folder(self.folder)
        return read_json(self.folder / INDEX_FILE)

    def _compare(self, earlier: Any) -> None:
        now = json.loads(_json(self.settings))
        if earlier != now:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(name for name in now if earlier.get(name) != now[name])
            raise FileProblem(
                f"{self.folder} was begun with other settings or files ({changed}); "
                "use the same ones, choose another --out folder, or delete it."
            )


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(found, dict):
        raise _damaged(path)
    return found


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


def _damaged(path: Path) -> FileProblem:
    return FileProblem(f"{path} is damaged; delete the folder and prepare it again.")


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _source_state(found: dict[str, Any]) -> SourceState:
    return SourceState(
        splitter=_splitter(**found["splitter"]),
        position=Position(*found["position"]),
        done=found["done"],
        splits={split: _written(found["splits"][split]) for split in SPLITS},
    )


def _written(found: dict[str, Any]) -> Written:
    shards, masks = ([Shard(**shard) for shard in found[kind]] for kind in ("shards", "masks"))
    return Written(found["tokens"], found["documents"], found["text_bytes"], shards, masks)


def _splitter(fraction: float, piece: int, held: list[int], kept: list[int]) -> Splitter:
    return Splitter(fraction, piece, tuple(held), tuple(kept))
