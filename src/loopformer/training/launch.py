"""Start or resume a run: settings in, a run folder out.

    launch("demo", ["training.steps=200"], out="runs/demo")
    launch(None, ["data.path=data/mine"], out="runs/x")  # the preset `elastic`
    launch(None, [], out="runs/demo", resume=True)       # with the settings stored in the run folder
    plan("paper/loopformer", [], out="runs/paper")       # what --dry-run prints

Settings come from a preset or a file and the user's overrides. The data decides the vocabulary, or a starting
model (`init_from`) decides all model settings. A resumed run keeps its model and the settings in `FIXED_ON_RESUME`.
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
from loopformer.config.model import parse_names
from loopformer.data.generated import Generated, open_data
from loopformer.data.prepare import prepare
from loopformer.data.shards import INDEX_FILE, TokenData, is_prepared
from loopformer.data.splits import SPLITS
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.files import explain_write_errors, lock_folder, read_yaml
from loopformer.loading import find_config
from loopformer.loading.folder import SETTINGS, checkpoints, data_folder
from loopformer.plots import has_matplotlib
from loopformer.training.distributed import Ranks
from loopformer.training.plan import check_ranks, estimated_micro_batch, make_plan
from loopformer.training.reporting import draw_curves
from loopformer.training.trainer import Trainer, can_use_graphs, fused_precision, open_loaders

# Settings that decide what is trained. All others may change when a run is resumed.
FIXED_ON_RESUME = (
    "data.documents",
    "data.states",
    "data.story_rows",
    "data.curriculum",
    "data.loss",
    "objective.trajectories",
    "objective.consistency",
    "objective.draws",
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
    """Train a new run or resume one. Returns the result as a dict that JSON can hold."""
    out = Path(out)
    require(not out.is_file(), f"{out} is a file; name a folder with --out.")
    run, user_keys = _load_settings(source, overrides, out, resume)
    ranks = Ranks.start(run.training.device)
    # The lock keeps a second process from training in the same folder.
    with lock_folder(out) if ranks.is_main else nullcontext(), _out_of_memory_advice():
        if not checkpoints(out):
            if ranks.is_main and run.data.prepare is not None and not is_prepared(run.data.path):
                say(f"preparing {run.data.prepare} into {run.data.path}")
                prepare([run.data.prepare], run.data.path, train_tokenizer=run.data.train_tokenizer)
            ranks.wait()  # the other ranks would open data that the main rank is still preparing
            _check_default_data(run, user_keys)
            run = _complete_model(run, user_keys, open_data(run.data))
        if ranks.is_main and not run.data.is_generated:
            for split in SPLITS:
                TokenData.open(run.data.path, split).verify(changed_only=True, say=say)
        ranks.wait()  # no rank trains on data that the main rank has not verified
        result = Trainer(run, out, ranks, resume, quiet).train()
        if ranks.is_main:
            with explain_write_errors(out):
                result["curves"] = draw_curves(out, run.objective)
            if not has_matplotlib() and not quiet:
                say("no curves.png: it needs matplotlib, pip install 'loopformer[plot]'")
        ranks.close()
    return result


def plan(source: str | None, overrides: Sequence[str], out: str | Path, resume: bool = False) -> dict[str, Any]:
    """What `--dry-run` prints: an estimate of the whole run, and its settings. Raises where `launch` would."""
    out, tokens, missing = Path(out), 0, None
    run, user_keys = _load_settings(source, overrides, out, resume)
    if _has_data(run):
        data = open_data(run.data)
        tokens = data.tokens
        run = run if checkpoints(out) else _complete_model(run, user_keys, data)
        open_loaders(run, data)  # raises if the data is too short
    else:
        run = with_expected_vocab(run, user_keys)
        remedy = "make it with `loopformer prepare`"
        if run.data.prepare is not None:
            remedy = f"training prepares it first, from {run.data.prepare}"
        missing = f"not there yet: {run.data.path}; {remedy}"
        if run.init_from is not None:
            run = _with_starting_model(run, user_keys, find_config(run.init_from)[0])
    ranks = Ranks.start(run.training.device)
    fused, graphs = fused_precision(run, ranks) is not None, can_use_graphs(run, ranks)
    micro = run.training.micro_batch
    if micro == "auto":
        micro = estimated_micro_batch(run, ranks.device, ranks.world, fused=fused, graphs=graphs)
    check_ranks(run, ranks.world)
    estimate = make_plan(run, tokens, ranks.device, micro, ranks.world, fused=fused, graphs=graphs)
    ranks.close()
    return {"plan": estimate, "settings": run_to_mapping(run), "data_missing": missing}


def _load_settings(
    source: str | None, overrides: Sequence[str], out: Path, resume: bool
) -> tuple[RunConfig, set[str]]:
    """The settings of a new or resumed run, with absolute paths, and the keys that the user set."""
    saved = checkpoints(out)
    # If the file in the run's folder is lost, the copy in the newest checkpoint replaces it.
    files = [folder / SETTINGS for folder in (out, *reversed(saved)) if (folder / SETTINGS).is_file()]
    if resume and source is None and not files:
        raise FileProblem(f"{out} holds no run to resume; name the folder of the run with --out.")
    run, keys = load_run(source or (files[0] if resume else DEFAULT_PRESET), overrides)
    if not saved:
        return _with_absolute_paths(run), keys
    if not resume or not files:
        raise LoopformerError(
            f"{out} already holds a run; resume it with `loopformer train --resume --out {out}`, or change --out."
        )
    stored = run_from_mapping(read_yaml(files[0]))
    if not any(override.startswith("data.path=") for override in overrides):
        # The run may have been moved, alone or together with its data.
        path = data_folder(out, run.data.path) or data_folder(out, stored.data.path) or stored.data.path
        run = replace(run, data=replace(run.data, path=str(path)))
    run = _check_resumable(_with_absolute_paths(stored), _with_absolute_paths(run), keys)
    if not _has_data(run):
        raise FileProblem(f"Cannot find this run's data, {run.data.path}; give its folder with data.path=…")
    return run, keys


def _with_absolute_paths(run: RunConfig) -> RunConfig:
    """The settings with absolute paths, so that a stored run can be resumed from any working directory."""
    start = run.init_from
    if start is not None and Path(start).exists():  # it may be a Hub id
        start = os.path.abspath(start)
    stories = run.data.stories
    if stories is not None:  # names of worlds and paths
        stories = ",".join(os.path.abspath(each) if Path(each).is_file() else each for each in parse_names(stories))
    data = replace(run.data, path=os.path.abspath(run.data.path), stories=stories)
    return replace(run, data=data, init_from=start)


def _has_data(run: RunConfig) -> bool:
    """Whether the data can be opened. Words and stories are generated, but tokens must be prepared."""
    return run.data.is_generated or is_prepared(run.data.path)


def _check_default_data(run: RunConfig, user_keys: set[str]) -> None:
    """Say what to do if there is no data at the default path, as in a first run."""
    if _has_data(run) or "data.path" in user_keys or Path(run.data.path).exists():
        return
    index = Path(os.path.relpath(run.data.path)) / INDEX_FILE
    raise FileProblem(
        f"{index} is missing; set data.path=… to a folder that `loopformer prepare` made, or try "
        "`loopformer train demo`."
    )


def _complete_model(run: RunConfig, user_keys: set[str], data: TokenData | Generated) -> RunConfig:
    """The run with the model settings of its starting model, or else with the vocabulary of its data."""
    if run.init_from is not None:
        model, tokenizer_folder = find_config(run.init_from)
        _check_same_tokenizer(tokenizer_folder, model, data)
        return _with_starting_model(run, user_keys, model)
    if "model.vocab" not in user_keys:
        run = replace(run, model=replace(run.model, vocab=data.vocab_size))
    if run.model.vocab < data.vocab_size:
        raise LoopformerError(
            f"The data's tokenizer has {data.vocab_size} tokens but model.vocab is {run.model.vocab}; "
            "leave model.vocab out."
        )
    return run


def _with_starting_model(run: RunConfig, user_keys: set[str], model: ModelConfig) -> RunConfig:
    _check_model_keys(run.model, model, user_keys, "the starting model")
    return replace(run, model=model)


def _check_same_tokenizer(tokenizer_folder: Path | None, model: ModelConfig, data: TokenData | Generated) -> None:
    """Refuse a starting model with other token ids than the data."""
    if tokenizer_folder is None and data.vocab_size != model.vocab:
        raise LoopformerError(
            f"The starting model has {model.vocab} tokens and no tokenizer, the data's tokenizer has "
            f"{data.vocab_size}; prepare the data with the model's own tokenizer."
        )
    if tokenizer_folder is not None and Tokenizer.load(tokenizer_folder).hash != data.tokenizer.hash:
        remedy = f"prepare it again with --tokenizer {tokenizer_folder / 'tokenizer.json'}"
        if not isinstance(data, TokenData):
            remedy = f"start from a model that was trained with {data.setting}, or leave init_from out"
        raise LoopformerError(
            f"The data was made with another tokenizer than the model in {tokenizer_folder}; {remedy}."
        )


def _check_model_keys(wanted: ModelConfig, model: ModelConfig, user_keys: set[str], owner: str) -> None:
    """Refuse model settings that the user set to other values than an existing model has."""
    for name in sorted(user_keys):
        section, _, key = name.partition(".")
        if section == "model" and getattr(wanted, key) != getattr(model, key):
            raise LoopformerError(
                f"{name} is {getattr(wanted, key)} but {owner} has {getattr(model, key)}; leave it out."
            )


def _check_resumable(stored: RunConfig, wanted: RunConfig, user_keys: set[str]) -> RunConfig:
    """The wanted settings with the stored model. Raises if they change what the run trains."""
    # `wanted` lacks what the data and the starting model decided, so only the keys that the user set are compared.
    _check_model_keys(wanted.model, stored.model, user_keys, "this run")
    for name in FIXED_ON_RESUME:
        before, now = attrgetter(name)(stored), attrgetter(name)(wanted)
        started = "other trajectories" if name == "objective.trajectories" else f"{name} = {before}, not {now}"
        remedy = "set it back, use --resume without a preset or file, or start a new run"
        require(before == now, f"This run was started with {started}; {remedy}.")
    return replace(wanted, model=stored.model)


@contextmanager
def _out_of_memory_advice() -> Iterator[None]:
    """Replace an out-of-memory error of the GPU or CPU by an error that says how to use less."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # On the CPU, PyTorch raises a plain RuntimeError that only its text tells apart.
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise RunFailed(
                "The device ran out of memory; lower training.micro_batch (or set it to auto), set "
                "training.graphs=false or training.checkpoint_loops=true, or lower objective.chunk, then --resume: "
                "checkpoints are safe."
            ) from error
        raise
