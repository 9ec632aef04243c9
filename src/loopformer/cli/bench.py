"""`loopformer bench`: how fast a model is on this machine."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import Device, Json, RemovedInt8, complete_model_or_preset
from loopformer.cli.output import output_file, print_files, stoppable
from loopformer.config.model import BOX
from loopformer.files import write_json

if TYPE_CHECKING:
    import torch

    from loopformer.model import LoopedLM

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

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
AnySettings = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A preset, a run, a model folder or box: its settings.",
        autocompletion=complete_model_or_preset,
    ),
]
BenchDtype = Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 elsewhere.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


@bench.command("decode")
@stoppable(_STOPPED)
def decode(
    model: AnyModel = BOX,
    budgets: Annotated[str | None, typer.Option(help="Loops per token: 1,2,4; by default L, L/2 and L/4.")] = None,
    batches: Annotated[str, typer.Option(help="Requests at a time: 1,64.")] = "1",
    contexts: Annotated[str | None, typer.Option(help="Prompt tokens; half the context by default.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens that are timed.")] = 32,
    removed_int8: RemovedInt8 = False,
    paths: Annotated[str | None, typer.Option(help="Of naive,plain,fused,transformers; by default all.")] = None,
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time per token: without a KV cache, through the engine, and by Transformers' GPT-2.

    Each row has its FLOPs, its bandwidth and its memory. Example: loopformer bench decode --batches 1,64
    """
    from loopformer.benchmark.decode import DECODE_PATHS, WARM_UP_TOKENS, left_out
    from loopformer.benchmark.decode import decode as measure
    from loopformer.config import parse_counts
    from loopformer.errors import require

    rows = parse_counts(batches, "--batches")
    require(tokens >= 1, f"--tokens must be 1 or more, got {tokens}.")
    lm = _model(model, device, dtype)
    config = lm.config
    lengths = [config.context // 2] if contexts is None else parse_counts(contexts, "--contexts")
    numbers = _budgets(lm, budgets)
    require(
        max(lengths) + WARM_UP_TOKENS + tokens <= config.context,
        f"{max(lengths)} tokens, {WARM_UP_TOKENS} to warm up and {tokens} new ones do not fit the context of "
        f"{config.context}; ask for fewer with --contexts or --tokens.",
    )
    wanted_paths = list(DECODE_PATHS) if paths is None else _names(paths)
    line = partial(typer.echo, err=as_json)
    for path, reason in left_out(lm, wanted_paths).items():
        line(f"{path} is left out: {reason}.")

    def print_row(row: dict[str, Any]) -> None:
        what = f"{row['path']:12s} M={row['budget']:<2d} batch {row['batch']:<3d} context {row['context']:<4d}"
        if row["ms_per_step"] is None:
            line(f"{what} did not fit")
            return
        line(f"{what} {row['ms_per_step']:8.3f} ms {row['tokens_per_second']:8,.0f} tokens/s MBU {row['mbu']:.0%}")

    with output_file(out):
        _finish(measure(lm, numbers, rows, lengths, tokens, wanted_paths, print_row), model, out, as_json)


@bench.command("engine")
@stoppable(_STOPPED)
def engine(
    model: AnyModel = BOX,
    rows: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    budgets: Annotated[str | None, typer.Option(help="Loops per token: 8,4,2; by default L, L/2 and L/4.")] = None,
    context: Annotated[int | None, typer.Option(help="Prompt tokens; half the context by default.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of each request that are timed.")] = 64,
    seconds: Annotated[float, typer.Option(help="Seconds of arrivals at each load.")] = 8.0,
    paths: Annotated[str, typer.Option(help="Of plain,fused; by default both.")] = "plain,fused",
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of the engine: at one budget, at mixed budgets, and of requests that arrive at random.

    Example: loopformer bench engine --model paper/loopformer-3x8 --rows 64 --context 512
    """
    from loopformer.benchmark.decode import ENGINE_PATHS
    from loopformer.benchmark.decode import engine as measure
    from loopformer.errors import LoopformerError, nearest, require

    wanted_paths = _names(paths)
    for path in wanted_paths:
        require(path != "static", "The path static was removed; leave it out: --paths plain,fused.")
        if path not in ENGINE_PATHS:
            raise LoopformerError(f"There is no path {path!r}; {nearest(path, list(ENGINE_PATHS))}")
    require(rows >= 1 and tokens >= 2 and seconds > 0, "--rows and --seconds must be positive, --tokens 2 or more.")
    lm = _model(model, device, dtype)
    longest = context or lm.config.context // 2
    numbers = _budgets(lm, budgets)
    require(
        longest + 2 * tokens <= lm.config.context,
        f"{longest} tokens and {2 * tokens} new ones do not fit the context of {lm.config.context}; "
        f"lower --tokens, {tokens}, of which there are twice as many here, or --context.",
    )
    with output_file(out):
        line = partial(typer.echo, err=as_json)
        _finish(measure(lm, rows, numbers, longest, tokens, wanted_paths, seconds, line), model, out, as_json)


@bench.command("train")
@stoppable(_STOPPED)
def train(
    model: AnySettings = BOX,
    micro_batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 12,
    paths: Annotated[
        str | None,
        typer.Option(help="Of naive,plain,compiled,fused,fused fp8,transformers; by default those that suit."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Micro-batches that are timed.")] = 20,
    device: Device = "auto",
    dtype: BenchDtype = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens per second, MFU and peak memory: the naive path, ours, Transformers' GPT-2.

    Example: loopformer bench train --model paper/loopformer-3x8 --micro-batch 12
    """
    from loopformer.benchmark.train import train as measure
    from loopformer.cli.info import config_of
    from loopformer.errors import require

    chosen, wanted = _device_and_dtype(device, dtype)
    require(wanted in ("bfloat16", "float32"), f"Training runs in bfloat16 or float32, not {wanted!r}.")
    require(micro_batch >= 1 and steps >= 1, "--micro-batch and --steps must be 1 or more.")

    def print_row(row: dict[str, Any]) -> None:
        what = f"{row['path']:13s} {row['routes']:15s}"
        if row["ms"] is None:
            line(f"{what} did not fit")
            return
        rate = f"{row['tflops']:.3g} TFLOP/s" if row["mfu"] is None else f"MFU {row['mfu']:.1%}"
        peak = "" if row["peak_gib"] is None else f" {row['peak_gib']:.1f} GiB"
        line(f"{what} {row['ms']:7.1f} ms {row['tokens_per_second']:9,.0f} tokens/s {rate}{peak}")

    line = partial(typer.echo, err=as_json)
    wanted_paths = None if paths is None else _names(paths)
    with output_file(out):
        _finish(
            measure(config_of(model), micro_batch, chosen, wanted, wanted_paths, steps, print_row),
            model,
            out,
            as_json,
        )


@bench.command("memory")
@stoppable(_STOPPED)
def memory(
    model: AnySettings = BOX,
    micro_batches: Annotated[str, typer.Option(help="Sequences at a time: 4,8,12.")] = "12",
    device: Device = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Peak memory of training by path and micro-batch, and of a row's keys by budget.

    Example: loopformer bench memory --model paper/loopformer-3x8 --micro-batches 4,12
    """
    from loopformer.benchmark.train import memory as measure
    from loopformer.cli.info import config_of
    from loopformer.config import parse_counts
    from loopformer.device import choose_device

    def print_row(row: dict[str, Any]) -> None:
        peak = "did not fit" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        typer.echo(f"{row['path']:23s} micro-batch {row['micro_batch']:<4d} {peak}", err=as_json)

    sizes = parse_counts(micro_batches, "--micro-batches")
    with output_file(out):
        _finish(measure(config_of(model), sizes, choose_device(device), print_row), model, out, as_json)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _budgets(model: "LoopedLM", text: str | None) -> list[int]:
    """The budgets to measure, which the model must have: L, L/2 and L/4 by default."""
    from loopformer.config import parse_counts

    loops = model.config.loops
    default = sorted({loops, max(1, loops // 2), max(1, loops // 4)}, reverse=True)
    budgets = default if text is None else parse_counts(text, "--budgets")
    for budget in budgets:
        model.resolve(budget)
    return budgets


def _device_and_dtype(device: str, dtype: str | None) -> "tuple[torch.device, str]":
    """Where to run, and in which precision."""
    from loopformer.device import choose_device

    chosen = choose_device(device)
    return chosen, dtype or ("bfloat16" if chosen.type == "cuda" else "float32")


def _model(name: str, device: str, dtype: str | None) -> "LoopedLM":
    """A preset with random weights (seed 0), or a model on disk."""
    import torch

    from loopformer.config import load_run, preset_names, with_expected_vocab
    from loopformer.device import DTYPES
    from loopformer.errors import require
    from loopformer.lm import load, optimize_weight_layout
    from loopformer.model import LoopedLM

    chosen, wanted = _device_and_dtype(device, dtype)
    require(wanted in DTYPES, f"Unknown dtype {wanted!r}; choose one of {', '.join(DTYPES)}.")
    if name in preset_names():
        torch.manual_seed(0)
        model = LoopedLM(with_expected_vocab(*load_run(name)).model)
    else:
        model = load(name).model
    return optimize_weight_layout(model.to(chosen, DTYPES[wanted])).eval()


def _finish(report: dict[str, Any], model: str, out: Path | None, as_json: bool) -> None:
    """Print the machine, or the whole report as JSON; write the JSON to a file if one is named."""
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
