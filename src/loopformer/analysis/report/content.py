"""How each number was made: commands, weights, texts, data files, settings, versions; and what the words mean.

blocks = provenance(found)      # found: what collect.collect returned

The report as a document: which tables and figures stand where, and the sentences around them.

    document = compose(found, drawn={"perplexity", "accuracy"})     # drawn: the figures that exist

A part that is missing is a sentence in its place that says why.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from loopformer.analysis.dynamics import DEFINITIONS, Dynamics
from loopformer.analysis.plots import schedule_name
from loopformer.analysis.report.collect import listed
from loopformer.analysis.report.document import (
    Block,
    Column,
    Commands,
    Document,
    Figure,
    Group,
    Heading,
    Items,
    Section,
    Table,
)
from loopformer.analysis.report.tables import (
    CHANCE_AVERAGE,
    TOLERANCE,
    counted,
    entries,
    figure_tables,
    flops_table,
    is_paper,
    main_table,
    parameter_table,
    percent,
    perplexity,
    score_table,
    texts,
    training_table,
)
from loopformer.evaluation.store import Piece

_COMMAND = 70  # characters, after which a command goes on in the next line


_HASH = 16  # digits of a hash on the page; the CSV file has all


_METRICS = ("curvature", "anisotropy", "prompt_entropy", "movement", "lens_divergence", "lens_agreement", "cka")


def provenance(found: Piece) -> list[Block]:
    """The last section of a report."""
    blocks: list[Block] = [
        "The first command made this report, the others repeat its numbers for the first model. Files that lay "
        "elsewhere are shown by their names.",
        Commands([_report_command(found), *_commands(found)]),
        _environment(found),
        Heading("Models"),
        _model_table(found),
    ]
    if texts := _text_table(found):
        blocks += [Heading("Perplexity"), _protocol(found), texts, _detail_table(found)]
    if any(model["tasks"] for model in found["models"]):
        blocks += [Heading("Benchmarks"), *_benchmark_protocol(found)]
    if any(model["analysis"] for model in found["models"]):
        blocks += [Heading("Representations"), *_representations(found)]
    return [*blocks, Heading("Costs"), Items(_COSTS)]


_COSTS = (
    "FLOPs are those of matrix products, a multiply-add counted as two, attention causal over a full context; "
    "per token, from the embedding to the logits. The modulation table is computed once per trajectory and not "
    "counted.",
    "kx / kMx is the paper's count: k blocks hold the parameters, k·M are computed. It leaves out embeddings, head "
    "and conditioning, which the true counts include.",
    "Training is counted as three forward passes per token and route.",
    "Seconds and tokens per second are those of the time when the number was measured.",
)


def _environment(found: Piece) -> str:
    made = found["made"]
    known = (("loopformer", "loopformer"), ("PyTorch", "torch"), ("lm-evaluation-harness", "lm_eval"))
    versions = [f"{label} {made[name]}" for label, name in (*known, ("matplotlib", "matplotlib")) if made[name]]
    return (
        f"Made {made['date']} on {made['device']}, {made['machine']}, in {made['dtype']}, with Python "
        f"{made['python']}, {listed(versions)}. No seed: nothing in these measurements is drawn at random, and the "
        "standard errors of accuracies follow from a formula. Seeds of training are in the table on training."
    )


def _report_command(found: Piece) -> str:
    asked = found["asked"]
    words = ["loopformer", "report", *(model["source"] for model in found["models"]), "--out", "DIR"]
    for text in asked["texts"]:
        words += ["--text", f"{text['name']}={text['source']}"]
    values = {
        "--tasks": asked["tasks"],
        "--data": asked["data"],
        "--limit": asked["limit"],
        "--budgets": asked["budgets"] and ",".join(map(str, asked["budgets"])),
        "--search": asked["search"],
        "--prompts": asked["prompts"],
        "--max-tokens": asked["max_tokens"],
        "--skip": ",".join(asked["skip"]) or None,
        "--field": asked["field"] if asked["field"] != "text" else None,
        "--dtype": asked["dtype"],
    }
    for option, value in values.items():
        words += [option, str(value)] if value is not None else []
    return _line([*words, *(["--search-tasks"] if asked["search_tasks"] else [])])


def _commands(found: Piece) -> list[str]:
    """For the first model: the command of each part."""
    model, asked = found["models"][0], found["asked"]
    common = ["--model", model["source"], "--dtype", asked["dtype"]]
    shorter = [] if asked["max_tokens"] is None else ["--max-tokens", str(asked["max_tokens"])]
    lines = []
    if rows := model["perplexity"]:
        given = [word for text in asked["texts"] for word in ("--text", text["source"])]
        lines.append(["eval", *common, *given, *shorter, "--budgets", _budgets(rows)])
    if runs := model["tasks"]:
        given = ["--data", asked["data"]] if asked["data"] else []
        given += [] if asked["limit"] is None else ["--limit", str(asked["limit"])]
        lines.append(["eval", *common, "--tasks", asked["tasks"], *given, "--budgets", _budgets(runs)])
    if model["search"]:
        given = ["--text", asked["texts"][0]["source"], "--budget", str(model["search"]["budget"])]
        lines.append(["search", *common, *given, *shorter])
    if model["analysis"]:
        given = ["--text", asked["texts"][0]["source"], "--prompts", str(asked["prompts"])]
        length = ["--length", str(model["analysis"]["length"])]
        lines.append(["analyze", "--model", model["source"], *given, *length])
    return [_line(["loopformer", *line]) for line in lines]


def _line(words: list[str]) -> str:
    """A command, broken before an option where it is long."""
    lines = [""]
    for word in words:
        if word.startswith("--") and len(lines[-1]) > _COMMAND:
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    return " \\\n    ".join(lines)


def _budgets(rows: list[Piece]) -> str:
    return ",".join(dict.fromkeys(str(row["budget"]) for row in rows))


def _model_table(found: Piece) -> Table:
    rows = []
    for model in found["models"]:
        sizes, settings = model["parameters"], model["settings"]
        rows.append(
            {
                **{
                    name: model[name]
                    for name in ("name", "source", "shape", "weights", "tokenizer", "dtype", "device")
                },
                **{name: settings[name] for name in ("conditioning", "width", "context", "vocab")},
                **{name: sizes[name] for name in ("total", "embeddings", "stack")},
                "conditioning_parameters": sizes["conditioning"],
                "step": model["training"] and model["training"]["step"],
            }
        )
    count = "{:,}".format
    columns = [
        Column("name", "model", text=True),
        Column("source", "source", text=True),
        Column("shape", "k⊗L", text=True),
        Column("conditioning", "conditioning", text=True),
        *(Column(one, one, hidden=True) for one in ("width", "context", "vocab", "dtype", "device", "tokenizer")),
        Column("total", "parameters", count),
        Column("embeddings", "in embeddings", count),
        Column("stack", "in the stack", count),
        Column("conditioning_parameters", "in conditioning", count),
        Column("step", "step", count, hidden=True),
        Column("weights", "weights, sha256", _short_hash, text=True),
    ]
    caption = "The models. The hash is of settings and weights as they are on disk."
    return Table("models", caption, columns, [Group(rows)])


def _protocol(found: Piece) -> str:
    rows = [row for model in found["models"] for row in model["perplexity"] or []]
    windows = sorted({row["window"] for row in rows})
    return (
        "Each document is read on its own after one end token; every token of it is scored once, end tokens are "
        f"not. Windows of {listed([str(one) for one in windows])} tokens without overlap. Perplexity is exp of the "
        "mean over all scored tokens, with sums in float64; bits per byte compare models with different tokenizers."
    )


def _text_table(found: Piece) -> Table | None:
    names = ("text", "part", "documents", "tokens", "bytes", "window", "sha256")
    rows = {
        tuple(row[name] for name in names): {name: row[name] for name in names}
        for model in found["models"]
        for row in model["perplexity"] or []
    }
    count = "{:,}".format
    columns = [
        Column("text", "text", text=True),
        Column("part", "part", text=True),
        Column("documents", "documents", count),
        Column("tokens", "tokens scored", count),
        Column("bytes", "bytes", count),
        Column("window", "window", count),
        Column("sha256", "text, sha256", _short_hash, text=True),
    ]
    caption = "The texts. The hash is of the documents' UTF-8, a zero byte between two."
    return Table("texts", caption, columns, [Group(list(rows.values()))]) if rows else None


def _detail_table(found: Piece) -> Table:
    names = ("text", "budget", "perplexity", "bits_per_byte", "seconds", "tokens_per_second", "dtype", "device")
    rows = [
        {"model": model["name"], **{name: row[name] for name in names}}
        for model in found["models"]
        for row in model["perplexity"] or []
    ]
    columns = [
        Column("model", "model", text=True),
        Column("text", "text", text=True),
        Column("budget", "M"),
        Column("perplexity", "perplexity", "{:.4f}".format),
        Column("bits_per_byte", "bits per byte", "{:.4f}".format),
        Column("seconds", "seconds", "{:.1f}".format),
        Column("tokens_per_second", "tokens/s", "{:,.0f}".format),
        Column("dtype", "dtype", hidden=True),
        Column("device", "device", hidden=True),
    ]
    return Table("perplexity", "Perplexity and bits per byte, and what measuring took.", columns, [Group(rows)])


def _benchmark_protocol(found: Piece) -> list[Block]:
    facts, runs = found["tasks"], next(model["tasks"] for model in found["models"] if model["tasks"])
    limit = "All examples" if facts["limit"] is None else f"The first {facts['limit']:,} examples of each task"
    said = (
        f"{limit}, zero-shot, with the prompts, choices and metrics of lm-evaluation-harness {facts['harness']}. "
        "acc_norm divides the log-likelihood of a choice by its length. A request that is longer than the context "
        "loses its beginning; the table counts these."
    )
    if runs[0]["paper"]:
        said += " The average is over ten benchmarks; ARC is the mean of its two tasks."
    rows = [_task_row(name, task, runs[0]["tasks"][name]) for name, task in facts["tasks"].items()]
    count = "{:,}".format
    columns = [
        Column("task", "task", text=True),
        Column("metric", "metric", text=True),
        Column("examples", "examples", count),
        Column("of", "of", count),
        Column("requests", "requests", count),
        Column("cut", "cut", count),
        Column("source", "data", text=True),
        Column("sha256", "data, sha256", _short_hash, text=True),
        Column("requests_sha256", "requests, sha256", hidden=True),
        Column("note", "stand-in", text=True, hidden=True),
    ]
    blocks: list[Block] = [said, Table("tasks", "The tasks and their data.", columns, [Group(rows)])]
    return [*blocks, *([Items(facts["notes"])] if facts["notes"] else [])]


def _task_row(name: str, facts: Piece, first: Piece) -> dict[str, Any]:
    data = facts["data"]
    row = {one: facts[one] for one in ("examples", "of", "requests", "requests_sha256", "note")}
    source = {"source": data.get("file") or data.get("dataset"), "sha256": data.get("sha256")}
    return {"task": name, "metric": first["metric"], "cut": first["cut"], **row, **source}


def _representations(found: Piece) -> list[Block]:
    first = next(model["analysis"] for model in found["models"] if model["analysis"])
    hashes = list(
        dict.fromkeys(model["analysis"]["tokens_sha256"] for model in found["models"] if model["analysis"])
    )
    said = (
        f"{first['prompts']} prompts of {first['length']} tokens from {first['documents']} documents of "
        f"{first['text']} ({first['part']}); sha256 of the tokens `{hashes[0][:_HASH]}`. Along the full trajectory "
        "of each model, states before the final norm; geometry and CKA in float64."
    )
    if len(hashes) > 1:
        said += " The models have different tokenizers, so their prompts are not the same tokens."
    return [said, Items([f"{name.replace('_', ' ')}: {DEFINITIONS[name]}." for name in _METRICS])]


def _short_hash(value: str) -> str:
    return f"`{value[:_HASH]}`"


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
