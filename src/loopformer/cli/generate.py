"""`loopformer generate`: continue a prompt, or a file of prompts, at a chosen budget."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import (
    SAMPLED_TEMPERATURE,
    SAMPLED_TOP_P,
    BudgetOption,
    DecodeDtype,
    Device,
    FastOption,
    MinP,
    Model,
    NewTokens,
    RepetitionPenalty,
    Seed,
    TopK,
    TrajectoryOption,
    check_at_most_one,
    draw_seed,
)
from loopformer.cli.output import format_number, output_file, print_files, print_table, progress, stoppable
from loopformer.config.model import BOX
from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.request import Request
    from loopformer.lm import LM, Fast


def _outcome_of_stop(*_: Any, source: Path | None = None, **__: Any) -> str:
    """What Ctrl-C leaves behind. The parameters are those of `generate`."""
    if source is None:
        return "only the text printed so far is kept, the same command starts again"
    return "answered lines are kept, the same command continues after them"


@stoppable(_outcome_of_stop)
def generate(
    model: Model = BOX,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue. Default: standard input.")
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt, instead of the argument.")
    ] = None,
    budget: BudgetOption = None,
    trajectory: TrajectoryOption = None,
    schedule: Annotated[
        str, typer.Option(help="How a budget is split into steps: uniform, or best, as `loopformer search` found.")
    ] = "uniform",
    max_ms_per_token: Annotated[
        float | None, typer.Option(help="Use the largest budget that takes at most this long per token here.")
    ] = None,
    max_flops: Annotated[
        float | None, typer.Option(help="Use the largest budget within this many FLOPs per token.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Show several budgets or trajectories side by side, such as 1,4,2-1-2-3.")
    ] = None,
    max_tokens: NewTokens = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help=f"Sampling temperature; 0 is greedy. Default: {SAMPLED_TEMPERATURE}, or 0 with --input."),
    ] = None,
    top_k: TopK = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens that reach this total probability. "
            f"Default: {SAMPLED_TOP_P}, or 1 with --input."
        ),
    ] = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be given several times.")
    ] = None,
    fast: FastOption = None,
    device: Device = "auto",
    dtype: DecodeDtype = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON at the end instead of streaming text.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--input", "-i", help="A file of prompts, one JSON object per line; needs --out.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file for the answers to --input. If it exists, it is continued."),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Maximum prompts of --input at once. Default: 16.")] = None,
) -> None:
    """Continue a prompt, streaming. The budget is a number of loops, a schedule or a target.

    The text is sampled, and its seed is printed: the same --seed gives the same text. With --temperature 0, every
    token is the most likely one.

    Examples: loopformer generate "Once upon a time" --budget 4

    loopformer generate "Once upon a time" --model runs/mine --compare 1,2,4

    loopformer generate --input prompts.jsonl --out answers.jsonl --budget 2

    A line of --input has a prompt, and perhaps an id, which its answer repeats.

    Its other fields replace options of the same name, such as budget, max_tokens, temperature, seed and stop.
    """
    from loopformer.device import dtype_of
    from loopformer.evaluation.store import scheduled_trajectory, weights_hash
    from loopformer.lm import load, move_to_device

    check_at_most_one({"the argument PROMPT": prompt, "--prompt": prompt_option})
    prompt = prompt_option if prompt is None else prompt
    targets = {"--max-ms-per-token": max_ms_per_token, "--max-flops": max_flops}
    check_at_most_one({"--budget": budget, "--trajectory": trajectory, **targets, "--compare": compare})
    single_prompt_only = {"a prompt": prompt, "--compare": compare, **targets, "--json": as_json}
    for name, value in {**single_prompt_only, "--schedule": schedule != "uniform"}.items():
        check_at_most_one({"--input": source, name: value})
    # These two measure without the fused kernels, so they exclude --fast.
    unfused_only = {"--compare": compare, "--max-ms-per-token": max_ms_per_token}
    for name, value in unfused_only.items():
        check_at_most_one({"--fast": fast, name: value})
    require((source is None) == (out is None), "--input and --out go together: prompts, and their answers.")
    require(rows is None or source is not None, "--rows is for a file of prompts; add --input.")
    require(
        schedule == "uniform" or any(value is not None for value in (budget, *targets.values())),
        "--schedule goes with --budget, --max-flops or --max-ms-per-token.",
    )
    text = _standard_input() if prompt is None and source is None else prompt or ""
    require(text != "" or source is not None, "The prompt is empty; give one, or pipe text into standard input.")

    chosen_dtype = None if dtype is None else dtype_of(dtype)
    lm = load(model)
    compared = None if compare is None else [lm.model.resolve(part) for part in compare.split(",")]
    # Saved schedules and answers are keyed by the weights on disk, so hash them before they are cast.
    weights = None if schedule == "uniform" and source is None else weights_hash(lm.model)
    needs_unfused = any(value is not None for value in unfused_only.values())
    mode: Fast = "auto" if fast is None and not needs_unfused else bool(fast)
    is_fused = move_to_device(lm, device, chosen_dtype, mode)
    # Answers to a file are compared and repeated, so they are greedy unless the options say otherwise.
    default_temperature, default_top_p = (SAMPLED_TEMPERATURE, SAMPLED_TOP_P) if source is None else (0.0, 1.0)
    temperature = default_temperature if temperature is None else temperature
    if source is None and temperature == 0:
        seed = None  # greedy text has none
    elif source is None and seed is None:
        seed = draw_seed()
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": default_top_p if top_p is None else top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stops": tuple(stop or ()),
    }
    if source is not None and out is not None:
        defaults = {"budget": budget, "trajectory": trajectory, **options}
        with output_file(out):
            _answer_file(lm, source, out, 16 if rows is None else rows, defaults, mode is True or is_fused, weights)
    elif compared is not None:
        _compare(lm, text, compared, options, as_json)
    else:
        if max_flops is not None or max_ms_per_token is not None:
            budget = _budget_for(lm, text, max_flops, max_ms_per_token)
        if schedule != "uniform":
            budget, trajectory = None, str(scheduled_trajectory(model, lm.model, budget or 0, schedule, weights))
        requests = lm.requests([text], budget, trajectory, **options)
        _stream(lm, requests, mode, is_fused, max_ms_per_token, as_json)


def _standard_input() -> str:
    """All of standard input, without the final newline."""

    if sys.stdin.isatty():
        typer.echo("Type the prompt, then Enter and Ctrl-D.", err=True)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LoopformerError("Standard input is not UTF-8 text; convert it.") from error


def _answer_file(
    lm: "LM", source: Path, out: Path, rows: int, defaults: dict[str, Any], fast: bool, weights: str | None
) -> None:
    """Answer a file of prompts. `defaults` holds the arguments of `lm.requests` for fields that a line lacks."""
    from loopformer.inference.batch_file import answer_file

    def request_of(fields: dict[str, Any]) -> "Request":
        line = {"stops" if name == "stop" else name: value for name, value in fields.items()}
        if "budget" in line or "trajectory" in line:  # it replaces both of the command line
            line = {"budget": None, "trajectory": None, **line}
        return lm.requests([line.pop("prompt")], **{**defaults, **line})[0]

    engine = lm.engine(rows, queue=rows, fast=fast)
    # A wrong option is wrong for every line, so check the options before the first line is answered.
    (example,) = lm.requests(["a"], **defaults)
    engine.check(example)
    settings = {**defaults, "weights": weights, "tokenizer": lm.need_tokenizer().hash}
    settings |= {"trajectory": str(example.trajectory), "device": lm.model.device.type}
    settings |= {"dtype": lm.model.dtype_name, "fast": fast}
    del settings["budget"]  # the trajectory already determines it
    with progress("prompts") as report:
        summary = answer_file(source, out, engine, request_of, settings, lambda *count: report(source.name, *count))
    print_files([out])
    if summary.errors:
        raise RunFailed(
            f"{summary.errors} of {summary.lines} lines failed; see `error` in {out}, correct these lines in "
            f"{source}, and run the same command again."
        )


def _budget_for(lm: "LM", text: str, max_flops: float | None, max_ms_per_token: float | None) -> int:
    """The largest budget within a target. Its expected cost is printed to stderr."""
    from loopformer.inference.budget import budget_for_flops, budget_for_milliseconds

    if max_flops is not None:
        budget = budget_for_flops(lm.model, max_flops)
        expected = f"{lm.model.cost.forward_flops(budget):.4g} FLOPs per token"
    else:
        prompt = lm.requests([text])[0].prompt
        budget, milliseconds = budget_for_milliseconds(lm.model, max_ms_per_token or 0.0, prompt)
        expected = f"about {milliseconds:.3g} ms per token here"
    typer.echo(f"budget {budget} of {lm.model.config.loops}: {expected}", err=True)
    return budget


def _stream(
    lm: "LM",
    requests: "list[Request]",
    mode: "Fast",
    is_fused: bool,
    max_ms_per_token: float | None,
    as_json: bool,
) -> None:
    """Run a single request, print its text as it is generated, then the time it took."""
    from loopformer.inference.request import REASONS

    results = []
    first: float | None = None  # time of the first event, which ends prefill
    started = time.perf_counter()
    for event in lm.events(requests, mode):
        first = first or time.perf_counter()
        if event.result is not None:
            results.append(event.result)
        if not as_json:
            sys.stdout.write(event.piece)
            sys.stdout.flush()
    ended, (result,) = time.perf_counter(), results
    seed = requests[0].sampling.seed
    seconds, count = ended - started, len(result.ids)
    ms_per_token = (ended - first) / (count - 1) * 1e3 if first is not None and count > 1 else None
    if as_json:
        content = {"text": result.text, "reason": result.reason, "trajectory": str(result.trajectory)}
        counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": count, "seed": seed}
        timing = {"seconds": seconds, "ms_per_token": ms_per_token}
        typer.echo(json.dumps({**content, **counts, **timing, "logprobs": result.logprobs}))
        return
    sys.stdout.write("\n")
    speed = "" if ms_per_token is None else f" {ms_per_token:.1f} ms each after the first,"
    included, note = "the prompt and compilation" if is_fused else "the prompt", ""
    if max_ms_per_token is not None and ms_per_token is not None and ms_per_token > max_ms_per_token:
        note = f" slower than {max_ms_per_token:g} ms because the machine is busier than when it was measured;"
    seeded = "" if seed is None else f" seed {seed};"
    typer.echo(
        f"[{count} tokens,{speed} {seconds:.2f} s including {included};{note}{seeded} {REASONS[result.reason]}]",
        err=True,
    )


def _compare(lm: "LM", text: str, compared: list[Trajectory], options: dict[str, Any], as_json: bool) -> None:
    """Continue the same prompt along several trajectories, with time per token and perplexity of the prompt.

    All of them draw with the same seed, so their texts differ only where the predictions do.
    """
    from loopformer.inference.budget import milliseconds_per_token

    # The first text of a process is slower than the next ones, and no row should carry that.
    lm.generate(text, trajectory=compared[0], **{**options, "max_tokens": 2})
    rows: list[dict[str, Any]] = []
    for trajectory in compared:
        started = time.perf_counter()
        result = lm.generate(text, trajectory=trajectory, **options)
        seconds = time.perf_counter() - started
        (scored,) = lm.score([text], trajectory=trajectory)
        milliseconds = milliseconds_per_token(lm.model, trajectory, lm.requests([text])[0].prompt)
        rows.append(
            {
                "budget": trajectory.budget,
                "trajectory": str(trajectory),
                "ms_per_token": milliseconds,
                "seconds": seconds,
                "seed": options["seed"],
                "prompt_perplexity": scored.perplexity,
                "text": result.text,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "loops": lambda row: row["trajectory"],
        "decode,\nms/token": lambda row: f"{row['ms_per_token']:.2f}",
        "total,\ns": lambda row: f"{row['seconds']:.2f}",
        "prompt\nperplexity": lambda row: format_number(row["prompt_perplexity"], ".2f", missing="-"),
        "continuation": lambda row: row["text"],
    }
    cells = [[show(row) for show in columns.values()] for row in rows]
    print_table(list(columns), cells, left=len(columns), lines=True)
    if options["seed"] is not None:
        typer.echo(f"[seed {options['seed']} for each]", err=True)
