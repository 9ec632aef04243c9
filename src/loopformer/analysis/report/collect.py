"""Everything a report shows, measured or taken from what is kept beside the models, as plain data.

    found = collect(Asked(("runs/elastic", "runs/fixed"), data=Path("data/eval"), limit=50))
    found["models"][0]["perplexity"], found["models"][0]["missing"]

One model is in memory at a time. Perplexity, answers, schedules and dynamics are kept in the store of each model as
they are finished, so a report that is stopped, repeated or extended measures only what is new. A part that cannot
be had of a model is one sentence in its `missing`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.analysis.dynamics import analyze
from loopformer.analysis.names import short_path
from loopformer.analysis.prompts import Prompts, read_prompts
from loopformer.analysis.report.asked import PARTS, Asked
from loopformer.analysis.report.training import training_facts
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import DTYPES, choose_device, device_name
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.evaluation.perplexity import perplexity
from loopformer.evaluation.schedules import count_schedules, search
from loopformer.evaluation.store import Piece
from loopformer.evaluation.subject import Subject
from loopformer.evaluation.text import Report, Text, read_text
from loopformer.evaluation.windows import Protocol
from loopformer.loading import find_config

if TYPE_CHECKING:
    from loopformer.evaluation.suite import Suite

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
    subject = Subject.open(source, asked.device, asked.dtype)
    found, missing = _facts(subject, name), dict[str, str]()
    found["training"] = training_facts(source)
    if found["training"] is None:
        missing["training"] = "A model without a run says nothing about its training."
    parts: dict[str, Callable[[_Shared, Subject, Report | None], Any]] = {
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


def _facts(subject: Subject, name: str) -> Piece:
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


def _obstacle(shared: _Shared, subject: Subject, part: str) -> str:
    """Why a part is not even begun."""
    if part in shared.asked.skip:
        return f"Left out, as asked for with --skip {part}."
    if subject.lm.tokenizer is None:
        return "This model came without a tokenizer; put its tokenizer.json beside its weights."
    if part == "tasks" and shared.suite is None:
        return shared.no_suite
    return _NO_TEXT if part != "tasks" and not shared.asked.sources else ""


def _perplexity(shared: _Shared, subject: Subject, report: Report | None) -> list[Piece]:
    asked, tokenizer = shared.asked, subject.lm.need_tokenizer()
    routes = [subject.model.route(budget) for budget in asked.budgets_of(subject.model.config)]
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
            routes,
            Protocol(max_tokens=asked.max_tokens),
            weights=subject.weights,
            store=subject.store,
            batch_tokens=asked.batch_tokens,
            report=report,
        )
    return rows


def _tasks(shared: _Shared, subject: Subject, report: Report | None) -> list[Piece]:
    from loopformer.evaluation.benchmarks import ask, model_facts, results

    assert shared.suite is not None
    routes = [subject.model.route(budget) for budget in shared.asked.budgets_of(subject.model.config)]
    runs = ask(subject, shared.suite.queries, routes, shared.asked.batch_tokens, report)
    found: list[Piece] = results(shared.suite, model_facts(subject, runs), runs)["runs"]
    return found


def _search(shared: _Shared, subject: Subject, report: Report | None) -> Piece:
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


def _analysis(shared: _Shared, subject: Subject, report: Report | None) -> Piece:
    """Representation dynamics along the full trajectory; kept like the others."""
    prompts, model = shared.chosen(subject.lm.need_tokenizer()), subject.model
    weight = model.tokens.weight
    key = {
        "kind": "dynamics",
        "weights": subject.weights,
        "prompts": prompts.hash,
        "trajectory": str(model.route(None)),
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
        from loopformer.evaluation.suite import Suite
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
