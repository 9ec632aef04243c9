"""The paper's claims against results/paper_claims: Markdown tables computed from the stored results.

    python experiments/paper_claims.py judge docs/paper-claims.md results/paper_claims/README.md

This fills each file between `<!-- judge: NAME -->` and `<!-- end -->` with the table of that name (TABLES).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from paper_results import (
    BUDGETS,
    GUESSING,
    METRICS,
    PAPER,
    PAPER_SPREAD,
    SEEDS,
    TASKS,
    TEXTS,
    TITLES,
    ModelAt,
    Result,
    Results,
    Value,
    example_error,
    is_plain_stack,
    over,
    task_average,
    uniform,
)

HOLDS, FAILS, OPEN, GUESSED = "holds", "**does not hold**", "undecided", "undecided: guessing"

# Claims


@dataclass(frozen=True)
class Pair:
    """A comparison of two perplexities, or of two task averages."""

    a: ModelAt
    b: ModelAt
    tasks: bool = False

    def ours(self, results: Results) -> Value:
        return results.task_gain(self.a, self.b) if self.tasks else results.log_ratio(self.a, self.b)

    @property
    def paper(self) -> float | None:
        """The same difference in the paper."""
        if self.a not in PAPER or self.b not in PAPER:
            return None
        mine, theirs = PAPER[self.a], PAPER[self.b]
        if self.tasks:
            return mine[3] - theirs[3]
        return statistics.fmean(math.log(x / y) for x, y in zip(mine[:3], theirs[:3], strict=True))

    def written(self, value: float) -> str:
        return f"{value:+.1f} points" if self.tasks else _percent(value)

    def written_error(self, value: Value) -> str:
        return f"{value.error:.1f} points" if self.tasks else _percent_error(value)

    def name(self) -> str:
        (mine, m), (theirs, n) = self.a, self.b
        if mine == theirs:
            return f"{TITLES[mine]}, {BUDGETS[m]} against {BUDGETS[n]}"
        return f"{TITLES[mine]} against {TITLES[theirs]}, {BUDGETS[m]}"

    def verdict(self, results: Results, expected: int) -> str:
        """Whether the difference has the expected sign, or with 0 whether it is no worse than the paper's."""
        ours = self.ours(results)
        if self.tasks and not (results.above_guessing(self.a) and results.above_guessing(self.b)):
            return GUESSED
        if expected:
            return {expected: HOLDS, 0: OPEN, -expected: FAILS}[ours.sign]
        assert self.paper is not None
        worse = (self.paper - ours.value) if self.tasks else (ours.value - self.paper)
        return {1: FAILS, 0: OPEN, -1: HOLDS}[Value(worse, ours.error).sign]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the comparisons that decide it, and the sign they must have."""

    text: str
    pairs: tuple[Pair, ...]
    expected: int  # 0: no further behind than in the paper

    def rows(self, results: Results) -> list[list[str]]:
        """A row for each comparison; the first has the claim."""
        rows = []
        for number, pair in enumerate(self.pairs):
            ours, paper = pair.ours(results), pair.paper
            cells = [
                "no number" if paper is None else pair.written(paper),
                pair.written(ours.value),
                pair.written_error(ours),
            ]
            rows.append(
                [self.text if number == 0 else "", pair.name(), *cells, pair.verdict(results, self.expected)]
            )
        return rows


def _percent(log_ratio: float) -> str:
    percent = 100 * math.expm1(log_ratio)
    return f"{percent:+.{_digits(percent)}f} %"


def _percent_error(log_ratio: Value) -> str:
    digits = _digits(100 * math.expm1(log_ratio.value))
    return f"{100 * math.exp(log_ratio.value) * log_ratio.error:.{digits}f} %"


def _digits(percent: float) -> int:
    return 1 if abs(percent) < 100 else 0


def pairs(of: str, against: Sequence[str], budget: int, tasks: bool = False) -> tuple[Pair, ...]:
    return tuple(Pair((of, budget), (other, budget), tasks) for other in against)


ELASTIC = ("base-loop-ee", "base-loop-ee-cons", "tmlt-ee")
LOOPED = ("base-loop", "tmlt", *ELASTIC)
LF = "loopformer"
CLAIMS = (
    Claim(
        "Looped models trail the plain stack of the same FLOPs on perplexity",
        tuple(Pair((name, 8), ("base-24", 8)) for name in (*LOOPED, LF)),
        1,
    ),
    Claim("LoopFormer surpasses even fixed-depth looped models on perplexity", pairs(LF, LOOPED[:2], 8), -1),
    Claim("LoopFormer has the best perplexity of the elastic models, 24×", pairs(LF, ELASTIC, 8), -1),
    Claim("The same, 12×", pairs(LF, ELASTIC, 4), -1),
    Claim("The same, 6×, but for Base-Loop-EE (table)", pairs(LF, ELASTIC[1:], 2), -1),
    Claim("At 6× Base-Loop-EE has a lower perplexity than LoopFormer (table)", pairs(LF, ELASTIC[:1], 2), 1),
    Claim(
        "At 12× LoopFormer stays close to Base with 12 blocks: no further behind than in the paper",
        (*pairs(LF, ("base-12",), 4), *pairs(LF, ("base-12",), 4, tasks=True)),
        0,
    ),
    Claim(
        "More loops go on refining: perplexity falls with the budget",
        (Pair((LF, 8), (LF, 4)), Pair((LF, 4), (LF, 2)), Pair((LF, 2), (LF, 1))),
        -1,
    ),
    Claim(
        "Looped models of fixed depth collapse at fewer loops",
        tuple(Pair((name, 4), (name, 8)) for name in ("base-loop", "tmlt")),
        1,
    ),
    Claim(
        "The consistency loss improves Base-Loop at every budget",
        tuple(Pair(("base-loop-ee-cons", budget), ("base-loop-ee", budget)) for budget in (8, 4, 2)),
        -1,
    ),
    Claim(
        "Base-Loop-EE performs better than Recurrent Depth (footnote)",
        tuple(Pair(("base-loop-ee", budget), ("recurrent-depth", budget)) for budget in (8, 4, 2)),
        -1,
    ),
    Claim("LoopFormer is the best looped model on the tasks, 24×", pairs(LF, LOOPED, 8, tasks=True), 1),
    Claim("The same among elastic ones, 12×", pairs(LF, ELASTIC, 4, tasks=True), 1),
    Claim("The same, 6×, but for Base-Loop-EE (table)", pairs(LF, ELASTIC[1:], 2, tasks=True), 1),
    Claim(
        "On the tasks LoopFormer comes near the plain stack of the same FLOPs: no further behind than in the paper",
        (*pairs(LF, ("base-24",), 8, tasks=True), *pairs(LF, ("base-6",), 2, tasks=True)),
        0,
    ),
    Claim(
        "Same parameters: at 6× on par with Base of 3 blocks (no further behind than in the paper)",
        (Pair((LF, 2), ("base-3", 1)), Pair((LF, 2), ("base-3", 1), tasks=True)),
        0,
    ),
    Claim(
        "Same parameters: at 12× and 24× better than Base of 3 blocks on perplexity",
        (Pair((LF, 4), ("base-3", 1)), Pair((LF, 8), ("base-3", 1))),
        -1,
    ),
    Claim(
        "The same on the tasks",
        (Pair((LF, 4), ("base-3", 1), tasks=True), Pair((LF, 8), ("base-3", 1), tasks=True)),
        1,
    ),
    Claim(
        "Same training FLOPs: LoopFormer of 34/50 of the steps is on par with TMLT (no further behind than there)",
        (*pairs("loopformer-34k", ("tmlt",), 8), *pairs("loopformer-34k", ("tmlt",), 8, tasks=True)),
        0,
    ),
)


def claims(results: Results) -> list[str]:
    head = ["claim", "compared", "paper", "this package", "standard error", "verdict"]
    return table(head, [row for claim in CLAIMS for row in claim.rows(results)], "llrrrl")


# What was measured


def models(results: Results) -> list[str]:
    """Every run at its budgets, as the paper's main table has them."""
    runs = {
        f"{TITLES[model]}, seed {seed}" if model in SEEDS else TITLES[model]: (model, run)
        for model in TITLES
        for seed, run in enumerate(results.runs(model))
    }
    blocks = {8: "base-24", 4: "base-12", 2: "base-6", 1: "base-3"}
    rows = []
    for budget, flops in BUDGETS.items():
        for title, (model, run) in runs.items():
            if is_plain_stack(model) and model != blocks[budget]:
                continue
            texts = [row for row in run["perplexity"] if row["trajectory"] == uniform(run, budget)]
            right = run["outcomes"][uniform(run, budget)]
            error = example_error({task: [100.0 * int(digit) for digit in right[task]] for task in TASKS})
            weights = f"{run['plan']['parameters_without_embeddings'] / 1e6:.1f} M"
            perplexities = [f"{row['perplexity']:.1f}" for row in texts]
            rows.append([flops, title, weights, *perplexities, f"{task_average(run, budget):.2f}", f"{error:.2f}"])
    return table(["FLOPs", "model", "weights", *TEXTS, "task average, %", "its error"], rows, "ll" + "r" * 6)


def tasks(results: Results) -> list[str]:
    """Each task at the full budget, with the score of guessing."""
    names = ["base-24", *LOOPED, "recurrent-depth", LF]
    rows = []
    for name in names:
        scores = [run["tasks"]["runs"][0]["paper"] for run in results.runs(name)]
        rows.append(
            [TITLES[name], *(f"{100 * statistics.fmean(score[task] for score in scores):.1f}" for task in GUESSING)]
        )
    rows.append(["guessing", *(f"{share:.1f}" for share in GUESSING.values())])
    return table(["24×, %", *GUESSING], rows, "l" + "r" * len(GUESSING))


def metric(name: str, of: Callable[[list[float]], float]) -> Callable[[Result], float]:
    return lambda analysis: of(analysis["metrics"][name]["mean"][1:])


def similarity(analysis: Result, first: int = 1) -> float:
    """Mean CKA between the states after different loops, from the `first` one on."""
    return statistics.fmean(float(analysis["cka"][i][j]) for i, j in combinations(range(first, 9), 2))


def late(analysis: Result) -> float:
    return similarity(analysis, 5)


def extent(curve: Sequence[float]) -> float:
    return max(curve) - min(curve)


def peak(curve: Sequence[float]) -> int:
    return 1 + max(range(len(curve)), key=lambda loop: curve[loop])


REPRESENTED = (*LOOPED, "recurrent-depth", LF, "loopformer-sequential")


def representation(results: Results) -> list[str]:
    """The range of each metric over the loops, and the similarity of the loops. Errors depend on seeds alone."""
    measures = [*(metric(name, extent) for name in METRICS), similarity, late]
    values = {model: [results.over_loops(model, of) for of in measures] for model in REPRESENTED}
    rows = [
        [TITLES[model], str(len(results.runs(model))), *(f"{value.value:.3f}" for value in own)]
        for model, own in values.items()
    ]
    for seeds, model in ((1, LOOPED[0]), (2, LF)):
        rows.append(
            [f"standard error, {seeds} seed{'s' * (seeds > 1)}", "", *(f"{v.error:.3f}" for v in values[model])]
        )
    head = ["M = 8", "seeds", *METRICS.values(), "CKA between loops", "CKA between loops 5 to 8"]
    return table(head, rows, "l" + "r" * 6)


def peaks(results: Results) -> list[str]:
    """The loop where each metric is highest."""
    rows = [
        [
            TITLES[model],
            str(seed),
            *(str(peak(run["analysis"][0]["metrics"][name]["mean"][1:])) for name in METRICS),
        ]
        for model in REPRESENTED
        for seed, run in enumerate(results.runs(model))
    ]
    return table(["M = 8", "seed", *METRICS.values()], rows, "l" + "r" * 4)


def representation_claims(results: Results) -> list[str]:
    rows = []
    for name, title in METRICS.items():
        mine = results.over_loops(LF, metric(name, extent))
        for other in ELASTIC:
            theirs = results.over_loops(other, metric(name, extent))
            rows.append(_moves(f"{title}: moves more over the loops than in {TITLES[other]}", mine, theirs, 1))
    for title, of in {"CKA between loops": similarity, "CKA between loops 5 to 8": late}.items():
        for other in ELASTIC:
            mine, theirs = results.over_loops(LF, of), results.over_loops(other, of)
            rows.append(_moves(f"{title}: lower than in {TITLES[other]}", mine, theirs, -1))
    for name, title in METRICS.items():
        rises = results.over_own_seeds(LF, over(metric(name, lambda curve: max(curve[1:-1]) - curve[0])))
        tapers = results.over_own_seeds(LF, over(metric(name, lambda curve: max(curve[1:-1]) - curve[-1])))
        for text, value in {
            "rises to mid-depth, highest of loops 2 to 7 against loop 1": rises,
            "tapers after that, highest of loops 2 to 7 against loop 8": tapers,
        }.items():
            rows.append([f"{title}: {text}", "", "", *_judged(value, 1)])
    head = ["claim about LoopFormer (figures, no numbers in the paper)", "LoopFormer", "the other", "difference"]
    return table([*head, "standard error", "verdict"], rows, "lrrrrl")


def _moves(text: str, mine: Value, theirs: Value, expected: int) -> list[str]:
    difference = Value(mine.value - theirs.value, math.hypot(mine.error, theirs.error))
    return [text, f"{mine.value:.3f}", f"{theirs.value:.3f}", *_judged(difference, expected)]


def _judged(value: Value, expected: int) -> list[str]:
    verdict = {expected: HOLDS, 0: OPEN, -expected: FAILS}[value.sign]
    return [f"{value.value:+.3f}", f"{value.error:.3f}", verdict]


# Schedules


def by_schedule(run: Result) -> dict[str, float]:
    """ln perplexity of each schedule of M = 4, the mean over the texts."""
    logs: dict[str, list[float]] = {}
    for text in run["schedules"]:
        for row in text["schedules"]:
            logs.setdefault(row["schedule"], []).append(math.log(row["perplexity"]))
    return {schedule: statistics.fmean(values) for schedule, values in logs.items()}


def lateness(schedule: str) -> int:
    """A number that is higher the later the coarse steps come."""
    return sum(position * int(step) for position, step in enumerate(schedule.split("-"), 1))


def mirrored(run: Result) -> list[float]:
    """ln perplexity of each coarse-early schedule over that of the same steps in reverse."""
    values = by_schedule(run)
    back = {schedule: "-".join(reversed(schedule.split("-"))) for schedule in values}
    return [
        values[schedule] - values[back[schedule]]
        for schedule in values
        if lateness(schedule) < lateness(back[schedule])
    ]


SAMPLED = {
    "loopformer": "uniform over schedules (the paper's text), seed 0",
    "loopformer-s1": "the same, seed 1",
    "loopformer-34k": "the same, 34/50 of the steps",
    "loopformer-sequential": "part by part (the authors' code), seed 0",
}


def schedules(results: Results) -> list[str]:
    """The best and the worst schedules, and the rank of equal steps."""
    rows = []
    for name, sampler in SAMPLED.items():
        values = by_schedule(results.files[name])
        ranked = sorted(values, key=lambda schedule: values[schedule])
        spread = f"{100 * math.expm1(values[ranked[-1]] - values[ranked[0]]):.1f} %"
        rows.append([sampler, *ranked[:3], *ranked[:-3:-1], str(1 + ranked.index("2-2-2-2")), spread])
    head = ["sampler", "best", "second", "third", "worst", "second worst", "rank of uniform", "worst over best"]
    return table(head, rows)


def schedule_steps(results: Results) -> list[str]:
    """The mean steps of the best schedules, and coarse-early ones against their mirror images."""
    rows = []
    for name, sampler in SAMPLED.items():
        values, pairs = by_schedule(results.files[name]), mirrored(results.files[name])
        ranked = sorted(values, key=lambda schedule: values[schedule])
        best = [[int(step) / 8 for step in schedule.split("-")] for schedule in ranked[:4]]
        means = [f"{statistics.fmean(column):.2f}" for column in zip(*best, strict=True)]
        wins = sum(difference < 0 for difference in pairs)
        rows.append([sampler, *means, str(wins), f"{100 * math.expm1(statistics.fmean(pairs)):+.1f} %"])
    head = ["sampler", *(f"step {number} of the best four, mean" for number in range(1, 5))]
    return table([*head, "coarse-early ones ahead of their mirror image, of 15", "by"], rows, "l" + "r" * 6)


def schedule_claims(results: Results) -> list[str]:
    def over_seeds(of: Callable[[Result], float], names: Sequence[str]) -> Value:
        deviation = statistics.stdev([of(run) for run in results.runs(LF)])
        values = [of(results.files[name]) for name in names]
        return Value(statistics.fmean(values), deviation / math.sqrt(len(values)))

    def spread(run: Result) -> float:
        values = by_schedule(run).values()
        return max(values) - min(values)

    spread_there = f"{100 * PAPER_SPREAD / PAPER[LF, 4][0]:+.0f} %"
    statements: dict[str, tuple[str, int, Callable[[Result], float]]] = {
        "Schedules of one budget differ: worst over best": (spread_there, 1, spread),
        "Coarse early, fine late beats its mirror image": ("yes", -1, lambda run: statistics.fmean(mirrored(run))),
        "The best coarse-early schedule beats the uniform one": ("yes", -1, best_over_uniform),
    }
    samplers = {"the paper's sampler": SEEDS[LF], "the authors' sampler": ("loopformer-sequential",)}
    rows = []
    for text, (paper, expected, of) in statements.items():
        for sampler, names in samplers.items():
            ours = over_seeds(of, names)
            verdict = {expected: HOLDS, 0: OPEN, -expected: FAILS}[ours.sign]
            rows.append([f"{text}; {sampler}", paper, _percent(ours.value), _percent_error(ours), verdict])
    rows.append(["Task averages differ between schedules", "1.3 points", "not measured", "", OPEN])
    return table(["claim", "paper", "this package", "standard error", "verdict"], rows, "lrrrl")


def best_over_uniform(run: Result) -> float:
    values = by_schedule(run)
    early = min(value for schedule, value in values.items() if lateness(schedule) < lateness("2-2-2-2"))
    return early - values["2-2-2-2"]


def cost(results: Results) -> list[str]:
    """Training FLOPs per token, and in total for the shorter run."""
    per_token, total = (
        [results.files[name]["plan"][key] for name in (LF, "loopformer-34k", "base-loop")]
        for key in ("training_gflops_per_token", "total_flops")
    )
    counted = {
        "Elastic training costs 1.5 times the FLOPs of fixed depth": (1.5, per_token[0] / per_token[2]),
        "34/50 of the steps cost the training FLOPs of fixed depth": (1.0, total[1] / total[2]),
    }
    rows = [
        [text, f"about {paper:g}", f"{ours:.2f}", HOLDS if abs(ours - paper) < 0.1 else FAILS]
        for text, (paper, ours) in counted.items()
    ]
    return table(["claim", "paper", "this package, counted", "verdict"], rows)


TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "claims": claims,
    "models": models,
    "tasks": tasks,
    "representation": representation,
    "peaks": peaks,
    "representation claims": representation_claims,
    "schedules": schedules,
    "schedule steps": schedule_steps,
    "schedule claims": schedule_claims,
    "cost": cost,
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str | None = None) -> list[str]:
    dashes = ["---:" if side == "r" else "---" for side in (align or "l" * len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, dashes, *rows)]


def fill(path: Path, results: Results) -> None:
    """Replace every judged table of a Markdown file."""
    path.write_text("\n".join(_filled(path.read_text("utf-8").splitlines(), results)) + "\n", encoding="utf-8")


def _filled(lines: Sequence[str], results: Results) -> Iterator[str]:
    old = False
    for line in lines:
        old = old and line != "<!-- end -->"
        if not old:
            yield line
        if line.startswith("<!-- judge: "):
            old = True
            yield from ("", *TABLES[line.removeprefix("<!-- judge: ").removesuffix(" -->")](results), "")
