"""Models and budgets that can be compared because they cost the same, within a stated tolerance.

    matched(rows, "flops_per_token")     # groups of rows of different models, the cheapest group first

A group begins with its smallest value and goes up to TOLERANCE above it, so no two rows of it differ by more. Only
groups with at least two models say anything.

The numbers of a report in rows, one for each model and budget, and how numbers are written.

    rows = entries(found)                     # found: what collect.collect returned
    rows[0]["model"], rows[0]["budget"], rows[0]["flops_per_token"], rows[0]["ppl:demo"], rows[0]["average"]
    counted(3_244_032)                        # "3.244 M"

Of the paper's tasks the ten scores and their average are taken; of any others each task's own metric, and their
mean where all of them are shares of right answers. Errors are standard errors; that of a mean takes the tasks for
independent.

The tables of a report, from its plain data: main, scores, matched by FLOPs or parameters, training, and the
numbers behind the figures.

What a report is asked for, checked before anything is measured.

asked = Asked(("runs/a", "runs/b"), texts=read_texts(["news=news.jsonl"]), budgets=read_budgets("1,2,4"))
asked.names                       # ("a", "b"): the shortest ends of the paths that tell them apart
asked.budgets_of(ModelConfig())   # those of the budgets that this model can follow

What training a model took, from its run: FLOPs by formula, tokens per second as recorded, and a fair comparison.

    facts = training_facts("runs/elastic")            # None for a model without a run
    slowdown(facts, [training_facts("runs/fixed")])   # (1.52, "fixed") or (None, why there is none)

Elastic training takes a short route beside the full one. Its cost in FLOPs follows from the sizes; its cost in time
is the ratio of tokens per second of two runs that differ in the objective alone.

Everything a report shows, measured or taken from what is kept beside the models, as plain data.

    found = collect(Asked(("runs/elastic", "runs/fixed"), data=Path("data/eval"), limit=50))
    found["models"][0]["perplexity"], found["models"][0]["missing"]

One model is in memory at a time. Perplexity, answers, schedules and dynamics are kept in the store of each model as
they are finished, so a report that is stopped, repeated or extended measures only what is new. A part that cannot
be had of a model is one sentence in its `missing`.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.analysis.dynamics import Prompts, analyze, model_names, read_prompts, short_path
from loopformer.config import ModelConfig, load_run, whole_numbers
from loopformer.config.run import validation_budgets
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import DTYPES, choose_device, device_name
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.evaluation.benchmarks import LoadedModel
from loopformer.evaluation.schedules import count_schedules, search
from loopformer.evaluation.store import Piece
from loopformer.evaluation.text import Protocol, Text, default_text, perplexity, read_text
from loopformer.evaluation.text import ReportProgress as Report
from loopformer.files import read_json
from loopformer.inference.score import BATCH_TOKENS
from loopformer.loading import find_config
from loopformer.loading.folder import SETTINGS, STATE, is_run_folder, newest_model, step_of
from loopformer.model.cost import Cost
from loopformer.training.plan import training_flops_per_token
from loopformer.training.reporting import read_metrics

if TYPE_CHECKING:
    from loopformer.evaluation.harness import Suite


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


PARTS = ("perplexity", "tasks", "search", "analysis")


@dataclass(frozen=True)
class Source:
    """A text: the name it has in the report, and where it is."""

    name: str
    source: str


@dataclass(frozen=True)
class Asked:
    """Which models, measured on what, and how."""

    models: tuple[str, ...]
    texts: tuple[Source, ...] = ()  # none: the data of the first run that has any
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
    def sources(self) -> tuple[Source, ...]:
        """The texts that are measured on."""
        if self.texts:
            return self.texts
        own = next((found for model in self.models if (found := default_text(model))), None)
        return () if own is None else (Source(short_path(own), own),)

    def check_depths(self, depths: Sequence[int]) -> None:
        """Refuse a budget that no model can follow."""
        deepest = max(depths)
        name = self.names[list(depths).index(deepest)]
        for option, budget in [("--budgets", one) for one in self.budgets or ()] + [("--search", self.search or 1)]:
            require(
                budget <= deepest,
                f"{option} {budget} is above the {deepest} loops of {name}"
                + (", the deepest model; " if len(depths) > 1 else "; ")
                + f"choose 1 to {deepest}.",
            )

    def budgets_of(self, config: ModelConfig) -> list[int]:
        """The budgets of one model: those asked for that it has, its full depth where it has none of them."""
        if self.budgets is None:
            return validation_budgets(config.loops)
        return [one for one in self.budgets if one <= config.loops] or [config.loops]


def read_texts(given: Sequence[str]) -> tuple[Source, ...]:
    """Texts as NAME=SOURCE or SOURCE; a text without a name has the last part of its path."""
    found: list[Source] = []
    for one in given:
        name, equals, source = one.partition("=")
        if not equals or Path(one).exists():
            name, source = Path(one).name if Path(one).exists() else one, one
        require(
            bool(name.strip()) and bool(source), f"{one!r} is no text; write NAME=SOURCE, as in news=news.jsonl."
        )
        require(
            name not in [other.name for other in found],
            f"Two texts are named {name}; give each a name of its own, as in first={source}.",
        )
        found.append(Source(name.strip(), source))
    return tuple(found)


def read_budgets(given: str | None) -> tuple[int, ...] | None:
    """Loops such as 1,2,4, in order and each once."""
    if given is None:
        return None
    return tuple(sorted(set(whole_numbers(given, "--budgets"))))


def read_skip(given: str | None) -> frozenset[str]:
    """Parts such as tasks,search."""
    parts = [part.strip() for part in (given or "").split(",") if part.strip()]
    for part in parts:
        require(part in PARTS, f"There is no part {part!r} to skip; {nearest(part, list(PARTS))}")
    return frozenset(parts)


# Of two runs whose speeds are compared, these have to be equal; the machine is not recorded.
_SAME = ("batch", "dtype", "device", "fused", "compile", "checkpoint_loops", "strategy")


_SAME_STATE = ("micro_batch", "world", "threads")


Facts = dict[str, Any]


def training_facts(source: str | Path) -> Facts | None:
    """Everything about the training of a run, in plain data; None for a model that is no run."""
    if not is_run_folder(source):
        return None
    folder = Path(source)
    run, _ = load_run(str(folder / SETTINGS))
    checkpoint = newest_model(folder, lambda _: None)
    state = read_json(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    cost, step = Cost(run.model), step_of(checkpoint)
    tokens = step * run.training.batch * run.model.context
    speeds = [
        record["tokens_per_second"]
        for record in read_metrics(folder)
        if record.get("kind") == "train" and record.get("tokens_per_second")
    ]
    per_token = training_flops_per_token(run)
    return {
        "elastic": run.objective.elastic,
        "short_fraction": run.objective.short_fraction if run.objective.elastic else 0.0,
        "step": step,
        "steps": run.training.steps,
        "tokens": tokens,
        "seed": run.training.seed,
        "fixed_flops_per_token": cost.training_flops(),
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "records": len(speeds),
        "data": state.get("data"),
        "model": asdict(run.model),
        "same": {name: getattr(run.training, name) for name in _SAME}
        | {name: state.get(name) for name in _SAME_STATE},
    }


def slowdown(elastic: Facts, others: Mapping[str, Facts | None]) -> tuple[float | None, str]:
    """How many times slower than a fixed-depth run of the same settings, and which; or why that is not known."""
    fixed = {name: facts for name, facts in others.items() if facts is not None and not facts["elastic"]}
    if not fixed:
        return None, "there is no fixed-depth run beside it"
    differences = {name: _differences(elastic, facts) for name, facts in fixed.items()}
    twin = next((name for name, found in differences.items() if not found), None)
    if twin is None:
        name, found = min(differences.items(), key=lambda pair: len(pair[1]))
        return None, f"{name} differs in {listed(found)}"
    if not (elastic["tokens_per_second"] and fixed[twin]["tokens_per_second"]):
        return None, "no speed was recorded"
    return fixed[twin]["tokens_per_second"] / elastic["tokens_per_second"], twin


def _differences(one: Facts, other: Facts) -> list[str]:
    found = [f"model.{name}" for name, value in one["model"].items() if other["model"].get(name) != value]
    return found + [name for name, value in one["same"].items() if other["same"].get(name) != value]


FORMAT, VERSION = "loopformer-report", 1


_LENGTH = 128  # tokens of a prompt, as in `loopformer analyze`


_NO_TEXT = "No text was given, and no run has prepared data of its own; give one with --text NAME=SOURCE."


_NO_TASKS = (
    "No benchmarks were asked for; give their files with --data, or --tasks paper to have them from the Hub."
)


def collect(asked: Asked, report: Report | None = None) -> Piece:
    """Measure whatever is missing of all models and put everything together."""
    require(asked.dtype in DTYPES, f"There is no dtype {asked.dtype!r}; choose one of {', '.join(DTYPES)}.")
    device = choose_device(asked.device)
    configs = [find_config(model)[0] for model in asked.models]
    asked.check_depths([config.loops for config in configs])
    suite, why = _suite(asked, report)
    shared = _Shared(asked, suite, why, min(_LENGTH, *(config.context for config in configs)))
    models = [
        _model(shared, source, name, _prefixed(report, name))
        for source, name in zip(asked.models, asked.names, strict=True)
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "made": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(device),
            "machine": platform.machine(),
            "dtype": asked.dtype,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("loopformer", "torch", "lm_eval", "matplotlib")},
        },
        "asked": {
            "texts": [{"name": one.name, "source": short_path(one.source)} for one in asked.sources],
            "tasks": asked.wanted_tasks,
            "data": asked.data and short_path(asked.data),
            "limit": asked.limit,
            "budgets": asked.budgets and list(asked.budgets),
            "search": asked.search,
            "search_tasks": asked.search_tasks,
            "prompts": asked.prompts,
            "skip": [part for part in PARTS if part in asked.skip],
            "max_tokens": asked.max_tokens,
            "field": asked.field,
            "device": asked.device,
            "dtype": asked.dtype,
        },
        "tasks": suite and suite.facts,
        "models": models,
    }


@dataclass
class _Shared:
    """What the models have in common; texts are read once for each tokenizer."""

    asked: Asked
    suite: Suite | None
    no_suite: str
    length: int
    texts: dict[tuple[str, str], Text] = field(default_factory=dict)
    prompts: dict[str, Prompts] = field(default_factory=dict)

    def text(self, number: int, tokenizer: Tokenizer, report: Report | None) -> Text:
        one = self.asked.sources[number]
        key = (one.name, tokenizer.hash)
        if key not in self.texts:
            read = read_text(one.source, tokenizer, self.asked.field, self.asked.max_tokens, report)
            self.texts[key] = replace(read, name=one.name)
        return self.texts[key]

    def chosen(self, tokenizer: Tokenizer) -> Prompts:
        """Prompts out of the first text."""
        one = self.asked.sources[0]
        if tokenizer.hash not in self.prompts:
            read = read_prompts(one.source, tokenizer, self.asked.prompts, self.length, self.asked.field)
            self.prompts[tokenizer.hash] = replace(read, text=one.name)
        return self.prompts[tokenizer.hash]

    def tried(self, part: str, measure: Callable[[], Piece | list[Piece]]) -> tuple[Any, str]:
        """What was measured, or the sentence that says why not; a wrong text is the user's to mend."""
        try:
            return measure(), ""
        except FileProblem:
            raise
        except LoopformerError as error:
            if part == "perplexity" and not isinstance(error, RunFailed):
                raise
            said = str(error)
            for one in self.asked.sources:
                said = said.replace(one.source, one.name)
            return None, said


def _model(shared: _Shared, source: str, name: str, report: Report | None) -> Piece:
    """All parts of one model, and why some of them are missing."""
    asked = shared.asked
    subject = LoadedModel.open(source, asked.device, asked.dtype)
    found, missing = _facts(subject, name), dict[str, str]()
    found["training"] = training_facts(source)
    if found["training"] is None:
        missing["training"] = "A model without a run says nothing about its training."
    parts: dict[str, Callable[[_Shared, LoadedModel, Report | None], Any]] = {
        "perplexity": _perplexity,
        "tasks": _tasks,
        "search": _search,
        "analysis": _analysis,
    }
    for part, measure in parts.items():
        found[part], why = None, _obstacle(shared, subject, part)
        if not why:
            found[part], why = shared.tried(part, partial(measure, shared, subject, report))
        if why:
            missing[part] = why
    return {**found, "missing": missing}


def _facts(subject: LoadedModel, name: str) -> Piece:
    """What the model is and costs."""
    config, cost = subject.model.config, subject.model.cost
    parameters = cost.parameters
    return {
        "name": name,
        "source": short_path(subject.source),
        "shape": f"{config.blocks}⊗{config.loops}",
        "settings": asdict(config),
        "weights": subject.weights,
        "tokenizer": subject.lm.tokenizer and subject.lm.tokenizer.hash,
        "dtype": subject.model.dtype_name,
        "device": subject.model.tokens.weight.device.type,
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


def _obstacle(shared: _Shared, subject: LoadedModel, part: str) -> str:
    """Why a part is not even begun."""
    if part in shared.asked.skip:
        return f"Left out, as asked for with --skip {part}."
    if subject.lm.tokenizer is None:
        return "This model came without a tokenizer; put its tokenizer.json beside its weights."
    if part == "tasks" and shared.suite is None:
        return shared.no_suite
    return _NO_TEXT if part != "tasks" and not shared.asked.sources else ""


def _perplexity(shared: _Shared, subject: LoadedModel, report: Report | None) -> list[Piece]:
    asked, tokenizer = shared.asked, subject.lm.need_tokenizer()
    trajectories = [subject.model.resolve(budget) for budget in asked.budgets_of(subject.model.config)]
    rows = []
    for number in range(len(asked.sources)):
        text, context = shared.text(number, tokenizer, report), subject.model.config.context
        tokens = min(text.tokens, asked.max_tokens or text.tokens)
        require(
            tokens >= context, f"{text.name} has {tokens} tokens, fewer than one window of {context}; give more."
        )
        rows += perplexity(
            subject.model,
            text,
            trajectories,
            Protocol(max_tokens=asked.max_tokens),
            weights=subject.weights,
            store=subject.store,
            batch_tokens=asked.batch_tokens,
            report=report,
        )
    return rows


def _tasks(shared: _Shared, subject: LoadedModel, report: Report | None) -> list[Piece]:
    from loopformer.evaluation.benchmarks import ask, model_facts, results

    assert shared.suite is not None
    trajectories = [subject.model.resolve(budget) for budget in shared.asked.budgets_of(subject.model.config)]
    runs = ask(subject, shared.suite.queries, trajectories, shared.asked.batch_tokens, report)
    found: list[Piece] = results(shared.suite, model_facts(subject, runs), runs)["runs"]
    return found


def _search(shared: _Shared, subject: LoadedModel, report: Report | None) -> Piece:
    from loopformer.evaluation.benchmarks import accuracy

    asked, loops = shared.asked, subject.model.config.loops
    budget = asked.search or max(1, loops // 2)
    require(budget <= loops, f"This model has {loops} loops, fewer than the {budget} of --search.")
    require(
        count_schedules(loops, budget) > 1,
        "There is only one schedule of this budget, so there is nothing to search.",
    )
    suite = shared.suite if asked.search_tasks else None
    return search(
        subject.model,
        budget,
        text=shared.text(0, subject.lm.need_tokenizer(), report),
        accuracy=None if suite is None else accuracy(subject, suite, asked.batch_tokens, report),
        tasks=None if suite is None else suite.facts,
        protocol=Protocol(max_tokens=asked.max_tokens),
        weights=subject.weights,
        store=subject.store,
        batch_tokens=asked.batch_tokens,
        report=report,
    )


def _analysis(shared: _Shared, subject: LoadedModel, report: Report | None) -> Piece:
    """Representation dynamics along the full trajectory; kept like the others."""
    prompts, model = shared.chosen(subject.lm.need_tokenizer()), subject.model
    weight = model.tokens.weight
    key = {
        "kind": "dynamics",
        "weights": subject.weights,
        "prompts": prompts.hash,
        "trajectory": str(model.resolve(None)),
        "states": "before",
        "dtype": str(weight.dtype),
        "device": weight.device.type,
    }
    kept = subject.store.get(key)
    if kept is None:
        progress = None if report is None else lambda done, total: report("prompts", done, total)
        found = replace(analyze(model, prompts, "", progress=progress), weights=subject.weights)
        kept = subject.store.put(key, found.to_json())
    name = dict(zip(shared.asked.models, shared.asked.names, strict=True))[subject.source]
    return {**kept, "model": name, "text": prompts.text, "part": prompts.part, "documents": prompts.documents}


def _suite(asked: Asked, report: Report | None) -> tuple[Suite | None, str]:
    """The tasks, or why there are none; a wrong name or a missing file is the user's to mend."""
    if asked.wanted_tasks is None or "tasks" in asked.skip:
        return None, _NO_TASKS
    if asked.data is not None and not Path(asked.data).is_dir():
        raise FileProblem(
            f"There is no folder {asked.data}; --data takes one with files like copa.validation.jsonl."
        )
    try:
        from loopformer.evaluation.harness import Suite
    except LoopformerError as error:  # the harness is not installed
        return None, str(error)
    names = [name.strip() for name in asked.wanted_tasks.split(",") if name.strip()]
    try:
        return Suite.load(names, asked.data, None, asked.limit, report), ""
    except RunFailed as error:  # the Hub cannot be reached
        return None, str(error)


def _prefixed(report: Report | None, name: str) -> Report | None:
    if report is None:
        return None
    return lambda doing, done, total: report(f"{name}: {doing}", done, total)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
