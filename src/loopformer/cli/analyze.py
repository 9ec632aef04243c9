"""`loopformer analyze`: how the states of models change from loop to loop."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopformer.cli.options import (
    MODEL,
    Device,
    Field,
    Json,
    OutFolder,
    TrajectoriesOption,
    complete_model,
    text_of_model,
)
from loopformer.cli.output import format_number, output_folder, print_files, print_table, progress, stoppable
from loopformer.config import ModelConfig, parse_counts
from loopformer.config.model import BOX
from loopformer.errors import require
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.store import JsonDict


@stoppable("an analysis is written when all is measured, the same command starts again")
def analyze(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help=f"{MODEL}; may be given several times. By default box.",
            autocompletion=complete_model,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="A prepared folder (its validation split) or anything `prepare` reads; "
            "by default the held-out text of the first run, else stdlib.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of prompts, one per document if there are enough.")] = 64,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 128, at most the context.")
    ] = None,
    budgets: Annotated[
        str | None, typer.Option("--budgets", "--budget", help="Loops, such as 4 or 1,2,4; L by default.")
    ] = None,
    trajectory: TrajectoriesOption = None,
    states: Annotated[str, typer.Option(help="Measure states before or after the final norm.")] = "before",
    debiased: Annotated[bool, typer.Option("--debiased", help="Draw debiased CKA; the files have both.")] = False,
    field: Field = "text",
    out: OutFolder = Path("analysis"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure curvature, anisotropy, entropy, CKA, movement and the logit lens after each loop, and draw them.

    Example: loopformer analyze --model runs/demo/elastic --model runs/demo/fixed --out analysis
    """
    from loopformer.analysis.dynamics import PROMPT_LENGTH, model_names, read_prompts, to_json, write_results
    from loopformer.analysis.dynamics import analyze as run
    from loopformer.analysis.figures import state_figures
    from loopformer.device import choose_device
    from loopformer.lm import load
    from loopformer.loading import find_config
    from loopformer.plots import has_matplotlib

    sources = model or [BOX]
    names, configs = model_names(sources), [find_config(path)[0] for path in sources]
    trajectories = _trajectories(budgets, trajectory or [], dict(zip(names, configs, strict=True)))
    context = min(config.context for config in configs)
    tokens = min(PROMPT_LENGTH, context) if length is None else length
    require(tokens <= context, f"--length {tokens} is above the context of {context} tokens; shorten it.")
    target, source = choose_device(device), text or _default_text(sources)
    results: list[JsonDict] = []
    with output_folder(out), progress("prompts") as report:
        for path, name in zip(sources, names, strict=True):
            lm = load(path).to(target)
            windows = read_prompts(source, lm.need_tokenizer(), prompts, tokens, field)
            for chosen in trajectories[name]:
                label = name if chosen is None else f"{name} along {chosen}"
                results.append(run(lm.model, windows, name, chosen, states=states, progress=partial(report, label)))
        files = write_results(results, out, state_figures(results, debiased) if has_matplotlib() else None)
    if not has_matplotlib():
        typer.echo("No figures are drawn without matplotlib; pip install 'loopformer[plot]'.", err=True)
    if as_json:
        typer.echo(json.dumps({**to_json(results), "files": [str(file) for file in files]}))
    else:
        _show(results)
        print_files(files)


def _default_text(models: Sequence[str]) -> str:
    """The held-out text of the first model that has one; otherwise stdlib, with a message that says so."""
    from loopformer.loading.folder import run_folder_of

    first = next((model for model in models if model == BOX or run_folder_of(model) is not None), None)
    if first is None:
        typer.echo("No model here has data of its own; using stdlib. Choose a text with --text.", err=True)
        return "stdlib"
    return text_of_model(first)


def _trajectories(
    budgets: str | None, schedules: Sequence[str], models: dict[str, ModelConfig]
) -> dict[str, list[Trajectory | None]]:
    """The trajectories to measure for each model, without those of more loops than it has. None: all its loops."""
    counts = [] if budgets is None else parse_counts(budgets, "--budgets")
    trajectories = list(dict.fromkeys([*map(Trajectory.uniform, counts), *map(Trajectory.parse, schedules)]))
    by_model: dict[str, list[Trajectory | None]] = {}
    for name, config in models.items():
        usable = [trajectory for trajectory in trajectories if trajectory.budget <= config.loops]
        by_model[name] = [*usable] or [None]
        for trajectory in trajectories:
            if trajectory.budget > config.loops:
                problem = f"{name}: budget {trajectory.budget} is above the model's {config.loops} loops"
                require(bool(usable), f"{problem}; choose 1 to {config.loops}.")
                typer.echo(f"{problem}. Left out.", err=True)
    return by_model


def _show(results: "Sequence[JsonDict]") -> None:
    """Print a table for each model and trajectory, with a row for each loop."""
    from loopformer.analysis.figures import trajectory_name

    first = results[0]
    typer.echo(
        f"{first['prompts']} prompts of {first['length']} tokens from {first['documents']} documents of "
        f"{first['text']} ({first['part']}), states {first['states']} the final norm"
    )
    if len({result["tokens_sha256"] for result in results}) > 1:
        typer.echo("The models have different tokenizers, so their prompts differ.", err=True)
    short = {"prompt_entropy": "entropy", "lens_divergence": "lens KL", "lens_agreement": "lens top-1"}
    columns = ["loop", *(short.get(name, name) for name in first["metrics"]), "CKA to last"]
    for result in results:
        typer.secho(f"{result['model']} {result['shape']}, {trajectory_name(result['trajectory'])}", bold=True)
        means = [series["mean"] for series in result["metrics"].values()]
        rows = [
            [str(loop), *(format_number(value, ".4g", missing="-") for value in values)]
            for loop, values in enumerate(zip(*means, result["cka"][-1], strict=True))
        ]
        print_table(columns, rows)
