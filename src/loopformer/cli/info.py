"""`loopformer info`: what a model is and what it costs at each budget."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loopformer.config import ModelConfig


def info(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model folder, published weights, or a preset's name.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Count costs at this context instead of the model's own.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, for weights without a config.")] = None,
    loops: Annotated[int | None, typer.Option(help="Loops L, for weights without a config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print sizes, k⊗L and the cost of each budget; without --model, the names of the presets.

    Example: loopformer info --model paper/loopformer-3x8
    """
    from loopformer.config import preset_names
    from loopformer.errors import require

    if model is None:
        names = preset_names()
        typer.echo(json.dumps(names) if as_json else "\n".join(names))
        return
    require(context is None or context >= 1, f"--context must be 1 or more, got {context}.")
    report = describe(config_of(model, heads, loops), context)
    if as_json:
        typer.echo(json.dumps({"model": model, **report}, indent=2))
    else:
        _show(model, report)


def config_of(model: str, heads: int | None, loops: int | None) -> "ModelConfig":
    """The settings of a preset or of a model on disk."""
    from loopformer.config import load_run, preset_names, with_expected_vocab
    from loopformer.errors import FileProblem, nearest, require

    names = preset_names()
    if model in names:
        require(
            heads is None and loops is None, "--heads and --loops are for weights without a config, not presets."
        )
        return with_expected_vocab(*load_run(model)).model
    from loopformer.loading import find_config

    try:
        return find_config(model, heads, loops)[0]
    except FileProblem as error:
        if Path(model).exists():
            raise
        hint = nearest(model, names, otherwise="`loopformer info` lists them.")
        raise FileProblem(f"{str(error).rstrip('.')}; nor is {model} a preset: {hint}") from error


def describe(config: "ModelConfig", context: int | None = None) -> dict[str, Any]:
    """Everything `info` shows, as plain data."""
    import dataclasses

    from loopformer.model.cost import Cost

    cost = Cost(config)
    parameters = cost.parameters
    length = config.context if context is None else context
    full = cost.forward_flops(context=length)
    return {
        "settings": dataclasses.asdict(config),
        "shape": f"{config.blocks}⊗{config.loops}",
        "parameters": {
            **dataclasses.asdict(parameters),
            "embeddings": parameters.embeddings,
            "without_embeddings": parameters.without_embeddings,
            "total": parameters.total,
        },
        "context": length,
        "training_gflops_per_token": {
            "full_route": cost.training_flops(length) / 1e9,
            "with_short_route": cost.training_flops(length, config.loops / 2) / 1e9,
            "overhead": cost.training_overhead(length),
        },
        "budgets": [
            {
                "budget": budget,
                "forward_gflops_per_token": cost.forward_flops(budget, length) / 1e9,
                "share_of_full": cost.forward_flops(budget, length) / full,
                "bf16_bytes_per_decoded_token": cost.decode_bytes(budget),
                "bf16_bytes_per_decoded_token_with_kv": cost.decode_bytes(budget, length),
                "bf16_kv_bytes_per_token": cost.kv_bytes(budget),
            }
            for budget in range(1, config.loops + 1)
        ],
    }


def _show(name: str, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings, parameters = report["settings"], report["parameters"]
    console.print(
        f"[bold]{name}[/bold]: {report['shape']}, conditioning {settings['conditioning']}, "
        f"width {settings['width']}, {settings['heads']} heads, FFN {settings['ffn']}, "
        f"context {settings['context']}, vocabulary {settings['vocab']}",
        highlight=False,
    )
    sizes = Table("parameters", "count", box=None, pad_edge=False)
    sizes.columns[1].justify = "right"
    for key in ("tokens", "positions", "stack", "conditioning", "final_norm", "without_embeddings", "total"):
        sizes.add_row(key.replace("_", " "), f"{parameters[key]:,}")
    console.print(sizes)
    training = report["training_gflops_per_token"]
    console.print(
        f"training: {training['full_route']:.4g} GFLOP per token, "
        f"{training['with_short_route']:.4g} with an average short route; context {report['context']}",
        highlight=False,
    )
    costs = Table(
        "budget", "GFLOP/token", "of full", "MB read/token", "with full KV", "KV KB/token", box=None, pad_edge=False
    )
    for row in report["budgets"]:
        costs.add_row(
            str(row["budget"]),
            f"{row['forward_gflops_per_token']:.4g}",
            f"{row['share_of_full']:.0%}",
            f"{row['bf16_bytes_per_decoded_token'] / 1e6:,.1f}",
            f"{row['bf16_bytes_per_decoded_token_with_kv'] / 1e6:,.1f}",
            f"{row['bf16_kv_bytes_per_token'] / 1e3:,.1f}",
        )
    for column in costs.columns:
        column.justify = "right"
    console.print(costs)
    console.print("FLOPs forward, causal attention; bytes per decoded token at batch 1 in bf16.", style="dim")
