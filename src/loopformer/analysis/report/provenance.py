"""How each number was made: commands, weights, texts, data files, settings, versions; and what the words mean.

blocks = provenance(found)      # found: what collect.collect returned
"""

import shlex
from typing import Any

from loopformer.analysis.dynamics import DEFINITIONS
from loopformer.analysis.report.document import Block, Column, Commands, Group, Heading, Items, Table
from loopformer.analysis.report.numbers import listed
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
        blocks += [Heading("Benchmarks"), *_benchmarks(found)]
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
        Column("weights", "weights, sha256", _short, text=True),
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
        Column("sha256", "text, sha256", _short, text=True),
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


def _benchmarks(found: Piece) -> list[Block]:
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
        Column("sha256", "data, sha256", _short, text=True),
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


def _short(value: str) -> str:
    return f"`{value[:_HASH]}`"
