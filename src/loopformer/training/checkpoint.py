"""Checkpoints that are whole or not there, and that are checked before they are trusted.

    runs/x/checkpoints/step-00000100/
      model.safetensors, config.json, tokenizer.json   a model folder of ours: `loopformer.load` reads it
      optimizer/*.safetensors                          the optimizer's moments; one file, or one per rank (FSDP)
      run.yaml, state.json                             settings, counters, RNG, data position
      checksums.json                                   written last, over all of the above

A checkpoint is written beside its place and renamed into it, so a crash at any moment leaves the earlier ones.
Nothing in it is pickled. Sharded optimizer state goes through torch.distributed.checkpoint's safetensors storage
and loads on any number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from loopformer.errors import FileProblem, remedy
from loopformer.files import sha256_of, sync_folder
from loopformer.loading.folder import CHECKSUMS, FOLDER, checkpoints, step_of, write_safetensors
from loopformer.training.distributed import Ranks
from loopformer.training.optimizer import ModelOptimizer

OPTIMIZER = "optimizer"


def write_checkpoint(
    run: Path, step: int, fill: Callable[[Path], None], optimizer: dict[str, Tensor], ranks: Ranks, sharded: bool
) -> Path:
    """Write a checkpoint in one go: `fill` puts the main rank's files into the folder it is given."""
    place = run / FOLDER / f"step-{step:08d}"
    part = place.with_name(place.name + ".part")

    def begin() -> None:
        if ranks.main:
            shutil.rmtree(part, ignore_errors=True)
            (part / OPTIMIZER).mkdir(parents=True)
            fill(part)

    def moments() -> None:
        if sharded:
            save(optimizer, storage_writer=HuggingFaceStorageWriter(str(part / OPTIMIZER), save_distributed=True))
        elif ranks.main:
            write_safetensors(optimizer, part / OPTIMIZER / "optimizer.safetensors")

    def finish() -> None:
        if ranks.main:
            _seal(part)
            if place.exists():
                _remove(place)
            os.rename(part, place)
            sync_folder(place.parent)

    for phase in (begin, moments, finish):
        trouble: BaseException | None = None
        try:
            phase()
        except (OSError, SafetensorError, FileProblem, CheckpointException) as error:
            trouble = error
        # Every rank must learn of a failure, or the others would wait for this one for ever.
        if ranks.any(trouble is not None):
            if ranks.main:
                shutil.rmtree(part, ignore_errors=True)
                with suppress(OSError):  # it holds the earlier ones
                    part.parent.rmdir()
            kept = checkpoints(run)
            last = f"the last good one is {kept[-1]}" if kept else "there is no earlier one"
            cause = _cause(trouble) if trouble is not None else None
            reason = " ".join(str(cause or "on another rank").split())
            what_to_do = remedy(cause) if cause is not None else "see what that rank says"
            raise FileProblem(
                f"The checkpoint of step {step} could not be written ({reason}); {last}. "
                f"{what_to_do.capitalize()} and go on with --resume."
            ) from trouble
    return place


def _cause(trouble: BaseException) -> BaseException:
    """What went wrong on the first rank that failed; the exception that gathers them prints their tracebacks."""
    if isinstance(trouble, CheckpointException) and trouble.failures:
        return trouble.failures[min(trouble.failures)][0]
    return trouble


def _seal(part: Path) -> None:
    """Put everything on the disk, then the checksums over it."""
    files = sorted(path for path in part.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    sums = {str(path.relative_to(part)): sha256_of(path) for path in files}
    with (part / CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump(sums, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(part)


def set_aside_newer(run: Path, step: int) -> list[Path]:
    """Rename checkpoints newer than the one a run goes on from: they are damaged, and in the way of new ones."""
    aside = []
    for path in checkpoints(run):
        if step_of(path) > step:
            places = (path.with_name(f"{path.name}.damaged{'' if n == 1 else f'-{n}'}") for n in count(1))
            aside.append(path.rename(next(place for place in places if not place.exists())))
    return aside


def rotate(run: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    for path in checkpoints(run)[:-keep]:
        if step_of(path) != best:
            _remove(path)
    for path in (run / FOLDER).glob("*.part"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that whoever reads it finds it whole or gone, not half of it."""
    gone = checkpoint.with_name(checkpoint.name + ".old.part")  # rotate clears such names where a crash leaves one
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(checkpoint, gone)
    shutil.rmtree(gone, ignore_errors=True)


def restore_optimizer(
    model: nn.Module, optimizer: ModelOptimizer, checkpoint: Path, updates: int, fused: bool
) -> None:
    """Load what the optimizer has gathered, whatever number of ranks wrote it."""
    tensors = optimizer.tensors(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a single process without a process group is meant
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(checkpoint / OPTIMIZER)))
    optimizer.set_updates(updates, fused)
