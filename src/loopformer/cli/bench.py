"""`loopformer bench`: how fast a model is on this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loopformer.model import LoopedLM

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", "-m", help="A preset (random weights), a run or a model folder.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


@bench.command("decode")
def decode(
    model: Model = "paper/loopformer-3x8",
    budgets: Annotated[str | None, typer.Option(help="Loops per token: 1,2,4; by default L, L/2 and L/4.")] = None,
    batches: Annotated[str, typer.Option(help="Rows at a time: 1,64.")] = "1",
    contexts: Annotated[str | None, typer.Option(help="Tokens before the first new one; half the context.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens that are timed.")] = 32,
    int8: Annotated[bool, typer.Option("--int8", help="Also with int8 weights, for a few rows on a GPU.")] = False,
    paths: Annotated[str | None, typer.Option(help="Of naive,plain,fused,transformers; by default all.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 elsewhere.")] = None,
    out: Out = None,
) -> None:
    """Time per token: without a cache, with ours, and by Transformers' GPT-2 with its own; the last line is JSON.

    Each with the FLOPs, the bandwidth and the memory it takes. Example: loopformer bench decode --batches 1,64
    """
    from loopformer.benchmark.decode import CHOICES, left_out
    from loopformer.benchmark.decode import decode as measure
    from loopformer.config import whole_numbers
    from loopformer.errors import require

    lm = _model(model, device, dtype)
    config = lm.config
    chosen = sorted({config.loops, max(1, config.loops // 2), max(1, config.loops // 4)})
    if budgets is not None:
        chosen = whole_numbers(budgets, "--budgets")
    for budget in chosen:
        lm.resolve(budget)
    lengths = [config.context // 2] if contexts is None else whole_numbers(contexts, "--contexts")
    require(tokens >= 1, f"--tokens must be 1 or more, got {tokens}.")
    require(
        max(lengths) + tokens <= config.context,
        f"{max(lengths)} tokens and {tokens} new ones do not fit the context of {config.context}; ask for fewer.",
    )

    ways = [path.strip() for path in paths.split(",")] if paths is not None else list(CHOICES)
    rows = whole_numbers(batches, "--batches")
    for path, reason in left_out(lm, ways, int8, rows).items():
        typer.echo(f"{path} is left out: {reason}.")

    def say(row: dict[str, Any]) -> None:
        what = f"{row['path']:12s} M = {row['budget']:<3d} batch {row['batch']:<4d} context {row['context']:<5d}"
        if row["ms_per_step"] is None:
            typer.echo(f"{what} did not fit")
            return
        mfu = "" if row["mfu"] is None else f" (MFU {row['mfu']:.1%})"
        memory = "" if row["peak_gib"] is None else f"  {row['peak_gib']:.1f} GiB"
        typer.echo(
            f"{what} {row['ms_per_step']:9.3f} ms  {row['tokens_per_second']:10.1f} tokens/s  "
            f"{row['tflops']:7.3f} TFLOP/s{mfu}  {row['gb_per_second']:7.1f} GB/s (MBU {row['mbu']:.1%}){memory}"
        )

    found = measure(lm, chosen, rows, lengths, tokens, int8, ways, say)
    _finish({**found, "model": model}, out)


@bench.command("train")
def train(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A preset, a run or a model folder: its settings.")
    ] = ("paper/loopformer-3x8"),
    micro_batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 12,
    paths: Annotated[
        str | None,
        typer.Option(help="Of naive,plain,compiled,fused,fused fp8,transformers; what makes sense here."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Micro-batches that are timed.")] = 20,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 elsewhere.")] = None,
    out: Out = None,
) -> None:
    """Tokens per second, MFU and peak memory: the naive path, ours, Transformers' GPT-2; the last line is JSON.

    Example: loopformer bench train --model paper/loopformer-3x8 --micro-batch 12
    """
    from loopformer.benchmark.train import train as measure
    from loopformer.cli.info import config_of
    from loopformer.device import choose_device
    from loopformer.errors import require

    place = choose_device(device)
    wanted = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    require(wanted in ("bfloat16", "float32"), f"Training runs in bfloat16 or float32, not {wanted!r}.")
    require(micro_batch >= 1 and steps >= 1, "--micro-batch and --steps must be 1 or more.")

    def say(row: dict[str, Any]) -> None:
        if row["ms"] is None:
            typer.echo(f"{row['path']:13s} {row['routes']:15s} did not fit")
            return
        mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        memory = "" if row["peak_gib"] is None else f"  {row['peak_gib']:.1f} GiB"
        typer.echo(
            f"{row['path']:13s} {row['routes']:15s} {row['ms']:9.1f} ms  {row['tokens_per_second']:9.0f} tokens/s  "
            f"{row['tflops']:7.2f} TFLOP/s{mfu}{memory}"
        )

    config = config_of(model, None, None)
    ways = None if paths is None else [path.strip() for path in paths.split(",")]
    _finish({**measure(config, micro_batch, place, wanted, ways, steps, say), "model": model}, out)


@bench.command("memory")
def memory(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A preset, a run or a model folder: its settings.")
    ] = ("paper/loopformer-3x8"),
    micro_batches: Annotated[str, typer.Option(help="Sequences at a time: 4,8,12.")] = "12",
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Peak memory of training by path and micro-batch, and of a row's keys by budget; the last line is JSON.

    Example: loopformer bench memory --model paper/loopformer-3x8 --micro-batches 4,12
    """
    from loopformer.benchmark.train import memory as measure
    from loopformer.cli.info import config_of
    from loopformer.config import whole_numbers
    from loopformer.device import choose_device

    def say(row: dict[str, Any]) -> None:
        peak = "did not fit" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        typer.echo(f"{row['path']:23s} micro-batch {row['micro_batch']:<4d} {peak}")

    config = config_of(model, None, None)
    found = measure(config, whole_numbers(micro_batches, "--micro-batches"), choose_device(device), say)
    _finish({**found, "model": model}, out)


def _model(name: str, device: str, dtype: str | None) -> "LoopedLM":
    """A preset with random weights (seed 0), or a model on disk."""
    import torch

    from loopformer.config import load_run, preset_names, with_expected_vocab
    from loopformer.device import DTYPES, choose_device
    from loopformer.errors import require
    from loopformer.lm import lay_out, load
    from loopformer.model import LoopedLM

    place = choose_device(device)
    wanted = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    require(wanted in DTYPES, f"Unknown dtype {wanted!r}; choose one of {', '.join(DTYPES)}.")
    if name in preset_names():
        torch.manual_seed(0)
        model = LoopedLM(with_expected_vocab(*load_run(name)).model)
    else:
        model = load(name).model
    return lay_out(model.to(place, DTYPES[wanted])).eval()


def _finish(report: dict[str, Any], out: Path | None) -> None:
    """What it ran on in words; the JSON, on the last line and in a file."""
    from loopformer.benchmark.machine import publish

    versions = [f"{name} {report[name]}" for name in ("python", "torch", "triton", "transformers") if report[name]]
    typer.echo(", ".join([report["device"], report["dtype"], *versions]))
    publish({"command": " ".join(["loopformer", *sys.argv[1:]]), "seed": 0, **report}, out)
