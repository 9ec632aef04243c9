"""The paper's ten zero-shot benchmarks: which tasks of lm-evaluation-harness, which metric, which local file.

    PAPER["arc"].tasks                               # ("arc_easy", "arc_challenge"), averaged into one
    found = read_local("data/eval", "hellaswag")     # the file, its examples in the form the harness expects
    paper_scores({"copa": 0.61, …})                  # ten scores and their average

Local files are JSON lines named TASK.SPLIT.jsonl, one example a line with the data set's own fields, as listed in
docs/benchmarks.md. The paper reports normalised accuracy where the harness has it, and the mean of both ARC tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformer.errors import FileProblem

Example = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One task of the harness and its local form."""

    metric: str  # what the paper reports
    folder: str  # of its definition, under the harness's lm_eval/tasks
    split: str  # the split that the harness scores
    examples: int  # in that split
    fields: tuple[str, ...]  # of an example
    file: str = ""  # first part of the local file's name, where it is not the task's


@dataclass(frozen=True)
class Benchmark:
    """One column of the paper's table."""

    label: str
    tasks: tuple[str, ...]


_ARC = ("question", "choices", "answerKey")
TASKS = {
    "copa": Task(
        "acc", "super_glue/copa", "validation", 100, ("premise", "choice1", "choice2", "question", "label")
    ),
    "hellaswag": Task("acc_norm", "hellaswag", "validation", 10_042, ("query", "choices", "label")),
    "lambada_openai": Task("acc", "lambada", "test", 5_153, ("text",)),
    "openbookqa": Task("acc_norm", "openbookqa", "test", 500, ("question_stem", "choices", "answerKey")),
    "piqa": Task("acc_norm", "piqa", "validation", 1_838, ("goal", "sol1", "sol2", "label")),
    "race": Task("acc", "race", "test", 1_045, ("article", "problems"), file="race_high"),
    "social_iqa": Task(
        "acc", "siqa", "validation", 1_954, ("context", "question", "answerA", "answerB", "answerC", "label")
    ),
    "arc_easy": Task("acc_norm", "arc", "test", 2_376, _ARC),
    "arc_challenge": Task("acc_norm", "arc", "test", 1_172, _ARC),
    "sciq": Task(
        "acc_norm",
        "sciq",
        "test",
        1_000,
        ("question", "correct_answer", "distractor1", "distractor2", "distractor3", "support"),
    ),
    "winogrande": Task("acc", "winogrande", "validation", 1_267, ("sentence", "option1", "option2", "answer")),
}
PAPER = {
    "copa": Benchmark("COPA", ("copa",)),
    "hellaswag": Benchmark("HellaSwag", ("hellaswag",)),
    "lambada": Benchmark("LAMBADA", ("lambada_openai",)),
    "openbookqa": Benchmark("OpenBookQA", ("openbookqa",)),
    "piqa": Benchmark("PIQA", ("piqa",)),
    "race": Benchmark("RACE", ("race",)),
    "social_iqa": Benchmark("Social IQa", ("social_iqa",)),
    "arc": Benchmark("ARC", ("arc_easy", "arc_challenge")),
    "sciq": Benchmark("SciQ", ("sciq",)),
    "winogrande": Benchmark("WinoGrande", ("winogrande",)),
}
_UNCLEANED = ("activity_label", "ctx_a", "ctx_b", "endings", "label")  # HellaSwag as it is on the Hub


@dataclass(frozen=True)
class Local:
    """A local file's examples, as the harness's own definition of the task reads them."""

    file: str
    sha256: str
    examples: tuple[Example, ...]
    cleaned: bool  # the harness's own preparation of the examples is done already
    note: str | None  # how this is not what the harness scores


def paper_scores(values: Mapping[str, float]) -> dict[str, float] | None:
    """The paper's ten scores and their average, from one value per task; None unless all eleven are there."""
    if not TASKS.keys() <= values.keys():
        return None
    scores = {
        name: sum(values[task] for task in benchmark.tasks) / len(benchmark.tasks)
        for name, benchmark in PAPER.items()
    }
    return {**scores, "average": sum(scores.values()) / len(scores)}


def read_local(folder: str | Path, name: str) -> Local:
    """The local form of a task: the split that the harness scores, else a stand-in, of which `note` tells."""
    task = TASKS[name]
    path = _find(Path(folder), name, task)
    content = path.read_bytes()
    examples = [_prepared(one, name) for one in _examples(path, content, task, name)]
    split = path.name.removeprefix(f"{task.file or name}.").removesuffix(".jsonl").rstrip("0123456789")
    notes = []
    if split != task.split:
        notes.append(f"the {split} split instead of {task.split}")
    if len(examples) != task.examples:
        notes.append(f"{len(examples):,} examples instead of {task.examples:,}")
    note = f"{name} is a stand-in: {', '.join(notes)}." if notes else None
    cleaned = name == "hellaswag" and "query" in examples[0]
    return Local(path.name, hashlib.sha256(content).hexdigest(), tuple(examples), cleaned, note)


def _find(folder: Path, name: str, task: Task) -> Path:
    """The task's own split first, whole before in part, then another one."""
    if not folder.is_dir():
        raise FileProblem(f"There is no folder {folder}; --data takes one with files like copa.validation.jsonl.")
    stem = task.file or name
    others = [split for split in ("test", "validation") if split != task.split]
    for split in (task.split, *others):
        for path in (folder / f"{stem}.{split}.jsonl", *sorted(folder.glob(f"{stem}.{split}[0-9]*.jsonl"))):
            if path.is_file():
                return path
    raise FileProblem(
        f"{folder} has no data for {name}; put {stem}.{task.split}.jsonl there, or leave {name} out of --tasks."
    )


def _examples(path: Path, content: bytes, task: Task, name: str) -> list[Example]:
    """The file's lines, each with the fields that the task needs."""
    found = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except ValueError as error:
            raise FileProblem(f"Line {number} of {path} is no JSON; the file is damaged.") from error
        if not isinstance(example, dict):
            raise FileProblem(f"Line {number} of {path} is no JSON object; it should be an example of {name}.")
        fields = _UNCLEANED if name == "hellaswag" and "ctx_a" in example else task.fields
        missing = next((field for field in fields if field not in example), None)
        if missing:
            raise FileProblem(f"Line {number} of {path} has no field {missing}; is this the file of another task?")
        found.append(example)
    if not found:
        raise FileProblem(f"{path} is empty; it should hold the examples of {name}, one a line.")
    return found


def _prepared(example: Example, name: str) -> Example:
    """An example as the Hub's data set has it: RACE's problems are the text of a Python list there."""
    if name == "race" and not isinstance(example["problems"], str):
        return {**example, "problems": repr(example["problems"])}
    return example
