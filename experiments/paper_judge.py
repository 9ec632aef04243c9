"""The paper's claims against results/paper_claims: Markdown tables computed from the stored results.

    python experiments/paper_claims.py judge docs/paper-claims.md results/paper_claims/README.md

This fills each file between `<!-- judge: NAME -->` and `<!-- end -->` with the table of that name (TABLES).

Errors. Perplexities are compared by the mean of their logarithms over the texts. The standard deviation of a run
is pooled over the models that were trained with two seeds, at the same budget, and used for the other models too.
Task averages add the error of the mean over the examples, which both models of a pair answered. A statement about a
single model that was trained twice has the error of its own two seeds. A difference below two standard errors is
undecided. So is a difference of task averages if either model is less than two standard errors above guessing.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
SEEDS = {"loopformer": ("loopformer", "loopformer-s1"), "tmlt-ee": ("tmlt-ee", "tmlt-ee-s1")}
TITLES = {
    "base-24": "Base, 24 blocks",
    "base-12": "Base, 12 blocks",
    "base-6": "Base, 6 blocks",
    "base-3": "Base, 3 blocks",
    "base-loop": "Base-Loop",
    "tmlt": "TMLT",
    "base-loop-ee": "Base-Loop-EE",
    "base-loop-ee-cons": "Base-Loop-EE-Cons",
    "recurrent-depth": "Recurrent Depth",
    "tmlt-ee": "TMLT-EE",
    "loopformer": "LoopFormer",
    "loopformer-sequential": "LoopFormer, authors' sampler",
    "loopformer-34k": "LoopFormer, 34/50 of the steps",
}
TEXTS = ("WikiText-2", "books", "reviews")  # in the order of the results
TASKS = (
    "copa",
    "hellaswag",
    "lambada_openai",
    "openbookqa",
    "piqa",
    "race",
    "social_iqa",
    "arc_easy",
    "arc_challenge",
    "sciq",
    "winogrande",
)
BUDGETS = {8: "24×", 4: "12×", 2: "6×", 1: "3×"}
GUESSING = {  # percent right by chance; ARC has three to five choices
    "copa": 50,
    "hellaswag": 25,
    "lambada": 0,
    "openbookqa": 25,
    "piqa": 50,
    "race": 25,
    "social_iqa": 100 / 3,
    "arc": 25,
    "sciq": 25,
    "winogrande": 50,
}
PAPER: dict[tuple[str, int], tuple[float, float, float, float]] = {  # the Pile, FineWeb-Edu, OpenWebText, average
    ("base-24", 8): (9.49, 20.7, 20.08, 45.27),
    ("base-loop", 8): (10.91, 24.53, 24.53, 42.88),
    ("tmlt", 8): (10.38, 22.87, 21.99, 44.69),
    ("base-loop-ee", 8): (11.6, 26.55, 25.64, 42.91),
    ("base-loop-ee-cons", 8): (11.56, 25.33, 24.41, 43.25),
    ("tmlt-ee", 8): (10.7, 24.07, 23.17, 44.03),
    ("loopformer", 8): (10.28, 22.87, 21.98, 44.81),
    ("base-12", 4): (9.98, 22.24, 21.41, 44.93),
    ("base-loop-ee", 4): (11.66, 26.74, 25.81, 42.59),
    ("base-loop-ee-cons", 4): (12.0, 27.72, 26.68, 41.1),
    ("tmlt-ee", 4): (12.18, 28.28, 27.11, 41.5),
    ("loopformer", 4): (11.12, 25.02, 24.21, 43.73),
    ("base-6", 2): (11.13, 25.28, 24.28, 42.73),
    ("base-loop-ee", 2): (12.61, 29.36, 28.38, 40.97),
    ("base-loop-ee-cons", 2): (15.07, 35.95, 34.88, 38.62),
    ("tmlt-ee", 2): (15.79, 37.83, 37.84, 37.59),
    ("loopformer", 2): (14.3, 33.45, 32.46, 40.36),
    ("base-3", 1): (12.93, 30.23, 29.20, 40.93),
    ("loopformer-34k", 8): (10.71, 23.66, 22.78, 44.21),
}
PAPER_SPREAD = 1.4  # of perplexity over the 35 schedules of M = 4, "~1.4"
METRICS = {"curvature": "curvature", "anisotropy": "anisotropy", "prompt_entropy": "prompt entropy"}
HOLDS, FAILS, OPEN, GUESSED = "holds", "**does not hold**", "undecided", "undecided: guessing"
ModelAt = tuple[str, int]  # a model and a budget M


@dataclass(frozen=True)
class Value:
    """A number and its standard error."""

    value: float
    error: float

    @property
    def sign(self) -> int:
        """The sign of the value, or 0 within two standard errors of zero."""
        return 0 if abs(self.value) < 2 * self.error else 1 if self.value > 0 else -1


class Results:
    """All measured models, and the differences between them."""

    def __init__(self, folder: Path) -> None:
        results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
        self.files: dict[str, Result] = {name: run for name, run in results.items() if "perplexity" in run}

    def runs(self, model: str) -> list[Result]:
        return [self.files[name] for name in SEEDS.get(model, (model,))]

    def log_perplexity(self, at: ModelAt) -> Value:
        return self._over_seeds(at, log_perplexity)

    def average(self, at: ModelAt) -> Value:
        """The average of the ten tasks in percent, with the error over examples and seeds."""
        over_seeds, examples = self._over_seeds(at, task_average), _example_error(self._outcomes(at))
        return Value(over_seeds.value, math.hypot(over_seeds.error, examples))

    def log_ratio(self, a: ModelAt, b: ModelAt) -> Value:
        """ln of the perplexity of `a` over that of `b`."""
        if a[0] == b[0] and a[0] in SEEDS:
            return self.over_own_seeds(a[0], lambda run: log_perplexity(run, a[1]) - log_perplexity(run, b[1]))
        mine, theirs = self.log_perplexity(a), self.log_perplexity(b)
        return Value(mine.value - theirs.value, math.hypot(mine.error, theirs.error))

    def task_gain(self, a: ModelAt, b: ModelAt) -> Value:
        """Points by which the task average of `a` is above that of `b`, on the same examples."""
        mine, theirs = self._over_seeds(a, task_average), self._over_seeds(b, task_average)
        my_outcomes, their_outcomes = self._outcomes(a), self._outcomes(b)
        paired = {
            task: [x - y for x, y in zip(values, their_outcomes[task], strict=True)]
            for task, values in my_outcomes.items()
        }
        return Value(mine.value - theirs.value, math.hypot(mine.error, theirs.error, _example_error(paired)))

    def over_own_seeds(self, model: str, of: Callable[[Result], float]) -> Value:
        """The mean over a model's runs, with the error of those runs alone."""
        values = [of(run) for run in self.runs(model)]
        return Value(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    def over_loops(self, model: str, statistic: Callable[[Result], float]) -> Value:
        """A statistic of the states along the full trajectory."""
        return self._over_seeds((model, 8), lambda run, budget: over(statistic)(run))

    def above_guessing(self, at: ModelAt) -> bool:
        average = self.average(at)
        return average.value - statistics.fmean(GUESSING.values()) >= 2 * average.error

    def _over_seeds(self, at: ModelAt, of: Callable[[Result, int], float]) -> Value:
        """The mean over a model's runs, with the error pooled from the models that were trained twice."""
        model, budget = at
        values = [of(run, budget) for run in self.runs(model)]
        trained = 8 if is_plain_stack(model) else budget  # a plain stack is run as it was trained
        pairs = [[of(run, trained) for run in self.runs(name)] for name in SEEDS]
        deviation = math.sqrt(statistics.fmean(statistics.variance(pair) for pair in pairs))
        return Value(statistics.fmean(values), deviation / math.sqrt(len(values)))

    def _outcomes(self, at: ModelAt) -> dict[str, list[float]]:
        """For each task and example, the percentage of a model's runs that got it right."""
        model, budget = at
        outcomes = [run["outcomes"][uniform(run, budget)] for run in self.runs(model)]
        examples = {task: zip(*(outcome[task] for outcome in outcomes), strict=True) for task in TASKS}
        return {
            task: [100 * statistics.fmean(map(int, right)) for right in rows] for task, rows in examples.items()
        }


def over(statistic: Callable[[Result], float]) -> Callable[[Result], float]:
    """A statistic of a run's states along the full trajectory."""
    return lambda run: statistic(run["analysis"][0])


def uniform(run: Result, budget: int) -> str:
    """The name of the uniform trajectory; a plain stack has only one pass."""
    return str(min(budget, run["settings"]["model"]["loops"]))


def log_perplexity(run: Result, budget: int) -> float:
    rows = [row for row in run["perplexity"] if row["trajectory"] == uniform(run, budget)]
    return statistics.fmean(math.log(row["perplexity"]) for row in rows)


def task_average(run: Result, budget: int) -> float:
    (row,) = (row for row in run["tasks"]["runs"] if row["trajectory"] == uniform(run, budget))
    return 100 * float(row["paper"]["average"])


def _example_error(outcomes: Mapping[str, Sequence[float]]) -> float:
    """The error of the average over ten benchmarks, where ARC is the mean of two tasks."""
    total = 0.0
    for task, values in outcomes.items():
        share, mean = 0.05 if task.startswith("arc_") else 0.1, statistics.fmean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)  # statistics.variance takes seconds for all
        total += share**2 * squares / (len(values) - 1) / len(values)
    return math.sqrt(total)


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


def is_plain_stack(model: str) -> bool:
    return model.removeprefix("base-").isdigit()


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
            error = _example_error({task: [100.0 * int(digit) for digit in right[task]] for task in TASKS})
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
