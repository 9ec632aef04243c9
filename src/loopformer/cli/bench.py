"""`loopformer bench`: how fast a model is on this machine."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import Device, Json, Verb, VerbGroup, complete_model_or_preset
from loopformer.cli.output import output_file, print_files, stoppable
from loopformer.config import load_run, parse_counts, preset_names, with_expected_vocab
from loopformer.config.model import BOX, parse_names
from loopformer.errors import require
from loopformer.files import write_json

if TYPE_CHECKING:
    from loopformer.model.looped import LoopedLM

bench = typer.Typer(cls=VerbGroup, help="Measure speed on this machine.", no_args_is_help=True)

_STOPPED = "nothing is kept but the lines above, the same command starts again"
AnyModel = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A preset (random weights), a run, a model folder or box.",
        autocompletion=complete_model_or_preset,
    ),
]
BenchDtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or int8 (on a CPU). Default: bfloat16 on a GPU, else float32.")
]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]
_COLUMN_FORMATS = {  # of a printed row; the other entries appear only in the JSON
    "path": "{:12s}",
    "routes": "{:14s}",
    "budget": "M={!s:<2}",
    "batch": "batch {:<3d}",
    "micro_batch": "batch {:<3d}",
    "context": "context {:<4d}",
    "ms_per_step": "{:8.3f} ms",
    "ms": "{:8.1f} ms",
    "tokens_per_second": "{:8,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "mbu": "MBU {:.0%}",
    "peak_gib": "{:.1f} GiB",
}


@bench.command("decode", cls=Verb)
@stoppable(_STOPPED)
def decode(
    model: AnyModel = BOX,
    budgets: Annotated[str | None, typer.Option(help="Loops per token: 8,4,2. Default: L, L/2 and L/4.")] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, such as 1,64.")] = "1",
    contexts: Annotated[str | None, typer.Option(help="Prompt tokens. Default: half the context.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens to time.")] = 32,
    paths: Annotated[
        str, typer.Option(help="Which of these to measure; naive has no KV cache.")
    ] = "naive,plain,fused,transformers,transformers compiled",
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time per token: without a KV cache, through the engine, and by Transformers' GPT-2.

    Each row also has FLOPs, bandwidth and memory. Example: loopformer bench decode --batches 1,64
    """
    from loopformer.benchmark.decode import WARM_UP_TOKENS, left_out
    from loopformer.benchmark.decode import decode as measure

    rows = parse_counts(batches, "--batches")
    require(tokens >= 1, f"--tokens must be 1 or more, got {tokens}.")
    lm = _model(model, device, dtype)
    config, numbers = lm.config, _budgets(lm, budgets)
    lengths = [config.context // 2] if contexts is None else parse_counts(contexts, "--contexts")
    require(
        max(lengths) + WARM_UP_TOKENS + tokens <= config.context,
        f"{max(lengths)} tokens, {WARM_UP_TOKENS} to warm up and {tokens} new ones do not fit the context of "
        f"{config.context}; ask for fewer with --contexts or --tokens.",
    )
    for path, reason in left_out(lm, parse_names(paths)).items():
        typer.echo(f"{path} is left out: {reason}.", err=as_json)
    with output_file(out):
        report = measure(lm, numbers, rows, lengths, tokens, parse_names(paths), partial(_print_row, as_json))
        _finish(report, model, out, as_json)


@bench.command("engine", cls=Verb)
@stoppable(_STOPPED)
def engine(
    model: AnyModel = BOX,
    rows: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    budgets: Annotated[str | None, typer.Option(help="Loops per token: 8,4,2. Default: L, L/2 and L/4.")] = None,
    context: Annotated[int | None, typer.Option(help="Prompt tokens. Default: half the context.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens to time per request.")] = 64,
    seconds: Annotated[float, typer.Option(help="Seconds of arrivals at each load.")] = 8.0,
    paths: Annotated[str, typer.Option(help="Which of these to measure.")] = "plain,fused",
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of the engine: at one budget, at mixed budgets, and with random arrivals.

    Example: loopformer bench engine --model paper/loopformer-3x8 --rows 64 --context 512
    """
    from loopformer.benchmark.engine import engine as measure

    require("static" not in parse_names(paths), "The path static was removed; leave it out: --paths plain,fused.")
    require(seconds > 0, f"--seconds must be positive, got {seconds:g}.")
    lm = _model(model, device, dtype)
    length = lm.config.context // 2 if context is None else context
    require(
        length + 2 * tokens <= lm.config.context,
        f"{length} prompt tokens and up to {2 * tokens} new ones (twice --tokens) do not fit the context of "
        f"{lm.config.context}; lower --tokens or --context.",
    )
    with output_file(out):
        print_line = partial(typer.echo, err=as_json)
        numbers = _budgets(lm, budgets)
        report = measure(lm, rows, numbers, length, tokens, parse_names(paths), seconds, print_line)
        _finish(report, model, out, as_json)


@bench.command("train", cls=Verb)
@stoppable(_STOPPED)
def train(
    model: AnyModel = BOX,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            "--micro-batches", "--micro-batch", help="Sequences per micro-batch, such as 4,12. Default: a group's."
        ),
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(
            help="Of naive,plain,compiled,fused,fused recomputed,fused fp8,transformers. Default: those that suit."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Micro-batches to time.")] = 20,
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens per second, MFU and peak memory of loopformer's training paths and of Transformers' GPT-2.

    The objective is the preset's, or the paper's for a model on disk. Weights are random.

    Example: loopformer bench train --model elastic --micro-batches 64,128
    """
    from loopformer.benchmark.train import train as measure
    from loopformer.cli.info import config_of
    from loopformer.config.run import paper_run
    from loopformer.device import choose_device

    chosen = choose_device(device)
    precision = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    require(precision in ("bfloat16", "float32"), f"Training runs in bfloat16 or float32, not {precision!r}.")
    require(steps >= 1, f"--steps must be 1 or more, got {steps}.")
    config = config_of(model)
    run = replace(load_run(model)[0], model=config) if model in preset_names() else paper_run(config)
    group = run.training.batch // run.objective.trajectory_groups
    sizes = [group] if micro_batches is None else parse_counts(micro_batches, "--micro-batches")
    names = None if paths is None else parse_names(paths)
    with output_file(out):
        print_row = partial(_print_row, as_json)
        _finish(measure(run, sizes, chosen, precision, names, steps, print_row), model, out, as_json)


def _budgets(model: "LoopedLM", text: str | None) -> list[int]:
    """The budgets to measure. Raises an error if the model has too few loops for one of them."""
    loops = model.config.loops
    default = sorted({loops, max(1, loops // 2), max(1, loops // 4)}, reverse=True)
    budgets = default if text is None else parse_counts(text, "--budgets")
    for budget in budgets:
        model.resolve(budget)
    return budgets


def _model(name: str, device: str, dtype: str | None) -> "LoopedLM":
    """A preset with random weights (seed 0), or a model on disk."""
    import torch

    from loopformer.device import choose_device, dtype_of
    from loopformer.lm import LM, load
    from loopformer.model.looped import LoopedLM

    chosen = choose_device(device)
    precision = dtype_of(dtype or ("bfloat16" if chosen.type == "cuda" else "float32"))
    if name in preset_names():
        torch.manual_seed(0)
        lm = LM(LoopedLM(with_expected_vocab(*load_run(name)).model).eval())
    else:
        lm = load(name)
    return lm.to(chosen, precision).model


def _print_row(as_json: bool, row: dict[str, Any]) -> None:
    shown = [form.format(row[name]) for name, form in _COLUMN_FORMATS.items() if row.get(name) is not None]
    has_run = row["tokens_per_second"] is not None
    typer.echo(" ".join(shown if has_run else [*shown, "did not fit"]), err=as_json)


def _finish(report: dict[str, Any], model: str, out: Path | None, as_json: bool) -> None:
    """Print the machine, or the complete report as JSON. Also write the JSON to `out` if it is given."""
    content = {"command": " ".join(["loopformer", *sys.argv[1:]]), "seed": 0, **report, "model": model}
    if out is not None:
        write_json(out, content)
    if as_json:
        typer.echo(json.dumps(content))
        return
    versions = [f"{name} {report[name]}" for name in ("python", "torch", "triton", "transformers") if report[name]]
    typer.echo(", ".join([report["device"], report["dtype"], *versions]))
    if out is not None:
        print_files([out])
