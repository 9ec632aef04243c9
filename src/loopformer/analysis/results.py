"""What was measured, as dataclasses: the states of a model from loop to loop, and everything a report shows.

    Dynamics.from_json(json.loads(text)["results"][0])           # of an analysis.json
    report = ReportResults.from_json(json.loads(text))           # of a report.json
    report.models[0].perplexity[0].bits_per_byte

Numbers are kept as plain JSON by whoever measures them; here that JSON becomes typed, once. Keys that no page needs
are left in the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from loopformer.config import ModelConfig
from loopformer.config.run import validation_budgets
from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory

States = Literal["before", "after"]
STATES: tuple[States, ...] = get_args(States)
MaybeNumber = float | None  # None where a value has no meaning
Cells = Mapping[str, str | float | None]  # of a row of a table, by column
REPORT_FORMAT = "loopformer-report"  # by which a report.json is known

DEFINITIONS = {
    "curvature": "mean angle between successive differences of token states, radians (Hosseini & Fedorenko 2023)",
    "anisotropy": "mean cosine between two different tokens of a prompt, states not centred (Godey et al. 2024)",
    "prompt_entropy": "entropy of the spectrum of the tokens' Gram matrix over log min(T, D), alpha = 1; "
    "tokens centred over their prompt, then of unit length (Skean et al. 2025)",
    "movement": "|h_i - h_(i-1)| / |h_(i-1)|, mean over tokens",
    "lens_divergence": "KL(final || after loop i) through final norm and head, nats per token",
    "lens_agreement": "share of tokens whose most likely next token is already the final one",
    "cka": "linear CKA between states, all tokens of all prompts pooled, float64 (Kornblith et al. 2019)",
    "cka_debiased": "the same with Song's unbiased HSIC",
}
_SHORT = {"hellaswag": "HS", "lambada": "LB", "openbookqa": "OBQA", "social_iqa": "SIQA", "winogrande": "WG"}
_SHARES = ("acc", "exact_match")  # metrics that are shares of right answers

T = TypeVar("T")


def model_names(models: Sequence[str]) -> tuple[str, ...]:
    """The shortest ends of the paths that tell the models apart."""
    paths = [Path(model).resolve() if Path(model).exists() else Path(model) for model in models]
    if len(set(paths)) < len(paths):
        raise LoopformerError("A model is given twice; give each one once.")
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(map(str, paths))


def short_path(path: str | Path) -> str:
    """A path as it can be shown to others: relative as it is, otherwise only its last part."""
    parts = Path(path).parts
    return Path(path).name if Path(path).is_absolute() or ".." in parts else str(path)


@dataclass(frozen=True)
class Series:
    """A metric at the embedding and after each loop: mean and standard deviation over prompts."""

    mean: list[MaybeNumber]  # [M + 1]
    std: list[MaybeNumber]


@dataclass(frozen=True)
class Dynamics:
    """Everything measured for one model along one trajectory, and what it was measured on."""

    model: str
    shape: str  # k⊗L
    weights: str  # hash of settings and weights
    trajectory: str
    depth: list[float]  # i / M
    states: States  # geometry before or after the final norm; the lens always goes through it
    text: str
    part: str  # of the text
    prompts: int
    documents: int
    length: int
    tokens: int
    tokens_sha256: str  # of the prompts' ids as little-endian int32
    seed: None  # nothing is drawn
    device: str
    dtype: str
    seconds: float
    metrics: dict[str, Series]
    cka: list[list[MaybeNumber]]  # [M + 1, M + 1]
    cka_debiased: list[list[MaybeNumber]]

    @property
    def trajectory_name(self) -> str:
        """The trajectory for people: M = 4, 2-1-1, or rounded steps where they have no short form."""
        if self.trajectory.isdigit():
            return f"M = {self.trajectory}"
        steps = Trajectory.parse(self.trajectory).steps
        if len(self.trajectory) <= 3 * len(steps):
            return self.trajectory
        return " ".join(f"{float(step):.2f}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Dynamics:
        metrics = {name: Series(**series) for name, series in plain["metrics"].items()}
        return cls(**{**plain, "metrics": metrics})


def metric_rows(results: Sequence[Dynamics]) -> Iterator[Cells]:
    """One row for each result, metric and loop."""
    for result in results:
        for metric, series in result.metrics.items():
            for loop, (depth, mean, std) in enumerate(zip(result.depth, series.mean, series.std, strict=True)):
                measured: Cells = {"loop": loop, "depth": depth, "metric": metric, "mean": mean, "std": std}
                yield {**_which_states(result), **measured}


def cka_rows(results: Sequence[Dynamics]) -> Iterator[Cells]:
    """One row for each result and two states of it."""
    for result in results:
        for i, (row, debiased_row) in enumerate(zip(result.cka, result.cka_debiased, strict=True)):
            for j, (plain, debiased) in enumerate(zip(row, debiased_row, strict=True)):
                yield {**_which_states(result), "loop_i": i, "loop_j": j, "cka": plain, "cka_debiased": debiased}


def _which_states(result: Dynamics) -> dict[str, str]:
    return {name: getattr(result, name) for name in ("model", "shape", "trajectory", "states")}


@dataclass(frozen=True)
class ScheduleResult:
    """One schedule of a search."""

    rank: int
    schedule: str  # for people, in units of 1/L
    trajectory: str
    steps: list[float]
    perplexity: MaybeNumber = None
    bits_per_byte: MaybeNumber = None
    accuracy: MaybeNumber = None


@dataclass(frozen=True)
class SearchResults:
    """All schedules of one budget that were measured, the best first."""

    budget: int
    loops: int
    by: str  # perplexity, accuracy or both
    method: str  # all, or beam
    measured: int
    text: str | None
    tokens: int | None  # of the text
    rank_correlation: MaybeNumber  # of perplexity and accuracy
    schedules: list[ScheduleResult]
    best: ScheduleResult
    uniform: ScheduleResult
    worst: ScheduleResult

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> SearchResults:
        text = plain.get("text") or {}
        schedules = [_from_keys(ScheduleResult, row) for row in plain["schedules"]]
        marked = {name: _from_keys(ScheduleResult, plain[name]) for name in ("best", "uniform", "worst")}
        own = {"text": text.get("text"), "tokens": text.get("tokens"), "schedules": schedules, **marked}
        return _from_keys(cls, plain, **own)


@dataclass(frozen=True)
class PerplexityResult:
    """The perplexity of one model on one text at one budget."""

    text: str
    part: str
    documents: int
    tokens: int  # that were scored
    bytes: int
    window: int
    sha256: str  # of the text
    budget: int
    perplexity: MaybeNumber
    bits_per_byte: MaybeNumber
    seconds: float
    tokens_per_second: float
    dtype: str
    device: str


@dataclass(frozen=True)
class TaskScore:
    """What a model scored on one task."""

    metric: str
    value: MaybeNumber
    stderr: MaybeNumber
    cut: int  # requests that were longer than the context


@dataclass(frozen=True)
class TaskRun:
    """All tasks at one budget."""

    budget: int
    paper: bool  # these are the paper's
    tasks: dict[str, TaskScore]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> TaskRun:
        tasks = {name: _from_keys(TaskScore, task) for name, task in plain["tasks"].items()}
        return cls(plain["budget"], bool(plain["paper"]), tasks)


@dataclass(frozen=True)
class TaskFacts:
    """Where the examples of a task come from."""

    examples: int
    of: int
    requests: int
    requests_sha256: str
    note: str | None  # about a stand-in for the data that the paper scored
    source: str | None  # a file, or a data set on the Hub
    sha256: str | None

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> TaskFacts:
        data = plain["data"]
        return _from_keys(cls, plain, source=data.get("file") or data.get("dataset"), sha256=data.get("sha256"))


@dataclass(frozen=True)
class TaskSuite:
    """The tasks themselves, the same for all models."""

    harness: str  # its version
    limit: int | None
    tasks: dict[str, TaskFacts]
    notes: list[str]


@dataclass(frozen=True)
class TrainingFacts:
    """What training a model took."""

    elastic: bool
    short_fraction: float
    step: int
    steps: int
    tokens: int
    seed: int
    fixed_flops_per_token: float
    flops_per_token: float
    flops: float
    tokens_per_second: MaybeNumber  # the median of what was recorded
    records: int
    data: str | None  # hash
    model: dict[str, Any]  # settings of the model, and of the run as far as speeds depend on them
    same: dict[str, Any]


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters sit where."""

    total: int
    embeddings: int
    stack: int
    conditioning: int


@dataclass(frozen=True)
class ModelResults:
    """Everything about one model; `missing` says in a sentence why a part is not there."""

    name: str
    source: str
    shape: str  # k⊗L
    settings: ModelConfig
    weights: str  # hash
    tokenizer: str | None  # hash
    dtype: str
    device: str
    parameters: ParameterCounts
    flops_per_token: dict[int, float]  # by budget
    training_overhead: MaybeNumber  # by the paper's formula
    io_flops: float
    loop_flops: float
    training: TrainingFacts | None
    perplexity: list[PerplexityResult]
    tasks: list[TaskRun]
    search: SearchResults | None
    analysis: Dynamics | None
    missing: dict[str, str]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.shape})"

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelResults:
        return _from_keys(
            cls,
            plain,
            settings=ModelConfig(**plain["settings"]),
            parameters=ParameterCounts(**plain["parameters"]),
            flops_per_token={int(budget): flops for budget, flops in plain["flops_per_token"].items()},
            training=TrainingFacts(**plain["training"]) if plain["training"] else None,
            perplexity=[_from_keys(PerplexityResult, row) for row in plain["perplexity"] or []],
            tasks=[TaskRun.from_json(run) for run in plain["tasks"] or []],
            search=SearchResults.from_json(plain["search"]) if plain["search"] else None,
            analysis=Dynamics.from_json(plain["analysis"]) if plain["analysis"] else None,
        )


@dataclass(frozen=True)
class TextSource:
    """A text: the name it has in a report, and where it is."""

    name: str
    source: str


@dataclass(frozen=True)
class ReportSettings:
    """What a report was asked for, with names instead of the places of one machine."""

    texts: list[TextSource]
    tasks: str | None
    data: str | None
    limit: int | None
    budgets: list[int] | None
    search: int | None
    search_tasks: bool
    prompts: int
    skip: list[str]
    max_tokens: int | None
    field: str
    device: str
    dtype: str


@dataclass(frozen=True)
class ReportMachine:
    """When, where and with which versions a report was made."""

    date: str
    device: str
    machine: str
    dtype: str
    python: str
    loopformer: str | None
    torch: str | None
    lm_eval: str | None
    matplotlib: str | None
    command: str | None = None  # that made it, where it was not `loopformer report`


@dataclass(frozen=True)
class ReportResults:
    """All that a report shows."""

    made: ReportMachine
    settings: ReportSettings
    suite: TaskSuite | None
    models: list[ModelResults]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ReportResults:
        settings, suite = plain["asked"], plain["tasks"]
        if suite is not None:
            tasks = {name: TaskFacts.from_json(task) for name, task in suite["tasks"].items()}
            suite = _from_keys(TaskSuite, suite, tasks=tasks)
        return cls(
            made=ReportMachine(**plain["made"]),
            settings=_from_keys(ReportSettings, settings, texts=[TextSource(**text) for text in settings["texts"]]),
            suite=suite,
            models=[ModelResults.from_json(model) for model in plain["models"]],
        )

    @property
    def texts(self) -> list[str]:
        """The names of the texts that a perplexity was measured on."""
        return list(dict.fromkeys(row.text for model in self.models for row in model.perplexity))

    @property
    def task_runs(self) -> list[TaskRun]:
        return [run for model in self.models for run in model.tasks]

    @property
    def is_paper(self) -> bool:
        """Whether the scores are the paper's ten."""
        return bool(self.task_runs) and all(run.paper for run in self.task_runs)

    @property
    def dynamics(self) -> list[Dynamics]:
        return [model.analysis for model in self.models if model.analysis]


def _from_keys(cls: type[T], plain: Mapping[str, Any], **own: Any) -> T:
    """A dataclass from the keys of the same names; `own` are those that are not taken as they stand."""
    values = {**plain, **own}
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    wanted = [field.name for field in fields if field.name in values or field.default is dataclasses.MISSING]
    return cls(**{name: values[name] for name in wanted})


class ScoreColumn(NamedTuple):
    """One column of scores."""

    key: str
    label: str  # short, for a heading
    name: str  # in full
    share: bool  # of right answers, shown in percent
    tasks: tuple[str, ...]  # whose mean it is


@dataclass(frozen=True)
class Entry:
    """One model at one budget: cost and quality."""

    model: str
    shape: str
    budget: int
    paper_cost: str
    parameters: int
    stack: int  # parameters in the blocks
    flops_per_token: float
    training_flops: float | None
    perplexity: dict[str, float | None]  # by text
    bits_per_byte: dict[str, float | None]
    scores: dict[str, float | None]  # by the keys of the score columns; empty where no task was scored
    errors: dict[str, float | None]
    average: float | None  # where all scores are shares of right answers
    average_error: float | None

    @property
    def label(self) -> str:
        return f"{self.model} ({self.shape})"


def score_columns(results: ReportResults) -> list[ScoreColumn]:
    """The columns of scores."""
    if results.is_paper:
        from loopformer.evaluation.tasks import PAPER  # here, because it loads PyTorch, which no other page needs

        return [
            ScoreColumn(key, _SHORT.get(key, benchmark.label), benchmark.label, True, benchmark.tasks)
            for key, benchmark in PAPER.items()
        ]
    metrics = {name: task.metric for run in results.task_runs[:1] for name, task in run.tasks.items()}
    return [
        ScoreColumn(name, name, f"{name} ({metric})", metric.startswith(_SHARES), (name,))
        for name, metric in metrics.items()
    ]


def entries(results: ReportResults) -> list[Entry]:
    """One row for each model and budget, the deepest budget last."""
    columns = score_columns(results)
    rows = []
    for model in results.models:
        measured = {row.budget for row in model.perplexity} | {run.budget for run in model.tasks}
        for budget in sorted(measured) or validation_budgets(model.settings.loops):
            rows.append(_entry(model, budget, columns))
    return rows


def _entry(model: ModelResults, budget: int, columns: Sequence[ScoreColumn]) -> Entry:
    blocks = model.settings.blocks
    texts = [row for row in model.perplexity if row.budget == budget]
    run = next((run for run in reversed(model.tasks) if run.budget == budget), None)
    scores, errors = _scores(run, columns) if run else ({}, {})
    averaged = all(column.share for column in columns)
    return Entry(
        model=model.name,
        shape=model.shape,
        budget=budget,
        paper_cost=f"{blocks}x / {blocks * budget}x",
        parameters=model.parameters.total,
        stack=model.parameters.stack,
        flops_per_token=model.flops_per_token[budget],
        training_flops=model.training.flops if model.training else None,
        perplexity={row.text: row.perplexity for row in texts},
        bits_per_byte={row.text: row.bits_per_byte for row in texts},
        scores=scores,
        errors=errors,
        average=_mean(list(scores.values())) if averaged else None,
        average_error=_mean_error(list(errors.values())) if averaged else None,
    )


def _scores(
    run: TaskRun, columns: Sequence[ScoreColumn]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Scores and their standard errors."""
    members = {column.key: [run.tasks[name] for name in column.tasks] for column in columns}
    scores = {key: _mean([task.value for task in tasks]) for key, tasks in members.items()}
    errors = {key: _mean_error([task.stderr for task in tasks]) for key, tasks in members.items()}
    return scores, errors


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _mean_error(errors: Sequence[float | None]) -> float | None:
    """The standard error of a mean of independent values."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None
