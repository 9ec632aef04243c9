"""What a report says: which tables and figures stand where, and the sentences around them.

    page = compose(results, drawn={"perplexity", "accuracy"})     # drawn: the figures that exist
    page.sections[0].blocks, page.tables

Text is plain, with `code` between backticks; page.py writes it as HTML and Markdown. A part that is missing is a
sentence in its place that says why. The last section says how each number was made.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from loopformer.analysis.report.tables import (
    CHANCE_AVERAGE,
    TOLERANCE,
    Table,
    counted,
    figure_tables,
    flops_table,
    listed,
    main_table,
    model_table,
    parameter_table,
    percent,
    perplexity,
    perplexity_table,
    score_table,
    short_hash,
    task_table,
    text_table,
    training_costs,
    training_table,
)
from loopformer.analysis.results import (
    DEFINITIONS,
    Cells,
    Dynamics,
    Entry,
    MaybeNumber,
    ReportResults,
    SearchResults,
    entries,
)

PART_NAMES = {
    "perplexity": "Perplexity",
    "tasks": "Benchmarks",
    "search": "Schedules",
    "analysis": "Representations",
    "training": "Training",
}
NO_FIGURES = "No figure is drawn without matplotlib; `pip install 'loopformer[plot]'` brings it."

_MOST_NAMED = 3  # models in the title
_COMMAND = 70  # characters, after which a command goes on in the next line
_METRICS = ("curvature", "anisotropy", "prompt_entropy", "movement", "lens_divergence", "lens_agreement", "cka")
_COSTS = (
    "FLOPs are those of matrix products, a multiply-add counted as two, attention causal over a full context; "
    "per token, from the embedding to the logits. The modulation table is computed once per trajectory and not "
    "counted.",
    "kx / kMx is the paper's count: k blocks hold the parameters, k·M are computed. It leaves out embeddings, head "
    "and conditioning, which the true counts include.",
    "Training is counted as three forward passes per token and trajectory.",
    "Seconds and tokens per second are those of the time when the number was measured.",
)


@dataclass(frozen=True)
class Picture:
    """A drawn figure, figures/NAME.png; `alt` says in words what it shows."""

    kind: ClassVar[str] = "picture"
    name: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Items:
    """A list."""

    kind: ClassVar[str] = "items"
    items: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines to type."""

    kind: ClassVar[str] = "commands"
    lines: Sequence[str]


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    kind: ClassVar[str] = "heading"
    text: str


PageBlock = str | Table | Picture | Items | Commands | Heading  # a string is a paragraph


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True)
class Page:
    """A whole report; `files` are tables that have a CSV file but no place on the page."""

    title: str
    lead: str
    sections: Sequence[Section]
    files: Sequence[Table] = field(default=())

    @property
    def tables(self) -> list[Table]:
        """Every table, those that are not on the page as well."""
        shown = [block for section in self.sections for block in section.blocks if isinstance(block, Table)]
        return [*shown, *self.files]


def compose(results: ReportResults, drawn: Collection[str]) -> Page:
    """The whole report."""
    lead = (
        f"{listed([model.label for model in results.models])}: k⊗L is a stack of k blocks that is applied up to L "
        f"times; the number of passes M is the budget. Measured {results.made.date[:10]} with loopformer "
        f"{results.made.loopformer}. Every table has a CSV file in `tables`, every figure is in `figures` for "
        "print, and `report.json` holds all numbers."
    )
    quality = [main_table(results), *_shallow(results), *_broken(results), *gaps(results, "perplexity")]
    sections = [
        Section("short", "In short", _short(results)),
        Section("main", "Quality and cost at each budget", quality),
        Section("benchmarks", "Benchmarks", _benchmarks(results)),
        Section("compute", "Quality against compute", _compute(results, drawn)),
        Section("matched", "Models of the same size or compute", _matched(results)),
        Section("schedules", "Schedules of one budget", _schedules(results, drawn)),
        Section("states", "What the states do from loop to loop", _states(results, drawn)),
        Section("training", "What elastic training costs", _training(results)),
        Section("made", "How each number was made", _provenance(results)),
    ]
    names = [model.name for model in results.models]
    title = f"Report: {listed(names)}" if len(names) <= _MOST_NAMED else f"Report on {len(names)} models"
    return Page(title, lead, sections, figure_tables(results))


def gaps(results: ReportResults, part: str) -> list[str]:
    """Why a part is missing, once where it is the same for all models."""
    reasons = {model.name: model.missing[part] for model in results.models if part in model.missing}
    different = list(dict.fromkeys(reasons.values()))
    if len(different) == 1 and len(reasons) == len(results.models):
        return [f"{PART_NAMES[part]}: {different[0]}"]
    return [
        f"{PART_NAMES[part]} of {listed([name for name, own in reasons.items() if own == reason])}: {reason}"
        for reason in different
    ]


def schedule_name(number: int, model: str) -> str:
    """The name of the figure of a model's schedules, which is also that of its file."""
    return f"schedules-{number}-" + re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.")


# The sections, in the order of the page.


def _short(results: ReportResults) -> list[PageBlock]:
    """The ends of each curve, in sentences."""
    rows, items = entries(results), []
    for model in results.models:
        own = [row for row in rows if row.model == model.name]
        parts = [_perplexity_ends(own, name, f"perplexity on {name}") for name in results.texts]
        known = [part for part in [*parts, _average_ends(own, "average accuracy")] if part]
        if known:
            items.append(f"{model.name}: {'; '.join(known)}.")
    if not items:
        return ["No perplexity and no benchmark was measured; the costs below follow from the models' sizes."]
    blocks: list[PageBlock] = [Items(items)]
    errors = [row.average_error for row in rows if row.average_error is not None]
    if errors:
        guessing = f" Guessing scores {percent(CHANCE_AVERAGE)}\u00a0%." if results.is_paper else ""
        blocks.append(
            f"One standard error of an average accuracy is up to {percent(max(errors))} points, so a "
            f"difference of less than about {percent(2.8 * max(errors))} points says little.{guessing}"
        )
    return blocks


def _perplexity_ends(rows: Sequence[Entry], text: str, what: str) -> str:
    return _ends([(row.budget, row.perplexity.get(text)) for row in rows], what, perplexity)


def _average_ends(rows: Sequence[Entry], what: str) -> str:
    return _ends([(row.budget, row.average) for row in rows], what, lambda value: f"{percent(value)}\u00a0%")


def _ends(points: Iterable[tuple[int, MaybeNumber]], what: str, show: Callable[[float], str]) -> str:
    """A value at the largest and at the smallest budget."""
    known = [(budget, value) for budget, value in points if value is not None]
    if not known:
        return ""
    (first, low), (last, high) = known[0], known[-1]
    at_last = f"{what} {show(high)} at M = {last}"
    return at_last if len(known) == 1 else f"{at_last} ({show(low)} at M = {first})"


def _shallow(results: ReportResults) -> list[PageBlock]:
    """Which models have fewer loops than were asked for."""
    most = max(results.settings.budgets or [0])
    names = [model.name for model in results.models if model.settings.loops < most]
    return [f"Shown only up to their own number of loops: {listed(names)}."] if names else []


def _broken(results: ReportResults) -> list[PageBlock]:
    """Which models compute no numbers."""
    return [
        f"{model.name} gives no finite numbers where its perplexity is missing; its weights are damaged or its "
        "training diverged."
        for model in results.models
        if any(row.perplexity is None for row in model.perplexity)
    ]


def _benchmarks(results: ReportResults) -> list[PageBlock]:
    blocks: list[PageBlock] = []
    if table := score_table(results):
        blocks.append(table)
        errors = [error for row in entries(results) for error in row.errors.values() if error]
        if errors:
            blocks.append(f"The standard error of a single score is up to {percent(max(errors))} points.")
        if results.suite and results.suite.notes:
            blocks.append(f"Not the data that the paper scored: {' '.join(results.suite.notes)}")
    return [*blocks, *gaps(results, "tasks")]


def _compute(results: ReportResults, drawn: Collection[str]) -> list[PageBlock]:
    rows, blocks = entries(results), list[PageBlock]()
    own = {model.name: [row for row in rows if row.model == model.name] for model in results.models}
    if results.texts:
        caption = (
            "Perplexity against compute: a point for each budget, a line for each model. Down and left is better."
        )
        ends = [
            _perplexity_ends(points, text, f"{model}, {text}:")
            for text in results.texts
            for model, points in own.items()
        ]
        blocks.append(_picture("perplexity", caption, _curves_in_words(ends), drawn))
    else:
        blocks.append("There is no perplexity to draw; what stands below the first table says why.")
    if any(row.average is not None for row in rows):
        caption = "Average accuracy against compute, with its standard error. Up and left is better."
        ends = [_average_ends(points, f"{model}, average accuracy") for model, points in own.items()]
        blocks.append(_picture("accuracy", caption, _curves_in_words(ends), drawn))
    else:
        blocks.append("There is no average accuracy to draw; the section on benchmarks says why.")
    return blocks


def _curves_in_words(ends: Sequence[str]) -> str:
    known = "; ".join(end for end in ends if end)
    return f"Line chart against FLOPs per token; the table above has every point. {known}."


def _matched(results: ReportResults) -> list[PageBlock]:
    if len(results.models) == 1:
        return ["One model alone has nothing to be matched with; name several runs to compare them."]
    none = f"No two models {{}} within {100 * TOLERANCE:g} %."
    return [
        parameter_table(results) or none.format("have stacks of the same number of parameters"),
        flops_table(results) or none.format("have a budget of the same FLOPs per token"),
    ]


def _schedules(results: ReportResults, drawn: Collection[str]) -> list[PageBlock]:
    blocks: list[PageBlock] = []
    for number, model in enumerate(results.models, 1):
        if search := model.search:
            blocks.append(_search_in_words(model.name, search))
            steps = "; ".join(f"{row.schedule} {perplexity(row.perplexity)}" for row in search.schedules[:40])
            caption = (
                f"Schedules of {model.name} at M = {search.budget}, best on top. A bar is the time from 0 to "
                f"1, a block of it one step; the names count in units of 1/{search.loops}."
            )
            alt = f"Bars of all schedules with their perplexities, best first: {steps}."
            blocks.append(_picture(schedule_name(number, model.name), caption, alt, drawn))
    return [*blocks, *gaps(results, "search")]


def _search_in_words(name: str, search: SearchResults) -> str:
    best, worst, uniform = search.best, search.worst, search.uniform
    count = f"all {search.measured}" if search.method == "all" else f"{search.measured} along a beam"
    paragraph = (
        f"{name}, M = {search.budget} of L = {search.loops}: of the schedules ({count}), ranked by "
        f"{search.by} on {search.tokens:,} tokens of {search.text}, the best is "
        f"{best.schedule} with {perplexity(best.perplexity)}, the worst {worst.schedule} with "
        f"{perplexity(worst.perplexity)}; uniform steps ({uniform.schedule}) are number {uniform.rank} "
        f"with {perplexity(uniform.perplexity)}."
    )
    if search.rank_correlation is not None:
        paragraph += (
            f" Rank correlation of perplexity and accuracy: {search.rank_correlation:.2f} "
            "(1: the better the one, the better the other)."
        )
    return paragraph


def _states(results: ReportResults, drawn: Collection[str]) -> list[PageBlock]:
    blocks: list[PageBlock] = []
    if results.dynamics:
        geometry = _series_in_words(results.dynamics, ("curvature", "anisotropy", "prompt_entropy"))
        caption = (
            "Curvature, anisotropy and prompt entropy over depth. A flat line means that more loops change little, "
            "which the paper calls collapse."
        )
        blocks.append(_picture("representations", caption, f"Line charts over depth. {geometry}", drawn))
        changes = _series_in_words(results.dynamics, ("movement", "lens_divergence", "lens_agreement"))
        caption = (
            "How far a loop moves the states, and how near the prediction after each loop is to the final one: a "
            "distance that falls early belongs to a model that can stop early."
        )
        blocks.append(_picture("changes", caption, f"Line charts over depth. {changes}", drawn))
        last = "; ".join(f"{result.model}: {_values(result.cka[-1])}" for result in results.dynamics)
        caption = "Similarity (CKA) of the states after any two loops: 1 is the same up to rotation and scale."
        blocks.append(
            _picture("cka", caption, f"Heat maps. Similarity of each state to the last one, {last}.", drawn)
        )
    return [*blocks, *gaps(results, "analysis")]


def _series_in_words(results: Sequence[Dynamics], metrics: Sequence[str]) -> str:
    return ", ".join(
        "; ".join(
            f"{metric.replace('_', ' ')} of {result.model}: {_values(result.metrics[metric].mean)}"
            for metric in metrics
        )
        for result in results
    )


def _values(values: Sequence[MaybeNumber]) -> str:
    return ", ".join("none" if value is None else f"{value:.3g}" for value in values)


def _training(results: ReportResults) -> list[PageBlock]:
    blocks: list[PageBlock] = [
        "Elastic training takes a short trajectory of M passes, M uniform on 1…L-1, beside the full one. With C₁ "
        "the FLOPs of one pass and C_io those outside the loop, the paper's ratio to fixed-depth training is "
        "(2·C_io + 3/2·L·C₁) / (C_io + L·C₁): about 1.5 where the loops are most of the cost, up to 2 where the "
        "vocabulary is."
    ]
    models_by_cost: dict[str, list[str]] = {}
    for model in results.models:
        if model.training_overhead is not None:
            costs = f"C_io = {counted(model.io_flops)}FLOP, C₁ = {counted(model.loop_flops)}FLOP per token"
            ratio = f"{costs} forward, L = {model.settings.loops}: ratio {model.training_overhead:.3f}."
            models_by_cost.setdefault(ratio, []).append(model.name)
    if models_by_cost:
        blocks.append(Items([f"{listed(names)}: {ratio}" for ratio, names in models_by_cost.items()]))
    if table := training_table(results):
        blocks.append(table)
    blocks += [_clock_in_words(cost) for cost in training_costs(results) if cost["objective"] == "elastic"]
    return [*blocks, *gaps(results, "training")]


def _clock_in_words(cost: Cells) -> str:
    """The overhead in wall-clock time, or why there is none."""
    model, slowdown, compared_with = (cost[name] for name in ("model", "slowdown", "compared_with"))
    if slowdown is None:
        return f"The overhead of {model} in wall-clock time is not known: {compared_with}."
    return (
        f"In wall-clock time {model} trained {slowdown:.2f} times slower than "
        f"{compared_with}, with the same model, batch, precision and number of threads and devices. Runs do "
        "not record the machine; the ratio means something if it was the same and equally busy."
    )


def _picture(name: str, caption: str, alt: str, drawn: Collection[str]) -> PageBlock:
    return Picture(name, caption, alt) if name in drawn else NO_FIGURES


# The last section: commands, weights, texts, data files, settings, versions; and what the words mean.


def _provenance(results: ReportResults) -> list[PageBlock]:
    blocks: list[PageBlock] = [
        "The first command made this report, the others repeat its numbers for the first model. Files that lay "
        "elsewhere are shown by their names.",
        Commands([results.made.command or _report_command(results), *_repeating_commands(results)]),
        _environment(results),
        Heading("Models"),
        model_table(results),
    ]
    if texts := text_table(results):
        blocks += [Heading("Perplexity"), _perplexity_protocol(results), texts, perplexity_table(results)]
    if results.task_runs:
        blocks += [Heading("Benchmarks"), *_benchmark_protocol(results)]
    if results.dynamics:
        blocks += [Heading("Representations"), *_state_protocol(results)]
    return [*blocks, Heading("Costs"), Items(_COSTS)]


def _report_command(results: ReportResults) -> str:
    settings = results.settings
    words = ["loopformer", "report", *(model.source for model in results.models), "--out", "DIR"]
    for text in settings.texts:
        words += ["--text", f"{text.name}={text.source}"]
    values = {
        "--tasks": settings.tasks,
        "--data": settings.data,
        "--limit": settings.limit,
        "--budgets": settings.budgets and ",".join(map(str, settings.budgets)),
        "--search": settings.search,
        "--prompts": settings.prompts,
        "--max-tokens": settings.max_tokens,
        "--skip": ",".join(settings.skip) or None,
        "--field": settings.field if settings.field != "text" else None,
        "--dtype": settings.dtype,
    }
    for option, value in values.items():
        words += [option, str(value)] if value is not None else []
    return _command([*words, *(["--search-tasks"] if settings.search_tasks else [])])


def _repeating_commands(results: ReportResults) -> list[str]:
    """For the first model: the command of each part."""
    model, settings = results.models[0], results.settings
    common = ["--model", model.source, "--dtype", settings.dtype]
    shorter = [] if settings.max_tokens is None else ["--max-tokens", str(settings.max_tokens)]
    commands: list[list[str]] = []
    if model.perplexity:
        texts = [word for text in settings.texts for word in ("--text", text.source)]
        budgets = _budgets(row.budget for row in model.perplexity)
        commands.append(["eval", *common, *texts, *shorter, "--budgets", budgets])
    if model.tasks:
        data = ["--data", settings.data] if settings.data else []
        limit = [] if settings.limit is None else ["--limit", str(settings.limit)]
        budgets = _budgets(run.budget for run in model.tasks)
        commands.append(["eval", *common, "--tasks", settings.tasks or "", *data, *limit, "--budgets", budgets])
    if model.search:
        searched = ["--text", settings.texts[0].source, "--budget", str(model.search.budget)]
        commands.append(["search", *common, *searched, *shorter])
    if model.analysis:
        prompts = ["--text", settings.texts[0].source, "--prompts", str(settings.prompts)]
        commands.append(["analyze", "--model", model.source, *prompts, "--length", str(model.analysis.length)])
    return [_command(["loopformer", *words]) for words in commands]


def _budgets(budgets: Iterable[int]) -> str:
    return ",".join(dict.fromkeys(map(str, budgets)))


def _command(words: Sequence[str]) -> str:
    """A command, broken before an option where it is long."""
    lines = [""]
    for word in words:
        if word.startswith("--") and len(lines[-1]) > _COMMAND:
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    return " \\\n    ".join(lines)


def _environment(results: ReportResults) -> str:
    made = results.made
    packages = {
        "loopformer": made.loopformer,
        "PyTorch": made.torch,
        "lm-evaluation-harness": made.lm_eval,
        "matplotlib": made.matplotlib,
    }
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    return (
        f"Made {made.date} on {made.device}, {made.machine}, in {made.dtype}, with Python "
        f"{made.python}, {listed(versions)}. No seed: nothing in these measurements is drawn at random, and the "
        "standard errors of accuracies follow from a formula. Seeds of training are in the table on training."
    )


def _perplexity_protocol(results: ReportResults) -> str:
    windows = sorted({row.window for model in results.models for row in model.perplexity})
    return (
        "Each document is read on its own after one end token; every token of it is scored once, end tokens are "
        f"not. Windows of {listed(list(map(str, windows)))} tokens without overlap. Perplexity is exp of the mean "
        "over all scored tokens, with sums in float64; bits per byte compare models with different tokenizers."
    )


def _benchmark_protocol(results: ReportResults) -> list[PageBlock]:
    suite = results.suite
    assert suite is not None  # where scores are, tasks are
    limit = "All examples" if suite.limit is None else f"The first {suite.limit:,} examples of each task"
    paragraph = (
        f"{limit}, zero-shot, with the prompts, choices and metrics of lm-evaluation-harness {suite.harness}. "
        "acc_norm divides the log-likelihood of a choice by its length. A request that is longer than the context "
        "loses its beginning; the table counts these."
    )
    if results.is_paper:
        paragraph += " The average is over ten benchmarks; ARC is the mean of its two tasks."
    return [paragraph, task_table(results), *([Items(suite.notes)] if suite.notes else [])]


def _state_protocol(results: ReportResults) -> list[PageBlock]:
    first = results.dynamics[0]
    hashes = list(dict.fromkeys(result.tokens_sha256 for result in results.dynamics))
    paragraph = (
        f"{first.prompts} prompts of {first.length} tokens from {first.documents} documents of "
        f"{first.text} ({first.part}); sha256 of the tokens {short_hash(hashes[0])}. Along the full trajectory "
        "of each model, states before the final norm; geometry and CKA in float64."
    )
    if len(hashes) > 1:
        paragraph += " The models have different tokenizers, so their prompts are not the same tokens."
    return [paragraph, Items([f"{name.replace('_', ' ')}: {DEFINITIONS[name]}." for name in _METRICS])]
