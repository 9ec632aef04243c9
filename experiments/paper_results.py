"""The stored results of the paper's models, the differences between them, and the paper's own numbers.

Errors. Perplexities are compared by the mean of their logarithms over the texts. The standard deviation of a run
is pooled over the models that were trained with two seeds, at the same budget, and used for the other models too.
Task averages add the error of the mean over the examples, which both models of a pair answered. A statement about a
single model that was trained twice has the error of its own two seeds. A difference below two standard errors is
undecided. So is a difference of task averages if either model is less than two standard errors above guessing.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        over_seeds, examples = self._over_seeds(at, task_average), example_error(self._outcomes(at))
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
        return Value(mine.value - theirs.value, math.hypot(mine.error, theirs.error, example_error(paired)))

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


def is_plain_stack(model: str) -> bool:
    return model.removeprefix("base-").isdigit()


def over(statistic: Callable[[Result], float]) -> Callable[[Result], float]:
    """A statistic of a run's states along the full trajectory."""
    return lambda run: statistic(run["analysis"][0])


def uniform(run: Result, budget: int) -> str:
    """The name of the uniform trajectory; a plain stack has only one loop."""
    return str(min(budget, run["settings"]["model"]["loops"]))


def log_perplexity(run: Result, budget: int) -> float:
    rows = [row for row in run["perplexity"] if row["trajectory"] == uniform(run, budget)]
    return statistics.fmean(math.log(row["perplexity"]) for row in rows)


def task_average(run: Result, budget: int) -> float:
    (row,) = (row for row in run["tasks"]["runs"] if row["trajectory"] == uniform(run, budget))
    return 100 * float(row["paper"]["average"])


def example_error(outcomes: Mapping[str, Sequence[float]]) -> float:
    """The error of the average over ten scores, where ARC is the mean of two tasks."""
    total = 0.0
    for task, values in outcomes.items():
        share, mean = 0.05 if task.startswith("arc_") else 0.1, statistics.fmean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)  # statistics.variance takes seconds for all
        total += share**2 * squares / (len(values) - 1) / len(values)
    return math.sqrt(total)
