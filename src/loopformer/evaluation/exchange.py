"""Requests and answers as files, for machines without lm-evaluation-harness.

    write_requests("requests.jsonl", Requests(facts, {"copa": [Query(…), …]}))      # where the harness is
    asked = read_requests("requests.jsonl")                                         # where the model is
    write_answers("answers.jsonl", Answers(asked.facts, model, runs))
    read_answers("answers.jsonl").runs["4"]["copa"].values                          # where the harness is

JSON lines. The first line says what the file is; then one request a line, or the answers of one (trajectory, task)
a line. Log-likelihoods keep every digit, so nothing changes on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopformer.errors import FileProblem
from loopformer.evaluation.queries import Answered, Query, digest
from loopformer.files import write_atomic

REQUESTS, ANSWERS, VERSION = "loopformer-requests", "loopformer-answers", 1

Queries = Mapping[str, list[Query]]  # of each task
Run = Mapping[str, Answered]  # of each task


@dataclass(frozen=True)
class Requests:
    """All requests of some tasks; `facts` is what the harness needs to build the same tasks again.

    facts["tasks"][name]["requests_sha256"] is the hash of a task's requests, which shows that a file is whole.
    """

    facts: Mapping[str, Any]
    queries: Queries


@dataclass(frozen=True)
class Answers:
    """Answers of one model to all requests, along each trajectory."""

    facts: Mapping[str, Any]
    model: Mapping[str, Any]
    runs: Mapping[str, Run]  # by trajectory


def write_requests(path: str | Path, requests: Requests) -> None:
    lines = (
        {"task": task, "kind": query.kind, "arguments": query.arguments}
        for task, queries in requests.queries.items()
        for query in queries
    )
    _write(path, {"format": REQUESTS, "version": VERSION, "facts": requests.facts}, lines)


def read_requests(path: str | Path) -> Requests:
    head, lines = _read(path, REQUESTS, "write it with --export-requests")
    queries: dict[str, list[Query]] = {}
    try:
        for line in lines:
            queries.setdefault(line["task"], []).append(Query(line["kind"], tuple(line["arguments"])))
        expected = {task: one["requests_sha256"] for task, one in head["facts"]["tasks"].items()}
        whole = expected == {task: digest(asked) for task, asked in queries.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if not whole:
        raise _damaged(path)
    return Requests(head["facts"], queries)


def write_answers(path: str | Path, answers: Answers) -> None:
    head = {"format": ANSWERS, "version": VERSION, "facts": answers.facts, "model": answers.model}
    lines = (
        {"trajectory": trajectory, "task": task, **asdict(answered)}
        for trajectory, run in answers.runs.items()
        for task, answered in run.items()
    )
    _write(path, head, lines)


def read_answers(path: str | Path) -> Answers:
    head, lines = _read(path, ANSWERS, "write it with --score-requests")
    runs: dict[str, dict[str, Answered]] = {}
    try:
        for line in lines:
            trajectory, task = line.pop("trajectory"), line.pop("task")
            runs.setdefault(trajectory, {})[task] = Answered(**line)
        return Answers(head["facts"], head["model"], runs)
    except (KeyError, TypeError) as error:
        raise _damaged(path) from error


def _write(path: str | Path, head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), text.encode())


def _read(path: str | Path, expected: str, how: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path} cannot be read; {how}.") from error
    try:
        head, *lines = [json.loads(line) for line in text.split("\n") if line]
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(head, dict) or head.get("format") != expected:
        kind = "requests" if expected == REQUESTS else "answers"
        raise FileProblem(f"{path} is no file of {kind}; {how}.")
    if head.get("version") != VERSION:
        found = head.get("version")
        raise FileProblem(f"{path} has version {found!r}, this loopformer reads {VERSION}; update it.")
    return head, lines


def _damaged(path: str | Path) -> FileProblem:
    return FileProblem(f"{path} is damaged; write it again.")
