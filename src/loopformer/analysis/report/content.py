"""The report as a document: which tables and figures stand where, and the sentences around them.

    document = compose(found, drawn={"perplexity", "accuracy"})     # drawn: the figures that exist

A part that is missing is a sentence in its place that says why.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from loopformer.analysis.dynamics import Dynamics
from loopformer.analysis.report.charts import schedule_name
from loopformer.analysis.report.document import Block, Document, Figure, Items, Section
from loopformer.analysis.report.matching import TOLERANCE
from loopformer.analysis.report.numbers import (
    CHANCE_AVERAGE,
    counted,
    entries,
    is_paper,
    listed,
    percent,
    perplexity,
    texts,
)
from loopformer.analysis.report.provenance import provenance
from loopformer.analysis.report.tables import (
    figure_tables,
    flops_table,
    main_table,
    parameter_table,
    score_table,
    training_table,
)
from loopformer.evaluation.store import Piece

WHAT = {
    "perplexity": "Perplexity",
    "tasks": "Benchmarks",
    "search": "Schedules",
    "analysis": "Representations",
    "training": "Training",
}
_MOST_NAMED = 3  # models in the title
NO_FIGURES = "No figure is drawn without matplotlib; `pip install 'loopformer[plot]'` brings it."


def compose(found: Piece, drawn: Collection[str]) -> Document:
    """The whole report."""
    names = [f"{model['name']} ({model['shape']})" for model in found["models"]]
    lead = (
        f"{listed(names)}: k⊗L is a stack of k blocks that is applied up to L times; the number of passes M is the "
        f"budget. Measured {found['made']['date'][:10]} with loopformer {found['made']['loopformer']}. Every table "
        "has a CSV file in `tables`, every figure is in `figures` for print, and `report.json` holds all numbers."
    )
    sections = [
        Section("short", "In short", _short(found)),
        Section(
            "main",
            "Quality and cost at each budget",
            [main_table(found), *_shallow(found), *_broken(found), *gaps(found, "perplexity")],
        ),
        Section("benchmarks", "Benchmarks", _benchmarks(found)),
        Section("compute", "Quality against compute", _compute(found, drawn)),
        Section("matched", "Models of the same size or compute", _matched(found)),
        Section("schedules", "Schedules of one budget", _schedules(found, drawn)),
        Section("states", "What the states do from loop to loop", _states(found, drawn)),
        Section("training", "What elastic training costs", _training(found)),
        Section("made", "How each number was made", provenance(found)),
    ]
    few = [model["name"] for model in found["models"]]
    title = f"Report: {listed(few)}" if len(few) <= _MOST_NAMED else f"Report on {len(few)} models"
    return Document(title, lead, sections, figure_tables(found))


def _short(found: Piece) -> list[Block]:
    """The ends of each curve, in sentences."""
    rows, items = entries(found), []
    for model in found["models"]:
        own = [row for row in rows if row["model"] == model["name"]]
        parts = [_ends(own, f"ppl:{name}", f"perplexity on {name}", perplexity, "") for name in texts(found)]
        parts.append(_ends(own, "average", "average accuracy", percent, "\u00a0%"))
        said = [part for part in parts if part]
        if said:
            items.append(f"{model['name']}: {'; '.join(said)}.")
    if not items:
        return ["No perplexity and no benchmark was measured; the costs below follow from the models' sizes."]
    blocks: list[Block] = [Items(items)]
    errors = [row["average_error"] for row in rows if row.get("average_error") is not None]
    if errors:
        guessing = f" Guessing scores {percent(CHANCE_AVERAGE)}\u00a0%." if is_paper(found) else ""
        blocks.append(
            f"One standard error of an average accuracy is up to {percent(max(errors))} points, so a "
            f"difference of less than about {percent(2.8 * max(errors))} points says little.{guessing}"
        )
    return blocks


def _ends(rows: Sequence[Piece], key: str, what: str, show: Callable[[Any], str], unit: str) -> str:
    """A value at the smallest and at the largest budget."""
    known = [row for row in rows if row.get(key) is not None]
    if not known:
        return ""
    first, last = known[0], known[-1]
    said = f"{what} {show(last[key])}{unit} at M = {last['budget']}"
    return said if first is last else f"{said} ({show(first[key])}{unit} at M = {first['budget']})"


def _shallow(found: Piece) -> list[Block]:
    """Which models have fewer loops than were asked for."""
    most = max(found["asked"]["budgets"] or [0])
    names = [model["name"] for model in found["models"] if model["settings"]["loops"] < most]
    return [f"Shown only up to their own number of loops: {listed(names)}."] if names else []


def _broken(found: Piece) -> list[Block]:
    """Which models compute no numbers."""
    names = [
        model["name"]
        for model in found["models"]
        if any(row["perplexity"] is None for row in model["perplexity"] or [])
    ]
    return [
        f"{name} gives no finite numbers where its perplexity is missing; its weights are damaged or its training "
        "diverged."
        for name in names
    ]


def _benchmarks(found: Piece) -> list[Block]:
    table = score_table(found)
    if table is None:
        return [*gaps(found, "tasks")]
    errors = [value for row in entries(found) for key, value in row.items() if key.startswith("error:") and value]
    said = f"The standard error of a single score is up to {percent(max(errors))} points." if errors else ""
    notes = found["tasks"]["notes"]
    stand_ins = [f"Not the data that the paper scored: {' '.join(notes)}"] if notes else []
    return [table, *([said] if said else []), *stand_ins, *gaps(found, "tasks")]


def _compute(found: Piece, drawn: Collection[str]) -> list[Block]:
    rows, blocks = entries(found), list[Block]()
    if texts(found):
        caption = (
            "Perplexity against compute: a point for each budget, a line for each model. Down and left is better."
        )
        blocks += _figure("perplexity", caption, _curves(found, [f"ppl:{name}" for name in texts(found)]), drawn)
    else:
        blocks.append("There is no perplexity to draw; what stands below the first table says why.")
    if any(row.get("average") is not None for row in rows):
        caption = "Average accuracy against compute, with its standard error. Up and left is better."
        blocks += _figure("accuracy", caption, _curves(found, ["average"]), drawn)
    else:
        blocks.append("There is no average accuracy to draw; the section on benchmarks says why.")
    return blocks


def _curves(found: Piece, keys: Sequence[str]) -> str:
    """The ends of the curves of a figure in words."""
    said = []
    for key in keys:
        show, what, unit = (
            (percent, "average accuracy", "\u00a0%") if key == "average" else (perplexity, f"{key[4:]}:", "")
        )
        for model in found["models"]:
            own = [row for row in entries(found) if row["model"] == model["name"]]
            if part := _ends(own, key, f"{model['name']}, {what}", show, unit):
                said.append(part)
    return f"Line chart against FLOPs per token; the table above has every point. {'; '.join(said)}."


def _matched(found: Piece) -> list[Block]:
    if len(found["models"]) == 1:
        return ["One model alone has nothing to be matched with; name several runs to compare them."]
    size, compute = parameter_table(found), flops_table(found)
    none = f"No two models {{}} within {100 * TOLERANCE:g} %."
    return [
        size or none.format("have stacks of the same number of parameters"),
        compute or none.format("have a budget of the same FLOPs per token"),
    ]


def _schedules(found: Piece, drawn: Collection[str]) -> list[Block]:
    blocks: list[Block] = []
    for number, model in enumerate(found["models"], 1):
        if result := model["search"]:
            blocks.append(_searched(model["name"], result))
            steps = "; ".join(
                f"{row['schedule']} {perplexity(row['perplexity'])}" for row in result["schedules"][:40]
            )
            caption = (
                f"Schedules of {model['name']} at M = {result['budget']}, best on top. A bar is the time from 0 to "
                f"1, a block of it one step; the names count in units of 1/{result['loops']}."
            )
            alt = f"Bars of all schedules with their perplexities, best first: {steps}."
            blocks += _figure(schedule_name(number, model["name"]), caption, alt, drawn)
    return [*blocks, *gaps(found, "search")]


def _searched(name: str, result: Piece) -> str:
    """What a search found, in sentences."""
    best, worst, uniform = (result[one] for one in ("best", "worst", "uniform"))
    count = f"all {result['measured']}" if result["method"] == "all" else f"{result['measured']} along a beam"
    said = (
        f"{name}, M = {result['budget']} of L = {result['loops']}: of the schedules ({count}), ranked by "
        f"{result['by']} on {result['text']['tokens']:,} tokens of {result['text']['text']}, the best is "
        f"{best['schedule']} with {perplexity(best['perplexity'])}, the worst {worst['schedule']} with "
        f"{perplexity(worst['perplexity'])}; uniform steps ({uniform['schedule']}) are number {uniform['rank']} "
        f"with {perplexity(uniform['perplexity'])}."
    )
    if result["rank_correlation"] is not None:
        said += (
            f" Rank correlation of perplexity and accuracy: {result['rank_correlation']:.2f} "
            "(1: the better the one, the better the other)."
        )
    return said


def _states(found: Piece, drawn: Collection[str]) -> list[Block]:
    results = [Dynamics.from_json(model["analysis"]) for model in found["models"] if model["analysis"]]
    blocks: list[Block] = []
    if results:
        metrics = ", ".join(_series(one, ("curvature", "anisotropy", "prompt_entropy")) for one in results)
        caption = (
            "Curvature, anisotropy and prompt entropy over depth. A flat line means that more loops change little, "
            "which the paper calls collapse."
        )
        blocks += _figure("representations", caption, f"Line charts over depth. {metrics}", drawn)
        caption = (
            "How far a loop moves the states, and how near the prediction after each loop is to the final one: a "
            "distance that falls early belongs to a model that can stop early."
        )
        changes = ", ".join(_series(one, ("movement", "lens_divergence", "lens_agreement")) for one in results)
        blocks += _figure("changes", caption, f"Line charts over depth. {changes}", drawn)
        caption = "Similarity (CKA) of the states after any two loops: 1 is the same up to rotation and scale."
        last = "; ".join(f"{one.model}: {_row(one.cka[-1])}" for one in results)
        blocks += _figure("cka", caption, f"Heat maps. Similarity of each state to the last one, {last}.", drawn)
    return [*blocks, *gaps(found, "analysis")]


def _series(result: Dynamics, names: Sequence[str]) -> str:
    return "; ".join(
        f"{name.replace('_', ' ')} of {result.model}: {_row(result.metrics[name].mean)}" for name in names
    )


def _row(values: Sequence[float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.3g}" for value in values)


def _training(found: Piece) -> list[Block]:
    blocks: list[Block] = [
        "Elastic training takes a short route of M passes, M uniform on 1…L-1, beside the full one. With C₁ the "
        "FLOPs of one pass and C_io those outside the loop, the paper's ratio to fixed-depth training is "
        "(2·C_io + 3/2·L·C₁) / (C_io + L·C₁): about 1.5 where the loops are most of the cost, up to 2 where the "
        "vocabulary is."
    ]
    sizes: dict[str, list[str]] = {}
    for model in found["models"]:
        if model["training_overhead"] is not None:
            costs = f"C_io = {counted(model['io_flops'])}FLOP, C₁ = {counted(model['loop_flops'])}FLOP per token"
            said = f"{costs} forward, L = {model['settings']['loops']}: ratio {model['training_overhead']:.3f}."
            sizes.setdefault(said, []).append(model["name"])
    items = [f"{listed(names)}: {said}" for said, names in sizes.items()]
    table = training_table(found)
    clocks = [_clock(row) for row in (table.groups[0].rows if table else []) if row["objective"] == "elastic"]
    return [
        *blocks,
        *([Items(items)] if items else []),
        *([table] if table else []),
        *clocks,
        *gaps(found, "training"),
    ]


def _clock(row: Mapping[str, Any]) -> str:
    """The overhead in wall-clock time, or why there is none."""
    if row["slowdown"] is None:
        return f"The overhead of {row['model']} in wall-clock time is not known: {row['compared_with']}."
    return (
        f"In wall-clock time {row['model']} trained {row['slowdown']:.2f} times slower than "
        f"{row['compared_with']}, with the same model, batch, precision and number of threads and devices. Runs do "
        "not record the machine; the ratio means something if it was the same and equally busy."
    )


def _figure(name: str, caption: str, alt: str, drawn: Collection[str]) -> list[Block]:
    return [Figure(name, caption, alt)] if name in drawn else [NO_FIGURES]


def gaps(found: Piece, part: str) -> list[str]:
    """Why a part is missing, once where it is the same for all models."""
    said = {model["name"]: model["missing"][part] for model in found["models"] if part in model["missing"]}
    reasons = list(dict.fromkeys(said.values()))
    what, everybody = WHAT[part], len(said) == len(found["models"])
    return [
        f"{what}: {reason}"
        if everybody and len(reasons) == 1
        else f"{what} of {listed([name for name, own in said.items() if own == reason])}: {reason}"
        for reason in reasons
    ]
