"""Where depth pays: elastic models, specialists and models of fixed depth track products over a group.

    python experiments/state_tracking.py run s3 --runs runs/states --workers 2     # minutes each, one CPU core
    python experiments/state_tracking.py run a5 --runs runs/states --workers 6     # on a GPU
    python experiments/state_tracking.py run a5 elastic specialist-8 --runs runs/states --seeds 0 1 --steps 10000
    python experiments/state_tracking.py collect --runs runs/states                # into results/state_tracking

A suite is a queue of models, and all models of a suite and seed see the same words in the same order.

A specialist M is the network of `elastic` trained at uniform(M) only, as a model of M loops. These and the plain
stacks are trained with Muon. `elastic-paper` and the models with early exits have the paper's objective and AdamW,
with a single short trajectory in a step. Positions, the start of the gates and the time scale are the same for all.

Every model is measured at all budgets up to twice the longest (beyond what it was trained for, where it is looped),
along all schedules of half of it where loops are told their steps, and by early exit (evaluation/early_exit.py).
"""

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from common import RAW, collect_results, mean_and_range, run_suite, suite_parser, to_json, train_run

from loopformer.data.states import Group
from loopformer.device import device_name
from loopformer.evaluation.loaded import LoadedModel
from loopformer.evaluation.states import track_states
from loopformer.model import LoopedLM
from loopformer.plots import Line, Panel, line_figure, save
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = Mapping[str, Any]

MUON: Settings = {"training.optimizer": "muon", "training.learning_rate": 2e-3, "training.weight_decay": 0.1}
OURS: Settings = {**MUON, "model.inject": "gated"}
SLOWER: Settings = {"training.matrix_learning_rate": 0.01}  # many loops may need a lower rate than few
ANY_BUDGET: Settings = {"objective.trajectories": "[{budget: any}]"}  # a random budget in every step
ANY_AND_ONE: Settings = {"objective.trajectories": "[{budget: any},{budget: 1, weight: 0.5}]"}
ONE_BUDGET: Settings = {"objective.trajectories": "[{budget: full}]"}


@dataclass(frozen=True)
class StateSuite:
    """Models by name, each a preset with its settings, and the settings that all of them share."""

    models: Mapping[str, tuple[str, Settings]]
    shared: Settings
    loops: int  # of the longest trajectory
    shown: str  # the elastic model of the picture
    seeds: tuple[int, ...]
    steps: int


S3_MODELS: Mapping[str, Settings] = {
    "elastic-and-one": {},
    **{f"specialist-{m}": {**ONE_BUDGET, "model.loops": m} for m in (5, 1, 3, 2, 4)},
}
SUITES = {
    "s3": StateSuite(
        {
            **{name: ("states", settings) for name, settings in S3_MODELS.items()},
            "elastic": ("states", ANY_BUDGET),
            "elastic-not-injected": ("states", {**ANY_BUDGET, "model.inject": "none"}),
            **{
                f"{name}-{rate}": ("states", {**settings, "training.matrix_learning_rate": rate})
                for rate in (0.04, 0.01)
                for name, settings in S3_MODELS.items()
            },
        },
        shared={"training.device": "cpu", "training.threads": 1},
        loops=5,
        shown="elastic-and-one",
        seeds=(0, 1, 2),
        steps=3000,
    ),
    "a5": StateSuite(
        {  # the most telling first
            "elastic": ("paper/loopformer-2x8", {**OURS, **ANY_BUDGET}),
            "specialist-8": ("paper/loopformer-2x8", {**OURS, **ONE_BUDGET}),
            **{
                f"specialist-{m}": ("paper/loopformer-2x8", {**OURS, **ONE_BUDGET, "model.loops": m})
                for m in (4, 2, 1)
            },
            "elastic-and-one": ("paper/loopformer-2x8", {**OURS, **ANY_AND_ONE}),
            "elastic-0.01": ("paper/loopformer-2x8", {**OURS, **ANY_BUDGET, **SLOWER}),
            "specialist-8-0.01": ("paper/loopformer-2x8", {**OURS, **ONE_BUDGET, **SLOWER}),
            "stack-2": ("paper/base", {**MUON, "model.blocks": 2}),
            "elastic-paper": ("paper/loopformer-2x8", {}),
            "stack-16": ("paper/base", {**MUON, "model.blocks": 16}),
            **{
                f"specialist-{m}-0.01": (
                    "paper/loopformer-2x8",
                    {**OURS, **ONE_BUDGET, **SLOWER, "model.loops": m},
                )
                for m in (4, 2, 1)
            },
            "base-loop-ee": ("paper/base-loop-ee-2x8", {}),
            "tmlt-ee": ("paper/tmlt-ee-2x8", {}),
        },
        shared={
            "model.width": 256,
            "model.heads": 4,
            "model.ffn": 640,
            "model.context": 33,  # the end token, and words of 32
            "model.positions": "rotary",
            "model.modulator_start": "one",
            "model.time_scale": 30,
            "data.states": "A5",
            "objective.trajectory_groups": 1,
            "objective.chunk": 16384,
            "training.batch": 512,
            "training.micro_batch": 512,
            "training.learning_rate": 1e-3,
            "training.min_learning_rate": 1e-4,
            "training.warmup": 200,
            "training.save_every": 2000,
            "training.validate_every": 2000,
            "training.keep": 1,
            "training.log_every": 50,
        },
        loops=8,
        shown="elastic-0.01",
        seeds=(0,),
        steps=4000,
    ),
}


def main() -> None:
    parser, run = suite_parser(__doc__, SUITES, results=Path("results/state_tracking"))
    run.add_argument("--steps", type=int, help="those of the suite by default")
    args = parser.parse_args()
    if args.verb == "collect":
        collect(args.runs, args.out)
    else:
        suite = SUITES[args.suite]
        run_suite(args, suite.models, suite.seeds, "{suite}-{name}-seed{seed}", train_and_measure)


def train_and_measure(args: argparse.Namespace, name: str, seed: int, run: Path) -> None:
    """Train one model, and write everything that was measured into one file."""
    suite = SUITES[args.suite]
    preset, model_settings = suite.models[name]
    steps = args.steps or suite.steps
    settings = {**suite.shared, "training.steps": steps, "training.seed": seed, **model_settings}
    facts = train_run(preset, settings, args.set, run, args.commit)
    torch.set_float32_matmul_precision("high")  # TF32 matmuls: far faster, and far finer than bf16
    loaded = LoadedModel.open(str(run), facts["settings"]["training"]["device"])
    group = Group.named(facts["settings"]["data"]["states"])
    along = measured_along(loaded.model, suite.loops)
    result = {
        "model": name,
        "suite": args.suite,
        "seed": seed,
        "hardware": hardware(loaded.model.device),
        **facts,
        "weights": loaded.weights,
        "states": track_states(loaded.model, group, along, batch_tokens=1 << 16),
    }
    (run / RAW).write_text(to_json(result), encoding="utf-8")
    print(json.dumps({"model": name, "seed": seed, "tracked": tracked(result)}))


def measured_along(model: LoopedLM, loops: int) -> list[Trajectory]:
    """Every budget up to twice `loops`, and the schedules of half of it. A plain stack has one trajectory."""
    config = model.config
    if config.loops == 1 and config.conditioning == "none":
        return [Trajectory.uniform(1)]
    schedules = []
    if config.conditioning not in ("none", "index"):
        schedules = list(Trajectory.enumerate(loops, (loops + 1) // 2))
    budgets = [Trajectory.uniform(budget) for budget in range(1, 2 * loops + 1)]
    return list(dict.fromkeys([*budgets, *schedules]))


def hardware(device: torch.device) -> str:
    where = f"one {device_name(device)}" if device.type == "cuda" else f"{os.cpu_count()} CPU cores, 1 used"
    return f"{where}, several runs at a time"


def tracked(result: Mapping[str, Any]) -> dict[str, int]:
    """The longest prefix with 95 % accuracy at every position, at each uniform budget."""
    rows = result["states"]["trajectories"]
    return {row["trajectory"]: row["tracked"] for row in rows if row["trajectory"] == str(row["budget"])}


def collect(runs: Path, out: Path) -> None:
    """Copy the results of finished runs, then print a table and draw the picture of each suite."""
    results = collect_results(runs, out)
    for name, suite in SUITES.items():
        by_model = {
            model: [result for result in results if (result["suite"], result["model"]) == (name, model)]
            for model in suite.models
        }
        if any(by_model.values()):
            print(f"\n{name}: accuracy over all positions in percent, mean of the seeds (lowest to highest)\n")
            print(markdown(by_model, suite.loops))
            save(compute_figure(by_model, suite), out / f"{name}.png")


def markdown(by_model: Mapping[str, Sequence[Mapping[str, Any]]], loops: int) -> str:
    """A row for each model, and a column for each uniform budget, two of them beyond the longest trained one."""
    budgets = [*range(1, loops + 1), loops + 1, 2 * loops]
    lines = [
        f"| model | seeds | {' | '.join(f'M={budget}' for budget in budgets)} |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for model, seeds in by_model.items():
        if seeds:
            cells = [
                mean_and_range([100 * share for result in seeds if (share := accuracy(result, budget)) is not None])
                for budget in budgets
            ]
            lines.append(f"| {model} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy(result: Mapping[str, Any], budget: int) -> float | None:
    """The accuracy over all positions along a uniform trajectory."""
    rows = {row["trajectory"]: row["mean_accuracy"] for row in result["states"]["trajectories"]}
    return rows.get(str(budget))


def compute_figure(found: Mapping[str, Sequence[Mapping[str, Any]]], suite: StateSuite) -> "Figure":
    """Accuracy against loops per position, means over the seeds: fixed budgets, early exit, specialists, each
    at the better of its rates."""
    best, loops = suite.shown, suite.loops

    def line(label: str, points: Mapping[float, Sequence[float]], dash: int = 0) -> Line:
        known = {taken: 100 * fmean(values) for taken, values in points.items() if values}
        return Line(label, list(known), list(known.values()), dash=dash)

    def at(model: str, budgets: Iterable[int]) -> dict[float, list[float]]:
        return {
            m: [value for one in found.get(model, ()) if (value := accuracy(one, m)) is not None] for m in budgets
        }

    special: dict[float, list[float]] = {}
    for m in range(1, loops + 1):
        rates = [at(f"specialist-{m}{rate}", [m])[m] for rate in ("", "-0.01", "-0.04")]
        special[m] = max(rates, key=lambda values: fmean(values) if values else 0.0)
    lines = [line("one elastic model, fixed budgets", at(best, range(1, loops + 1)))]
    exits = [
        {row["threshold"]: row for row in one["states"]["certainty"] if row["trajectory"] == str(loops)}
        for one in found.get(best, ())
    ]
    if exits:
        means = {
            fmean(one[threshold]["mean_passes"] for one in exits): [
                one[threshold]["mean_accuracy"] for one in exits
            ]
            for threshold in sorted(exits[0])
        }
        lines.append(line("the same, by certainty", means))
    lines.append(line("specialists, each at its own budget", special, dash=1))
    if "elastic-paper" in found:
        lines.append(line("the paper's objective, AdamW", at("elastic-paper", range(1, loops + 1))))
    panel = Panel(lines, xlabel="loops per position", ylabel="accuracy, %")
    return line_figure([panel], height=3.4)


if __name__ == "__main__":
    main()
