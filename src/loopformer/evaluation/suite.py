"""Tasks of lm-evaluation-harness: their requests in plain data, and metrics from the answers.

    suite = Suite.load(["paper"], data="data/eval", limit=50)     # the paper's tasks, from local files
    suite.queries["copa"]                                         # what to ask the model
    suite.metrics({"copa": answered, …})                          # the harness's own numbers

Definitions are the harness's own: prompts, choices, preparation of examples, metrics. With `data`, only where the
examples of the paper's tasks come from is replaced. Any other task or group of the harness has its data from the
Hub, and `include` is a folder of one's own tasks.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.exchange import Requests
from loopformer.evaluation.harness import Recorded
from loopformer.evaluation.paper_tasks import TASKS, Local, read_local
from loopformer.evaluation.queries import Answered, Query, digest
from loopformer.evaluation.text import Report

_SEED = 1234  # of few-shot examples; the harness's own default
_BOOTSTRAP = 1000  # draws, for standard errors that have no formula
_GUESSES = ("acc_norm", "acc")  # the metric of a task that is not the paper's, where it has one of these

Metrics = dict[str, dict[str, float | None]]  # of each task: metric and metric_stderr


@dataclass(frozen=True)
class Suite:
    """Tasks as the harness has them, and what they were asked for with."""

    names: tuple[str, ...]  # as the user wrote them
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    local: Mapping[str, Local]  # tasks with local data
    limit: int | None  # examples of each task, the first ones
    queries: Mapping[str, list[Query]]  # the requests of each task, in the harness's order

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        data: str | Path | None = None,
        include: str | Path | None = None,
        limit: int | None = None,
        report: Report | None = None,
    ) -> Suite:
        """Find tasks by name, `paper` for all of the paper's, and read their examples."""
        require(limit is None or limit >= 1, f"--limit must be 1 or more examples a task, got {limit}.")
        wanted = list(dict.fromkeys(task for name in names for task in (TASKS if name == "paper" else [name])))
        require(len(wanted) > 0, "--tasks is empty; give paper or names of tasks, such as piqa,arc_easy.")
        local = {name: read_local(data, name) for name in wanted if data is not None and name in TASKS}
        tasks, groups = dict[str, Any](), dict[str, Any]()
        with _quiet():
            manager = _manager(wanted, include)
        for number, name in enumerate(wanted):
            if report:
                report("loading tasks", number, len(wanted))
            with _quiet():
                loaded = _load(manager, name, local.get(name))
            tasks |= loaded["tasks"]
            groups |= {group: one for group, one in loaded["groups"].items() if name not in local}
        queries = {}
        for number, (name, task) in enumerate(tasks.items()):
            if report:
                report("building requests", number, len(tasks))
            with _quiet():
                queries[name] = _build(name, task, limit, local.get(name))
        return cls(tuple(names), tasks, groups, local, limit, queries)

    def metrics(self, answered: Mapping[str, Answered]) -> tuple[Metrics, Metrics]:
        """What the harness makes of answers to all requests: metrics of tasks, and of groups."""
        from lm_eval.evaluator import evaluate

        for task in self.tasks.values():
            for instance in task.instances:  # where the harness left the answers of another run
                instance.resps, instance.filtered_resps = [], {}
        with _quiet():
            found = evaluate(
                Recorded(self.queries, answered),
                {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": {}},
                limit=self.limit,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
            )
        every = {name: _plain(values) for name, values in found["results"].items()}
        return (
            {name: values for name, values in every.items() if name in self.tasks},
            {name: _plain(values) for name, values in found.get("groups", {}).items()},
        )

    def metric(self, task: str, found: Mapping[str, float | None]) -> str:
        """Which metric stands for a task: the paper's, else normalised accuracy, accuracy, or its first one."""
        if task in TASKS and TASKS[task].metric in found:
            return TASKS[task].metric
        names = [name for name in found if not name.split(",")[0].endswith("_stderr")]
        return next((name for guess in _GUESSES for name in names if name.split(",")[0] == guess), names[0])

    @property
    def facts(self) -> dict[str, Any]:
        """Everything about the tasks that is not about a model, in plain data."""
        return {
            "names": list(self.names),
            "limit": self.limit,
            "harness": version("lm_eval"),
            "tasks": {name: self._facts(name) for name in self.tasks},
            "notes": [one.note for one in self.local.values() if one.note],
        }

    @property
    def requests(self) -> Requests:
        """All that a machine without the harness needs."""
        return Requests(self.facts, self.queries)

    def _facts(self, name: str) -> dict[str, Any]:
        task, local = self.tasks[name], self.local.get(name)
        source = [task.config.dataset_path, task.config.dataset_name]
        hub = {"dataset": ":".join(part for part in source if part)}
        return {
            "version": task.VERSION,
            "examples": len({instance.doc_id for instance in task.instances}),
            "of": len(task.eval_docs),
            "data": hub if local is None else {"file": local.file, "sha256": local.sha256},
            "note": local and local.note,
            "requests": len(self.queries[name]),
            "requests_sha256": digest(self.queries[name]),
        }


def _manager(names: Sequence[str], include: str | Path | None) -> Any:
    """The harness's index of tasks: that of the paper's and one's own, or, which takes long, of all."""
    import lm_eval.tasks

    if include is not None and not Path(include).is_dir():
        raise FileProblem(f"There is no folder {include}; --include takes a folder of task definitions (YAML).")
    own = [] if include is None else [str(include)]
    root = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(str(root / task.folder) for task in TASKS.values())
    manager = lm_eval.tasks.TaskManager(include_path=[*folders, *own], include_defaults=False)
    if set(names) <= set(manager.all_subtasks):  # a group may have members elsewhere, so it needs the whole index
        return manager
    manager = lm_eval.tasks.TaskManager(include_path=own or None)
    for name in names:
        hint = nearest(name, manager.all_tasks, otherwise="`lm_eval ls tasks` lists all that there are.")
        require(name in manager.all_tasks, f"There is no task {name}; {hint}")
    return manager


def _load(manager: Any, name: str, local: Local | None) -> Any:
    """One task or group; with local data, only the source of the examples is another."""
    spec: Any = name
    if local is not None:
        spec = {"group": f"local-{name}", "task": [{"task": name, **_overrides(name, local)}]}
    try:
        return manager.load([spec])
    except LoopformerError:
        raise
    except Exception as error:  # whatever the Hub, the network or a task's own code throws
        raise _failed(name, local, error) from error


def _overrides(name: str, local: Local) -> dict[str, Any]:
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


def _failed(name: str, local: Local | None, error: Exception) -> RunFailed | FileProblem:
    """What to say and do about a task that the harness stumbled over."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if local is not None:
        return FileProblem(
            f"An example in {local.file} is none of {name} ({what}); compare the fields with docs/benchmarks.md."
        )
    hint = "give its data with --data" if name in TASKS else "check its data and its definition"
    return RunFailed(f"The task {name} cannot be loaded ({what}); connect to the Hub, or {hint}.")


def _build(name: str, task: Any, limit: int | None, local: Local | None) -> list[Query]:
    """The requests of a task; the harness would build them again for every model."""
    task.set_fewshot_seed(seed=_SEED)
    try:
        task.build_all_requests(limit=limit)
    except Exception as error:  # whatever a task's own code throws at an example
        raise _failed(name, local, error) from error
    task.build_all_requests = lambda **_: None
    return [
        Query(instance.request_type, tuple(instance.args))
        for instance in task.instances
        for _ in range(instance.repeats or 1)
    ]


def _plain(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers only: `acc` and `acc_stderr`, with the name of the answers' filter where it has one."""
    found = {}
    for key, value in values.items():
        if "," in key:
            number = value if value is None or isinstance(value, str) else float(value)
            found[key.removesuffix(",none")] = None if isinstance(number, str) else number
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness logs, prints and draws bars; errors still come through, as exceptions."""
    logger, before = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # it would fork a process that holds a model
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
