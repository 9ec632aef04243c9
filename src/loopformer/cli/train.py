"""`loopformer train`: from prepared tokens to a model, on one device or many."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.options import Json, complete_preset
from loopformer.cli.output import format_duration, stoppable
from loopformer.config import DEFAULT_PRESET

MAX_EPOCHS = 4  # text that is repeated more often teaches less and less (Muennighoff et al. 2023)


@stoppable("what was saved is kept, the same command with --resume continues")
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET",
            help="A preset (`loopformer info` lists them) or a .yaml file; elastic by default.",
            autocompletion=complete_preset,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as training.steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the last good checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print FLOPs, memory and time, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model. A stopped run resumes with --resume: to the same bits on one CPU process, else up to rounding.

    Examples: loopformer train data.path=data/mine --out runs/mine

    loopformer train demo training.steps=500

    Several GPUs: torchrun --nproc-per-node 8 -m loopformer train paper/loopformer data.path=data/pile
    """
    from loopformer.training.launch import launch, plan

    settings = list(settings or [])
    if config is not None and "=" in config:
        settings.insert(0, config)
        config = None
    is_main = int(os.environ.get("RANK", 0)) == 0
    is_file = config is not None and Path(config).suffix in (".yaml", ".yml")
    name = Path(config).stem if config is not None and is_file else (config or DEFAULT_PRESET).replace("/", "-")
    folder = out or Path("runs") / name
    if dry_run:
        planned = plan(config, settings, folder, resume)
        if is_main:
            _show_plan(planned, as_json)
        return

    def say(sentence: str) -> None:
        typer.echo(sentence, err=True)

    result = launch(config, settings, folder, resume, quiet=as_json, say=say)
    if is_main:
        if as_json:
            typer.echo(json.dumps(result))
        elif result["finished"]:
            typer.echo(f"{folder}: step {result['step']}, {result['seconds']:.0f} s; use it with --model {folder}")
    if result["signal"] is not None:
        raise typer.Exit(128 + result["signal"])


def _show_plan(planned: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(planned, indent=2))
        return
    plan = planned["plan"]
    hours = "unknown on this device" if plan["hours"] is None else format_duration(plan["hours"] * 3600)
    epochs = "" if plan["epochs"] is None else f", {plan['epochs']:.2f} epochs"
    rate = "" if plan["device_tflops"] is None else f" at {plan['device_tflops']:.3g} TFLOP/s"
    rows = {
        "parameters": f"{plan['parameters']:,} ({plan['parameters_without_embeddings']:,} without embeddings)",
        "steps": f"{plan['steps']:,}",
        "tokens": f"{plan['tokens']:,}{epochs}",
        "FLOPs": f"{plan['training_gflops_per_token']:.4g} G per token, {plan['total_flops']:.3g} in all",
        "micro-batch": plan["micro_batch"],
        "memory": f"about {plan['memory_gib_per_device']:.2f} GiB per device",
        "time": f"about {hours} on {plan['device']}{rate}",
        "data": planned["data_missing"],
    }
    if plan["epochs"] is not None and plan["epochs"] > MAX_EPOCHS:
        advice = "add text, or lower training.steps or training.batch"
        rows["warning"] = f"more than {MAX_EPOCHS} epochs repeat the text so often that it teaches little; {advice}"
    typer.echo("\n".join(f"{name:12} {value}" for name, value in rows.items() if value is not None))
