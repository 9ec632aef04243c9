"""Everything that needs lm-evaluation-harness: our models in it, its tasks as plain requests, and its metrics.

    lm = LoopformerLM("runs/mine", budget=4)                       # or trajectory="4-2-1-1", or a loaded LM
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])
    lm_eval.simple_evaluate(model=lm.at(2), tasks=["arc_easy"])    # another budget, the same weights

    suite = Suite.load(["paper"], data="data/eval", limit=50)      # the paper's tasks, from local files
    runs = run_requests(loaded, suite.queries, loaded.trajectories("1,2,4"))
    suite.results(model_facts(loaded, runs), runs)                 # the harness's own numbers, in plain data

The harness has no hook for models of other packages, so its own command line runs through this module:

    python -m loopformer.lm_eval --model loopformer --model_args path=runs/mine,budget=4 --tasks arc_easy --limit 50

Model arguments are path, budget or trajectory (as 4-2-1-1), device, dtype and batch_tokens. Batches are counted in
tokens, so the harness's batch sizes are not used.

The definitions of tasks are the harness's own: prompts, choices, preparation of examples, metrics. `data` replaces
only the source of the examples of the paper's tasks. Any other task or group of the harness has its data from the
Hub. `include` is a folder of your own tasks.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loopformer.device import choose_device, dtype_of
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.store import JsonDict, LoadedModel, ReportProgress, weights_hash
from loopformer.evaluation.tasks import (
    TASKS,
    Answers,
    LocalExamples,
    Query,
    Requests,
    TaskAnswers,
    answer_requests,
    hash_requests,
    model_facts,
    paper_scores,
    read_examples,
    run_requests,
)
from loopformer.lm import LM, load
from loopformer.model.looped import TrajectoryLike
from loopformer.scoring import BATCH_TOKENS
from loopformer.trajectory import Trajectory

_MISSING = "lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'."

try:
    import lm_eval.tasks
    from lm_eval.api import model as api
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import evaluate
except ImportError as error:
    if __name__ == "__main__":
        print(f"loopformer: {_MISSING}", file=sys.stderr)
        raise SystemExit(LoopformerError.exit_code) from None
    raise LoopformerError(_MISSING) from error

ARGUMENTS = ["path", "budget", "trajectory", "device", "dtype", "batch_tokens"]
Metrics = dict[str, dict[str, float | None]]  # by task: metric and metric_stderr

_DEFAULT_DEVICE = "cuda:0"  # what the harness passes where the user names no device, even without a GPU
_SEED = 1234  # of few-shot examples; the harness's own default
_BOOTSTRAP = 1000  # draws, for standard errors that have no formula
_USUAL_METRICS = ("acc_norm", "acc")  # by preference, for a task that is not the paper's


class _PlainModel(api.LM):  # type: ignore[misc]
    """A model of the harness with one method for all kinds of requests."""

    def answer(self, kind: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        raise NotImplementedError

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(total, greedy) for total, greedy in self.answer("loglikelihood", requests, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self.answer("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self.answer("generate_until", requests, disable_tqdm)


@register_model("loopformer")
class LoopformerLM(_PlainModel):
    """A model along one trajectory, in the form that the harness expects."""

    def __init__(
        self,
        path: str | LM | None = None,
        budget: int | None = None,
        trajectory: TrajectoryLike = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for name in others:
            raise LoopformerError(f"Unknown model argument {name}; {nearest(name, ARGUMENTS)}")
        if path is None:
            raise LoopformerError("Say which model: --model_args path=runs/mine,budget=4.")
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        if isinstance(path, LM):
            self.lm = path
        else:
            chosen = choose_device("auto" if device is None or device == _DEFAULT_DEVICE else device)
            number_type = dtype_of(dtype)  # refused before the weights are loaded, if it is wrong
            self.lm = load(str(path)).to(chosen, number_type)
        self.trajectory = self.lm.model.resolve(budget if trajectory is None else trajectory)
        self.batch_tokens = batch_tokens
        self._device = self.lm.model.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LoopformerLM:
        """The model of the command line: model arguments come before the harness's own options."""
        return cls(**{**(additional_config or {}), **arg_dict})

    def at(self, trajectory: TrajectoryLike) -> LoopformerLM:
        """The same weights along another trajectory or at another budget."""
        other = copy(self)
        other.trajectory = self.lm.model.resolve(trajectory)
        return other

    def answer(self, kind: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        from tqdm import tqdm  # type: ignore[import-untyped]  # as every model of the harness does

        queries = [Query(kind, request.args) for request in requests]
        with tqdm(total=len(requests), desc=f"Running {kind} requests", disable=disable_tqdm) as bar:

            def count(done: int, _: int) -> None:
                bar.update(done - bar.n)

            answers = answer_requests(self.lm, queries, [self.trajectory], self.batch_tokens, count)
        return answers[self.trajectory].values

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results about the model."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.lm.model.parameters()),
            "model_dtype": str(self.lm.model.tokens.weight.dtype),
            "model_sha": weights_hash(self.lm.model),
            "trajectory": str(self.trajectory),
            "budget": self.trajectory.budget,
        }


class RecordedAnswers(_PlainModel):
    """Replays the answers to each task's requests, in the order of the requests."""

    def __init__(self, queries: Mapping[str, Sequence[Query]], answered: Mapping[str, TaskAnswers]) -> None:
        super().__init__()
        self._remaining: dict[tuple[str, str], list[Any]] = {}  # by task and kind, the next answer last
        for task, requests in queries.items():
            for query, value in reversed(list(zip(requests, answered[task].values, strict=True))):
                self._remaining.setdefault((task, query.kind), []).append(value)

    def answer(self, kind: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        return [self._remaining[request.task_name, kind].pop() for request in requests]


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
        """Find tasks by name, `paper` for all of the paper's, and build the requests for their examples.

        `limit` is how many examples of each task are used.
        """
        require(limit is None or limit >= 1, f"--limit must be 1 or more examples a task, got {limit}.")
        wanted = list(dict.fromkeys(task for name in names for task in (TASKS if name == "paper" else [name])))
        require(len(wanted) > 0, "--tasks is empty; give paper or names of tasks, such as piqa,arc_easy.")
        local = {name: read_examples(data, name) for name in wanted if data is not None and name in TASKS}
        tasks, groups = dict[str, Any](), dict[str, Any]()
        with _quiet():
            manager = _task_manager(wanted, include)
        for number, name in enumerate(wanted):
            if report:
                report("loading tasks", number, len(wanted))
            spec: Any = name
            if name in local:  # a group of one task, in which only the source of the examples is replaced
                spec = {"group": f"local-{name}", "task": [{"task": name, **_local_source(name, local[name])}]}
            with _quiet(), _task_errors(name, local.get(name)):
                loaded = manager.load([spec])
            tasks |= loaded["tasks"]
            groups |= {} if name in local else loaded["groups"]
        queries, facts = dict[str, list[Query]](), dict[str, JsonDict]()
        for number, (name, task) in enumerate(tasks.items()):
            if report:
                report("building requests", number, len(tasks))
            with _quiet(), _task_errors(name, local.get(name)):
                task.set_fewshot_seed(seed=_SEED)
                task.build_all_requests(limit=limit)
            task.build_all_requests = lambda **_: None  # `evaluate` would build them again for every trajectory
            queries[name] = [
                Query(instance.request_type, tuple(instance.args))
                for instance in task.instances
                for _ in range(instance.repeats or 1)
            ]
            facts[name] = _task_facts(task, local.get(name), queries[name])
        notes = [each.note for each in local.values() if each.note]
        suite = {
            "names": list(names),
            "limit": limit,
            "harness": version("lm_eval"),
            "tasks": facts,
            "notes": notes,
        }
        return cls(suite, queries, tasks, groups)

    def metrics(self, answered: Mapping[str, TaskAnswers]) -> tuple[Metrics, Metrics]:
        """The harness's metrics of tasks and of groups, from the answers to all requests."""
        for task in self.tasks.values():
            for instance in task.instances:  # the harness leaves the answers of an earlier run in them
                instance.resps, instance.filtered_resps = [], {}
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # to bootstrap errors, it would fork a process with a model
        with _quiet():
            evaluated = evaluate(
                RecordedAnswers(self.queries, answered),
                {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": {}},
                limit=self.facts["limit"],
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
            )
        results, groups = evaluated["results"], evaluated.get("groups", {})
        return (
            {name: _plain_numbers(values) for name, values in results.items() if name in self.tasks},
            {name: _plain_numbers(values) for name, values in groups.items()},
        )

    def metric(self, task: str, metrics: Mapping[str, float | None]) -> str:
        """The metric that stands for a task: the paper's, else normalised accuracy, accuracy, or its first one."""
        if task in TASKS and TASKS[task].metric in metrics:
            return TASKS[task].metric
        names = [name for name in metrics if not name.split(",")[0].endswith("_stderr")]
        return next((name for usual in _USUAL_METRICS for name in names if name.split(",")[0] == usual), names[0])

    def results(self, model: Mapping[str, Any], runs: Mapping[str, Mapping[str, TaskAnswers]]) -> JsonDict:
        """All numbers in plain data: per trajectory and task the metric, its value, error, examples and seconds."""
        rows = list[JsonDict]()
        for trajectory, run in runs.items():
            all_metrics, groups = self.metrics(run)
            tasks = {}
            for name, metrics in all_metrics.items():
                metric = self.metric(name, metrics)
                first, _, rest = metric.partition(",")
                tasks[name] = {
                    "metric": metric,
                    "value": metrics[metric],
                    "stderr": metrics.get(",".join(part for part in (f"{first}_stderr", rest) if part)),
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
                    "flops_per_token": model["flops_per_token"][trajectory],
                    "seconds": sum(answered.seconds for answered in run.values()),
                    "tasks": tasks,
                    "groups": groups,
                    "paper": paper_scores({name: tasks[name]["value"] for name in TASKS}) if is_paper else None,
                }
            )
        return {"model": dict(model), **self.facts, "runs": rows}

    def collect(self, answers: Answers) -> JsonDict:
        """The results from a file of answers, which must be to exactly the requests of this suite."""
        for task, facts in self.facts["tasks"].items():
            answered = answers.facts["tasks"].get(task)
            if answered is None or answered["requests_sha256"] != facts["requests_sha256"]:
                raise FileProblem(
                    f"The answers are to other requests of {task} than these; use the same --data and harness "
                    f"({answers.facts['harness']} there, {self.facts['harness']} here), or export and score again."
                )
            for run in answers.runs.values():
                if task not in run or len(run[task].values) != facts["requests"]:
                    raise FileProblem(
                        f"The file has not all answers to {task}; it is damaged, score the requests again."
                    )
        if not answers.runs:
            raise FileProblem("The file has no answers; it is damaged, score the requests again.")
        return self.results(answers.model, answers.runs)

    def accuracy(
        self, loaded: LoadedModel, batch_tokens: int = BATCH_TOKENS, report: ReportProgress | None = None
    ) -> Callable[[Sequence[Trajectory]], dict[Trajectory, float]]:
        """A function that scores trajectories: the paper's average if all its tasks are here, else the mean."""

        def score(trajectories: Sequence[Trajectory]) -> dict[Trajectory, float]:
            runs = run_requests(loaded, self.queries, trajectories, batch_tokens, report, together=True)
            scores = {}
            for row in self.results(model_facts(loaded, runs), runs)["runs"]:
                for name, task in row["tasks"].items():
                    if not task["metric"].startswith("acc"):
                        raise LoopformerError(
                            f"The task {name} has {task['metric']} and no accuracy; leave it out."
                        )
                values = [task["value"] for task in row["tasks"].values()]
                scores[row["trajectory"]] = row["paper"]["average"] if row["paper"] else sum(values) / len(values)
            return {trajectory: float(scores[str(trajectory)]) for trajectory in trajectories}

        return score


def _task_manager(names: Sequence[str], include: str | Path | None) -> Any:
    """The harness's index of tasks: the paper's and your own if they are enough, else all, which takes long."""
    if include is not None and not Path(include).is_dir():
        raise FileProblem(f"There is no folder {include}; --include takes a folder of task definitions (YAML).")
    own = [] if include is None else [str(include)]
    root = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(str(root / task.folder) for task in TASKS.values())
    manager = lm_eval.tasks.TaskManager(include_path=[*folders, *own], include_defaults=False)
    if set(names) <= set(manager.all_subtasks):  # a group may have members elsewhere, so it needs the full index
        return manager
    manager = lm_eval.tasks.TaskManager(include_path=own or None)
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks, otherwise="`lm_eval ls tasks` lists all that there are.")
            raise LoopformerError(f"There is no task {name}; {hint}")
    return manager


def _local_source(name: str, local: LocalExamples) -> dict[str, Any]:
    """What replaces the source of a task's examples in its definition."""
    import datasets

    split = TASKS[name].split

    def read(**_: Any) -> dict[str, Any]:
        return {split: datasets.Dataset.from_list([*local.examples])}

    changes: dict[str, Any] = {"custom_dataset": read, "training_split": None, "fewshot_split": None}
    if split == "test":
        changes["validation_split"] = None
    if local.cleaned:
        changes["process_docs"] = None
    return changes


def _task_facts(task: Any, local: LocalExamples | None, queries: Sequence[Query]) -> JsonDict:
    """Everything about a task that does not depend on a model, in plain data."""
    hub = {"dataset": ":".join(part for part in (task.config.dataset_path, task.config.dataset_name) if part)}
    return {
        "version": task.VERSION,
        "examples": len({instance.doc_id for instance in task.instances}),
        "of": len(task.eval_docs),
        "data": hub if local is None else {"file": local.file, "sha256": local.sha256},
        "note": local and local.note,
        "requests": len(queries),
        "requests_sha256": hash_requests(queries),
    }


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
                f"An example in {local.file} is none of {name} ({what}); "
                "compare the fields with docs/benchmarks.md."
            ) from error
        hint = "give its data with --data" if name in TASKS else "check its data and its definition"
        raise RunFailed(f"The task {name} cannot be loaded ({what}); connect to the Hub, or {hint}.") from error


def _plain_numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers alone: `acc` and `acc_stderr`, with the name of the filter of answers where there is one."""
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


def main() -> None:
    """Run the harness's command line, in which `loopformer` is a registered model."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except LoopformerError as error:
        print(f"loopformer: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
