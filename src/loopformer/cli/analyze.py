"""`loopformer analyze`: what the states of one or several models do from loop to loop."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopformer.cli.completion import models
from loopformer.cli.options import MODEL, Device, Field, Json, OutFolder, Trajectories, own_text
from loopformer.cli.output import number, output_folder, print_files, print_table, progress, stoppable
from loopformer.config.model import BOX

if TYPE_CHECKING:
    from loopformer.analysis.dynamics import Dynamics
    from loopformer.config import ModelConfig
    from loopformer.trajectory import Trajectory

_LENGTH = 128  # tokens; the same for most models, because entropy depends on it


@stoppable("an analysis is written when all is measured, the same command starts again")
def analyze(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help=f"{MODEL}; may be given several times. By default box.", autocompletion=models
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="A prepared folder (its validation split) or anything `prepare` reads; "
            "the first run's own held-out text by default, else stdlib.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts, one per document where there are enough.")] = 64,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a prompt; 128, or a model's context if that is less.")
    ] = None,
    budgets: Annotated[
        str | None, typer.Option("--budgets", "--budget", help="Loops: 4, or several: 1,2,4; L by default.")
    ] = None,
    trajectory: Trajectories = None,
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
    from loopformer.analysis.dynamics import analyze as run
    from loopformer.analysis.dynamics import check_states, model_names, read_prompts, to_json, write_results
    from loopformer.analysis.figures import state_figures
    from loopformer.device import choose_device
    from loopformer.errors import require
    from loopformer.lm import load
    from loopformer.loading import find_config
    from loopformer.plots import available

    model = model or [BOX]
    check_states(states)
    require(prompts >= 1, f"--prompts must be 1 or more, got {prompts}.")
    names, configs = model_names(model), [find_config(path)[0] for path in model]
    followed = _trajectories(budgets, trajectory or [], dict(zip(names, configs, strict=True)))
    context = min(config.context for config in configs)
    tokens = min(_LENGTH, context) if length is None else length
    require(tokens <= context, f"--length {tokens} is above the context of {context} tokens; shorten it.")
    place, source = choose_device(device), text or _own_text(model)
    results: list[Dynamics] = []
    with output_folder(out), progress("prompts") as report:
        for path, name in zip(model, names, strict=True):
            lm = load(path).to(place)
            read = read_prompts(source, lm.need_tokenizer(), prompts, tokens, field)
            for along in followed[name]:
                doing = name if along is None else f"{name} along {along}"
                results.append(run(lm.model, read, name, along, states=states, progress=partial(report, doing)))
        files = write_results(results, out, state_figures(results, debiased) if available() else None)
    if not available():
        typer.echo("No figures are drawn without matplotlib; pip install 'loopformer[plot]'.", err=True)
    if as_json:
        typer.echo(json.dumps({**to_json(results), "files": [str(file) for file in files]}))
    else:
        _show(results)
        print_files(files)


def _own_text(models: Sequence[str]) -> str:
    """What is held out for the first model that has such text; for none of them stdlib, and that is said."""
    from loopformer.loading.folder import run_of

    first = next((model for model in models if model == BOX or run_of(model) is not None), None)
    if first is None:
        typer.echo("No model here is a run with data of its own; measured on stdlib, or give --text.", err=True)
        return "stdlib"
    return own_text(first)


def _trajectories(
    budgets: str | None, schedules: Sequence[str], models: "dict[str, ModelConfig]"
) -> "dict[str, list[Trajectory | None]]":
    """What each model is to follow; None is its full trajectory. What one has too few loops for is left out."""
    from loopformer.config import whole_numbers
    from loopformer.errors import LoopformerError
    from loopformer.trajectory import Trajectory, resolve

    numbers = [] if budgets is None else whole_numbers(budgets, "--budgets")
    wanted = list(dict.fromkeys([*map(Trajectory.uniform, numbers), *map(Trajectory.parse, schedules)]))
    followed: dict[str, list[Trajectory | None]] = {}
    for name, config in models.items():
        mine: list[Trajectory | None] = []
        lacks: list[LoopformerError] = []
        for trajectory in wanted:
            try:
                mine.append(resolve(trajectory, config.loops))
            except LoopformerError as error:
                lacks.append(error)
        if lacks and not mine:
            raise LoopformerError(f"{name}: {lacks[0]}") from lacks[0]
        for lack in lacks:
            typer.echo(f"{name}: {lack} Left out.", err=True)
        followed[name] = mine or [None]
    return followed


def _show(results: "Sequence[Dynamics]") -> None:
    """A table for each model and trajectory, a row for each loop."""
    first = results[0]
    typer.echo(
        f"{first.prompts} prompts of {first.length} tokens from {first.documents} documents of {first.text} "
        f"({first.part}), states {first.states} the final norm"
    )
    if len({result.tokens_sha256 for result in results}) > 1:
        typer.echo("The models have different tokenizers, so the prompts are not the same for all.", err=True)
    short = {"prompt_entropy": "entropy", "lens_divergence": "lens KL", "lens_agreement": "lens top-1"}
    columns = ["loop", *(short.get(name, name) for name in first.metrics), "CKA to last"]
    for result in results:
        typer.secho(f"{result.model} {result.shape}, {result.trajectory_name}", bold=True)
        rows = []
        for loop, similar in enumerate(result.cka[-1]):
            values = [*(series.mean[loop] for series in result.metrics.values()), similar]
            rows.append([str(loop), *(number(value, ".4g", missing="-") for value in values)])
        print_table(columns, rows)
