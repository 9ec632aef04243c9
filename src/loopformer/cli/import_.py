"""`loopformer import`: turn the authors' weights into a model folder of ours."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import Json
from loopformer.cli.output import stoppable


@stoppable("a model is there when it is whole, the same command starts again")
def import_(
    source: Annotated[str, typer.Argument(help="A .safetensors or .pt file, a Hugging Face folder, or a Hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    heads: Annotated[int | None, typer.Option(help="Attention heads, where no config says so.")] = None,
    loops: Annotated[int | None, typer.Option(help="Loops L, where no config says so.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2 (from the Hub), a tokenizer.json, or a folder with one; the authors used gpt2."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Import published weights; nothing that comes with them is run.

    Example: loopformer import armenjeddi/LoopFormer-3block-8iterations models/3x8 --loops 8 --tokenizer gpt2
    """
    from loopformer.data.tokenizer import Tokenizer
    from loopformer.errors import LoopformerError, require
    from loopformer.files import no_empty_folder
    from loopformer.lm import LM, load_official
    from loopformer.loading.folder import CONFIG, WEIGHTS, save_model

    if not force and any((out / name).exists() for name in (CONFIG, WEIGHTS)):
        raise LoopformerError(f"{out} already holds a model; choose another folder or add --force.")
    if out.exists() and not out.is_dir():
        raise LoopformerError(f"{out} is a file; name a folder to write to.")
    chosen = None if tokenizer is None else Tokenizer.find(tokenizer)
    with no_empty_folder(out):
        lm = load_official(source, heads, loops)
        if chosen is not None:
            words, rows = chosen.vocab_size, lm.model.config.vocab
            require(words <= rows, f"{tokenizer} has {words} tokens, the model {rows}; it is not the model's own.")
            lm = LM(lm.model, chosen)
        save_model(lm.model, out, source={"imported_from": source})
        if lm.tokenizer is not None:
            lm.tokenizer.save(out)
    config = lm.model.config
    if as_json:
        typer.echo(json.dumps({"out": str(out), "parameters": lm.model.cost.parameters.total}))
    else:
        typer.echo(
            f"{out}: {config.blocks}⊗{config.loops}, conditioning {config.conditioning}, "
            f"{lm.model.cost.parameters.total:,} parameters"
            + ("" if lm.tokenizer else "; no tokenizer.json beside the weights: for text, import with --tokenizer")
        )
