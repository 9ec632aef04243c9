"""`loopformer calibrate`: thresholds for depth by certainty, at a wanted mean budget."""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.eval import TEXT_HELP, own_text
from loopformer.cli.output import shown


def calibrate(
    model: Annotated[str, typer.Option("--model", "-m", help="A run, a model folder or published weights.")],
    mean_budget: Annotated[float, typer.Option(help="The wanted mean budget, 1 to L.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to put the results into.")],
    text: Annotated[
        str | None, typer.Option("--text", "--data", help=f"{TEXT_HELP}. A run's own data by default.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Choose the depth per token or per prompt.")] = "token",
    measure: Annotated[str, typer.Option(help="Certainty by entropy, margin or kl.")] = "entropy",
    fill: Annotated[
        str, typer.Option(help="Keys that earlier tokens lack: exact computes them; copy is cheaper and lossy.")
    ] = "exact",
    count: Annotated[
        str, typer.Option(help="The mean budget in passes one after another, or compute (FLOPs, as loops).")
    ] = "passes",
    choices: Annotated[
        str | None,
        typer.Option(help="Depths to choose among, as 1,2,4; by default all lists of two and three are tried."),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text, as long as the model's context, at most.")] = 256,
    copy_tokens: Annotated[
        int, typer.Option(help="Tokens of each half that policies are run on with --fill copy.")
    ] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Pick thresholds on one half of a text, report on the other, and compare with fixed budgets.

    Writes calibration.json, for `loopformer generate --adaptive`, and calibration.png.

    Example: loopformer calibrate --model runs/mine --mean-budget 2.5 --out runs/mine/adaptive
    """
    from loopformer.config import whole_numbers
    from loopformer.device import choose_device
    from loopformer.errors import require
    from loopformer.evaluation.calibrate import Wanted, draw, plain, save
    from loopformer.evaluation.calibrate import calibrate as run
    from loopformer.evaluation.simulate import cut
    from loopformer.evaluation.store import weights_hash
    from loopformer.evaluation.text import read_text
    from loopformer.lm import load

    depths = None if choices is None else tuple(whole_numbers(choices, "--choices"))
    wanted = Wanted(mean_budget, mode, measure, fill, count, depths, copy_tokens)
    require(windows >= 1, f"--windows must be 1 or more, got {windows}.")
    started = time.perf_counter()
    lm = load(model).to(choose_device(device))
    source = text or own_text(model)
    _check_folder(out)
    context = lm.model.config.context
    with shown() as report:
        read = read_text(source, lm.need_tokenizer(), max_tokens=windows * context, report=report)
        rows = cut(read, context, windows)
        found = run(lm.model, rows, wanted, report)
    told = {
        "model": model,
        "weights": weights_hash(lm.model),
        "text": {"name": read.name, "part": read.part, "sha256": read.sha256},
        "windows": len(rows),
        "context": context,
        "seconds": time.perf_counter() - started,
    }
    content = plain(found, wanted, told)
    files = [save(content, out)]
    picture = draw(content, out)
    if picture is None:
        typer.echo("No picture is drawn without matplotlib; pip install 'loopformer[plot]'.", err=True)
    else:
        files.append(picture)
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _show(content, files)


def _check_folder(out: Path) -> None:
    """Before the work, not after it."""
    from loopformer.errors import FileProblem

    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise FileProblem(f"The folder {out} cannot be written to; choose another with --out.")


def _show(found: dict[str, Any], files: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    policy = found["policy"]
    depths = ", ".join(map(str, policy.get("rungs") or policy["routes"]))
    thresholds = ", ".join(f"{one:.4g}" for one in policy["thresholds"])
    lossy = " (lossy)" if found["lossy"] else ""
    console.print(
        f"picked: per {policy['mode']}, {policy['measure']}, depths {depths}, thresholds {thresholds}"
        f"{', fill ' + policy['fill'] + lossy if 'fill' in policy else ''}; mean budget "
        f"{found['mean_budget_where_picked']:.2f} in {found['wanted']['count']} where it was picked",
        highlight=False,
        markup=False,
    )
    table = Table("held-out half", "perplexity", "passes/token", "compute", "MFLOP/token", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, family in found["fixed"].items():
        for budget, row in enumerate(family, start=1):
            label = f"{budget} uniform steps" if name == "uniform" else f"rung {budget}"
            table.add_row(label, *_cells(row))
    for row in found["curve"]:
        table.add_row("adaptive" + ", picked" * (row["policy"] == policy), *_cells(row))
    console.print(table, highlight=False)
    for one in found["against_fixed"].values():
        console.print(one["sentence"], highlight=False, markup=False)
    console.print(f"written: {', '.join(map(str, files))}", style="dim", markup=False, highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['perplexity']:.2f}", f"{row['passes']:.2f}", f"{row['compute']:.2f}", f"{row['mflops']:.3f}"]
