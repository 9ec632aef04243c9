"""Which recipe lets one model serve every budget, beside the paper's recipe and specialists of one budget.

    python experiments/elastic.py run final --data data/claims/data --runs runs/elastic --workers 6
    python experiments/elastic.py collect --runs runs/elastic     # into results/elastic, with tables and a picture

The tokens are those of `paper_claims.py prepare`. A suite is a queue of runs (SUITES): each is a preset, COMMON,
and the settings of its line. All runs see the same samples in the same order.

Each run is measured on held-out windows of the same text at every budget 1…L, where the loss of every window is
stored, and along all schedules of M = L/2. The suites that led to these are in results/elastic only: each file has
its whole command.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    DEVICE,
    RAW,
    collect_results,
    mean_and_range,
    measure_windows,
    perplexities,
    run_suite,
    suite_parser,
    to_json,
    train_run,
)

from loopformer.config import ModelConfig, from_mapping
from loopformer.device import device_name
from loopformer.model.cost import Cost
from loopformer.plots import Line, Panel, house_style, line_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = Mapping[str, Any]

PAPER = "paper/loopformer"
COMMON: Settings = {
    "model.blocks": 1,
    "model.loops": 8,
    "model.width": 512,
    "model.heads": 8,
    "model.ffn": 1280,
    "model.context": 256,
    "objective.trajectory_groups": 1,
    "objective.chunk": 8192,
    "training.steps": 1000,
    "training.batch": 128,
    "training.micro_batch": 128,
    "training.warmup": 100,
    "training.learning_rate": 1e-3,
    "training.min_learning_rate": 1e-4,
    "training.save_every": 100_000,
    "training.validate_every": 500,
    "training.log_every": 50,
    "training.keep": 1,
}
MUON: Settings = {
    "training.optimizer": "muon",
    "training.learning_rate": 2e-3,
    "training.min_learning_rate": 1e-4,
    "training.weight_decay": 0.1,
}
OURS: Settings = {
    **MUON,
    "model.modulator_start": "one",
    "model.time_scale": 30,
    "model.positions": "rotary",
    "model.inject": "gated",
}


def objective(*entries: str, **more: Any) -> Settings:
    """Settings of an objective with these trajectories, matched by their distributions."""
    named = {key.replace("__", "."): value for key, value in more.items()}
    return {"objective.trajectories": f"[{', '.join(entries)}]", "objective.consistency": "distribution", **named}


def specialist(budget: int, **more: Any) -> Settings:
    """Settings of a model trained at one budget alone, with our optimizer and start."""
    return {**OURS, **objective(f"{{budget: {budget}}}", **more)}


def with_exits(entries: str, weight: float) -> str:
    """A list of entries in which those of the full trajectory have exits of this weight."""
    return entries.replace("{budget: full, ", f"{{budget: full, exits: {weight}, ")


FULL = "{budget: full}"
ELASTIC: Settings = {  # the preset's objective: the full trajectory alone at first, then shares of the rows
    **OURS,
    **objective(
        "{budget: full, active_range: [0, 0.1]}",
        "{budget: full, rows: 0.5, weight: 1.0, active_range: [0.1, 1]}",
        "{budget: [4, 7], rows: 0.0625, weight: 0.15, active_range: [0.1, 1]}",
        "{budget: [4, 7], rows: 0.0625, weight: 0.15, active_range: [0.1, 1], sampler: compositions}",
        "{budget: [2, 3], rows: 0.125, weight: 0.3, active_range: [0.1, 1], sampler: compositions}",
        "{budget: 1, rows: 0.25, weight: 0.5, active_range: [0.1, 1]}",
        training__steps=2000,
    ),
}
MATCHED: Settings = {  # all budgets on all rows
    **OURS,
    **objective(
        FULL,
        *(f"{{budget: {m}, weight: 0.1, match: 0.3, active_range: [0.2, 1]}}" for m in ("[4, 7]", "[2, 3]", "1")),
    ),
}
FASTER: Settings = {"training.matrix_learning_rate": 0.04}
PLAIN_STEPS = {8: 1564, 4: 2413, 2: 3312, 1: 4070}  # blocks → steps with the training FLOPs of `elastic`
FOUR_DRAWS: Settings = {
    "objective.trajectory_groups": 4,
    "training.micro_batch": 32,
}  # a draw per quarter of the rows
LARGE: Settings = {"model.width": 2048, "model.heads": 32, "model.ffn": 6144}
EARLY_EXIT: Settings = {  # naive: no conditioning, short trajectories trained along with the full one
    **MUON,
    **objective(FULL, "{budget: short, weight: 0.1}"),
    "model.conditioning": "none",
    "model.positions": "rotary",
    **FOUR_DRAWS,
}
RECURRENT_DEPTH: Settings = {  # of the preset paper/recurrent-depth; its adapter takes more FLOPs per step
    **EARLY_EXIT,
    "model.norms": "sandwich",
    "model.start": "random",
    "model.inject": "adapter",
    "training.steps": 880,
}


def plain(blocks: int, **more: Any) -> Settings:
    """Settings of a plain Transformer of this many blocks, with our optimizer and start."""
    shape = {"model.conditioning": "none", "model.blocks": blocks, "model.loops": 1, "model.positions": "rotary"}
    steps = PLAIN_STEPS[blocks]
    return {**MUON, **shape, "model.start": "normed", **objective(FULL), "training.steps": steps, **more}


SUITES: dict[str, dict[str, Settings]] = {
    "final": {  # `elastic` has the tokens of `…-twice`, and no more FLOPs than `paper…` or `early-exit`
        "elastic": ELASTIC,
        "elastic-matched": MATCHED,
        **{f"specialist-{m}": specialist(m) for m in (8, 4, 2, 1)},
        **{f"specialist-{m}-twice": specialist(m, training__steps=2000) for m in (8, 4, 2, 1)},
        "paper-ours": {**OURS, **FOUR_DRAWS},
        "paper": {**FOUR_DRAWS},
        "paper-adamw-2e-3": {
            "training.learning_rate": 2e-3,
            **FOUR_DRAWS,
        },
        "early-exit": EARLY_EXIT,
        "specialist-8-muon-0.01": specialist(8, training__matrix_learning_rate=0.01),
        "specialist-1-muon-0.01": specialist(1, training__matrix_learning_rate=0.01),
        "specialist-1-muon-0.04": specialist(1, training__matrix_learning_rate=0.04),
    },
    "normed": {  # the same from a normalised embedding; `elastic-time-10` is the preset
        name: {**settings, "model.start": "normed"}
        for name, settings in {
            "elastic": ELASTIC,
            "elastic-time-10": {**ELASTIC, "model.time_scale": 10},
            "elastic-muon-0.04": {**ELASTIC, **FASTER},
            "specialist-8": specialist(8),
            "specialist-1": specialist(1),
            "elastic-matched": MATCHED,
            "specialist-4": specialist(4),
            "specialist-2": specialist(2),
            **{f"specialist-{m}-twice": specialist(m, training__steps=2000) for m in (8, 4, 2, 1)},
            "paper-ours": {**OURS, **FOUR_DRAWS},
            "early-exit": EARLY_EXIT,
            "elastic-matched-muon-0.04": {**MATCHED, **FASTER},
            **{f"specialist-{m}-muon-0.04": {**specialist(m), **FASTER} for m in (8, 4, 2, 1)},
        }.items()
    },
    "baselines": {  # with the training FLOPs of `elastic` each, or 5 % more
        **{f"plain-{m}": plain(m) for m in PLAIN_STEPS},
        **{f"plain-{m}-muon-0.04": plain(m, **FASTER) for m in PLAIN_STEPS},
        "recurrent-depth": RECURRENT_DEPTH,
        "recurrent-depth-muon-0.04": {**RECURRENT_DEPTH, **FASTER},
    },
    "rows": {  # a draw for each row instead of one for each part of the batch, and exits
        name: {**ELASTIC, "model.start": "normed", "model.time_scale": 10, **settings}
        for name, settings in {
            "elastic-part": {},
            "elastic-row": {"objective.draws": "row"},
            "elastic-row-exits": {
                "objective.draws": "row",
                "objective.trajectories": with_exits(ELASTIC["objective.trajectories"], 0.1),
            },
        }.items()
    },
    "equal": {  # specialists with the training FLOPs of `elastic` each: a loop costs as much as a block
        f"specialist-{m}": {**specialist(m, training__steps=steps), "model.start": "normed"}
        for m, steps in PLAIN_STEPS.items()
    },
    "large": {  # 106 M parameters
        "elastic": {**ELASTIC, **LARGE, "training.steps": 1800},
        "elastic-time-10": {
            **ELASTIC,
            **LARGE,
            "training.steps": 1800,
            "model.start": "normed",
            "model.time_scale": 10,
        },
        "paper": {
            **LARGE,
            "training.learning_rate": 6e-4,
            "training.steps": 880,
            **FOUR_DRAWS,
        },
    },
}
STORED_AS = {  # seed 0 of these runs, under the name of an earlier suite
    **{("final", f"specialist-{m}"): ("parts", f"specialist-{m}") for m in (8, 4, 2, 1)},
    ("final", "elastic"): ("smooth", "compositions-and-equal"),
}
PRESET = ("normed", "elastic-time-10")
LABELS = {  # lines of the picture: looped models
    PRESET: "elastic",
    ("baselines", "recurrent-depth"): "Recurrent Depth, our optimizer",
    ("normed", "paper-ours"): "the paper's objective, our optimizer",
    ("normed", "early-exit"): "naive early exit, our optimizer",
    ("final", "paper-adamw-2e-3"): "the paper's recipe",
}
BUDGETS = range(1, 9)


def main() -> None:
    parser, run = suite_parser(__doc__, SUITES, results=Path("results/elastic"))
    run.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "collect":
        collect(args.runs, args.out)
    else:
        run_suite(args, SUITES[args.suite], (0,), "{suite}-{name}-s{seed}", train_and_measure)


def train_and_measure(args: argparse.Namespace, name: str, seed: int, run: Path) -> None:
    """Train one run, and write everything that was measured into one file."""
    settings = {**COMMON, "data.path": args.data, "training.seed": seed, **SUITES[args.suite][name]}
    facts = train_run(PAPER, settings, args.set, run, args.commit)
    result = {
        "suite": args.suite,
        "name": name,
        "seed": seed,
        "hardware": f"{device_name(DEVICE)}, several runs at a time",
        **facts,
        "windows": measure_windows(run, args.data),
    }
    (run / RAW).write_text(to_json(result), encoding="utf-8")
    print(f"{name}: " + "  ".join(f"{value:.2f}" for value in perplexities(result).values()))


def collect(runs: Path, out: Path) -> None:
    """Copy the results of finished runs, print a table per suite, and draw the picture."""
    results = collect_results(runs, out)
    by_run: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for suite, names in SUITES.items():
        for name in names:
            stored_as = {(suite, name), STORED_AS.get((suite, name), (suite, name))}
            if seeds := [result for result in results if (result["suite"], result["name"]) in stored_as]:
                by_run[suite, name] = seeds
        if table := {name: seeds for (of, name), seeds in by_run.items() if of == suite}:
            print(f"\n{suite}: perplexity, mean of the seeds (lowest to highest)\n\n{markdown(table)}")
    if PRESET in by_run and ("baselines", "plain-1") in by_run:
        save(compute_figure(by_run), out / "elastic.png")


def markdown(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A row for each run, with its training FLOPs and seeds; a column for each budget."""
    lines = ["| run | PFLOP | seeds | M=1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |", "|---" * 11 + "|"]
    for name, seeds in runs.items():
        flops = seeds[0]["plan"]["total_flops"] / 1e15
        by_seed = [perplexities(result) for result in seeds]
        cells = [
            mean_and_range([values[str(budget)] for values in by_seed if str(budget) in values])
            for budget in range(1, 9)
        ]
        lines.append(f"| {name} | {flops:.1f} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compute_figure(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> "Figure":
    """Perplexity against compute per token, means over the seeds: looped models, and plain ones of each depth."""

    def line(label: str, points: Sequence[tuple[Sequence[Mapping[str, Any]], int]], **style: Any) -> Line:
        costs = [Cost(from_mapping(ModelConfig, seeds[0]["settings"]["model"], "model")) for seeds, _ in points]
        mflops = [cost.forward_flops(budget) / 1e6 for cost, (_, budget) in zip(costs, points, strict=True)]
        means = [
            statistics.fmean(perplexities(result)[str(budget)] for result in seeds) for seeds, budget in points
        ]
        return Line(label, mflops, means, **style)

    def numbered(unit: str, numbers: Iterable[int]) -> list[str]:
        return [f"{number} {unit}{'s' * (number > 1)}" for number in numbers]

    # The inner points of `elastic` lie close together, so their names are numbers alone.
    loops = [*numbered("loop", BUDGETS[:1]), *map(str, BUDGETS[1:-1]), *numbered("loop", BUDGETS[-1:])]
    lines = [
        line(label, [(runs[run], budget) for budget in BUDGETS], names=loops if run == PRESET else ())
        for run, label in LABELS.items()
        if run in runs
    ]
    depths = sorted(PLAIN_STEPS)
    plain_runs = [(runs["baselines", f"plain-{blocks}"], 1) for blocks in depths]
    lines.append(line("plain Transformers, one per point", plain_runs, names=numbered("block", depths), dash=1))
    special = [(runs["normed", f"specialist-{budget}-twice"], budget) for budget in depths]
    lines.append(line("specialists, one per point", special, dash=1))
    panel = Panel(lines, xlabel="MFLOP per token (forward)", ylabel="held-out perplexity (log scale)", log_y=True)
    figure = line_figure([panel], height=3.6, legend=None)
    with house_style():  # the upper right corner is free
        (axis,) = figure.axes
        axis.legend(loc="upper right", fontsize=6.5)
        for name in axis.texts:
            if "block" in name.get_text() or name.get_text() == "1 loop":  # to the right a line would cross it
                name.set_position((-4, -8))
                name.set_horizontalalignment("right")
    return figure


if __name__ == "__main__":
    main()
