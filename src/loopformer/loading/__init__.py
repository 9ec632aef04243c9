"""Models on disk: folder.py (the package's own model and run folders) · published.py (published weights).

model, tokenizer_folder = find_model("runs/demo")     # a run, a model folder, published weights, or "box"
config, tokenizer_folder = find_config("runs/demo")   # the same without the weights
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from loopformer.config import ModelConfig
from loopformer.errors import FileProblem, require
from loopformer.loading.folder import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    find_damage,
    is_checkpoint,
    is_model_folder,
    is_run_folder,
    newest_model,
    read_config,
    resolve_model_path,
)
from loopformer.loading.folder import load_model as load_model
from loopformer.loading.folder import save_model as save_model
from loopformer.loading.published import load_published
from loopformer.model import LoopedLM

T = TypeVar("T")
_ATTEMPTS = 20  # to read a run whose training is deleting old checkpoints


def find_model(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[LoopedLM, Path | None]:
    """The model, in fp32 on the CPU, and the folder of its tokenizer if there is one."""
    return _find(source, heads, loops, load_model, lambda model: model)


def find_config(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[ModelConfig, Path | None]:
    """The model's settings and the folder of its tokenizer; weights are read only if they are published ones."""
    return _find(source, heads, loops, read_config, lambda model: model.config)


def _find(
    source: str | Path,
    heads: int | None,
    loops: int | None,
    read_folder: Callable[[Path], T],
    from_published: Callable[[LoopedLM], T],
) -> tuple[T, Path | None]:
    def read(folder: Path) -> tuple[T, Path | None]:
        if not is_model_folder(folder):
            return from_published(load_published(source, heads, loops)), _tokenizer_folder(folder)
        config = read_config(folder)
        for name, given, stored in (("heads", heads, config.heads), ("loops", loops, config.loops)):
            require(given in (None, stored), f"{folder / CONFIG} says {stored} {name}; leave --{name} out.")
        return read_folder(folder), _tokenizer_folder(folder)

    return from_model_folder(source, read)


def read_model(folder: Path) -> tuple[LoopedLM, Path | None]:
    """The model of a model folder and the folder of its tokenizer, without verifying checksums."""
    return load_model(folder), _tokenizer_folder(folder)


def _tokenizer_folder(folder: Path) -> Path | None:
    return folder if (folder / TOKENIZER).is_file() else None


def from_model_folder(source: str | Path, read: Callable[[Path], T]) -> T:
    """The result of `read` on the folder that holds the model.

    A running training may delete the checkpoint while it is being read. Then the newest one is read instead.
    """
    for attempt in range(_ATTEMPTS):
        folder = model_folder(source)
        try:
            return read(folder)
        except (FileProblem, OSError):
            is_intact = folder.is_dir() and find_damage(folder, (WEIGHTS, CONFIG, TOKENIZER)) is None
            if not is_run_folder(source) or is_intact or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def model_folder(source: str | Path) -> Path:
    """The folder that holds the model: the newest intact checkpoint of a run, or the bundled model for `box`.

    A path to a checkpoint is verified against its checksums.
    """
    path = resolve_model_path(source)
    if is_run_folder(path):
        return newest_model(path, lambda sentence: print(sentence, file=sys.stderr))
    if is_checkpoint(path) and (damage := find_damage(path, (WEIGHTS, CONFIG, TOKENIZER))) is not None:
        raise FileProblem(f"The checkpoint {path} is damaged ({damage}); use another checkpoint of the run.")
    return path
