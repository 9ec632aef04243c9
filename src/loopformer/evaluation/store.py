"""Finished pieces of an evaluation, kept so that an interrupted or extended one does not start again.

store = Store.beside("runs/mine")                      # runs/mine/evaluation
key = {"weights": weights_hash(model), "text": sha256, "trajectory": "4-2-1-1"}
value = store.get(key) or store.put(key, measure())    # plain JSON

A piece is one file, named by the hash of its key and written whole or not at all. What changes a number belongs in
the key; the weights' hash does, so pieces of other weights are never found.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loopformer.files import write_json
from loopformer.model import LoopedLM

Piece = dict[str, Any]
VERSION = 1  # of what pieces hold and how they are measured; another one finds none of the old


class Store:
    """A folder of pieces; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, source: str | Path) -> "Store":
        """In the folder of a run or model; for anything else, or a read-only one, in the user's cache.

        Nothing is kept where that cannot be written either: numbers are worth more than their copies.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "loopformer"
        homes = (Path(source), cache) if Path(source).is_dir() else (cache,)
        return cls(next((home / "evaluation" for home in homes if _writable(home / "evaluation")), None))

    def get(self, key: Mapping[str, Any]) -> Piece | None:
        """The value kept under this key; a file that is not whole counts as none."""
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            piece = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None
        value = piece.get("value") if isinstance(piece, dict) else None
        return value if isinstance(value, dict) else None

    def put(self, key: Mapping[str, Any], value: Piece) -> Piece:
        """Keep a value and return it."""
        path = self._path(key)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"key": dict(key), "value": value})
        return value

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        whole = {"version": VERSION, **key}
        name = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]
        return self.folder / f"{name}.json"


def _writable(folder: Path) -> bool:
    """Whether files can be put there, also if the folder has to be made first."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def weights_hash(model: LoopedLM) -> str:
    """What the model computes, as one hash: its settings and its weights, in their dtype."""
    digest = hashlib.sha256(json.dumps(model.config.plain(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
