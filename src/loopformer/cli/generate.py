"""`loopformer generate`: continue a prompt at a budget of the user's choice."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopformer.cli.options import Device, Model
from loopformer.cli.output import number, print_table, stoppable
from loopformer.config.model import BOX

if TYPE_CHECKING:
    import torch

    from loopformer.inference.request import Event, Request
    from loopformer.lm import LM, Fast


@stoppable("nothing is kept but the text so far, the same command starts again")
def generate(
    model: Model = BOX,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input without it.")] = None,
    budget: Annotated[int | None, typer.Option(help="Loops per token, 1 to L; L by default.")] = None,
    trajectory: Annotated[str | None, typer.Option(help="A schedule: 4-2-1-1, 1/2,1/4,1/4, cosine:4.")] = None,
    schedule: Annotated[
        str, typer.Option(help="Steps of a budget: uniform, or best, as `loopformer search` found them.")
    ] = "uniform",
    max_ms_per_token: Annotated[
        float | None, typer.Option(help="The largest budget that is this fast here.")
    ] = None,
    max_flops: Annotated[
        float | None, typer.Option(help="The largest budget of at most these FLOPs per token.")
    ] = None,
    compare: Annotated[str | None, typer.Option(help="Several budgets side by side: 1,2,4.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft tokens at this smaller budget or schedule and verify them; the text is the same."),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens per draft; by default as many as pay, from what is accepted.")
    ] = None,
    certainty: Annotated[
        float | None,
        typer.Option(help="A token whose next one is likelier than this takes no further pass: 0.9."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the most likely that make up this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those this fraction as likely as the most likely.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repetition less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    fast: Annotated[
        bool | None,
        typer.Option(
            "--fast/--no-fast", help="Fused kernels as CUDA graphs, compiled at first use; by default on a GPU."
        ),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="On a GPU: int8 copies of the weights; the text may differ.")
    ] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default bfloat16 for fused kernels, else float32."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON at the end instead of text as it comes.")
    ] = False,
) -> None:
    """Continue a prompt, streaming; the budget is a number, a schedule or a target.

    Examples: loopformer generate "Once upon a time" --budget 4

    loopformer generate "Once upon a time" --model runs/mine --compare 1,2,4
    """
    from loopformer.config import whole_numbers
    from loopformer.device import dtype_of
    from loopformer.errors import require
    from loopformer.evaluation.schedules import scheduled
    from loopformer.evaluation.store import weights_hash
    from loopformer.lm import load

    text = _standard_input() if prompt is None else prompt
    require(text != "", "The prompt is empty; give one, or pipe text into standard input.")
    depths = (budget, trajectory, max_ms_per_token, max_flops, compare)
    require(
        sum(depth is not None for depth in depths) <= 1,
        "Give one of --budget, --trajectory, --max-ms-per-token, --max-flops and --compare.",
    )
    require(draft is None or compare is None, "Give --draft or --compare, not both.")
    require(not fast or compare is None, "--fast goes without --compare, which measures the plain path.")
    require(
        certainty is None or (compare is None and max_flops is None and max_ms_per_token is None),
        "--certainty goes without --compare, --max-flops and --max-ms-per-token, which are for fixed budgets.",
    )
    require(fast is not False or not int8, "Give --int8 or --no-fast, not both.")
    require(
        not (fast or int8) or max_ms_per_token is None,
        "--fast and --int8 go without --max-ms-per-token, which measures the plain path; give --budget.",
    )
    plain = compare is not None or max_ms_per_token is not None
    require(draft_length is None or draft is not None, "--draft-length goes with --draft.")
    require(
        schedule == "uniform" or any(depth is not None for depth in (budget, max_flops, max_ms_per_token)),
        "--schedule goes with --budget, --max-flops or --max-ms-per-token.",
    )
    wanted = None if dtype is None else dtype_of(dtype)
    budgets = None if compare is None else whole_numbers(compare, "--compare")
    lm = load(model)
    # What was found for these weights knows them as they are on disk, before they are cast.
    weights = None if schedule == "uniform" else weights_hash(lm.model)
    way: Fast = "auto" if fast is None and not plain else bool(fast)
    fused = _place(lm, device, wanted, way, certainty is not None)
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
    if budgets is not None:
        _compare(lm, text, budgets, options, as_json)
        return
    if max_flops is not None or max_ms_per_token is not None:
        budget = _budget_for(lm, text, max_flops, max_ms_per_token)
    if schedule != "uniform":
        budget, trajectory = None, str(scheduled(model, lm.model, budget or 0, schedule, weights))
    requests = lm.requests([text], budget, trajectory, **options)
    _stream(lm, requests, (draft, draft_length), way, int8, fused, as_json)


def _standard_input() -> str:
    """All of it, without the newline at its end."""
    from loopformer.errors import LoopformerError

    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LoopformerError("Standard input is not UTF-8 text; convert it.") from error


# All that this verb uses of the decode paths is below.


def _place(lm: "LM", device: str, dtype: "torch.dtype | None", fast: "Fast", certainty: bool) -> bool:
    """Move the model to where it will run; whether fused kernels will run it."""
    import torch

    from loopformer.device import choose_device
    from loopformer.inference.fused.backend import obstacle

    place = choose_device(device)
    fused = fast is not False and obstacle(lm.to(place).model, certainty) is None
    lm.to(place, dtype or (torch.bfloat16 if fused else torch.float32))
    return fused


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
    int8: bool,
    fused: bool,
    as_json: bool,
) -> None:
    """Run a request, showing its text as it comes; `draft` is a budget or schedule, and a length."""
    from loopformer.inference.draft import Draft
    from loopformer.inference.request import REASONS

    results = []

    def show(event: "Event") -> None:
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
        _, report = lm.speculate(requests, plan, fast, show, int8)
        extra["draft_acceptance"] = kept = report.acceptance
        said = " nothing was drafted;" if kept is None else f" {kept:.0%} of drafted tokens accepted;"
    else:
        for event in lm.events(requests, fast, int8):
            show(event)
    seconds, (result,) = time.perf_counter() - started, results
    if as_json:
        content = {"text": result.text, "reason": result.reason, "trajectory": str(result.trajectory)}
        counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": len(result.ids)}
        took = {"mean_passes": result.mean_passes, "seconds": seconds}
        typer.echo(json.dumps({**content, **counts, **took, **extra, "logprobs": result.logprobs}))
        return
    sys.stdout.write("\n")
    rate = seconds / len(result.ids) * 1e3
    included = "prompt and compilation" if fused else "prompt"
    if requests[0].certainty is not None:
        said = f" {result.mean_passes:.2f} passes each;{said}"
    typer.echo(
        f"[{len(result.ids)} tokens, {rate:.1f} ms each, {included} included;{said} {REASONS[result.reason]}]",
        err=True,
    )


def _compare(lm: "LM", text: str, budgets: list[int], options: dict[str, Any], as_json: bool) -> None:
    """The same prompt at several budgets: continuation, time per token, perplexity of the prompt."""
    from loopformer.inference.budget import milliseconds_per_token

    rows: list[dict[str, Any]] = []
    for budget in budgets:
        result = lm.generate(text, budget=budget, **options)
        (scored,) = lm.score([text], budget=budget)
        milliseconds = milliseconds_per_token(lm.model, budget, lm.requests([text])[0].prompt)
        rows.append(
            {
                "budget": budget,
                "ms_per_token": milliseconds,
                "prompt_perplexity": scored.perplexity,
                "text": result.text,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns = ["budget", "ms/token", "prompt perplexity", "continuation"]
    cells = [
        [
            str(row["budget"]),
            f"{row['ms_per_token']:.2f}",
            number(row["prompt_perplexity"], ".2f", missing="-"),
            row["text"],
        ]
        for row in rows
    ]
    print_table(columns, cells, left=len(columns), lines=True)
