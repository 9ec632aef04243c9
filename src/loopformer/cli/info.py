"""`loopformer info`: what a model is and what it costs at each budget."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.options import MODEL, Heads, Json, Loops, complete_model_or_preset, the_model
from loopformer.cli.output import print_table, stoppable
from loopformer.config import ModelConfig, load_run, preset_names, with_expected_vocab
from loopformer.config.run import describe_settings, list_presets
from loopformer.errors import FileProblem, nearest, require

# The columns of the table of budgets: heading, key of the row, unit to divide by, format.
BUDGET_COLUMNS = (
    ("budget", "budget", 1, "d"),
    ("GFLOP/token", "forward_gflops_per_token", 1, ".4g"),
    ("of full", "share_of_full", 1, ".0%"),
    ("MB read/token", "bf16_bytes_per_decoded_token", 1e6, ",.1f"),
    ("with full KV", "bf16_bytes_per_decoded_token_with_kv", 1e6, ",.1f"),
    ("KV KB/token", "bf16_kv_bytes_per_token", 1e3, ",.1f"),
)
ModelOrPreset = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"{MODEL}; or a preset.", autocompletion=complete_model_or_preset),
]
ModelOrPresetOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="The same as the argument MODEL.", autocompletion=complete_model_or_preset),
]


@stoppable("nothing is written, the same command starts again")
def info(
    model: ModelOrPreset = None,
    model_option: ModelOrPresetOption = None,
    context: Annotated[
        int | None, typer.Option(help="Count costs at this context. Default: the model's own.")
    ] = None,
    heads: Heads = None,
    loops: Loops = None,
    settings: Annotated[bool, typer.Option("--settings", help="List the settings of `loopformer train`.")] = False,
    as_json: Json = False,
) -> None:
    """Print a model's parameters, its shape k⊗L (k blocks, L loops) and the cost of each budget.

    Without a model, list the presets.

    Example: loopformer info paper/loopformer-3x8
    """
    if settings:
        _show_settings(as_json)
        return
    if model is None and model_option is None:
        _show_presets(as_json)
        return
    model = the_model(model, model_option)
    require(context is None or context >= 1, f"--context must be 1 or more, got {context}.")
    report = _describe(config_of(model, heads, loops), context)
    if as_json:
        typer.echo(json.dumps({"model": model, **report}, indent=2))
    else:
        _show(model, report)


def _show_presets(as_json: bool) -> None:
    from loopformer.model.cost import Cost

    rows = []
    for preset in list_presets():
        config = with_expected_vocab(*load_run(preset.name)).model
        shape, parameters = f"{config.blocks}⊗{config.loops}", Cost(config).parameters.total
        rows.append({**dataclasses.asdict(preset), "shape": shape, "parameters": parameters})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    cells = [[row["name"], row["shape"], f"{row['parameters'] / 1e6:,.1f}", row["about"]] for row in rows]
    print_table(["preset", "k⊗L", "million", "what it is"], cells, left=1, text=(3,))
    sizes = next(row["sizes"] for row in rows if row["name"] == "paper/loopformer")
    typer.secho(
        f"Parameters in millions. Presets in paper/ also exist with the suffixes -{', -'.join(sizes)}, "
        "and paper/base with -3x1 to -24x1. `loopformer train PRESET data.path=… --out …` trains one on your text. "
        "`loopformer info --settings` lists the settings.",
        dim=True,
    )


def _show_settings(as_json: bool) -> None:
    names, rows = ("name", "default", "meaning"), list(describe_settings())
    if as_json:
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
    else:
        print_table(["setting", "default", "meaning"], rows, left=3)


def config_of(model: str, heads: int | None = None, loops: int | None = None) -> ModelConfig:
    """The settings of a preset or of a model on disk."""
    presets = preset_names()
    if model in presets:
        require(heads is None and loops is None, "--heads and --loops are for weights without a config.")
        return with_expected_vocab(*load_run(model)).model
    from loopformer.loading import find_config

    try:
        return find_config(model, heads, loops)[0]
    except FileProblem as error:
        if Path(model).exists():
            raise  # the user meant this file or folder, so a hint at presets would mislead
        hint = nearest(model, presets, otherwise="`loopformer info` lists them.")
        raise FileProblem(f"{str(error).rstrip('.')}; nor is {model} a preset: {hint}") from error


def _describe(config: ModelConfig, context: int | None) -> dict[str, Any]:
    """Everything `info` shows, as plain data."""
    from loopformer.model.cost import Cost

    cost, length = Cost(config), config.context if context is None else context
    # `asdict` leaves properties out, so add them by name.
    parameters, derived = cost.parameters, ("embeddings", "without_embeddings", "total")
    return {
        "settings": config.plain(),
        "shape": f"{config.blocks}⊗{config.loops}",
        "parameters": dataclasses.asdict(parameters) | {name: getattr(parameters, name) for name in derived},
        "context": length,
        "training_gflops_per_token": {
            "full_route": cost.training_flops(length) / 1e9,
            # The objective's short trajectory has L / 2 loops on average.
            "with_short_route": cost.training_flops(length, [config.loops, config.loops / 2]) / 1e9,
            "overhead": cost.training_overhead(length),
        },
        "budgets": [
            {
                "budget": budget,
                "forward_gflops_per_token": cost.forward_flops(budget, length) / 1e9,
                "share_of_full": cost.forward_flops(budget, length) / cost.forward_flops(context=length),
                "bf16_bytes_per_decoded_token": cost.decode_bytes(budget),
                "bf16_bytes_per_decoded_token_with_kv": cost.decode_bytes(budget, length),
                "bf16_kv_bytes_per_token": cost.kv_bytes(budget),
            }
            for budget in range(1, config.loops + 1)
        ],
    }


def _show(name: str, report: dict[str, Any]) -> None:
    settings, training = report["settings"], report["training_gflops_per_token"]
    typer.echo(
        f"{typer.style(name, bold=True)}: {report['shape']}, conditioning {settings['conditioning']}, "
        f"width {settings['width']}, {settings['heads']} heads, FFN {settings['ffn']}, "
        f"context {settings['context']}, vocabulary {settings['vocab']}"
    )
    sizes = ("tokens", "positions", "stack", "conditioning", "final_norm", "without_embeddings", "total")
    counts = [[key.replace("_", " "), f"{report['parameters'][key]:,}"] for key in sizes]
    print_table(["parameters", "count"], counts, left=1)
    typer.echo(
        f"training: {training['full_route']:.4g} GFLOP per token, "
        f"{training['with_short_route']:.4g} with an average short trajectory; context {report['context']}"
    )
    # Dividing makes a float even of an integer, and the format "d" refuses floats.
    rows = [
        [format(row[key] / unit if unit > 1 else row[key], form) for _, key, unit, form in BUDGET_COLUMNS]
        for row in report["budgets"]
    ]
    print_table([heading for heading, *_ in BUDGET_COLUMNS], rows)
    typer.secho("FLOPs forward, causal attention; bytes per decoded token at batch 1 in bf16.", dim=True)
