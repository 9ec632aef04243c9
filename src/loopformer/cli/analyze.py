"""`loopformer analyze`: what the states of one or several models do from loop to loop."""

import json
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopformer.cli.output import shown

if TYPE_CHECKING:
    from loopformer.analysis.dynamics import Dynamics
    from loopformer.config import ModelConfig
    from loopformer.trajectory import Trajectory

_LENGTH = 128  # tokens; the same for most models, because entropy depends on it


def analyze(
    model: Annotated[
        list[str],
        typer.Option(
            "--model", "-m", help="A run, a model folder or published weights; may be given several times."
        ),
    ],
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
    trajectory: Annotated[
        list[str] | None, typer.Option(help="A schedule, such as 4-2-1-1; may be given several times.")
    ] = None,
    states: Annotated[str, typer.Option(help="Measure states before or after the final norm.")] = "before",
    debiased: Annotated[bool, typer.Option("--debiased", help="Draw debiased CKA; the files have both.")] = False,
    field: Annotated[str, typer.Option(help="The field of .jsonl, .parquet and datasets that is text.")] = "text",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")] = Path("analysis"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure curvature, anisotropy, entropy, CKA, movement and the logit lens after each loop, and draw them.

    Example: loopformer analyze --model runs/demo/elastic --model runs/demo/fixed --out analysis
    """
    from loopformer.analysis.dynamics import analyze as run
    from loopformer.analysis.dynamics import checked_states, model_names, read_prompts, to_json, write_results
    from loopformer.device import choose_device
    from loopformer.errors import require
    from loopformer.lm import load
    from loopformer.loading import find_config

    checked_states(states)
    require(prompts >= 1, f"--prompts must be 1 or more, got {prompts}.")
    names, configs = model_names(model), [find_config(path)[0] for path in model]
    trajectories = _trajectories(budgets, trajectory or [], dict(zip(names, configs, strict=True)))
    context = min(config.context for config in configs)
    tokens = min(_LENGTH, context) if length is None else length
    require(tokens <= context, f"--length {tokens} is above the context of {context} tokens; shorten it.")
    where, source = choose_device(device), text or _own_text(model)
    _check_folder(out)
    results: list[Dynamics] = []
    with shown("prompts") as report:
        for path, name in zip(model, names, strict=True):
            lm = load(path).to(where)
            read = read_prompts(source, lm.need_tokenizer(), prompts, tokens, field)
            for one in trajectories:
                progress = partial(report, name if one is None else f"{name} along {one}")
                results.append(run(lm.model, read, name, one, states=states, progress=progress))
    files = write_results(results, out)
    if find_spec("matplotlib"):
        from loopformer.analysis.plots import save_figures

        files += save_figures(results, out, debiased)
    else:
        typer.echo("No figures are drawn without matplotlib; pip install 'loopformer[plot]'.", err=True)
    if as_json:
        typer.echo(json.dumps({**to_json(results), "files": [str(file) for file in files]}))
    else:
        _show(results, files)


def _own_text(models: Sequence[str]) -> str:
    """The held-out text of the first run; where no model is a run, that of stdlib, and that is said."""
    from loopformer.errors import FileProblem
    from loopformer.evaluation.text import default_text
    from loopformer.loading.folder import run_of

    run = next((model for model in models if run_of(model) is not None), None)
    if run is None:
        typer.echo("No model here is a run with data of its own; measured on stdlib, or give --text.", err=True)
        return "stdlib"
    if (text := default_text(run)) is None:
        raise FileProblem(
            f"The data that {run} was trained on cannot be found; give its folder or another text with --text."
        )
    return text


def _trajectories(
    budgets: str | None, given: Sequence[str], models: "dict[str, ModelConfig]"
) -> "list[Trajectory | None]":
    """What every model is to follow; None is each one's full trajectory. Too long for one of them is refused."""
    from loopformer.config import whole_numbers
    from loopformer.errors import LoopformerError
    from loopformer.trajectory import Trajectory, resolve

    asked = [] if budgets is None else whole_numbers(budgets, "--budgets")
    trajectories = [
        *(Trajectory.uniform(budget) for budget in asked),
        *(Trajectory.parse(text) for text in given),
    ]
    for name, config in models.items():
        for trajectory in trajectories:
            try:
                resolve(trajectory, config.loops)
            except LoopformerError as error:
                raise LoopformerError(f"{name}: {error}") from error
    return list(dict.fromkeys(trajectories)) or [None]


def _check_folder(out: Path) -> None:
    """Before the work, not after it."""
    from loopformer.errors import FileProblem

    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise FileProblem(f"The folder {out} cannot be written to; choose another with --out.")


def _show(results: "Sequence[Dynamics]", files: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, first = Console(), results[0]
    console.print(
        f"{first.prompts} prompts of {first.length} tokens from {first.documents} documents of {first.text} "
        f"({first.part}), states {first.states} the final norm",
        highlight=False,
        markup=False,
    )
    if len({result.tokens_sha256 for result in results}) > 1:
        typer.echo("The models have different tokenizers, so the prompts are not the same for all.", err=True)
    short = {"prompt_entropy": "entropy", "lens_divergence": "lens KL", "lens_agreement": "lens top-1"}
    columns = [short.get(name, name) for name in first.metrics]
    for result in results:
        console.print(f"{result.model} {result.shape}, {result.trajectory_name}", style="bold", markup=False)
        table = Table("loop", *columns, "CKA to last", box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for loop, similar in enumerate(result.cka[-1]):
            values = [series.mean[loop] for series in result.metrics.values()]
            table.add_row(str(loop), *("-" if one is None else f"{one:.4g}" for one in [*values, similar]))
        console.print(table, highlight=False)
    console.print(f"written: {', '.join(str(file) for file in files)}", style="dim", markup=False, highlight=False)
