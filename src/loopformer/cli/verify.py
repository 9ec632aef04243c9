"""`loopformer verify`: is what lies on disk whole?"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.completion import models
from loopformer.cli.options import Json
from loopformer.cli.output import stoppable

AT_ONCE = 1 << 24  # tokens
Checks = Iterator[tuple[str, Callable[[], None]]]  # what is looked at, and what raises if it is not whole


@stoppable("nothing is written, the same command starts again")
def verify(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Prepared data, runs, checkpoints, model folders, weights, or box.", autocompletion=models
        ),
    ],
    as_json: Json = False,
) -> None:
    """Compare files with their checksums, and look at every token and every weight; exit code 1 if one is wrong.

    Example: loopformer verify data/mine runs/mine
    """
    from loopformer.errors import FileProblem, LoopformerError

    checked = []
    for path in paths:
        for what, check in _checks(path):
            try:
                check()
                wrong = None
            except LoopformerError as error:
                wrong = str(error)
            checked.append({"path": path, "what": what, "wrong": wrong})
            if not as_json:
                typer.echo(f"{what}: {wrong or 'whole'}")
    if as_json:
        typer.echo(json.dumps(checked))
    if damaged := [outcome["what"] for outcome in checked if outcome["wrong"]]:
        raise FileProblem(f"{len(damaged)} of {len(checked)} not whole: {', '.join(map(str, damaged))}.")


def _checks(path: str) -> Checks:
    from loopformer.data.shards import STATE_FILE, is_prepared
    from loopformer.loading.folder import checkpoints, is_run_folder

    folder = Path(path)
    if is_prepared(folder):
        for split in ("train", "val"):
            yield f"{path}, {split} split", partial(_check_data, folder, split)
    elif (folder / STATE_FILE).is_file():
        yield path, partial(_fail, "it is not prepared to the end; the same `loopformer prepare` goes on with it")
    elif is_run_folder(path) and checkpoints(folder):
        for checkpoint in checkpoints(folder):
            yield str(checkpoint), partial(_check_model, str(checkpoint))
    elif folder.is_dir() and not any((*folder.glob("*.safetensors"), *folder.glob("*.pt"))) and path != "box":
        yield (
            path,
            partial(_fail, "it holds neither prepared data nor a checkpoint nor weights; name a folder that does"),
        )
    else:
        yield path, partial(_check_model, path)


def _fail(sentence: str) -> None:
    from loopformer.errors import FileProblem

    raise FileProblem(sentence)


def _check_data(folder: Path, split: str) -> None:
    """Shards are as they were made, and every token is one of the vocabulary."""
    from loopformer.data.shards import TokenData

    data = TokenData.open(folder, split)
    data.verify()
    for source in data.sources:
        for start in range(0, len(source.ids), AT_ONCE):
            data.check_ids(source.ids.read(start, start + AT_ONCE), source.name)


def _check_model(path: str) -> None:
    """All files of a checkpoint are as they were written, every weight is a finite number, the tokenizer fits."""
    from loopformer.data.tokenizer import Tokenizer
    from loopformer.errors import FileProblem
    from loopformer.loading import find_model, read_model
    from loopformer.loading.folder import check_finite, damage, is_checkpoint, located

    place = located(path)
    if is_checkpoint(place):
        if (wrong := damage(place)) is not None:
            raise FileProblem(wrong)
        model, folder = read_model(place)  # not found anew, which would compare its weights once more
    else:
        model, folder = find_model(path)
    check_finite(model.state_dict())
    if folder is not None and (words := Tokenizer.load(folder).vocab_size) > model.config.vocab:
        raise FileProblem(f"its tokenizer has {words} tokens, the model {model.config.vocab}")
