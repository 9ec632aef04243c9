"""Which recipe lets one model serve every budget: one change at a time, beside the paper's recipe and specialists.

    python benchmarks/elastic.py run parts --data data/claims/data --runs runs/elastic --workers 6
    python benchmarks/elastic.py collect --runs runs/elastic      # into results/elastic; tables, a picture

The tokens are those of `paper_claims.py prepare`. A suite is a queue of runs (SUITES), or only those named are run;
every run is a preset, COMMON, and what its line says. All of them see the same samples in the same order.

Each is measured on held-out windows of the same text at every budget 1…L, where the loss of every window is kept,
and along all schedules of M = L/2.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from queueing import RAW, add_run_options, collected, passed_on, rounded, spread, trained, work_through

from loopformer.config import ModelConfig, from_mapping
from loopformer.data.loader import Windows, validation_windows
from loopformer.data.shards import TokenData
from loopformer.device import device_name
from loopformer.loading import find_model
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.plots import Line, Panel, line_figure, save
from loopformer.scoring import token_logprobs
from loopformer.trajectory import Trajectory

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
    "objective.route_draws": 1,
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
START: Settings = {"model.modulator_start": "one", "model.time_scale": 30}
ROTARY: Settings = {**START, "model.positions": "rotary"}
MUON: Settings = {
    "training.optimizer": "muon",
    "training.learning_rate": 2e-3,
    "training.min_learning_rate": 1e-4,
    "training.weight_decay": 0.1,
}
OURS: Settings = {**ROTARY, **MUON, "model.inject": "gated"}
FULL = "{budget: full}"
SHORT = "{budget: short, sampler: compositions, weight: 0.1, match: 0.5}"
ONE = "{budget: 1, weight: 0.1, match: 0.2}"
PAIR = (FULL, "{budget: short, sampler: compositions, weight: 0.1, match: 0.1}")  # the paper's


def following(*entries: str, **more: Any) -> Settings:
    """An objective of these trajectories, matched by their distributions."""
    named = {key.replace("__", "."): value for key, value in more.items()}
    return {"objective.trajectories": f"[{', '.join(entries)}]", "objective.consistency": "distribution", **named}


def grid(weight: float) -> Settings:
    """The full trajectory, and 4, 2 and 1 equal steps beside it."""
    return following(FULL, *(f"{{budget: {budget}, weight: {weight}, match: 0.0}}" for budget in (4, 2, 1)))


def strata(weight: float, match: float = 0.0, start: float = 0.0, end: float = 1.0) -> list[str]:
    """Short budgets of three kinds, each in every step from `start` of training on, to its `end`."""
    rest = f"weight: {weight}, match: {match}, during: [{start}, {end:g}]"
    return [f"{{budget: {budget}, {rest}}}" for budget in ("[4, 7]", "[2, 3]", "1")]


def shared_rows(
    start: float = 0.2, one: float = 0.3, shares: Sequence[float] = (0.5, 0.25, 0.125, 0.125)
) -> Settings:
    """The full trajectory alone until `start` of training, then shares of the rows full, 4 to 7, 2 or 3, and 1."""
    drawn = (("full", 1.0), ("[4, 7]", 0.3), ("[2, 3]", 0.3), ("1", one))
    return rows_from(start, [(*entry, share, "equal") for entry, share in zip(drawn, shares, strict=True)])


def rows_from(start: float, entries: Sequence[tuple[str, float, float, str]]) -> Settings:
    """The full trajectory alone until `start` of training, then entries: budget, weight, share of rows, steps."""
    written = [f"{{budget: full, during: [0, {start}]}}"]
    for budget, weight, share, steps in entries:
        sampler = "" if steps == "equal" else f", sampler: {steps}"
        written.append(f"{{budget: {budget}, rows: {share}, weight: {weight}, during: [{start}, 1]{sampler}}}")
    return following(*written, training__steps=2000)


def specialist(budget: int, **more: Any) -> Settings:
    """Trained on so many equal steps alone, with our optimizer and start."""
    return {**OURS, **following(f"{{budget: {budget}}}", **more)}


def mixture(
    full_rows: float = 0.5,
    unequal_rows: float = 0.0625,
    equal_weight: float = 0.15,
    unequal_weight: float = 0.15,
    unequal: str = "[4, 7]",
) -> list[tuple[str, float, float, str]]:
    """The preset's shares of rows, but for those of the full trajectory and of 4 to 7 equal or unequal steps."""
    return [
        ("full", 1.0, full_rows, "equal"),
        ("[4, 7]", equal_weight, 0.0625, "equal"),
        (unequal, unequal_weight, unequal_rows, "compositions"),
        ("[2, 3]", 0.3, 0.125, "compositions"),
        ("1", 0.5, 0.25, "equal"),
    ]


ELASTIC: Settings = {**OURS, **rows_from(0.1, mixture())}  # the preset's objective
MATCHED: Settings = {**OURS, **following(FULL, *strata(0.1, match=0.3, start=0.2))}  # all budgets on all rows
FASTER: Settings = {"training.matrix_learning_rate": 0.04}
ANY = following("{budget: any}")
FOUR_DRAWS: Settings = {"objective.route_draws": 4, "training.micro_batch": 32}  # one for each quarter of the rows
LARGE: Settings = {"model.width": 2048, "model.heads": 32, "model.ffn": 6144}
WIDE: Settings = {"model.ffn": 4096}  # more room in one pass, no more of them: is it room that budgets contend for?
SUITES: dict[str, dict[str, Settings]] = {
    "parts": {  # the most telling first
        "ours-any": {**OURS, **ANY},
        "specialist-8": specialist(8),
        "specialist-1": specialist(1),
        "specialist-4": specialist(4),
        "specialist-2": specialist(2),
        "paper": {},
        "paper-ours": {**OURS},  # the paper's objective with our optimizer, positions and start
        "sandwich": {**OURS, **following(FULL, SHORT, ONE)},
        "any-twice": {**OURS, **ANY, "training.steps": 2000},
        "any-parts-4": {**OURS, **ANY, **FOUR_DRAWS},
        "any-any": {**OURS, **following("{budget: any}", "{budget: any}")},
        "any-one": {**OURS, **following("{budget: any}", "{budget: 1, weight: 0.2}")},
        "any-full": {**OURS, **following("{budget: any}", "{budget: full, weight: 0.5}")},
        "any-no-inject": {**ROTARY, **MUON, **ANY},
        "any-adamw": {**ROTARY, **ANY, "model.inject": "gated"},
        "any-learned": {**START, **MUON, **ANY, "model.inject": "gated"},
        "growing": {
            **OURS,
            **following(
                "{budget: [1, 2], during: [0, 0.11]}",
                "{budget: [1, 4], during: [0.11, 0.22]}",
                "{budget: [1, 6], during: [0.22, 0.33]}",
                "{budget: any, during: [0.33, 1]}",
            ),
        },
    },
    "balance": {  # between one pass that does everything and short budgets that are not learned
        "wide-grid-0.3": {**OURS, **grid(0.3), **WIDE},
        "grid-0.3": {**OURS, **grid(0.3)},
        "grid-0.1": {**OURS, **grid(0.1)},
        "wide-specialist-8": {**specialist(8), **WIDE},
        "deep-first": {
            **OURS,
            **following(
                FULL,
                "{budget: short, sampler: compositions, weight: 0.1, during: [0, 0.6]}",
                *(f"{{budget: {budget}, weight: 0.3, during: [0.6, 1]}}" for budget in (4, 2, 1)),
            ),
        },
        "deep-0.3": {**OURS, **following("{budget: [3, 8]}", "{budget: [1, 2], weight: 0.3}")},
        "wide-specialist-1": {**specialist(1), **WIDE},
        "deep-0.1": {**OURS, **following("{budget: [3, 8]}", "{budget: [1, 2], weight: 0.1}")},
        "paper-one": {**OURS, **following(*PAIR, "{budget: 1, weight: 0.1}"), "objective.consistency": "hidden"},
    },
    "order": {  # do short budgets that come in late leave the deep ones alone?
        "strata-0.1": {**OURS, **following(FULL, *strata(0.1))},
        "strata-0.3-from-0.2": {**OURS, **following(FULL, *strata(0.3, start=0.2))},
        "strata-match-from-0.2": {**OURS, **following(FULL, *strata(0.1, match=0.3, start=0.2))},
        "strata-0.3-from-0.4": {**OURS, **following(FULL, *strata(0.3, start=0.4))},
        "strata-0.5-from-0.4": {**OURS, **following(FULL, *strata(0.5, start=0.4))},
        "rows-from-0.2": {**OURS, **shared_rows()},
    },
    "one": {  # what one pass needs, how cheap matching can be, and what of the model is needed
        "matched-from-0.1": {**OURS, **following(FULL, *strata(0.1, match=0.3, start=0.1))},
        "matched-from-0.1-one-0.6": {
            **OURS,
            **following(FULL, *strata(0.1, 0.3, 0.1)[:2], "{budget: 1, weight: 0.2, match: 0.6, during: [0.1, 1]}"),
        },
        "matched-rows": {
            **OURS,
            **following(
                FULL,
                "{budget: [4, 7], rows: 0.25, weight: 0.1, match: 0.3, during: [0.1, 1]}",
                "{budget: [2, 3], rows: 0.25, weight: 0.1, match: 0.3, during: [0.1, 1]}",
                "{budget: 1, rows: 0.5, weight: 0.2, match: 0.6, during: [0.1, 1]}",
            ),
        },
        "rows-from-0.1": {**OURS, **shared_rows(start=0.1)},
        "rows-from-0.1-one-0.6": {**OURS, **shared_rows(start=0.1, one=0.6)},
        "rows-one-0.6": {**OURS, **shared_rows(one=0.6)},
        "rows-from-0.1-more-ones": {
            **OURS,
            **shared_rows(start=0.1, one=0.5, shares=(0.5, 0.125, 0.125, 0.25)),
        },
        "rows-time-10": {**OURS, **shared_rows(), "model.time_scale": 10},
        "rows-muon-0.01": {**OURS, **shared_rows(), "training.matrix_learning_rate": 0.01},
        "rows-not-injected": {**ROTARY, **MUON, **shared_rows()},
    },
    "smooth": {  # schedules of unequal steps, too: at whose expense?
        "compositions": {
            **OURS,
            **rows_from(
                0.1,
                [
                    ("full", 1.0, 0.5, "equal"),
                    *((budget, 0.3, 0.125, "compositions") for budget in ("[4, 7]", "[2, 3]")),
                    ("1", 0.5, 0.25, "equal"),
                ],
            ),
        },
        "half-compositions": {
            **OURS,
            **rows_from(
                0.1,
                [
                    ("full", 1.0, 0.5, "equal"),
                    *(
                        (budget, 0.3, 0.0625, steps)
                        for budget in ("[4, 7]", "[2, 3]")
                        for steps in ("equal", "compositions")
                    ),
                    ("1", 0.5, 0.25, "equal"),
                ],
            ),
        },
        "compositions-and-equal": ELASTIC,  # the weight of `compositions`, half of it for 4 to 7 equal steps
        "more-compositions": {
            **OURS,
            **rows_from(
                0.1,
                [
                    ("full", 1.0, 0.4375, "equal"),
                    *((budget, 0.3, 0.125, "compositions") for budget in ("[5, 7]", "[3, 4]")),
                    ("2", 0.3, 0.0625, "compositions"),
                    ("1", 0.5, 0.25, "equal"),
                ],
            ),
        },
    },
    "final": {  # with seeds; `elastic` has the tokens of `…-twice`, and no more FLOPs than `paper…` or `early-exit`
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
        "early-exit": {  # naive: passes are told nothing, and short trajectories are trained beside the full one
            **MUON,
            **following(FULL, "{budget: short, weight: 0.1}"),
            "model.conditioning": "none",
            "model.positions": "rotary",
            **FOUR_DRAWS,
        },
        "specialist-8-muon-0.01": specialist(8, training__matrix_learning_rate=0.01),
        "specialist-1-muon-0.01": specialist(1, training__matrix_learning_rate=0.01),
        "specialist-1-muon-0.04": specialist(1, training__matrix_learning_rate=0.04),
    },
    "normed": {  # the same from an embedding that is normalised; with time × 10 the preset
        name: {**settings, "model.start": "normed"}
        for name, settings in {
            "elastic": ELASTIC,
            "elastic-unequal": {**OURS, **rows_from(0.1, mixture(equal_weight=0.1, unequal_weight=0.3))},
            "elastic-more-unequal": {**OURS, **rows_from(0.1, mixture(full_rows=0.4375, unequal_rows=0.125))},
            "elastic-unequal-four": {**OURS, **rows_from(0.1, mixture(unequal="4"))},
            "elastic-time-10": {**ELASTIC, "model.time_scale": 10},
            "elastic-muon-0.04": {**ELASTIC, **FASTER},
            "specialist-8": specialist(8),
            "specialist-1": specialist(1),
            "elastic-matched": MATCHED,
            "specialist-4": specialist(4),
            "specialist-2": specialist(2),
            **{f"specialist-{m}-twice": specialist(m, training__steps=2000) for m in (8, 4, 2, 1)},
            "paper-ours": {**OURS, **FOUR_DRAWS},
            "elastic-matched-muon-0.04": {**MATCHED, **FASTER},
            **{f"specialist-{m}-muon-0.04": {**specialist(m), **FASTER} for m in (8, 4, 2, 1)},
        }.items()
    },
    "rest": {  # what makes Recurrent Depth strong in the paper's table; other orders; two blocks; rates
        "elastic-sandwich": {**ELASTIC, "model.norms": "sandwich"},
        "elastic-adapter": {**ELASTIC, "model.inject": "adapter"},
        "elastic-sandwich-adapter": {**ELASTIC, "model.norms": "sandwich", "model.inject": "adapter"},
        "elastic-random-start": {
            **ELASTIC,
            "model.norms": "sandwich",
            "model.inject": "adapter",
            "model.start": "random",
        },
        "random-then-matched": {
            **OURS,
            **following(
                "{budget: any, during: [0, 0.3]}", "{budget: full, during: [0.3, 1]}", *strata(0.1, 0.3, 0.3)
            ),
        },
        "learned-then-matched": {**OURS, **following(FULL, *strata(0.3, 0, 0.2, 0.6), *strata(0.1, 0.3, 0.6))},
        # With the FLOPs of `elastic`.
        "sandwich-shorter": {**OURS, **following(FULL, SHORT, ONE, training__steps=770)},
        "elastic-two-blocks": {**ELASTIC, "model.blocks": 2},
        "specialist-8-two-blocks": specialist(8, model__blocks=2),
        "specialist-1-two-blocks": specialist(1, model__blocks=2),
        **{
            f"specialist-{m}-muon-{rate}": specialist(m, training__matrix_learning_rate=rate)
            for m, rate in ((8, 0.04), (4, 0.01), (4, 0.04), (2, 0.01), (2, 0.04))
        },
        "paper-adamw-4e-3": {
            "training.learning_rate": 4e-3,
            **FOUR_DRAWS,
        },
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
ELSEWHERE = {  # seed 0 of the same
    **{("final", f"specialist-{m}"): ("parts", f"specialist-{m}") for m in (8, 4, 2, 1)},
    ("final", "elastic"): ("smooth", "compositions-and-equal"),
}
PRESET = ("normed", "elastic-time-10")
LABELS = {  # of the picture, by suite and run
    PRESET: "elastic",
    ("normed", "paper-ours"): "the paper's objective, our optimizer and start",
    ("final", "early-exit"): "naive early exit, our optimizer",
    ("final", "paper-adamw-2e-3"): "the paper's recipe, at the better of its rates",
}
WINDOWS = 512  # held out, of the context each
ROWS = 64  # at a time
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("run", "model"):
        one = verbs.add_parser(verb)
        add_run_options(one, workers=4)
        one.add_argument("suite", choices=list(SUITES))
        one.add_argument("names", nargs="*", metavar="RUN", help="all of the suite by default")
        one.add_argument("--data", type=Path, required=True)
        one.add_argument("--seeds", type=int, nargs="+", default=[0])
    one = verbs.add_parser("collect")
    one.add_argument("--runs", type=Path, required=True)
    one.add_argument("--out", type=Path, default=Path("results/elastic"))
    asked = parser.parse_args()
    if asked.verb == "collect":
        collect(asked.runs, asked.out)
        return
    names = asked.names or list(SUITES[asked.suite])
    if unknown := set(names) - set(SUITES[asked.suite]):
        parser.error(f"{asked.suite} has no {', '.join(sorted(unknown))}")
    if asked.verb == "model":
        folder = asked.runs / run_name(asked.suite, names[0], asked.seeds[0])
        train_and_measure(asked.suite, names[0], asked.seeds[0], asked.data, folder, asked.commit, asked.set)
        return
    shared = ["--data", str(asked.data), *passed_on(asked)]
    start = [sys.executable, __file__, "model", asked.suite]
    commands = {
        run_name(asked.suite, name, seed): [*start, name, "--seeds", str(seed), *shared]
        for seed in asked.seeds
        for name in names
    }
    work_through(commands, asked.runs, asked.workers)


def run_name(suite: str, name: str, seed: int) -> str:
    return f"{suite}-{name}-s{seed}"


def train_and_measure(
    suite: str, name: str, seed: int, data: Path, run: Path, commit: str, trial: Sequence[str]
) -> None:
    """One run, and everything that was measured of it in one file."""
    settings = {**COMMON, "data.path": data, "training.seed": seed, **SUITES[suite][name]}
    facts = trained(PAPER, settings, trial, run, commit)
    found = {
        "suite": suite,
        "name": name,
        "seed": seed,
        "hardware": f"{device_name(DEVICE)}, several runs at a time",
        **facts,
        "windows": measured(run, data),
    }
    (run / RAW).write_text(rounded(found), encoding="utf-8")
    print(f"{name}: " + "  ".join(f"{ppl:.2f}" for ppl in perplexities(found).values()))


def measured(run: Path, data: Path) -> dict[str, Any]:
    """Held-out windows: nats of each at every budget, and nats per token along each schedule of half the loops."""
    model = find_model(run)[0].to(DEVICE).eval()
    windows = validation_windows(TokenData.open(str(data), "val"), model.config.context, WINDOWS)
    loops, tokens = model.config.loops, model.config.context
    along = [Trajectory.uniform(budget) for budget in range(1, loops + 1)]
    nats = {str(one): window_losses(model, windows, one) for one in along}
    schedules: dict[str, float] = {}
    if model.config.conditioning == "trajectory":
        for one in Trajectory.enumerate(loops, (loops + 1) // 2):
            if not one.is_uniform:
                schedules[str(one)] = statistics.fmean(window_losses(model, windows, one)) / tokens
    return {"tokens": tokens, "nats": nats, "schedules": schedules}


@torch.no_grad()
def window_losses(model: LoopedLM, windows: Windows, trajectory: Trajectory) -> list[float]:
    """The summed nats of every held-out window, in bf16 on a GPU."""
    device = model.device
    sums: list[float] = []
    for start in range(0, len(windows), ROWS):
        batch = windows.batch(start, min(start + ROWS, len(windows)))
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model(inputs, trajectory, logits=False, check=False).hidden
            logprobs = token_logprobs(model, hidden.flatten(0, 1), targets.flatten())[0]
        sums += (-logprobs.view(targets.shape).sum(1)).tolist()
    return sums


def perplexities(found: Mapping[str, Any]) -> dict[str, float]:
    """Perplexity along every uniform trajectory."""
    tokens, nats = found["windows"]["tokens"], found["windows"]["nats"]
    return {name: math.exp(statistics.fmean(sums) / tokens) for name, sums in nats.items()}


def collect(runs: Path, out: Path) -> None:
    """The results of every run that is done, one file each; of those tables, and a picture with the preset."""
    every = collected(runs, out)
    found = {
        (suite, run): seeds
        for suite, runs_of_suite in SUITES.items()
        for run in runs_of_suite
        if (seeds := [one for one in every if (one["suite"], one["name"]) in _known_as(suite, run)])
    }
    for suite in SUITES:
        if table := {run: seeds for (of, run), seeds in found.items() if of == suite}:
            print(f"\n{suite}: perplexity, mean of the seeds (lowest to highest)\n\n{markdown(table)}")
    if PRESET in found:
        save(compute_figure(found), out / "elastic.png")


def _known_as(suite: str, run: str) -> set[tuple[str, str]]:
    return {(suite, run), ELSEWHERE.get((suite, run), (suite, run))}


def markdown(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A row for each run, with its training FLOPs and seeds; a column for each budget."""
    lines = ["| run | PFLOP | seeds | M=1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |", "|---" * 11 + "|"]
    for name, seeds in found.items():
        flops = seeds[0]["plan"]["total_flops"] / 1e15
        each = [perplexities(one) for one in seeds]
        cells = [spread([one[str(budget)] for one in each]) for budget in range(1, 9)]
        lines.append(f"| {name} | {flops:.1f} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compute_figure(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> "Figure":
    """Perplexity against compute per token, means over the seeds: one model of each recipe, and the specialists."""
    config = from_mapping(ModelConfig, found[PRESET][0]["settings"]["model"], "model")
    mflops = {budget: Cost(config).forward_flops(budget) / 1e6 for budget in range(1, config.loops + 1)}

    def at(run: tuple[str, str], budget: int) -> float:
        return statistics.fmean(perplexities(one)[str(budget)] for one in found[run])

    def line(label: str, points: Mapping[int, float], dash: int = 0) -> Line:
        names = [f"M={budget}" if dash else "" for budget in points]  # below the lowest line there is room
        return Line(label, [mflops[budget] for budget in points], list(points.values()), names=names, dash=dash)

    lines = [line(label, {m: at(run, m) for m in mflops}) for run, label in LABELS.items() if run in found]
    special = {m: ("normed", f"specialist-{m}-twice") for m in mflops}
    own = {m: at(run, m) for m, run in special.items() if run in found}
    flops = sum(found[special[m]][0]["plan"]["total_flops"] for m in own) / found[PRESET][0]["plan"]["total_flops"]
    lines.append(line(f"specialists with as many tokens, {flops:.1f} times the FLOPs in all", own, dash=1))
    panel = Panel(lines, xlabel="MFLOP per token (forward)", ylabel="held-out perplexity", log_y=True, falling=True)
    return line_figure([panel], height=3.4)


if __name__ == "__main__":
    main()
