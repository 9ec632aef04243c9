"""Collects everything that a report shows as plain JSON, and measures what is not stored yet.

    request = ReportRequest(("runs/elastic", "runs/fixed"), texts=read_texts(["news=news.jsonl"]), limit=50)
    measured = collect(request)                 # what write_report takes
    measured["models"][0]["perplexity"], measured["models"][0]["missing"]

One model is in memory at a time. Every finished measurement goes into the store beside its model, so a report that
is stopped, repeated or extended measures only what is new. If a part of a model cannot be measured, its `missing`
says why. Training is not measured: its FLOPs are computed from the settings of the run, and its tokens per second
are read from the metrics of the run.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from loopformer.analysis.dynamics import PROMPT_LENGTH, analyze, model_names, read_prompts
from loopformer.config import ModelConfig, load_run
from loopformer.config.model import parse_names
from loopformer.config.run import validation_budgets
from loopformer.device import choose_device, device_name
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.loaded import LoadedModel
from loopformer.evaluation.schedules import search
from loopformer.evaluation.store import JsonDict, ReportProgress, count_schedules, device_and_dtype
from loopformer.evaluation.tasks import run_requests
from loopformer.evaluation.text import Protocol, Text, default_text, perplexity, read_text
from loopformer.files import read_json
from loopformer.loading import find_config
from loopformer.loading.folder import SETTINGS, STATE, is_run_folder, newest_model, step_of
from loopformer.model.cost import Cost
from loopformer.scoring import BATCH_TOKENS
from loopformer.training.plan import training_flops_per_token
from loopformer.training.reporting import read_metrics

if TYPE_CHECKING:
    from loopformer.lm_eval import Suite

PARTS = ("perplexity", "tasks", "search", "analysis")  # what --skip accepts
_NO_TASKS = "No tasks were asked for; give their files with --data, or --tasks paper to have them from the Hub."
_NO_TEXT = "No text was given, and no run has prepared data that can be found; give one with --text NAME=SOURCE."
_ONE_SCHEDULE = "There is only one schedule of this budget, so there is nothing to search."


@dataclass(frozen=True)
class ReportRequest:
    """Which models to measure, on what, and how."""

    models: tuple[str, ...]
    texts: Mapping[str, str] | None = None  # name → source; None: the data of the first run that has any
    tasks: str | None = None  # comma-separated; `paper` means its ten tasks and is the default if data is given
    data: Path | None = None  # a folder with the paper's tasks as files
    limit: int | None = None  # at most this many examples of each task
    budgets: tuple[int, ...] | None = None  # None: 1, L/4, L/2 and L of each model
    search: int | None = None  # the budget whose schedules are searched; None: L/2 of each model
    search_tasks: bool = False  # also measure the tasks of each schedule in the search
    prompts: int = 64
    skip: frozenset[str] = frozenset()  # parts to leave out, of PARTS
    max_tokens: int | None = None  # read at most this many of each text
    field: str = "text"
    device: str = "auto"
    dtype: str = "float32"
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        require(len(self.models) > 0, "There is nothing to report on; name a run or a model.")
        for name in ("prompts", "limit", "search", "max_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')} must be 1 or more, got {value}.")
        require(
            not self.search_tasks or (self.task_names is not None and not self.skip & {"tasks", "search"}),
            "--search-tasks needs tasks and a search; give --data or --tasks and skip neither.",
        )

    @property
    def task_names(self) -> str | None:
        return self.tasks or ("paper" if self.data is not None else None)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """The texts to measure on, by name; by default the held-out text of the first run that has one."""
        if self.texts:
            return self.texts
        held_out = next((text for model in self.models if (text := default_text(model))), None)
        return {} if held_out is None else {short_path(held_out): held_out}

    def check_budgets(self, loops: Sequence[int]) -> None:
        """Refuse a budget above the loops of the deepest model."""
        for option, budget in (("--budgets", max(self.budgets or (1,))), ("--search", self.search or 1)):
            problem = f"{option} {budget} is above the {max(loops)} loops of the deepest model"
            require(budget <= max(loops), f"{problem}; choose 1 to {max(loops)}.")

    def budgets_of(self, config: ModelConfig) -> list[int]:
        """The requested budgets that a model has, or its full depth if it has none of them."""
        if self.budgets is None:
            return validation_budgets(config.loops)
        return [budget for budget in self.budgets if budget <= config.loops] or [config.loops]

    def to_json(self) -> JsonDict:
        """The request as report.json stores it, without absolute paths."""
        plain = asdict(self)
        del plain["models"], plain["batch_tokens"]
        return plain | {
            "texts": [{"name": name, "source": short_path(source)} for name, source in self.sources.items()],
            "tasks": self.task_names,
            "data": self.data and short_path(self.data),
            "budgets": self.budgets and list(self.budgets),
            "skip": [part for part in PARTS if part in self.skip],
        }


def short_path(path: str | Path) -> str:
    """A path that reveals nothing of this machine: a relative path as it is, of any other only the last part."""
    return Path(path).name if Path(path).is_absolute() or ".." in Path(path).parts else str(path)


def read_texts(texts: Sequence[str]) -> dict[str, str]:
    """Sources by name, from NAME=SOURCE or SOURCE; a text without a name gets the last part of its path."""
    sources: dict[str, str] = {}
    for text in texts:
        name, _, source = text.partition("=") if "=" in text else (Path(text).name, "=", text)
        require(bool(name and source), f"{text!r} is no text; write NAME=SOURCE, as in news=news.jsonl.")
        require(name not in sources, f"Two texts are named {name}; give each another name, as in first={source}.")
        sources[name] = source
    return sources


def read_skip(skip: str | None) -> frozenset[str]:
    """The parts that a comma-separated list such as tasks,search names."""
    parts = parse_names(skip or "")
    for part in parts:
        require(part in PARTS, f"There is no part {part!r} to skip; {nearest(part, list(PARTS))}")
    return frozenset(parts)


def collect(request: ReportRequest, progress: ReportProgress | None = None) -> JsonDict:
    """The content of report.json. Only what the stores of the models lack is measured."""
    names = model_names(request.models)  # refuses a model that is given twice
    configs = [find_config(model)[0] for model in request.models]
    request.check_budgets([config.loops for config in configs])
    device = device_name(choose_device(request.device))
    suite, no_suite_reason = _load_suite(request, progress)
    # One length for all models, because the entropy of a prompt depends on it.
    length = min(PROMPT_LENGTH, *(config.context for config in configs))
    collector = _Collector(request, suite, no_suite_reason, length, progress)
    return {
        "made": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "machine": platform.machine(),
            "dtype": request.dtype,
            "python": platform.python_version(),
            "loopformer": version("loopformer"),
            "torch": version("torch"),
        },
        "asked": request.to_json(),
        "tasks": suite and suite.facts,
        "models": [collector.measure(*model) for model in zip(request.models, names, strict=True)],
    }


def _load_suite(request: ReportRequest, progress: ReportProgress | None) -> tuple[Suite | None, str]:
    """The tasks, or the reason why there are none; a wrong name or a missing file is an error."""
    if request.task_names is None or "tasks" in request.skip:
        return None, _NO_TASKS
    try:
        from loopformer.lm_eval import Suite
    except LoopformerError as error:  # the harness is not installed
        return None, str(error)
    try:
        return Suite.load(parse_names(request.task_names), request.data, None, request.limit, progress), ""
    except RunFailed as error:  # the Hub cannot be reached
        return None, str(error)


@dataclass
class _Collector:
    """Measures one model after another. A text is tokenized once for each tokenizer."""

    request: ReportRequest
    suite: Suite | None
    no_suite_reason: str
    length: int  # tokens of each prompt of the analysis
    progress: ReportProgress | None
    # By (name, hash of the tokenizer): models with the same tokenizer share texts.
    texts: dict[tuple[str, str], Text] = field(default_factory=dict)

    def measure(self, source: str, name: str) -> JsonDict:
        """All parts of one model, and the reason for each part that is missing."""
        loaded, notify = LoadedModel.open(source, self.request.device, self.request.dtype), self.progress
        progress = None if notify is None else lambda doing, done, total: notify(f"{name}: {doing}", done, total)
        measures: dict[str, Callable[[LoadedModel, ReportProgress | None], JsonDict | list[JsonDict]]] = {
            "perplexity": self._perplexity,
            "tasks": self._tasks,
            "search": self._search,
            "analysis": self._analysis,
        }
        parts: JsonDict = {"training": training_facts(source), **dict.fromkeys(measures)}
        missing: dict[str, str] = {}
        if parts["training"] is None:
            missing["training"] = "A model without a run says nothing about its training."
        for part, measure in measures.items():
            try:
                require(part not in self.request.skip, f"Left out, as asked for with --skip {part}.")
                require(bool(self.request.sources) or part == "tasks", _NO_TEXT)
                parts[part] = measure(loaded, progress)
            except FileProblem:  # a wrong file is the user's to correct, so it stops the report
                raise
            except LoopformerError as error:
                missing[part] = str(error)
                # Others may read the report, so a text goes by its name and not by its path here.
                for text, path in self.request.sources.items():
                    missing[part] = missing[part].replace(path, text)
        if parts["analysis"] is not None:
            parts["analysis"]["model"] = name
        return {
            "name": name,
            "source": short_path(source),
            "weights": loaded.weights,
            "tokenizer": loaded.lm.tokenizer and loaded.lm.tokenizer.hash,
            **device_and_dtype(loaded.model),
            **size_facts(loaded.model.config),
            **parts,
            "missing": missing,
        }

    def _perplexity(self, loaded: LoadedModel, progress: ReportProgress | None) -> list[JsonDict]:
        trajectories = [loaded.model.resolve(budget) for budget in self.request.budgets_of(loaded.model.config)]
        rows = []
        for name in self.request.sources:
            text = self._text(name, loaded, progress)
            rows += perplexity(loaded.model, text, trajectories, **self._scoring(loaded, progress))
        return rows

    def _tasks(self, loaded: LoadedModel, progress: ReportProgress | None) -> list[JsonDict]:
        if self.suite is None:
            raise LoopformerError(self.no_suite_reason)
        trajectories = [loaded.model.resolve(budget) for budget in self.request.budgets_of(loaded.model.config)]
        answers = run_requests(loaded, self.suite, trajectories, self.request.batch_tokens, progress)
        rows: list[JsonDict] = self.suite.results(answers)["runs"]
        return rows

    def _search(self, loaded: LoadedModel, progress: ReportProgress | None) -> JsonDict:
        loops = loaded.model.config.loops
        budget = self.request.search or max(1, loops // 2)
        loaded.model.resolve(budget)  # refuses a budget above the loops
        require(count_schedules(loops, budget) > 1, _ONE_SCHEDULE)
        suite = self.suite if self.request.search_tasks else None
        return search(
            loaded.model,
            budget,
            text=self._text(next(iter(self.request.sources)), loaded, progress),
            accuracy=None
            if suite is None
            else partial(suite.accuracy, loaded, batch_tokens=self.request.batch_tokens, report=progress),
            tasks=None if suite is None else suite.facts,
            **self._scoring(loaded, progress),
        )

    def _analysis(self, loaded: LoadedModel, progress: ReportProgress | None) -> JsonDict:
        """The dynamics of the states along the full trajectory, stored like the other parts."""
        (text, source), *_ = self.request.sources.items()
        model, request = loaded.model, self.request
        prompts = read_prompts(source, loaded.lm.need_tokenizer(), request.prompts, self.length, request.field)
        key = {
            "kind": "dynamics",
            "weights": loaded.weights,
            "prompts": prompts.hash,
            "trajectory": str(model.resolve(None)),
            "states": "before",
            "dtype": str(model.tokens.weight.dtype),
            "device": model.device.type,
        }
        stored = loaded.store.get(key)
        if stored is None:
            # Stored without a name: each report names its models anew, and `measure` sets that name.
            on_prompts = None if progress is None else lambda done, total: progress("prompts", done, total)
            measured = analyze(model, prompts, "", progress=on_prompts) | {"weights": loaded.weights}
            stored = loaded.store.put(key, measured)
        return {**stored, "text": text, "part": prompts.part, "documents": prompts.documents}

    def _text(self, name: str, loaded: LoadedModel, progress: ReportProgress | None) -> Text:
        tokenizer, request = loaded.lm.need_tokenizer(), self.request
        key = (name, tokenizer.hash)
        if key not in self.texts:
            text = read_text(request.sources[name], tokenizer, request.field, request.max_tokens, progress)
            self.texts[key] = replace(text, name=name)
        return self.texts[key]

    def _scoring(self, loaded: LoadedModel, progress: ReportProgress | None) -> JsonDict:
        """The arguments that `perplexity` and `search` share, besides the model and the text."""
        return {
            "protocol": Protocol(max_tokens=self.request.max_tokens),
            "weights": loaded.weights,
            "store": loaded.store,
            "batch_tokens": self.request.batch_tokens,
            "report": progress,
        }


def size_facts(config: ModelConfig) -> JsonDict:
    """The parameters and costs of a model with these settings."""
    cost = Cost(config)
    sizes = cost.parameters
    return {
        "shape": f"{config.blocks}⊗{config.loops}",
        "settings": config.plain(),
        "parameters": {name: getattr(sizes, name) for name in ("total", "embeddings", "stack", "conditioning")},
        "flops_per_token": {str(budget): cost.forward_flops(budget) for budget in range(1, config.loops + 1)},
        "training_overhead": cost.training_overhead() if config.loops > 1 else None,
        "io_flops": 2 * cost.head_matmul_params,
        "loop_flops": cost.loop_flops(),
    }


def training_facts(source: str | Path) -> JsonDict | None:
    """What the training of a run cost; None if the source is not a run folder."""
    if not is_run_folder(source):
        return None
    folder = Path(source)
    run, _ = load_run(str(folder / SETTINGS))
    checkpoint = newest_model(folder, lambda _: None)
    records = [record for record in read_metrics(folder) if record.get("kind") == "train"]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    tokens = step_of(checkpoint) * run.training.batch * run.model.context
    return {
        "elastic": run.objective.is_elastic,
        "short_fraction": max((t.rows for t in run.objective.trajectories if t.budget != "full"), default=0.0),
        "step": step_of(checkpoint),
        "steps": run.training.steps,
        "tokens": tokens,
        "seed": run.training.seed,
        "fixed_flops_per_token": Cost(run.model).training_flops(),
        "flops_per_token": training_flops_per_token(run),
        "flops": training_flops_per_token(run) * tokens,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "records": len(speeds),
        "data": read_json(checkpoint / STATE).get("data") if (checkpoint / STATE).is_file() else None,
    }
