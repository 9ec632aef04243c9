"""`loopformer export`: a folder that Hugging Face's tools load."""

import json
from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.completion import budgets, models
from loopformer.cli.options import Heads, Json, Loops
from loopformer.cli.output import stoppable


@stoppable("an export is there when it is whole, the same command starts again")
def export(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run, a model folder or published weights.", autocompletion=models),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; an earlier export in it is replaced.")
    ],
    self_contained: Annotated[
        bool, typer.Option("--self-contained", help="Add the model's code, for places without loopformer.")
    ] = False,
    budget: Annotated[
        int | None, typer.Option(help="Loops per token where a call does not say, 1 to L.", autocompletion=budgets)
    ] = None,
    trajectory: Annotated[str | None, typer.Option(help="The same as a schedule: 4-2-1-1, cosine:4.")] = None,
    heads: Heads = None,
    loops: Loops = None,
    as_json: Json = False,
) -> None:
    """Write weights, settings, tokenizer and a model card for Transformers, PEFT and lm-eval.

    Example: loopformer export runs/mine exported --self-contained
    """
    from loopformer.files import no_empty_folder
    from loopformer.hf.export import export as run

    with no_empty_folder(out):
        done = run(
            source,
            out,
            self_contained=self_contained,
            budget=budget,
            trajectory=trajectory,
            heads=heads,
            loops=loops,
        )
    config, parameters = done.model.config, done.model.cost.parameters.total
    default = done.config.trajectory or done.config.budget or config.loops
    if as_json:
        summary = {"out": str(out), "parameters": parameters, "default": str(default), "files": done.files}
        typer.echo(json.dumps(summary))
        return
    tokenizer = "" if "tokenizer.json" in done.files else "; no tokenizer came with the weights"
    typer.echo(
        f"{out}: {config.blocks}⊗{config.loops}, {parameters:,} parameters, "
        f"{len(done.files)} files; follows {default} where a call names no budget{tokenizer}"
    )
    trust = ", trust_remote_code=True" if self_contained else ""
    first = "" if self_contained else "import loopformer.hf; "
    typer.echo(
        f'{first}AutoModelForCausalLM.from_pretrained("{out}"{trust}, budget={min(2, config.loops)})', err=True
    )
