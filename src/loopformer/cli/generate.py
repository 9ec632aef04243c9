"""`loopformer generate`: continue a prompt, or a file of prompts, at a budget of the user's choice."""

import json
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import (
    BudgetOption,
    CertaintyOption,
    DecodeDtype,
    Device,
    FastOption,
    MinP,
    Model,
    NewTokens,
    RemovedInt8,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrajectoryOption,
    warn_of_certainty,
)
from loopformer.cli.output import number, output_file, print_files, print_table, progress, stoppable
from loopformer.config.model import BOX

if TYPE_CHECKING:
    from loopformer.inference.request import Event, Request
    from loopformer.lm import LM, Fast
    from loopformer.trajectory import Trajectory


def _kept(*_: Any, source: Path | None = None, **__: Any) -> str:
    if source is None:
        return "nothing is kept but the text so far, the same command starts again"
    return "what is answered is kept, the same command goes on after it"


@stoppable(_kept)
def generate(
    model: Model = BOX,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input without it.")] = None,
    budget: BudgetOption = None,
    trajectory: TrajectoryOption = None,
    schedule: Annotated[
        str, typer.Option(help="Steps of a budget: uniform, or best, as `loopformer search` found them.")
    ] = "uniform",
    max_ms_per_token: Annotated[
        float | None, typer.Option(help="The largest budget that is this fast here.")
    ] = None,
    max_flops: Annotated[
        float | None, typer.Option(help="The largest budget of at most these FLOPs per token.")
    ] = None,
    compare: Annotated[str | None, typer.Option(help="Budgets and schedules side by side: 1,2,4-2-1-1.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft tokens at this smaller budget or schedule and verify them; the text is the same."),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens per draft; by default as many as pay, from what is accepted.")
    ] = None,
    certainty: CertaintyOption = None,
    max_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    fast: FastOption = None,
    int8: RemovedInt8 = False,
    device: Device = "auto",
    dtype: DecodeDtype = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON at the end instead of text as it comes.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="A file of prompts instead, one JSON object per line; with --out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where their answers go; what is there is continued.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Prompts of --input that run at once; 16 by default.")] = None,
) -> None:
    """Continue a prompt, streaming; the budget is a number, a schedule or a target.

    Examples: loopformer generate "Once upon a time" --budget 4

    loopformer generate "Once upon a time" --model runs/mine --compare 1,2,4

    loopformer generate --input prompts.jsonl --out answers.jsonl --budget 2

    A line of --input has a prompt, and what else it has goes before the options: budget or trajectory, max_tokens,
    temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, certainty; an id is passed on.
    """
    from loopformer.device import dtype_of
    from loopformer.errors import require
    from loopformer.evaluation.schedules import scheduled
    from loopformer.evaluation.store import weights_hash
    from loopformer.lm import load, place

    one_prompt = {
        "a prompt": prompt is not None,
        "--compare": compare is not None,
        "--draft": draft is not None,
        "--max-flops": max_flops is not None,
        "--max-ms-per-token": max_ms_per_token is not None,
        "--schedule": schedule != "uniform",
        "--json": as_json,
    }
    for name, given in one_prompt.items():
        require(source is None or not given, f"--input goes without {name}; leave out one of them.")
    require((source is None) == (out is None), "--input, the prompts, and --out, their answers, go together.")
    require(rows is None or source is not None, "--rows goes with --input.")
    text = prompt if prompt is not None else _standard_input() if source is None else ""
    require(text != "" or source is not None, "The prompt is empty; give one, or pipe text into standard input.")
    depths = (budget, trajectory, max_ms_per_token, max_flops, compare)
    require(
        sum(depth is not None for depth in depths) <= 1,
        "Give one of --budget, --trajectory, --max-ms-per-token, --max-flops and --compare.",
    )
    require(draft is None or compare is None, "Give --draft or --compare, not both.")
    require(not fast or draft is None, "--fast goes without --draft, which runs on the plain path; leave out one.")
    require(not fast or compare is None, "--fast goes without --compare, which measures the plain path.")
    require(
        certainty is None or (compare is None and max_flops is None and max_ms_per_token is None),
        "--certainty goes without --compare, --max-flops and --max-ms-per-token, which are for fixed budgets.",
    )
    require(
        not fast or max_ms_per_token is None,
        "--fast goes without --max-ms-per-token, which measures the plain path; give --budget.",
    )
    plain = compare is not None or max_ms_per_token is not None or draft is not None
    require(draft_length is None or draft is not None, "--draft-length goes with --draft.")
    require(
        schedule == "uniform" or any(depth is not None for depth in (budget, max_flops, max_ms_per_token)),
        "--schedule goes with --budget, --max-flops or --max-ms-per-token.",
    )
    wanted = None if dtype is None else dtype_of(dtype)
    lm = load(model)
    compared = None if compare is None else [lm.model.resolve(part) for part in compare.split(",")]
    # What was found for these weights knows them as they are on disk, before they are cast.
    weights = None if schedule == "uniform" and source is None else weights_hash(lm.model)
    way: Fast = "auto" if fast is None and not plain else bool(fast)
    fused = place(lm, device, wanted, way, certainty is not None)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stops": tuple(stop or ()),
        "certainty": certainty,
    }
    if source is not None and out is not None:
        defaults = {"budget": budget, "trajectory": trajectory, **options}
        with output_file(out):
            _answer_file(
                lm, model, source, out, 16 if rows is None else rows, defaults, way is True or fused, weights
            )
        return
    if compared is not None:
        _compare(lm, text, compared, options, as_json)
        return
    if max_flops is not None or max_ms_per_token is not None:
        budget = _budget_for(lm, text, max_flops, max_ms_per_token)
    if schedule != "uniform":
        budget, trajectory = None, str(scheduled(model, lm.model, budget or 0, schedule, weights))
    requests = lm.requests([text], budget, trajectory, **options)
    warn_of_certainty(certainty, model)
    _stream(lm, requests, (draft, draft_length), way, fused, max_ms_per_token, as_json)


def _standard_input() -> str:
    """All of it, without the newline at its end."""
    from loopformer.errors import LoopformerError

    if sys.stdin.isatty():
        typer.echo("Type the prompt, then Enter and Ctrl-D.", err=True)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LoopformerError("Standard input is not UTF-8 text; convert it.") from error


# All that this verb uses of the decode paths is below.


def _answer_file(
    lm: "LM",
    model: str,
    source: Path,
    out: Path,
    rows: int,
    defaults: dict[str, Any],
    fast: bool,
    weights: str | None,
) -> None:
    """Answer a file of prompts; the defaults are what `lm.requests` is given where a line says nothing."""
    from loopformer.errors import RunFailed
    from loopformer.inference.batch_file import answer_file
    from loopformer.inference.request import Request
    from loopformer.inference.sampling import Sampling

    warn = cache(partial(warn_of_certainty, model=model))  # once of each

    def request_of(fields: dict[str, Any]) -> Request:
        own = {"stops" if name == "stop" else name: value for name, value in fields.items()}
        if "budget" in own or "trajectory" in own:
            own = {"budget": None, "trajectory": None, **own}
        request = lm.requests([own.pop("prompt")], **{**defaults, **own})[0]
        warn(request.certainty)
        return request

    settings = dict(defaults)
    (follows,) = lm.trajectories(1, settings.pop("budget"), settings.pop("trajectory"))
    engine = lm.engine(rows, queue=rows, fast=fast)
    sampling = Sampling(**{name: settings[name] for name in Sampling.__dataclass_fields__})
    others = {name: settings[name] for name in ("max_tokens", "stops", "certainty")}
    engine.backend.check(Request((0,), follows, sampling, **others))  # what is wrong with all lines is said at once
    settings |= {"weights": weights, "tokenizer": lm.need_tokenizer().hash, "trajectory": str(follows)}
    settings |= {"device": lm.model.device.type, "dtype": lm.model.dtype_name, "fast": fast}
    with progress("prompts") as report:
        done = answer_file(source, out, engine, request_of, settings, lambda *count: report(source.name, *count))
    print_files([out])
    if done.errors:
        raise RunFailed(
            f"{done.errors} of {done.lines} lines could not be run; see `error` in {out}, and put these lines, "
            "corrected, into a file of their own."
        )


def _budget_for(lm: "LM", text: str, max_flops: float | None, max_ms_per_token: float | None) -> int:
    """The budget for a target, said on stderr."""
    from loopformer.inference.budget import budget_for_flops, budget_for_milliseconds

    if max_flops is not None:
        budget = budget_for_flops(lm.model, max_flops)
        said = f"{lm.model.cost.forward_flops(budget):.4g} FLOPs per token"
    else:
        prompt = lm.requests([text])[0].prompt
        budget, expected = budget_for_milliseconds(lm.model, max_ms_per_token or 0.0, prompt)
        said = f"about {expected:.3g} ms per token here"
    typer.echo(f"budget {budget} of {lm.model.config.loops}: {said}", err=True)
    return budget


def _stream(
    lm: "LM",
    requests: "list[Request]",
    draft: tuple[str | None, int | None],
    fast: "Fast",
    fused: bool,
    promised: float | None,
    as_json: bool,
) -> None:
    """Run a request, showing its text as it comes; `draft` is a budget or schedule, and a length, `promised` the
    milliseconds that a token may take."""
    from loopformer.inference.draft import Draft
    from loopformer.inference.request import REASONS

    results = []
    first: float | None = None  # when it came

    def show(event: "Event") -> None:
        nonlocal first
        first = first or time.perf_counter()
        if event.result is not None:
            results.append(event.result)
        if not as_json:
            sys.stdout.write(event.piece)
            sys.stdout.flush()

    extra: dict[str, Any] = {}
    said = ""
    started = time.perf_counter()
    if draft[0] is not None:
        plan = Draft(lm.model.resolve(draft[0]), draft[1])
        _, report = lm.speculate(requests, plan, fast, show)
        extra["draft_acceptance"] = kept = report.acceptance
        said = " nothing was drafted;" if kept is None else f" {kept:.0%} of drafted tokens accepted;"
    else:
        for event in lm.events(requests, fast):
            show(event)
    ended, (result,) = time.perf_counter(), results
    seconds, count = ended - started, len(result.ids)
    decoding = (ended - first) / (count - 1) * 1e3 if first is not None and count > 1 else None
    if as_json:
        content = {"text": result.text, "reason": result.reason, "trajectory": str(result.trajectory)}
        counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": count}
        took = {"mean_passes": result.mean_passes, "seconds": seconds, "ms_per_token": decoding}
        typer.echo(json.dumps({**content, **counts, **took, **extra, "logprobs": result.logprobs}))
        return
    sys.stdout.write("\n")
    each = "" if decoding is None else f" {decoding:.1f} ms each after the first,"
    included = "the prompt and compilation" if fused else "the prompt"
    if requests[0].certainty is not None:
        said = f" {result.mean_passes:.2f} passes each;{said}"
    if promised is not None and decoding is not None and decoding > promised:
        said += f" slower than the {promised:g} ms asked for, as the machine is busier than when it was measured;"
    typer.echo(
        f"[{count} tokens,{each} {seconds:.2f} s with {included};{said} {REASONS[result.reason]}]",
        err=True,
    )


def _compare(lm: "LM", text: str, compared: "list[Trajectory]", options: dict[str, Any], as_json: bool) -> None:
    """The same prompt along several trajectories: continuation, time per token, perplexity of the prompt."""
    from loopformer.inference.budget import milliseconds_per_token

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
                "prompt_perplexity": scored.perplexity,
                "text": result.text,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns = ["passes", "decode,\nms/token", "in all,\ns", "prompt\nperplexity", "continuation"]
    cells = [
        [
            row["trajectory"],
            f"{row['ms_per_token']:.2f}",
            f"{row['seconds']:.2f}",
            number(row["prompt_perplexity"], ".2f", missing="-"),
            row["text"],
        ]
        for row in rows
    ]
    print_table(columns, cells, left=len(columns), lines=True)
