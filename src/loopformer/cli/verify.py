"""`loopformer verify`: check data, runs and models on disk for damage."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import Json, ModelsOption, complete_model
from loopformer.cli.output import stoppable
from loopformer.errors import FileProblem, LoopformerError, require

TOKENS_PER_READ = 1 << 24  # bounds the memory of the check
Checks = Iterator[tuple[str, Callable[[], None]]]  # a name, and a function that raises if it finds damage


@stoppable("nothing is written, the same command starts again")
def verify(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Data, runs, checkpoints, models, or the bundled box.",
            autocompletion=complete_model,
        ),
    ] = None,
    models: ModelsOption = None,
    as_json: Json = False,
) -> None:
    """Compare files with the checksums they have, and check every token and weight. Exits with 1 on a failure.

    Example: loopformer verify data/mine runs/mine
    """
    paths = [*(paths or []), *(models or [])]
    require(bool(paths), "There is nothing to verify; name prepared data, a run or a model.")
    results, damaged = [], []
    for path in paths:
        for name, check in _checks(path):
            try:
                check()
                problem = None
            except LoopformerError as error:
                problem = str(error)
                damaged.append(name)
            results.append({"path": path, "what": name, "wrong": problem})
            if not as_json:
                typer.echo(f"{name}: {problem or 'ok'}")
    if as_json:
        typer.echo(json.dumps(results))
    if damaged:
        raise FileProblem(f"{len(damaged)} of {len(results)} did not pass: {', '.join(damaged)}.")


def _checks(path: str) -> Checks:
    """The checks of a path: one per split of prepared data, one per checkpoint of a run, one for a model."""
    from loopformer.data.shards import is_prepared
    from loopformer.loading.folder import checkpoints, is_run_folder

    folder = Path(path)
    if is_prepared(folder):
        for split in ("train", "val"):
            yield f"{path}, {split} split", partial(_check_data, folder, split)
    elif is_run_folder(folder) and (saved := checkpoints(folder)):
        for checkpoint in saved:
            yield str(checkpoint), partial(_check_model, str(checkpoint))
    else:
        yield path, partial(_check_model, path)


def _check_data(folder: Path, split: str) -> None:
    """Raise if a shard differs from its checksum or holds a token outside the vocabulary."""
    from loopformer.data.shards import TokenData

    data = TokenData.open(folder, split)
    data.verify()
    for source in data.sources:
        for start in range(0, len(source.ids), TOKENS_PER_READ):
            data.check_ids(source.ids.read(start, start + TOKENS_PER_READ), source.name)


def _check_model(path: str) -> None:
    """Raise if a file differs from its checksum, a weight is not finite, or the tokenizer is too large."""
    from loopformer.data.shards import STATE_FILE
    from loopformer.data.tokenizer import Tokenizer
    from loopformer.loading import find_model, read_model
    from loopformer.loading.folder import check_finite, find_damage, is_checkpoint, resolve_model_path

    folder = resolve_model_path(path)
    if (folder / STATE_FILE).is_file():
        raise FileProblem("its preparation is unfinished; run the same `loopformer prepare` again")
    if folder.is_dir() and not any((*folder.glob("*.safetensors"), *folder.glob("*.pt"))):
        raise FileProblem("it has no prepared data, checkpoint or weights; name a folder that has some")
    if is_checkpoint(folder):
        if (problem := find_damage(folder)) is not None:
            raise FileProblem(problem)
        model, tokenizer = read_model(folder)  # `find_model` would compute the checksums of the weights again
    else:
        model, tokenizer = find_model(path)
    check_finite(model.state_dict())
    if tokenizer is not None and (tokens := Tokenizer.load(tokenizer).vocab_size) > model.config.vocab:
        raise FileProblem(f"its tokenizer has {tokens} tokens, but the model has {model.config.vocab}")
