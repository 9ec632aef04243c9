"""`loopformer export`: write a folder that Hugging Face's tools load."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import Heads, Json, Loops, ModelArgument, ModelOption, complete_budget
from loopformer.cli.output import stoppable
from loopformer.errors import LoopformerError
from loopformer.files import remove_empty_on_failure


@stoppable("an export appears only when it is complete, the same command starts again")
def export(
    model: ModelArgument = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The folder to write. An earlier export in it is replaced.")
    ] = None,
    model_option: ModelOption = None,
    self_contained: Annotated[
        bool, typer.Option("--self-contained", help="Include the model's code, for machines without loopformer.")
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(help="Default budget of the exported model, 1 to L.", autocompletion=complete_budget),
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(help="Default schedule of the exported model, such as 2-1-2-3 or cosine:4.")
    ] = None,
    heads: Heads = None,
    loops: Loops = None,
    as_json: Json = False,
) -> None:
    """Write weights, settings, tokenizer and a model card for Transformers, PEFT and lm-eval.

    Example: loopformer export runs/mine exported --self-contained
    """
    from loopformer.hf.export import export as run
    from loopformer.model.cost import Cost

    if model_option is not None and out is None and model is not None:  # `export --model MODEL OUT`
        model, out = model_option, Path(model)
    elif model is None or out is None or model_option is not None:
        raise LoopformerError("Give the model and the folder to write, as in loopformer export runs/mine exported.")
    with remove_empty_on_failure(out):
        config, files = run(
            model,
            out,
            self_contained=self_contained,
            budget=budget,
            trajectory=trajectory,
            heads=heads,
            loops=loops,
        )
    settings, parameters = config.settings, Cost(config.settings).parameters.total
    default = config.trajectory or config.budget or settings.loops
    if as_json:
        typer.echo(json.dumps({"out": str(out), "parameters": parameters, "default": str(default), "files": files}))
        return
    tokenizer = "" if "tokenizer.json" in files else "; no tokenizer came with the weights"
    typer.echo(
        f"{out}: {settings.blocks}⊗{settings.loops}, {parameters:,} parameters, {len(files)} files; "
        f"default trajectory {default}{tokenizer}"
    )
    trust = ", trust_remote_code=True" if self_contained else ""
    setup = "" if self_contained else "import loopformer.hf; "
    typer.echo(
        f'{setup}AutoModelForCausalLM.from_pretrained("{out}"{trust}, budget={min(2, settings.loops)})', err=True
    )
