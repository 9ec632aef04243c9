"""Requests and answers come back from their files as they were, or not at all."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer.errors import FileProblem
from loopformer.evaluation.tasks import (
    Answered,
    Answers,
    Query,
    Requests,
    digest,
    read_answers,
    read_requests,
    write_answers,
    write_requests,
)


def _requests(texts: list[str]) -> Requests:
    queries = {
        "one": [Query("loglikelihood", (text, " x")) for text in texts],
        "two": [Query("generate_until", ("a", {"until": texts, "temperature": 0.5}))],
    }
    facts = {"tasks": {task: {"requests_sha256": digest(asked)} for task, asked in queries.items()}}
    return Requests(facts, queries)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_requests_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    file = tmp_path_factory.mktemp("exchange") / "requests.jsonl"
    requests = _requests(texts)
    write_requests(file, requests)
    assert read_requests(file) == requests


def test_answers_come_back_to_the_last_digit(tmp_path: Path) -> None:
    answered = Answered([[-0.1 - 0.2, True], [-1e-17, False]], tokens=7, cut=1, seconds=0.25)
    texts = Answered(["a\u2028b\n"], 3, 0, 0.5)
    answers = Answers(
        {"tasks": {}}, {"path": "m"}, {"1": {"one": answered}, "2-1-1": {"one": answered, "two": texts}}
    )
    write_answers(tmp_path / "new" / "answers.jsonl", answers)
    assert read_answers(tmp_path / "new" / "answers.jsonl") == answers


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    with pytest.raises(FileProblem, match="cannot be read"):
        read_requests(file)
    write_requests(file, _requests(["a", "b"]))
    with pytest.raises(FileProblem, match="no file of answers"):
        read_answers(file)
    lines = file.read_text().splitlines(keepends=True)
    for damage in ("".join(lines[:-1]), "".join(lines)[:-9], "", lines[0], "".join([*lines, "[]\n"])):
        file.write_text(damage)
        with pytest.raises(FileProblem, match=r"damaged|no file of requests"):
            read_requests(file)
    head = json.loads(lines[0])
    file.write_text(json.dumps({**head, "version": 9}) + "\n")
    with pytest.raises(FileProblem, match="has version 9"):
        read_requests(file)
