"""`loopformer import`: convert published weights into a model folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import Heads, Json, Loops
from loopformer.cli.output import stoppable
from loopformer.errors import require
from loopformer.files import remove_empty_on_failure


@stoppable("a model appears only when it is complete, the same command starts again")
def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A .safetensors or .pt file, a Hugging Face folder, or a Hub id."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    heads: Heads = None,
    loops: Loops = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2 (from the Hub), a tokenizer.json, or its folder. The published weights use gpt2."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing model and everything that belongs to it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Import published weights. Code that comes with them is never run.

    Example: loopformer import armenjeddi/LoopFormer-3block-8iterations models/3x8 --loops 8 --tokenizer gpt2
    """
    from loopformer.data.tokenizer import Tokenizer
    from loopformer.evaluation.store import SCHEDULES_FILE
    from loopformer.lm import LM, load_official
    from loopformer.loading import from_model_folder
    from loopformer.loading.folder import (
        TEMPLATE,
        default_trajectory,
        find_chat_template,
        install_model,
        run_folder_of,
        save_model,
        staging_folder,
    )

    _check_target(out, force)
    chosen = None if tokenizer is None else Tokenizer.find(tokenizer)
    with remove_empty_on_failure(out):
        lm, default, template = from_model_folder(
            source,
            lambda folder: (
                load_official(folder, heads, loops),
                default_trajectory(folder),
                find_chat_template(folder, run_folder_of(folder)),
            ),
        )
        if chosen is not None:
            tokens, vocab = chosen.vocab_size, lm.model.config.vocab
            require(
                tokens <= vocab, f"{tokenizer} has {tokens} tokens, the model {vocab}; it is not the model's own."
            )
            lm = LM(lm.model, chosen)
        target = out.resolve()
        with staging_folder(target) as stage:
            save_model(lm.model, stage, source={"imported_from": source}, default=default)
            if lm.tokenizer is not None:
                lm.tokenizer.save(stage)
            if template is not None:
                (stage / TEMPLATE).write_text(template, encoding="utf-8")
            install_model(stage, target, [SCHEDULES_FILE])
    config = lm.model.config
    if as_json:
        typer.echo(json.dumps({"out": str(out), "parameters": lm.model.cost.parameters.total}))
    else:
        typer.echo(
            f"{out}: {config.blocks}⊗{config.loops}, conditioning {config.conditioning}, "
            f"{lm.model.cost.parameters.total:,} parameters"
            + ("" if default is None else f"; default trajectory {default}")
            + ("" if lm.tokenizer else "; no tokenizer.json found: for text, import with --tokenizer")
        )


def _check_target(out: Path, force: bool) -> None:
    """Refuse a folder that holds anything but a model. Replacing a model needs --force."""
    from loopformer.data.shards import is_prepared
    from loopformer.loading.folder import is_checkpoint, is_model_folder, is_run_folder

    require(not out.exists() or out.is_dir(), f"{out} is a file; name a folder to write to.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    other = is_checkpoint(out) or is_run_folder(out) or is_prepared(out)
    require(
        is_model_folder(out) and not other,
        f"{out} holds files that are not a model; choose another folder.",
    )
    require(force, f"{out} already holds a model; choose another folder or add --force.")
