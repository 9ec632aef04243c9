"""The bridge to lm-evaluation-harness: its tasks become plain requests, and it computes metrics from the answers.

    suite = Suite.load(["paper"], data="data/eval", limit=50)      # the paper's tasks, from local files
    answers = run_requests(loaded, suite, loaded.trajectories("1,2,4"))
    suite.results(answers)                                         # the harness's own numbers, in plain data

The harness defines the tasks: prompts, choices, preparation of examples, metrics. `data` replaces only
the source of the examples of the paper's tasks. `include` is a folder of your own tasks. Tasks must be scored by
log-likelihoods; for tasks that generate, export the model and run the harness itself (docs/huggingface.md).
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.store import JsonDict, ReportProgress
from loopformer.evaluation.tasks import (
    TASKS,
    Answers,
    LocalExamples,
    Query,
    Requests,
    TaskAnswers,
    hash_requests,
    paper_scores,
    read_examples,
    run_requests,
)
from loopformer.scoring import BATCH_TOKENS
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.loaded import LoadedModel

try:
    import lm_eval.tasks
    from lm_eval.api import model as api
    from lm_eval.evaluator import evaluate
except ImportError as error:
    raise LoopformerError("lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'.") from error

MetricValues = dict[str, dict[str, float | None]]  # by task: metric and metric_stderr

_SEED = 1234  # of few-shot examples; the harness's own default
_BOOTSTRAP_DRAWS = 1000  # for the standard error of metrics that have no formula for it
_MAIN_METRICS = ("acc_norm", "acc")  # in this order, for tasks that the paper does not have


class RecordedAnswers(api.LM):  # type: ignore[misc]
    """A model for the harness that runs nothing and returns recorded answers."""

    def __init__(self, queries: Mapping[str, list[Query]], answered: Mapping[str, TaskAnswers]) -> None:
        super().__init__()
        self._values = {
            (task, query): value
            for task, task_queries in queries.items()
            for query, value in zip(task_queries, answered[task].values, strict=True)
        }

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        return [self._values[each.task_name, Query(each.request_type, tuple(each.args))] for each in requests]

    loglikelihood_rolling = generate_until = loglikelihood


@dataclass(frozen=True)
class Suite(Requests):
    """Requests together with the harness's tasks, which compute the metrics of the answers."""

    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        data: str | Path | None = None,
        include: str | Path | None = None,
        limit: int | None = None,
        report: ReportProgress | None = None,
    ) -> Suite:
        """Find tasks by name, and build the requests for their examples. `paper` stands for all tasks of the paper.

        `limit` is the maximum number of examples per task.
        """
        require(limit is None or limit >= 1, f"--limit must be 1 or more examples a task, got {limit}.")
        expanded = list(dict.fromkeys(task for name in names for task in (TASKS if name == "paper" else [name])))
        require(len(expanded) > 0, "--tasks is empty; give paper or names of tasks, such as piqa,arc_easy.")
        local_tasks = {name: read_examples(data, name) for name in expanded if data is not None and name in TASKS}
        tasks, groups = dict[str, Any](), dict[str, Any]()
        queries, facts = dict[str, list[Query]](), dict[str, JsonDict]()
        with _quiet():
            manager = _task_manager(expanded, include)
        for number, name in enumerate(expanded):
            if report:
                report("loading tasks", number, len(expanded))
            local = local_tasks.get(name)
            with _quiet(), _task_errors(name, local):
                # A local task is a group of one task, in which only the source of the examples is replaced.
                if local is None:
                    loaded = manager.load([name])
                else:
                    source = _local_source(name, local)
                    loaded = manager.load([{"group": f"local-{name}", "task": [{"task": name, **source}]}])
                new = {task_name: task for task_name, task in loaded["tasks"].items() if task_name not in tasks}
                for task in new.values():
                    task.set_fewshot_seed(seed=_SEED)
                    task.build_all_requests(limit=limit)
                    task.build_all_requests = lambda **_: None  # `evaluate` would do it again for every trajectory
                    if local is not None:
                        _check_labels(task)
            tasks |= new
            groups |= {} if local is not None else loaded["groups"]
            for task_name, task in new.items():
                task_queries = [Query(instance.request_type, tuple(instance.args)) for instance in task.instances]
                hub = ":".join(part for part in (task.config.dataset_path, task.config.dataset_name) if part)
                queries[task_name] = task_queries
                facts[task_name] = {
                    "version": task.VERSION,
                    "examples": len({instance.doc_id for instance in task.instances}),
                    "of": len(task.eval_docs),
                    "data": {"dataset": hub} if local is None else {"file": local.file, "sha256": local.sha256},
                    "note": local and local.note,
                    "requests": len(task_queries),
                    "requests_sha256": hash_requests(task_queries),
                }
        suite_facts = {"names": list(names), "limit": limit, "harness": version("lm_eval"), "tasks": facts}
        suite_facts["notes"] = [each.note for each in local_tasks.values() if each.note]
        return cls(suite_facts, queries, tasks, groups)

    def compute_metrics(self, answered: Mapping[str, TaskAnswers]) -> tuple[MetricValues, MetricValues]:
        """The harness's metrics of tasks and of groups, from the answers to all requests."""
        for task in self.tasks.values():
            for instance in task.instances:  # `evaluate` appends, so answers of the last trajectory must go first
                instance.resps, instance.filtered_resps = [], {}
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # or its bootstrap forks this process, model and all
        with _quiet():
            evaluated = evaluate(
                RecordedAnswers(self.queries, answered),
                {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": {}},
                limit=self.facts["limit"],
                bootstrap_iters=_BOOTSTRAP_DRAWS,
                log_samples=False,
            )
        tasks = {name: _plain_numbers(evaluated["results"][name]) for name in self.tasks}
        return tasks, {name: _plain_numbers(values) for name, values in evaluated.get("groups", {}).items()}

    def main_metric(self, task: str, metrics: Mapping[str, float | None]) -> str:
        """The main metric of a task: the paper's, else normalised accuracy, else accuracy, else the first."""
        if task in TASKS and TASKS[task].metric in metrics:
            return TASKS[task].metric
        names = [name for name in metrics if not name.split(",")[0].endswith("_stderr")]
        return next((name for main in _MAIN_METRICS for name in names if name.split(",")[0] == main), names[0])

    def results(self, answers: Answers) -> JsonDict:
        """All results as plain data: the main metric and the costs of each task, along each trajectory.

        Raises if the answers are not to exactly the requests of this suite.
        """
        for task, facts in self.facts["tasks"].items():
            is_same = answers.facts["tasks"].get(task, {}).get("requests_sha256") == facts["requests_sha256"]
            sizes = {len(run[task].values) if task in run else 0 for run in answers.runs.values()}
            if not is_same or sizes != {facts["requests"]}:
                raise FileProblem(
                    f"The answers are to other requests of {task}, or some are missing; use the same --data and "
                    f"harness ({answers.facts['harness']} there, {self.facts['harness']} here), or score again."
                )
        rows = list[JsonDict]()
        for trajectory, run in answers.runs.items():
            all_metrics, groups = self.compute_metrics(run)
            tasks = {}
            for name, metrics in all_metrics.items():
                metric = self.main_metric(name, metrics)
                metric_name, comma, answer_filter = metric.partition(",")
                tasks[name] = {
                    "metric": metric,
                    "value": metrics[metric],
                    "stderr": metrics.get(f"{metric_name}_stderr{comma}{answer_filter}"),
                    "examples": self.facts["tasks"][name]["examples"],
                    "seconds": run[name].seconds,
                    "tokens": run[name].tokens,
                    "cut": run[name].cut,
                    "metrics": metrics,
                }
            is_paper = all(name in tasks and tasks[name]["metric"] == task.metric for name, task in TASKS.items())
            rows.append(
                {
                    "trajectory": trajectory,
                    "budget": Trajectory.parse(trajectory).budget,
                    "flops_per_token": answers.model["flops_per_token"][trajectory],
                    "seconds": sum(answered.seconds for answered in run.values()),
                    "tasks": tasks,
                    "groups": groups,
                    "paper": paper_scores({name: tasks[name]["value"] for name in TASKS}) if is_paper else None,
                }
            )
        return {"model": dict(answers.model), **self.facts, "runs": rows}

    def accuracy(
        self,
        loaded: LoadedModel,
        trajectories: Sequence[Trajectory],
        batch_tokens: int = BATCH_TOKENS,
        report: ReportProgress | None = None,
    ) -> dict[Trajectory, float]:
        """One accuracy per trajectory: the paper's average if the suite has all its tasks, else the mean."""
        rows = self.results(run_requests(loaded, self, trajectories, batch_tokens, report, together=True))["runs"]
        for name, task in rows[0]["tasks"].items():
            metric = task["metric"]
            require(metric.startswith("acc"), f"The task {name} has {metric} and no accuracy; leave it out.")
        means = [fmean(task["value"] for task in row["tasks"].values()) for row in rows]
        scores = [row["paper"]["average"] if row["paper"] else mean for row, mean in zip(rows, means, strict=True)]
        return dict(zip(trajectories, scores, strict=True))


def _task_manager(names: Sequence[str], include: str | Path | None) -> Any:
    """The harness's index of tasks. Index only the paper's tasks and `include` where they suffice; all is slow."""
    if include is not None and not Path(include).is_dir():
        raise FileProblem(f"There is no folder {include}; --include takes a folder of task definitions (YAML).")
    included = [] if include is None else [str(include)]
    root = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(str(root / task.folder) for task in TASKS.values())
    manager = lm_eval.tasks.TaskManager(include_path=[*folders, *included], include_defaults=False)
    if set(names) <= set(manager.all_subtasks):  # a group may have members elsewhere, so it needs the full index
        return manager
    manager = lm_eval.tasks.TaskManager(include_path=included or None)
    for name in set(names) - set(manager.all_tasks):
        hint = nearest(name, manager.all_tasks, otherwise="`lm_eval ls tasks` lists all that there are.")
        raise LoopformerError(f"There is no task {name}; {hint}")
    return manager


def _local_source(name: str, local: LocalExamples) -> dict[str, Any]:
    """The fields of a task's definition that make it read its examples from a local file."""
    import datasets

    split = TASKS[name].split
    return {
        "custom_dataset": lambda **_: {split: datasets.Dataset.from_list([*local.examples])},
        "training_split": None,
        "fewshot_split": None,
        **({"validation_split": None} if split == "test" else {}),
        **({"process_docs": None} if local.cleaned else {}),
    }


def _check_labels(task: Any) -> None:
    """Refuse an example whose label is not among its choices. The harness would count it as a wrong answer."""
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
        return
    for doc in {instance.doc_id: instance.doc for instance in task.instances}.values():
        label, choices = task.doc_to_target(doc), task.doc_to_choice(doc)
        is_hidden = doc.get("label", 0) in (-1, None, "")  # as in splits that are published without labels
        if is_hidden or (label not in range(len(choices)) and label not in choices):
            raise ValueError(f"the label {doc.get('label', label)!r} is none of its choices")


@contextmanager
def _task_errors(name: str, local: LocalExamples | None) -> Iterator[None]:
    """Turn whatever the Hub, the network or a task's own code raises into one sentence with a remedy."""
    try:
        yield
    except LoopformerError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if local is not None:
            raise FileProblem(
                f"An example in {local.file} does not fit {name} ({what}); compare the fields with docs/tasks.md."
            ) from error
        hint = "give its data with --data" if name in TASKS else "check its data and its definition"
        raise RunFailed(f"The task {name} cannot be loaded ({what}); connect to the Hub, or {hint}.") from error


def _plain_numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The numeric metrics of a task by name: `acc` and `acc_stderr`, or `acc,FILTER` for filtered answers."""
    return {
        key.removesuffix(",none"): None if value is None or isinstance(value, str) else float(value)
        for key, value in values.items()
        if "," in key
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's log, output and progress bars; errors still come through, as exceptions."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit("This command was removed; export the model with `loopformer export` and run `lm_eval --model hf`.")
