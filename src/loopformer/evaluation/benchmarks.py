"""Zero-shot benchmarks of a model at any budgets: ask, keep, and put the numbers together.

    subject, suite = Subject.open("runs/mine"), Suite.load(["paper"], data="data/eval")
    runs = ask(subject, suite.queries, [Trajectory.uniform(4)])        # needs no harness
    results(suite, model_facts(subject, runs), runs)                   # plain data, one entry per trajectory

The weights are loaded once for all trajectories. The answers of each (task, trajectory) are kept at once, so an
interrupted or extended evaluation asks only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from loopformer.errors import FileProblem, require
from loopformer.evaluation.store import Piece
from loopformer.evaluation.subject import Subject
from loopformer.evaluation.tasks import TASKS, Answered, Answers, Queries, Run, answer_along, digest, paper_scores
from loopformer.evaluation.text import Report
from loopformer.inference.score import BATCH_TOKENS
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.harness import Suite


def ask(
    subject: Subject,
    queries: Queries,
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: Report | None = None,
    together: bool = False,
) -> dict[str, dict[str, Answered]]:
    """The answers to each task's requests along each trajectory, by trajectory and task.

    `together` computes what the trajectories share only once; the time of each is then a share of the whole.
    """
    hashes = {task: digest(asked) for task, asked in queries.items()}
    runs: dict[str, dict[str, Answered]] = {str(trajectory): {} for trajectory in trajectories}
    for group in [list(trajectories)] if together else [[trajectory] for trajectory in trajectories]:
        for task, asked in queries.items():
            keys = {
                trajectory: {**_key(subject, trajectory, together), "task": task, "requests": hashes[task]}
                for trajectory in group
            }
            kept = {trajectory: subject.store.get(key) for trajectory, key in keys.items()}
            new = [trajectory for trajectory in keys if kept[trajectory] is None]
            if new:
                found = answer_along(subject.lm, asked, new, batch_tokens, _counter(report, task, new))
                kept |= {
                    trajectory: subject.store.put(keys[trajectory], asdict(found[trajectory])) for trajectory in new
                }
            for trajectory, piece in kept.items():
                assert piece is not None
                runs[str(trajectory)][task] = Answered(**piece)
    return runs


def model_facts(subject: Subject, runs: Iterable[str]) -> Piece:
    """What was evaluated, and what a token of it costs along each trajectory."""
    config = subject.model.config
    return {
        "path": subject.source,
        "shape": f"{config.blocks}⊗{config.loops}",
        "context": config.context,
        **_identity(subject),
        "flops_per_token": {one: subject.model.cost.forward_flops(Trajectory.parse(one).budget) for one in runs},
    }


def results(suite: Suite, model: Mapping[str, Any], runs: Mapping[str, Run]) -> Piece:
    """All numbers in plain data: per trajectory and task the metric, its value, error, examples and seconds."""
    facts = suite.facts
    rows = [_row(suite, facts, model, trajectory, run) for trajectory, run in runs.items()]
    return {"model": dict(model), **facts, "runs": rows}


def collect(suite: Suite, answers: Answers) -> Piece:
    """The same from a file of answers, which must be to the very requests of the suite."""
    for task, facts in suite.facts["tasks"].items():
        given = answers.facts["tasks"].get(task)
        if given is None or given["requests_sha256"] != facts["requests_sha256"]:
            raise FileProblem(
                f"The answers are to other requests of {task} than these; use the same --data and harness "
                f"({answers.facts['harness']} there, {suite.facts['harness']} here), or export and score again."
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
    subject: Subject, suite: Suite, batch_tokens: int = BATCH_TOKENS, report: Report | None = None
) -> Callable[[Sequence[Trajectory]], dict[Trajectory, float]]:
    """A function that scores trajectories: the mean over the tasks, or the paper's average where all are there."""

    def score(trajectories: Sequence[Trajectory]) -> dict[Trajectory, float]:
        runs = ask(subject, suite.queries, trajectories, batch_tokens, report, together=True)
        rows = results(suite, model_facts(subject, runs), runs)["runs"]
        return {trajectory: _score_of(row) for trajectory, row in zip(trajectories, rows, strict=True)}

    return score


def _score_of(row: Piece) -> float:
    for name, task in row["tasks"].items():
        require(
            task["metric"].startswith("acc"),
            f"The task {name} has {task['metric']} and no accuracy; leave it out.",
        )
    values = [task["value"] for task in row["tasks"].values()]
    return float(row["paper"]["average"] if row["paper"] else sum(values) / len(values))


def _row(suite: Suite, facts: Piece, model: Mapping[str, Any], trajectory: str, run: Run) -> Piece:
    tasks, groups = suite.metrics(run)
    rows = {}
    for name, found in tasks.items():
        metric = suite.metric(name, found)
        first, _, rest = metric.partition(",")
        rows[name] = {
            "metric": metric,
            "value": found[metric],
            "stderr": found.get(",".join(part for part in (f"{first}_stderr", rest) if part)),
            "examples": facts["tasks"][name]["examples"],
            "seconds": run[name].seconds,
            "tokens": run[name].tokens,
            "cut": run[name].cut,
            "metrics": found,
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


def _key(subject: Subject, trajectory: Trajectory, together: bool) -> Piece:
    return {
        "kind": "answers, time shared" if together else "answers",
        **_identity(subject),
        "trajectory": str(trajectory),
    }


def _identity(subject: Subject) -> Piece:
    return {
        "weights": subject.weights,
        "tokenizer": subject.lm.need_tokenizer().hash,
        "dtype": subject.model.dtype_name,
        "device": subject.model.tokens.weight.device.type,
    }


def _counter(
    report: Report | None, task: str, trajectories: Sequence[Trajectory]
) -> Callable[[int, int], None] | None:
    if report is None:
        return None
    where = f"M={trajectories[0].budget}" if trajectories[0].is_uniform else str(trajectories[0])
    where = where if len(trajectories) == 1 else f"{len(trajectories)} schedules"
    return lambda done, total: report(f"{task} {where}", done, total)
