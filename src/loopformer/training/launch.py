"""Start or continue a run: settings in, a run folder out.

    launch("demo", ["training.steps=200"], out="runs/demo")
    launch(None, ["data.path=data/mine"], out="runs/x")  # the preset `elastic`
    launch(None, [], out="runs/demo", resume=True)       # with the run's own settings
    plan("paper/loopformer", [], out="runs/paper")       # what --dry-run prints

Settings come from a preset or a file and the user's overrides; the data and the starting model fill in the rest. A
resumed run keeps its model and the settings in `FIXED`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from loopformer.config import (
    DEFAULT_PRESET,
    ModelConfig,
    RunConfig,
    load_run,
    run_from_mapping,
    run_to_mapping,
    with_expected_vocab,
)
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData, is_prepared
from loopformer.data.splits import SPLITS
from loopformer.data.states import Group, open_data
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import available_bytes
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.files import explain_write_errors, lock_folder, read_yaml
from loopformer.loading import find_config
from loopformer.loading.folder import SETTINGS, checkpoints, data_folder
from loopformer.plots import has_matplotlib
from loopformer.training.distributed import Ranks
from loopformer.training.plan import estimated_micro_batch, make_plan, micro_batches
from loopformer.training.reporting import draw_curves
from loopformer.training.trainer import Trainer, fused_precision, open_loaders

# Settings that decide what is trained. Any other may change when a run is resumed.
FIXED = (
    "data.documents",
    "data.states",
    "objective.trajectories",
    "objective.consistency",
    "objective.trajectory_groups",
    "training.batch",
    "training.optimizer",
    "training.weight_decay",
    "training.beta1",
    "training.beta2",
    "training.clip",
    "training.seed",
    "init_from",
)


def launch(
    source: str | None,
    overrides: Sequence[str],
    out: str | Path,
    resume: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, and return the result as plain data."""
    out = Path(out)
    run, written = _settings(source, overrides, out, resume)
    ranks = Ranks.start(run.training.device)
    with lock_folder(out) if ranks.is_main else nullcontext(), _out_of_memory_advice():
        if not checkpoints(out):
            if ranks.is_main and run.data.prepare is not None and not is_prepared(run.data.path):
                say(f"preparing {run.data.prepare} into {run.data.path}")
                prepare([run.data.prepare], run.data.path, train_tokenizer=run.data.train_tokenizer)
            ranks.wait()  # the other ranks read what the main one prepares
            run = _settle_run(run, written, open_data(run.data))
        if ranks.is_main and run.data.states is None:
            for split in SPLITS:
                TokenData.open(run.data.path, split).verify(changed_only=True, say=say)
        ranks.wait()
        result = Trainer(run, out, ranks, resume, quiet).train()
        if ranks.is_main:
            with explain_write_errors(out):
                result["curves"] = draw_curves(out)
            if not has_matplotlib() and not quiet:
                say("no curves.png: it needs matplotlib, pip install 'loopformer[plot]'")
        ranks.close()
    return result


def plan(source: str | None, overrides: Sequence[str], out: str | Path, resume: bool = False) -> dict[str, Any]:
    """What `--dry-run` prints: the estimate of the whole run, and its settings. It refuses what training would."""
    out, tokens, missing = Path(out), 0, None
    run, written = _settings(source, overrides, out, resume)
    if _has_data(run):
        data = open_data(run.data)
        tokens = data.tokens
        run = run if checkpoints(out) else _settle_run(run, written, data)
        open_loaders(run, data)  # refuses data that is too short
    else:
        run = with_expected_vocab(run, written)
        remedy = "make it with `loopformer prepare`"
        if run.data.prepare is not None:
            remedy = f"training prepares it first, from {run.data.prepare}"
        missing = f"not there yet: {run.data.path}; {remedy}"
        if run.init_from is not None:
            run = _with_starting_model(run, written, find_config(run.init_from)[0])
    ranks = Ranks.start(run.training.device)
    fused = fused_precision(run, ranks) is not None
    micro = run.training.micro_batch
    if micro == "auto":
        micro = estimated_micro_batch(run, 0.9 * available_bytes(ranks.device), ranks.world, fused)
    micro_batches(run, micro, world=ranks.world)  # refuses rows that the ranks cannot share
    estimate = make_plan(run, tokens, ranks.device, micro, ranks.world, fused)
    ranks.close()
    return {"plan": estimate, "settings": run_to_mapping(run), "data_missing": missing}


def _settings(source: str | None, overrides: Sequence[str], out: Path, resume: bool) -> tuple[RunConfig, set[str]]:
    """The settings of a run that starts or resumes, with absolute paths, and the keys that the user wrote."""
    saved = checkpoints(out)
    # The run's own file, or the newest checkpoint's copy.
    files = [folder / SETTINGS for folder in (out, *reversed(saved)) if (folder / SETTINGS).is_file()]
    if resume and source is None and not files:
        raise FileProblem(f"{out} holds no run to go on with; check --out.")
    run, keys = load_run(source or (files[0] if resume else DEFAULT_PRESET), overrides)
    if not saved:
        return _with_absolute_paths(run), keys
    if not resume or not files:
        raise LoopformerError(
            f"{out} already holds a run; go on with `loopformer train --resume --out {out}`, or choose another."
        )
    stored = run_from_mapping(read_yaml(files[0]))
    if not any(word.startswith("data.path=") for word in overrides):
        # The run may have been moved, alone or together with its data.
        path = data_folder(out, run.data.path) or data_folder(out, stored.data.path) or stored.data.path
        run = replace(run, data=replace(run.data, path=str(path)))
    run = _continued(_with_absolute_paths(stored), _with_absolute_paths(run), keys)
    if not _has_data(run):
        raise FileProblem(
            f"The data of this run, {run.data.path}, cannot be found; give its folder with data.path=…"
        )
    return run, keys


def _with_absolute_paths(run: RunConfig) -> RunConfig:
    """The settings as they are stored, so that a run works from any working directory."""
    start = run.init_from
    if start is not None and Path(start).exists():  # it may be a Hub id
        start = os.path.abspath(start)
    return replace(run, data=replace(run.data, path=os.path.abspath(run.data.path)), init_from=start)


def _has_data(run: RunConfig) -> bool:
    """Whether the data is there: states are drawn, tokens must have been prepared."""
    return run.data.states is not None or is_prepared(run.data.path)


def _settle_run(run: RunConfig, written: set[str], data: TokenData | Group) -> RunConfig:
    """The settings with the vocabulary of the data, or with the model settings of the starting model."""
    if run.init_from is not None:
        model, tokenizer = find_config(run.init_from)
        _check_same_tokenizer(tokenizer, model, data)
        return _with_starting_model(run, written, model)
    if "model.vocab" not in written:
        run = replace(run, model=replace(run.model, vocab=data.vocab_size))
    if run.model.vocab < data.vocab_size:
        raise LoopformerError(
            f"The data's tokenizer has {data.vocab_size} tokens but model.vocab is {run.model.vocab}; "
            "leave model.vocab out."
        )
    return run


def _with_starting_model(run: RunConfig, written: set[str], model: ModelConfig) -> RunConfig:
    _check_written(run.model, model, written, "the starting model")
    return replace(run, model=model)


def _check_same_tokenizer(folder: Path | None, model: ModelConfig, data: TokenData | Group) -> None:
    """Refuse a starting model whose token ids are not those of the data."""
    if folder is None and data.vocab_size != model.vocab:
        raise LoopformerError(
            f"The starting model has {model.vocab} tokens and no tokenizer, the data's tokenizer has "
            f"{data.vocab_size}; prepare the data with the model's own tokenizer."
        )
    if folder is not None and Tokenizer.load(folder).hash != data.tokenizer.hash:
        remedy = f"prepare it again with --tokenizer {folder / 'tokenizer.json'}"
        if isinstance(data, Group):
            remedy = f"start from a model that was trained with data.states={data.name}, or leave init_from out"
        raise LoopformerError(f"The data was made with another tokenizer than the model in {folder}; {remedy}.")


def _check_written(wanted: ModelConfig, model: ModelConfig, written: set[str], owner: str) -> None:
    """Refuse model settings that the user wrote and that an existing model does not have."""
    for name in sorted(written):
        section, _, key = name.partition(".")
        if section == "model" and getattr(wanted, key) != getattr(model, key):
            raise LoopformerError(
                f"{name} is {getattr(wanted, key)} but {owner} has {getattr(model, key)}; leave it out."
            )


def _continued(stored: RunConfig, wanted: RunConfig, written: set[str]) -> RunConfig:
    """The wanted settings for a resumed run, unless they make it another run."""
    # The data and the starting model decided some of the model's settings, so only what the user wrote can differ.
    _check_written(wanted.model, stored.model, written, "this run")
    for name in FIXED:
        before, now = attrgetter(name)(stored), attrgetter(name)(wanted)
        started = "other trajectories" if name == "objective.trajectories" else f"{name} = {before}, not {now}"
        remedy = "leave it so, as --resume does where no preset or file is named, or start a new run"
        require(before == now, f"This run was started with {started}; {remedy}.")
    return replace(wanted, model=stored.model)


@contextmanager
def _out_of_memory_advice() -> Iterator[None]:
    """Replace an out-of-memory error of a GPU or the CPU by one with a remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise RunFailed(
                "The device ran out of memory; lower training.micro_batch (or set it to auto), set "
                "training.checkpoint_loops=true, or lower objective.chunk, then --resume: checkpoints are safe."
            ) from error
        raise
