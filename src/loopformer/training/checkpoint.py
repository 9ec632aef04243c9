"""Checkpoints, written completely or not at all.

    runs/x/checkpoints/step-00000100/
      model.safetensors, config.json, tokenizer.json   a model folder: `loopformer.load` reads it
      optimizer/*.safetensors                          the optimizer's moments; one file, or one per rank (FSDP)
      run.yaml, state.json                             settings, counters, RNG, data position
      checksums.json                                   written last, over all of the above

A checkpoint is written under a temporary name and renamed, so a crash at any moment leaves the earlier ones intact.
Nothing in it is pickled. Sharded optimizer state goes through torch.distributed.checkpoint's safetensors storage,
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
from loopformer.loading.folder import CHECKSUMS, FOLDER, checkpoints, is_checkpoint, step_of, write_safetensors
from loopformer.training.distributed import Ranks
from loopformer.training.optimizer import ModelOptimizer

OPTIMIZER = "optimizer"
_REMOVED = ".old.part"  # the suffix of a checkpoint that is being removed


def write_checkpoint(
    run: Path, step: int, fill: Callable[[Path], None], optimizer: dict[str, Tensor], ranks: Ranks, sharded: bool
) -> Path:
    """Write a checkpoint completely or not at all. `fill` writes everything but the optimizer, on the main rank."""
    path = run / FOLDER / f"step-{step:08d}"
    part = path.with_name(path.name + ".part")

    def write_files() -> None:
        if ranks.is_main:
            shutil.rmtree(part, ignore_errors=True)
            (part / OPTIMIZER).mkdir(parents=True)
            fill(part)

    def write_optimizer() -> None:
        if sharded:
            save(optimizer, storage_writer=HuggingFaceStorageWriter(str(part / OPTIMIZER), save_distributed=True))
        elif ranks.is_main:
            write_safetensors(optimizer, part / OPTIMIZER / "optimizer.safetensors")

    def publish() -> None:
        if ranks.is_main:
            _seal(part)  # before the rename: under its final name a checkpoint must be complete
            if path.exists():
                _remove(path)
            os.rename(part, path)
            sync_folder(path.parent)

    for phase in (write_files, write_optimizer, publish):
        failure: BaseException | None = None
        try:
            phase()
        except (OSError, SafetensorError, FileProblem, CheckpointException) as error:
            failure = error
        # All ranks must learn of a failure after each phase. Otherwise they would wait for this one for ever.
        if ranks.any(failure is not None):
            if ranks.is_main:
                shutil.rmtree(part, ignore_errors=True)
                with suppress(OSError):  # the folder is not empty if it holds earlier checkpoints
                    part.parent.rmdir()
            kept = checkpoints(run)
            last = f"the last good one is {kept[-1]}" if kept else "there is no earlier one"
            cause = _first_cause(failure)
            reason = " ".join(str(cause or "on another rank").split())
            advice = remedy(cause) if cause is not None else "see the message of that rank"
            raise FileProblem(
                f"The checkpoint of step {step} could not be written ({reason}); {last}. "
                f"{advice.capitalize()} and continue with --resume."
            ) from failure
    return path


def _first_cause(failure: BaseException | None) -> BaseException | None:
    """The error of the first rank: a CheckpointException itself prints the tracebacks of all."""
    if isinstance(failure, CheckpointException) and failure.failures:
        return failure.failures[min(failure.failures)][0]
    return failure


def _seal(part: Path) -> None:
    """Flush all files to the disk, then write their checksums. So checksums imply that all files are there."""
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
    """Rename checkpoints newer than the resumed one. They are damaged, and new ones will need their names."""
    aside = []
    for path in checkpoints(run):
        if step_of(path) > step:
            names = (path.with_name(f"{path.name}.damaged{'' if n == 1 else f'-{n}'}") for n in count(1))
            aside.append(path.rename(next(name for name in names if not name.exists())))
    return aside


def delete_old_checkpoints(run: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    for path in checkpoints(run)[:-keep]:
        if step_of(path) != best:
            _remove(path)
    for path in (run / FOLDER).glob("*.part"):
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(run: Path) -> None:
    """Delete what is left of checkpoints whose removal was interrupted."""
    for path in (run / FOLDER).glob(f"*{_REMOVED}"):
        if is_checkpoint(path.with_name(path.name.removesuffix(_REMOVED))):
            shutil.rmtree(path, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that a concurrent reader finds all of it or nothing."""
    removed = checkpoint.with_name(checkpoint.name + _REMOVED)  # the next start deletes it after a crash
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(checkpoint, removed)
    shutil.rmtree(removed, ignore_errors=True)


def not_resumable(checkpoint: Path, reason: str) -> FileProblem:
    """The error for a checkpoint whose checksums match, but whose content training never wrote."""
    return FileProblem(f"{reason}; move {checkpoint} away, so that --resume continues from an earlier checkpoint.")


def restore_optimizer(model: nn.Module, optimizer: ModelOptimizer, checkpoint: Path, updates: int) -> None:
    """Load the optimizer's state, whatever number of ranks wrote it. Raises if it is not this optimizer's."""
    # `load` fills these tensors in place: they are the optimizer's own state.
    tensors = optimizer.tensors(model)
    with warnings.catch_warnings():
        # torch warns of a missing process group, which a single process does not need.
        warnings.simplefilter("ignore", UserWarning)
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(checkpoint / OPTIMIZER)))
        except CheckpointException as error:
            reason = " ".join(str(_first_cause(error)).split())
            raise not_resumable(
                checkpoint, f"{checkpoint / OPTIMIZER} is not the state of this run's optimizer ({reason[:200]})"
            ) from error
    optimizer.set_updates(updates)
