"""A model under evaluation, and its zero-shot benchmarks at any budgets: ask, keep, and put the numbers together.

    loaded, suite = LoadedModel.open("runs/mine"), Suite.load(["paper"], data="data/eval")
    runs = ask(loaded, suite.queries, loaded.trajectories("1,2,4"))     # needs no harness
    results(suite, model_facts(loaded, runs), runs)                     # plain data, one entry per trajectory

The weights are loaded once for all trajectories, and results are kept under the hash that they have on disk,
whatever the dtype they are then cast to. The answers of each (task, trajectory) are kept at once, so an interrupted
or extended evaluation asks only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from loopformer.config import whole_numbers
from loopformer.config.run import validation_budgets
from loopformer.device import choose_device, dtype_of
from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.schedules import scheduled
from loopformer.evaluation.store import Piece, Store, weights_hash
from loopformer.evaluation.tasks import TASKS, Answered, Answers, Queries, TaskAnswers, answer, digest, paper_scores
from loopformer.evaluation.text import ReportProgress, placement
from loopformer.lm import LM, load
from loopformer.model import LoopedLM
from loopformer.scoring import BATCH_TOKENS
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.harness import Suite


@dataclass(frozen=True)
class LoadedModel:
    """A model under evaluation, the hash of its weights, and where its finished pieces are kept."""

    source: str
    lm: LM
    weights: str
    store: Store

    @classmethod
    def open(cls, source: str, device: str = "auto", dtype: str = "float32") -> LoadedModel:
        """Load a run, a model folder or published weights onto a device."""
        number, where = dtype_of(dtype), choose_device(device)
        lm = load(source)
        weights = weights_hash(lm.model)
        return cls(source, lm.to(where, number), weights, Store.beside(source))

    @property
    def model(self) -> LoopedLM:
        return self.lm.model

    def trajectories(
        self, budgets: str | None = None, trajectories: Sequence[str] = (), schedule: str = "uniform"
    ) -> list[Trajectory]:
        """Budgets such as "1,2,4" at uniform or best schedules, and trajectories; 1, L/4, L/2 and L by default."""
        numbers = [] if trajectories else validation_budgets(self.model.config.loops)
        if budgets is not None:
            numbers = whole_numbers(budgets, "--budgets")
        by_budget = [scheduled(self.source, self.model, number, schedule, self.weights) for number in numbers]
        return list(dict.fromkeys([*by_budget, *map(self.model.resolve, trajectories)]))

    @property
    def identity(self) -> Piece:
        """What answers depend on besides the requests and the trajectory."""
        return {
            "weights": self.weights,
            "tokenizer": self.lm.need_tokenizer().hash,
            **placement(self.model),
        }


def ask(
    loaded: LoadedModel,
    queries: Queries,
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
    together: bool = False,
) -> dict[str, dict[str, Answered]]:
    """The answers to each task's requests along each trajectory, by trajectory and task.

    `together` computes what the trajectories share only once; the time of each is then a share of the whole.
    """
    kind = "answers, time shared" if together else "answers"
    hashes = {task: digest(requests) for task, requests in queries.items()}
    runs: dict[str, dict[str, Answered]] = {str(trajectory): {} for trajectory in trajectories}
    for group in [list(trajectories)] if together else [[trajectory] for trajectory in trajectories]:
        for task, requests in queries.items():
            about = {"kind": kind, **loaded.identity, "task": task, "requests": hashes[task]}
            keys = {trajectory: {**about, "trajectory": str(trajectory)} for trajectory in group}
            pieces = {trajectory: loaded.store.get(key) for trajectory, key in keys.items()}
            new = [trajectory for trajectory in keys if pieces[trajectory] is None]
            if new:
                counted = _counter(report, task, new)
                for trajectory, answered in answer(loaded.lm, requests, new, batch_tokens, counted).items():
                    pieces[trajectory] = loaded.store.put(keys[trajectory], asdict(answered))
            for trajectory, piece in pieces.items():
                assert piece is not None
                runs[str(trajectory)][task] = Answered(**piece)
    return runs


def _counter(
    report: ReportProgress | None, task: str, trajectories: Sequence[Trajectory]
) -> Callable[[int, int], None] | None:
    """How far one task is, in the words of a progress bar."""
    if report is None:
        return None
    first = trajectories[0]
    where = f"M={first.budget}" if first.is_uniform else str(first)
    where = where if len(trajectories) == 1 else f"{len(trajectories)} schedules"
    return lambda done, total: report(f"{task} {where}", done, total)


def model_facts(loaded: LoadedModel, runs: Iterable[str]) -> Piece:
    """What was evaluated, and what a token of it costs along each trajectory."""
    config, cost = loaded.model.config, loaded.model.cost
    return {
        "path": loaded.source,
        "shape": f"{config.blocks}⊗{config.loops}",
        "context": config.context,
        **loaded.identity,
        "flops_per_token": {name: cost.forward_flops(Trajectory.parse(name).budget) for name in runs},
    }


def results(suite: Suite, model: Mapping[str, Any], runs: Mapping[str, TaskAnswers]) -> Piece:
    """All numbers in plain data: per trajectory and task the metric, its value, error, examples and seconds."""
    facts = suite.facts
    rows = [_row(suite, facts, model, trajectory, run) for trajectory, run in runs.items()]
    return {"model": dict(model), **facts, "runs": rows}


def _row(suite: Suite, facts: Piece, model: Mapping[str, Any], trajectory: str, run: TaskAnswers) -> Piece:
    """The numbers of one trajectory."""
    tasks, groups = suite.metrics(run)
    rows = {}
    for name, metrics in tasks.items():
        metric = suite.metric(name, metrics)
        first, _, rest = metric.partition(",")
        rows[name] = {
            "metric": metric,
            "value": metrics[metric],
            "stderr": metrics.get(",".join(part for part in (f"{first}_stderr", rest) if part)),
            "examples": facts["tasks"][name]["examples"],
            "seconds": run[name].seconds,
            "tokens": run[name].tokens,
            "cut": run[name].cut,
            "metrics": metrics,
        }
    ours = set(TASKS) <= set(rows) and all(rows[name]["metric"] == TASKS[name].metric for name in TASKS)
    return {
        "trajectory": trajectory,
        "budget": Trajectory.parse(trajectory).budget,
        "flops_per_token": model["flops_per_token"][trajectory],
        "seconds": sum(answered.seconds for answered in run.values()),
        "tasks": rows,
        "groups": groups,
        "paper": paper_scores({name: rows[name]["value"] for name in TASKS}) if ours else None,
    }


def collect(suite: Suite, answers: Answers) -> Piece:
    """The results from a file of answers, which must be to the very requests of the suite."""
    suite_facts = suite.facts
    for task, facts in suite_facts["tasks"].items():
        answered = answers.facts["tasks"].get(task)
        if answered is None or answered["requests_sha256"] != facts["requests_sha256"]:
            raise FileProblem(
                f"The answers are to other requests of {task} than these; use the same --data and harness "
                f"({answers.facts['harness']} there, {suite_facts['harness']} here), or export and score again."
            )
        for run in answers.runs.values():
            if task not in run or len(run[task].values) != facts["requests"]:
                raise FileProblem(
                    f"The file has not all answers to {task}; it is damaged, score the requests again."
                )
    if not answers.runs:
        raise FileProblem("The file has no answers; it is damaged, score the requests again.")
    return results(suite, answers.model, answers.runs)


def accuracy(
    loaded: LoadedModel, suite: Suite, batch_tokens: int = BATCH_TOKENS, report: ReportProgress | None = None
) -> Callable[[Sequence[Trajectory]], dict[Trajectory, float]]:
    """A function that scores trajectories: the mean over the tasks, or the paper's average where all are there."""

    def mean(row: Piece) -> float:
        for name, task in row["tasks"].items():
            if not task["metric"].startswith("acc"):
                raise LoopformerError(f"The task {name} has {task['metric']} and no accuracy; leave it out.")
        values = [task["value"] for task in row["tasks"].values()]
        return float(row["paper"]["average"] if row["paper"] else sum(values) / len(values))

    def score(trajectories: Sequence[Trajectory]) -> dict[Trajectory, float]:
        runs = ask(loaded, suite.queries, trajectories, batch_tokens, report, together=True)
        rows = results(suite, model_facts(loaded, runs), runs)["runs"]
        return {trajectory: mean(row) for trajectory, row in zip(trajectories, rows, strict=True)}

    return score
