"""Our models in lm-evaluation-harness, and its tasks as plain requests whose metrics it computes from our answers.

    lm = LoopformerLM("runs/mine", budget=4)                       # or trajectory="4-2-1-1", or a loaded LM
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])
    lm_eval.simple_evaluate(model=lm.at(2), tasks=["arc_easy"])    # another budget, the same weights

    suite = Suite.load(["paper"], data="data/eval", limit=50)      # the paper's tasks, from local files
    suite.queries["copa"]                                          # what to ask the model
    suite.metrics({"copa": answered, …})                           # the harness's own numbers

The harness's own command line has the model as `loopformer` through `python -m loopformer.lm_eval`. Batches are
counted in tokens (`batch_tokens`), so the harness's batch sizes are not used.

Definitions of tasks are the harness's own: prompts, choices, preparation of examples, metrics. With `data`, only
where the examples of the paper's tasks come from is replaced. Any other task or group of the harness has its data
from the Hub, and `include` is a folder of one's own tasks.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loopformer.device import choose_device, dtype_of
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.tasks import TASKS, Answered, Local, Query, Requests, answer, digest, read_local
from loopformer.evaluation.text import ReportProgress
from loopformer.lm import LM, load
from loopformer.model.looped import TrajectoryLike
from loopformer.scoring import BATCH_TOKENS, Span, loglikelihoods

try:
    from lm_eval.api import model as api
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise LoopformerError("lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'.") from error


ARGUMENTS = ["path", "budget", "trajectory", "device", "dtype", "batch_tokens"]
Metrics = dict[str, dict[str, float | None]]  # of each task: metric and metric_stderr

_ITS_DEVICE = "cuda:0"  # what the harness's command line says where the user says nothing, also without a GPU
_SEED = 1234  # of few-shot examples; the harness's own default
_BOOTSTRAP = 1000  # draws, for standard errors that have no formula
_GUESSES = ("acc_norm", "acc")  # the metric of a task that is not the paper's, where it has one of these


@register_model("loopformer")
class LoopformerLM(api.TemplateLM):  # type: ignore[misc]
    """A model along one trajectory, as the harness wants it."""

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
            where = choose_device("auto" if device is None or device == _ITS_DEVICE else device)
            number = dtype_of(dtype)
            self.lm = load(str(path)).to(where, number)
        self.trajectory = self.lm.model.resolve(budget if trajectory is None else trajectory)
        self.batch_tokens = batch_tokens
        self._device = self.lm.model.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LoopformerLM:
        """From the command line's model arguments, which come before its own options."""
        return cls(**{**(additional_config or {}), **arg_dict})

    def at(self, trajectory: TrajectoryLike) -> LoopformerLM:
        """The same weights along another trajectory or at another budget."""
        other = copy(self)
        other.trajectory = self.lm.model.resolve(trajectory)
        return other

    @property
    def eot_token_id(self) -> int:
        return self.lm.need_tokenizer().eot

    @property
    def max_length(self) -> int:
        return self.lm.model.config.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.lm.need_tokenizer().encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(total, greedy) for total, greedy in self._answer("loglikelihood", requests, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self._answer("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._answer("generate_until", requests, disable_tqdm)

    def _answer(self, kind: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        from tqdm import tqdm  # type: ignore[import-untyped]  # as every model of the harness does

        with tqdm(total=len(requests), desc=f"Running {kind} requests", disable=disable_tqdm) as bar:

            def count(done: int, _: int) -> None:
                bar.update(done - bar.n)

            queries = [Query(kind, request.args) for request in requests]
            return answer(self.lm, queries, [self.trajectory], self.batch_tokens, count)[self.trajectory].values

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        spans = [Span((*before, *scored), len(scored)) for _, before, scored in requests]
        return loglikelihoods(self.lm.model, spans, [self.trajectory], self.batch_tokens)[self.trajectory].answers

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results about the model."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.lm.model.parameters()),
            "model_dtype": str(self.lm.model.tokens.weight.dtype),
            "model_sha": weights_hash(self.lm.model),
            "trajectory": str(self.trajectory),
            "budget": self.trajectory.budget,
        }


class Recorded(api.LM):  # type: ignore[misc]
    """Answers that were given before, task by task, in the order of the requests."""

    def __init__(self, queries: Mapping[str, Sequence[Query]], answered: Mapping[str, Answered]) -> None:
        super().__init__()
        self._left = {
            (task, kind): iter(
                [value for query, value in zip(requests, answered[task].values, strict=True) if query.kind == kind]
            )
            for task, requests in queries.items()
            for kind in {query.kind for query in requests}
        }

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return [(total, greedy) for total, greedy in self._next("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return self._next("loglikelihood_rolling", requests)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return self._next("generate_until", requests)

    def _next(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        return [next(self._left[request.task_name, kind]) for request in requests]


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
        report: ReportProgress | None = None,
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
            groups |= {} if name in local else loaded["groups"]
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
            evaluated = evaluate(
                Recorded(self.queries, answered),
                {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": {}},
                limit=self.limit,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
            )
        metrics = {name: _plain(values) for name, values in evaluated["results"].items()}
        return (
            {name: values for name, values in metrics.items() if name in self.tasks},
            {name: _plain(values) for name, values in evaluated.get("groups", {}).items()},
        )

    def metric(self, task: str, metrics: Mapping[str, float | None]) -> str:
        """Which metric stands for a task: the paper's, else normalised accuracy, accuracy, or its first one."""
        if task in TASKS and TASKS[task].metric in metrics:
            return TASKS[task].metric
        names = [name for name in metrics if not name.split(",")[0].endswith("_stderr")]
        return next((name for guess in _GUESSES for name in names if name.split(",")[0] == guess), names[0])

    @property
    def facts(self) -> dict[str, Any]:
        """Everything about the tasks that is not about a model, in plain data."""
        return {
            "names": list(self.names),
            "limit": self.limit,
            "harness": version("lm_eval"),
            "tasks": {name: self._facts(name) for name in self.tasks},
            "notes": [local.note for local in self.local.values() if local.note],
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
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks, otherwise="`lm_eval ls tasks` lists all that there are.")
            raise LoopformerError(f"There is no task {name}; {hint}")
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
    numbers = {}
    for key, value in values.items():
        if "," in key:
            number = value if value is None or isinstance(value, str) else float(value)
            numbers[key.removesuffix(",none")] = None if isinstance(number, str) else number
    return numbers


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
