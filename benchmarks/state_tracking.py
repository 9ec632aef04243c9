"""Where depth pays: products over a group, tracked by elastic models, specialists and models of fixed depth.

    python benchmarks/state_tracking.py run s3 --runs runs/states --workers 2          # minutes each, one CPU core
    python benchmarks/state_tracking.py run a5 --runs runs/states --workers 6          # on a GPU
    python benchmarks/state_tracking.py run a5 elastic specialist-8 --runs runs/states --seeds 0 1 --steps 10000
    python benchmarks/state_tracking.py collect --runs runs/states                     # into results/state_tracking

A suite is a queue of models that `run` works through, `--workers` at a time, each in a process of its own, or only
the models named. A model that is done is left out, one that was stopped goes on from its last checkpoint; SIGTERM
stops all of them in order. All models of a suite and seed see the same words in the same order.

A specialist M is the network of `elastic` trained at uniform(M) only, as a model of M loops. These and the plain
stacks are trained with Muon; `elastic-paper` and the models with early exits have the paper's objective and AdamW,
with one short trajectory in a step. Positions, start of the gates and time scale are the same for all.

Every model is measured at all budgets up to twice the longest (beyond what it was trained for, where it is looped),
along all schedules of half of it where passes are told their steps, and by early exit (evaluation/early_exit.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from queueing import RAW, add_run_options, collected, passed_on, rounded, spread, trained, work_through

from loopformer.data.states import Group
from loopformer.device import device_name
from loopformer.evaluation.states import track_states
from loopformer.evaluation.store import LoadedModel
from loopformer.model import LoopedLM
from loopformer.plots import Line, Panel, line_figure, save
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = Mapping[str, Any]

MUON: Settings = {"training.optimizer": "muon", "training.learning_rate": 2e-3, "training.weight_decay": 0.1}
OURS: Settings = {**MUON, "model.inject": "gated"}
SLOWER: Settings = {"training.matrix_learning_rate": 0.01}  # what suits few passes may be too much for many
ANY_BUDGET: Settings = {"objective.trajectories": "[{budget: any}]"}  # a random one in every step
ANY_AND_ONE: Settings = {"objective.trajectories": "[{budget: any},{budget: 1, weight: 0.5}]"}
ONE_BUDGET: Settings = {"objective.trajectories": "[{budget: full}]"}


@dataclass(frozen=True)
class StateSuite:
    """Models by name, each a preset and what is set over it, and what all of them share."""

    models: Mapping[str, tuple[str, Settings]]
    shared: Settings
    loops: int  # of the longest trajectory
    shown: str  # the elastic model that the picture is of
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
            "objective.route_draws": 1,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("run", "model"):
        one = verbs.add_parser(verb)
        add_run_options(one, workers=2)
        one.add_argument("suite", choices=list(SUITES))
        one.add_argument("models", nargs="*", metavar="MODEL", help="those of the suite by default")
        one.add_argument("--seeds", type=int, nargs="+", help="those of the suite by default")
        one.add_argument("--steps", type=int, help="those of the suite by default")
    one = verbs.add_parser("collect")
    one.add_argument("--runs", type=Path, required=True)
    one.add_argument("--out", type=Path, default=Path("results/state_tracking"))
    asked = parser.parse_args()
    if asked.verb == "collect":
        collect(asked.runs, asked.out)
        return
    suite = SUITES[asked.suite]
    models, seeds, steps = (
        asked.models or list(suite.models),
        asked.seeds or suite.seeds,
        asked.steps or suite.steps,
    )
    if unknown := set(models) - set(suite.models):
        parser.error(f"{asked.suite} has no {', '.join(sorted(unknown))}; it has {', '.join(suite.models)}")
    if asked.verb == "model":
        (name,), (seed,) = models, seeds
        folder = asked.runs / run_name(asked.suite, name, seed)
        train_and_measure(asked.suite, name, seed, steps, folder, asked.commit, asked.set)
        return
    shared = ["--steps", str(steps), *passed_on(asked)]
    commands = {
        run_name(asked.suite, name, seed): [
            *(sys.executable, __file__, "model", asked.suite, name, "--seeds", str(seed)),
            *shared,
        ]
        for seed in seeds
        for name in models
    }
    work_through(commands, asked.runs, asked.workers)


def run_name(suite: str, name: str, seed: int) -> str:
    return f"{suite}-{name}-seed{seed}"


def train_and_measure(
    suite: str, name: str, seed: int, steps: int, run: Path, commit: str, trial: Sequence[str]
) -> None:
    """One model: its run folder, and everything that was measured in one file."""
    preset, own = SUITES[suite].models[name]
    settings = {**SUITES[suite].shared, "training.steps": steps, "training.seed": seed, **own}
    facts = trained(preset, settings, trial, run, commit)
    torch.set_float32_matmul_precision("high")  # TF32 matmuls: far faster, and far finer than bf16
    loaded = LoadedModel.open(str(run), facts["settings"]["training"]["device"])
    group = Group.named(facts["settings"]["data"]["states"])
    along = measured_along(loaded.model, SUITES[suite].loops)
    found = {
        "model": name,
        "suite": suite,
        "seed": seed,
        "hardware": hardware(loaded.model.device),
        **facts,
        "weights": loaded.weights,
        "states": track_states(loaded.model, group, along, batch_tokens=1 << 16),
    }
    (run / RAW).write_text(rounded(found), encoding="utf-8")
    print(json.dumps({"model": name, "seed": seed, "tracked": tracked(found)}))


def measured_along(model: LoopedLM, loops: int) -> list[Trajectory]:
    """Every budget to twice `loops`, and the schedules of half of it; a plain stack has only one trajectory."""
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


def tracked(found: Mapping[str, Any]) -> dict[str, int]:
    """The longest prefix with 95 % at every place, at each uniform budget."""
    rows = found["states"]["trajectories"]
    return {row["trajectory"]: row["tracked"] for row in rows if row["trajectory"] == str(row["budget"])}


def collect(runs: Path, out: Path) -> None:
    """The results of every run that is done, one file each; then, of all that are there, tables and a picture."""
    every = collected(runs, out)
    for name, suite in SUITES.items():
        found = {
            model: [one for one in every if one["suite"] == name and one["model"] == model]
            for model in suite.models
        }
        if any(found.values()):
            print(f"\n{name}: accuracy over all places in percent, mean of the seeds (lowest to highest)\n")
            print(markdown(found, suite.loops))
            save(compute_figure(found, suite), out / f"{name}.png")


def markdown(found: Mapping[str, Sequence[Mapping[str, Any]]], loops: int) -> str:
    """A row for each model, a column for each uniform budget that it was trained for or reaches beyond."""
    budgets = [*range(1, loops + 1), loops + 1, 2 * loops]
    lines = [
        f"| model | seeds | {' | '.join(f'M={budget}' for budget in budgets)} |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for model, seeds in found.items():
        if seeds:
            cells = [
                spread([100 * at for one in seeds if (at := accuracy(one, budget)) is not None])
                for budget in budgets
            ]
            lines.append(f"| {model} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy(found: Mapping[str, Any], budget: int) -> float | None:
    """Over all places, along so many equal steps."""
    rows = {row["trajectory"]: row["mean_accuracy"] for row in found["states"]["trajectories"]}
    return rows.get(str(budget))


def compute_figure(found: Mapping[str, Sequence[Mapping[str, Any]]], suite: StateSuite) -> "Figure":
    """Accuracy against passes per place, means over the seeds: fixed budgets, early exit, specialists, each
    at the better of its rates."""
    best, loops = suite.shown, suite.loops

    def line(label: str, points: Mapping[float, Sequence[float]], dash: int = 0) -> Line:
        known = {passes: 100 * fmean(values) for passes, values in points.items() if values}
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
    panel = Panel(lines, xlabel="passes per place", ylabel="accuracy, %")
    return line_figure([panel], height=3.4)


if __name__ == "__main__":
    main()
