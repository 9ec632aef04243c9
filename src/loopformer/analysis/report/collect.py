"""Everything a report shows, measured or taken from what is kept beside the models, as plain data.

    request = ReportRequest(("runs/elastic", "runs/fixed"), texts=read_texts(["news=news.jsonl"]), limit=50)
    found = collect(request)                    # what report.json holds
    found["models"][0]["perplexity"], found["models"][0]["missing"]

One model is in memory at a time. Perplexity, answers, schedules and dynamics are kept in the store of each model as
they are finished, so a report that is stopped, repeated or extended measures only what is new. A part that cannot
be had of a model is one sentence in its `missing`. Of training, nothing is measured: FLOPs follow from the settings
of the run, tokens per second are as recorded.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.analysis.dynamics import Prompts, analyze, read_prompts
from loopformer.analysis.results import REPORT_FORMAT, TextSource, TrainingFacts, model_names, short_path
from loopformer.config import ModelConfig, RunConfig, load_run, whole_numbers
from loopformer.config.run import validation_budgets
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import DTYPES, choose_device, device_name
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.schedules import search
from loopformer.evaluation.store import LoadedModel, Piece, ReportProgress, count_schedules, placement
from loopformer.evaluation.tasks import model_facts, run_requests
from loopformer.evaluation.text import (
    Protocol,
    Text,
    default_text,
    perplexity,
    read_text,
)
from loopformer.files import read_json
from loopformer.loading import find_config
from loopformer.loading.folder import SETTINGS, STATE, is_run_folder, newest_model, step_of
from loopformer.model.cost import Cost
from loopformer.scoring import BATCH_TOKENS
from loopformer.training.plan import training_flops_per_token
from loopformer.training.reporting import read_metrics

if TYPE_CHECKING:
    from loopformer.lm_eval import Suite


VERSION = 1  # of what report.json holds
PARTS = ("perplexity", "tasks", "search", "analysis")

_LENGTH = 128  # tokens of a prompt, as in `loopformer analyze`
# Of two runs whose speeds are compared, these have to be equal; the machine is not recorded.
_SAME = ("batch", "dtype", "device", "fused", "compile", "checkpoint_loops", "strategy")
_SAME_STATE = ("micro_batch", "world", "threads")
_NO_TEXT = "No text was given, and no run has prepared data that can be found; give one with --text NAME=SOURCE."
_NO_TASKS = (
    "No benchmarks were asked for; give their files with --data, or --tasks paper to have them from the Hub."
)


@dataclass(frozen=True)
class ReportRequest:
    """Which models, measured on what, and how."""

    models: tuple[str, ...]
    texts: tuple[TextSource, ...] = ()  # none: the data of the first run that has any
    tasks: str | None = None  # names, separated by commas; `paper` for its ten
    data: Path | None = None  # a folder with the paper's tasks as files
    limit: int | None = None  # examples of a task
    budgets: tuple[int, ...] | None = None  # None: 1, L/4, L/2 and L of each model
    search: int | None = None  # the budget whose schedules are searched; None: L/2 of each model
    search_tasks: bool = False  # measure the schedules by the tasks, too
    prompts: int = 64
    skip: frozenset[str] = frozenset()  # of PARTS
    max_tokens: int | None = None  # of a text
    field: str = "text"
    device: str = "auto"
    dtype: str = "float32"
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        require(len(self.models) > 0, "Name at least one run or model.")
        require(self.prompts >= 1, f"--prompts must be 1 or more, got {self.prompts}.")
        require(self.limit is None or self.limit >= 1, f"--limit must be 1 or more examples, got {self.limit}.")
        require(
            self.search is None or self.search >= 1, f"--search takes a budget of 1 or more, got {self.search}."
        )
        require(
            self.max_tokens is None or self.max_tokens >= 1, f"--max-tokens must be 1 or more: {self.max_tokens}."
        )
        require(
            not self.search_tasks or (self.wanted_tasks is not None and not self.skip & {"tasks", "search"}),
            "--search-tasks needs tasks and a search; give --data or --tasks and skip neither.",
        )
        model_names(self.models)  # refuses a model that is given twice

    @cached_property
    def names(self) -> tuple[str, ...]:
        return model_names(self.models)

    @property
    def wanted_tasks(self) -> str | None:
        """The tasks by name: the paper's where only their data is given."""
        return self.tasks or ("paper" if self.data is not None else None)

    @cached_property
    def sources(self) -> tuple[TextSource, ...]:
        """The texts that are measured on."""
        if self.texts:
            return self.texts
        own = next((text for model in self.models if (text := default_text(model))), None)
        return () if own is None else (TextSource(short_path(own), own),)

    def check_depths(self, depths: Sequence[int]) -> None:
        """Refuse a budget that no model can follow."""
        deepest = max(depths)
        name = self.names[list(depths).index(deepest)]
        deepest_of_several = ", the deepest model" if len(depths) > 1 else ""
        budgets = [("--budgets", budget) for budget in self.budgets or ()] + [("--search", self.search or 1)]
        for option, budget in budgets:
            require(
                budget <= deepest,
                f"{option} {budget} is above the {deepest} loops of {name}{deepest_of_several}; "
                f"choose 1 to {deepest}.",
            )

    def to_json(self) -> Piece:
        """As report.json holds it: nothing tells where things lie on this machine."""
        return {
            "texts": [{"name": text.name, "source": short_path(text.source)} for text in self.sources],
            "tasks": self.wanted_tasks,
            "data": self.data and short_path(self.data),
            "limit": self.limit,
            "budgets": self.budgets and list(self.budgets),
            "search": self.search,
            "search_tasks": self.search_tasks,
            "prompts": self.prompts,
            "skip": [part for part in PARTS if part in self.skip],
            "max_tokens": self.max_tokens,
            "field": self.field,
            "device": self.device,
            "dtype": self.dtype,
        }

    def budgets_of(self, config: ModelConfig) -> list[int]:
        """The budgets of one model: those asked for that it has, its full depth where it has none of them."""
        if self.budgets is None:
            return validation_budgets(config.loops)
        return [budget for budget in self.budgets if budget <= config.loops] or [config.loops]


def read_texts(texts: Sequence[str]) -> tuple[TextSource, ...]:
    """Texts as NAME=SOURCE or SOURCE; a text without a name has the last part of its path."""
    sources: list[TextSource] = []
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or Path(text).exists():
            name, source = Path(text).name if Path(text).exists() else text, text
        if not name.strip() or not source:
            raise LoopformerError(f"{text!r} is no text; write NAME=SOURCE, as in news=news.jsonl.")
        if name in [other.name for other in sources]:
            raise LoopformerError(f"Two texts are named {name}; give each a name of its own, as in first={source}.")
        sources.append(TextSource(name.strip(), source))
    return tuple(sources)


def read_budgets(budgets: str | None) -> tuple[int, ...] | None:
    """Loops such as 1,2,4, in order and each once."""
    return None if budgets is None else tuple(sorted(set(whole_numbers(budgets, "--budgets"))))


def read_skip(skip: str | None) -> frozenset[str]:
    """Parts such as tasks,search."""
    parts = [part.strip() for part in (skip or "").split(",") if part.strip()]
    for part in parts:
        if part not in PARTS:
            raise LoopformerError(f"There is no part {part!r} to skip; {nearest(part, list(PARTS))}")
    return frozenset(parts)


def collect(request: ReportRequest, report: ReportProgress | None = None) -> Piece:
    """Measure whatever is missing of all models and put everything together."""
    require(request.dtype in DTYPES, f"There is no dtype {request.dtype!r}; choose one of {', '.join(DTYPES)}.")
    device = choose_device(request.device)
    configs = [find_config(model)[0] for model in request.models]
    request.check_depths([config.loops for config in configs])
    suite, why_none = _load_suite(request, report)
    length = min(_LENGTH, *(config.context for config in configs))
    collector = _Collector(request, suite, why_none, length, report)
    models = [collector.model(source, name) for source, name in zip(request.models, request.names, strict=True)]
    return {
        "format": REPORT_FORMAT,
        "version": VERSION,
        "made": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(device),
            "machine": platform.machine(),
            "dtype": request.dtype,
            "python": platform.python_version(),
            **{package: _version(package) for package in ("loopformer", "torch", "lm_eval", "matplotlib")},
        },
        "asked": request.to_json(),
        "tasks": suite and suite.facts,
        "models": models,
    }


def _load_suite(request: ReportRequest, report: ReportProgress | None) -> tuple[Suite | None, str]:
    """The tasks, or why there are none; a wrong name or a missing file is the user's to mend."""
    if request.wanted_tasks is None or "tasks" in request.skip:
        return None, _NO_TASKS
    if request.data is not None and not Path(request.data).is_dir():
        raise FileProblem(
            f"There is no folder {request.data}; --data takes one with files like copa.validation.jsonl."
        )
    try:
        from loopformer.lm_eval import Suite
    except LoopformerError as error:  # the harness is not installed
        return None, str(error)
    names = [name.strip() for name in request.wanted_tasks.split(",") if name.strip()]
    try:
        return Suite.load(names, request.data, None, request.limit, report), ""
    except RunFailed as error:  # the Hub cannot be reached
        return None, str(error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass
class _Collector:
    """Measures model after model; texts and prompts are read once for each tokenizer."""

    request: ReportRequest
    suite: Suite | None
    no_suite: str  # why there is none
    length: int  # of a prompt
    report: ReportProgress | None
    texts: dict[tuple[str, str], Text] = field(default_factory=dict)
    prompts: dict[str, Prompts] = field(default_factory=dict)

    def model(self, source: str, name: str) -> Piece:
        """All parts of one model, and why some of them are missing."""
        loaded = LoadedModel.open(source, self.request.device, self.request.dtype)
        training, missing = training_facts(source), dict[str, str]()
        if training is None:
            missing["training"] = "A model without a run says nothing about its training."
        report = self.report
        named = None if report is None else lambda doing, done, total: report(f"{name}: {doing}", done, total)
        measures: dict[str, Callable[[], Piece | list[Piece]]] = {
            "perplexity": lambda: self._perplexity(loaded, named),
            "tasks": lambda: self._tasks(loaded, named),
            "search": lambda: self._search(loaded, named),
            "analysis": lambda: self._analysis(loaded, name, named),
        }
        parts: Piece = dict.fromkeys(PARTS)
        for part, measure in measures.items():
            why = self._obstacle(loaded, part)
            if not why:
                parts[part], why = self._measured(part, measure)
            if why:
                missing[part] = why
        return {
            **_facts(loaded, name),
            "training": None if training is None else asdict(training),
            **parts,
            "missing": missing,
        }

    def _obstacle(self, loaded: LoadedModel, part: str) -> str:
        """Why a part is not even begun."""
        if part in self.request.skip:
            return f"Left out, as asked for with --skip {part}."
        if loaded.lm.tokenizer is None:
            return "This model came without a tokenizer; put its tokenizer.json beside its weights."
        if part == "tasks":
            return self.no_suite
        return "" if self.request.sources else _NO_TEXT

    def _measured(
        self, part: str, measure: Callable[[], Piece | list[Piece]]
    ) -> tuple[Piece | list[Piece] | None, str]:
        """What was measured, or the sentence that says why not; a wrong text is the user's to mend."""
        try:
            return measure(), ""
        except FileProblem:
            raise
        except LoopformerError as error:
            if part == "perplexity" and not isinstance(error, RunFailed):
                raise
            sentence = str(error)
            for text in self.request.sources:
                sentence = sentence.replace(text.source, text.name)
            return None, sentence

    def _perplexity(self, loaded: LoadedModel, report: ReportProgress | None) -> list[Piece]:
        request, context = self.request, loaded.model.config.context
        trajectories = [loaded.model.resolve(budget) for budget in request.budgets_of(loaded.model.config)]
        rows = []
        for source in request.sources:
            text = self._text(source, loaded.lm.need_tokenizer(), report)
            tokens = min(text.tokens, request.max_tokens or text.tokens)
            if tokens < context:
                raise LoopformerError(
                    f"{text.name} has {tokens} tokens, fewer than one window of {context}; give more."
                )
            rows += perplexity(
                loaded.model,
                text,
                trajectories,
                Protocol(max_tokens=request.max_tokens),
                weights=loaded.weights,
                store=loaded.store,
                batch_tokens=request.batch_tokens,
                report=report,
            )
        return rows

    def _tasks(self, loaded: LoadedModel, report: ReportProgress | None) -> list[Piece]:
        assert self.suite is not None
        trajectories = [loaded.model.resolve(budget) for budget in self.request.budgets_of(loaded.model.config)]
        runs = run_requests(loaded, self.suite.queries, trajectories, self.request.batch_tokens, report)
        rows: list[Piece] = self.suite.results(model_facts(loaded, runs), runs)["runs"]
        return rows

    def _search(self, loaded: LoadedModel, report: ReportProgress | None) -> Piece:
        request, loops = self.request, loaded.model.config.loops
        budget = request.search or max(1, loops // 2)
        require(budget <= loops, f"This model has {loops} loops, fewer than the {budget} of --search.")
        require(
            count_schedules(loops, budget) > 1,
            "There is only one schedule of this budget, so there is nothing to search.",
        )
        suite = self.suite if request.search_tasks else None
        return search(
            loaded.model,
            budget,
            text=self._text(request.sources[0], loaded.lm.need_tokenizer(), report),
            accuracy=None if suite is None else suite.accuracy(loaded, request.batch_tokens, report),
            tasks=None if suite is None else suite.facts,
            protocol=Protocol(max_tokens=request.max_tokens),
            weights=loaded.weights,
            store=loaded.store,
            batch_tokens=request.batch_tokens,
            report=report,
        )

    def _analysis(self, loaded: LoadedModel, name: str, report: ReportProgress | None) -> Piece:
        """Representation dynamics along the full trajectory; kept like the others."""
        prompts, model = self._prompts(loaded.lm.need_tokenizer()), loaded.model
        key = {
            "kind": "dynamics",
            "weights": loaded.weights,
            "prompts": prompts.hash,
            "trajectory": str(model.resolve(None)),
            "states": "before",
            "dtype": str(model.tokens.weight.dtype),
            "device": model.device.type,
        }
        kept = loaded.store.get(key)
        if kept is None:
            progress = None if report is None else lambda done, total: report("prompts", done, total)
            dynamics = replace(analyze(model, prompts, "", progress=progress), weights=loaded.weights)
            kept = loaded.store.put(key, dynamics.to_json())
        return {**kept, "model": name, "text": prompts.text, "part": prompts.part, "documents": prompts.documents}

    def _text(self, source: TextSource, tokenizer: Tokenizer, report: ReportProgress | None) -> Text:
        key = (source.name, tokenizer.hash)
        if key not in self.texts:
            text = read_text(source.source, tokenizer, self.request.field, self.request.max_tokens, report)
            self.texts[key] = replace(text, name=source.name)
        return self.texts[key]

    def _prompts(self, tokenizer: Tokenizer) -> Prompts:
        """Prompts out of the first text."""
        source = self.request.sources[0]
        if tokenizer.hash not in self.prompts:
            prompts = read_prompts(source.source, tokenizer, self.request.prompts, self.length, self.request.field)
            self.prompts[tokenizer.hash] = replace(prompts, text=source.name)
        return self.prompts[tokenizer.hash]


def _facts(loaded: LoadedModel, name: str) -> Piece:
    """What the model is and costs."""
    return {
        "name": name,
        "source": short_path(loaded.source),
        "weights": loaded.weights,
        "tokenizer": loaded.lm.tokenizer and loaded.lm.tokenizer.hash,
        **placement(loaded.model),
        **size_facts(loaded.model.config),
    }


def size_facts(config: ModelConfig) -> Piece:
    """What a model of these settings has and costs."""
    cost = Cost(config)
    parameters = cost.parameters
    return {
        "shape": f"{config.blocks}⊗{config.loops}",
        "settings": config.plain(),
        "parameters": {
            "total": parameters.total,
            "embeddings": parameters.embeddings,
            "stack": parameters.stack,
            "conditioning": parameters.conditioning,
        },
        "flops_per_token": {str(budget): cost.forward_flops(budget) for budget in range(1, config.loops + 1)},
        "training_overhead": cost.training_overhead() if config.loops > 1 else None,
        "io_flops": 2 * cost.head_products,
        "loop_flops": cost.loop_flops(),
    }


def training_facts(source: str | Path) -> TrainingFacts | None:
    """What training a run took; None for a model that is no run."""
    if not is_run_folder(source):
        return None
    folder = Path(source)
    run, _ = load_run(str(folder / SETTINGS))
    checkpoint = newest_model(folder, lambda _: None)
    state = read_json(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    speeds = [
        record["tokens_per_second"]
        for record in read_metrics(folder)
        if record.get("kind") == "train" and record.get("tokens_per_second")
    ]
    return facts_of_run(run, step_of(checkpoint), speeds, state)


def facts_of_run(run: RunConfig, step: int, speeds: Sequence[float], state: Mapping[str, Any]) -> TrainingFacts:
    """The same from its settings, the steps it took, and the tokens per second and the state that it recorded."""
    per_token, entries = training_flops_per_token(run), run.objective.trajectories
    tokens = step * run.training.batch * run.model.context
    return TrainingFacts(
        elastic=run.objective.elastic,
        short_fraction=max((entry.rows for entry in entries if entry.budget != "full"), default=0.0),
        step=step,
        steps=run.training.steps,
        tokens=tokens,
        seed=run.training.seed,
        fixed_flops_per_token=Cost(run.model).training_flops(),
        flops_per_token=per_token,
        flops=per_token * tokens,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        records=len(speeds),
        data=state.get("data"),
        model=run.model.plain(),
        same={name: getattr(run.training, name) for name in _SAME}
        | {name: state.get(name) for name in _SAME_STATE},
    )
