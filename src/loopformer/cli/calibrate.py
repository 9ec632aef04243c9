"""`loopformer calibrate`: thresholds for depth by certainty, at a wanted mean budget."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from loopformer.cli.options import TEXT, Device, Json, Model, own_text
from loopformer.cli.output import output_folder, print_files, print_table, progress, stoppable


@stoppable("a calibration is written when it is finished, the same command starts again")
def calibrate(
    model: Model,
    mean_budget: Annotated[float, typer.Option(help="The wanted mean budget, 1 to L.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to put the results into.")],
    text: Annotated[
        str | None, typer.Option("--text", "--data", help=f"{TEXT}. A run's own data by default.")
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
    device: Device = "auto",
    as_json: Json = False,
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
    place, source = choose_device(device), text or own_text(model)
    started = time.perf_counter()
    with output_folder(out), progress() as report:
        lm = load(model).to(place)
        context = lm.model.config.context
        read = read_text(source, lm.need_tokenizer(), max_tokens=windows * context, report=report)
        rows = cut(read, context, windows)
        calibrated = run(lm.model, rows, wanted, report)
        facts = {
            "model": model,
            "weights": weights_hash(lm.model),
            "text": {"name": read.name, "part": read.part, "sha256": read.sha256},
            "windows": len(rows),
            "context": context,
            "seconds": time.perf_counter() - started,
        }
        content = plain(calibrated, wanted, facts)
        files = [save(content, out)]
    picture = draw(content, out)
    if picture is None:
        typer.echo("No picture is drawn without matplotlib; pip install 'loopformer[plot]'.", err=True)
    else:
        files.append(picture)
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _show(content)
        print_files(files)


def _show(content: dict[str, Any]) -> None:
    """The policy that was picked, and fixed and adaptive depths side by side on the held-out half."""
    policy = content["policy"]
    depths = ", ".join(map(str, policy.get("rungs") or policy["routes"]))
    thresholds = ", ".join(f"{threshold:.4g}" for threshold in policy["thresholds"])
    lossy = " (lossy)" if content["lossy"] else ""
    typer.echo(
        f"picked: per {policy['mode']}, {policy['measure']}, depths {depths}, thresholds {thresholds}"
        f"{', fill ' + policy['fill'] + lossy if 'fill' in policy else ''}; mean budget "
        f"{content['mean_budget_where_picked']:.2f} in {content['wanted']['count']} where it was picked"
    )
    labelled = [
        (f"{budget} uniform steps" if family == "uniform" else f"rung {budget}", row)
        for family, rows in content["fixed"].items()
        for budget, row in enumerate(rows, start=1)
    ]
    labelled += [("adaptive" + ", picked" * (row["policy"] == policy), row) for row in content["curve"]]
    print_table(
        ["held-out half", "perplexity", "passes/token", "compute", "MFLOP/token"],
        [
            [
                label,
                f"{row['perplexity']:.2f}",
                f"{row['passes']:.2f}",
                f"{row['compute']:.2f}",
                f"{row['mflops']:.3f}",
            ]
            for label, row in labelled
        ],
        left=1,
    )
    for verdict in content["against_fixed"].values():
        typer.echo(verdict["sentence"])
