"""The paper's ten benchmarks and their local files."""

import hashlib
from pathlib import Path

import pytest

from loopformer.errors import FileProblem
from loopformer.evaluation.tasks import PAPER, TASKS, paper_scores, read_local

from .examples import HUB, LOCAL, write_lines, write_local


def test_ten_scores_and_their_average() -> None:
    values = {name: number / 100 for number, name in enumerate(TASKS)}
    scores = paper_scores(values)
    assert scores is not None
    assert len(PAPER) == 10
    assert scores["arc"] == pytest.approx((values["arc_easy"] + values["arc_challenge"]) / 2)
    assert scores["average"] == pytest.approx(sum(scores[name] for name in PAPER) / 10)
    assert paper_scores({name: 0.5 for name in TASKS if name != "sciq"}) is None


def test_every_task_is_in_one_benchmark() -> None:
    assert sorted(task for benchmark in PAPER.values() for task in benchmark.tasks) == sorted(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_files_are_read_with_their_hash(tmp_path: Path, name: str) -> None:
    folder = write_local(tmp_path)
    found = read_local(folder, name)
    assert found.sha256 == hashlib.sha256((folder / found.file).read_bytes()).hexdigest()
    assert len(found.examples) == len(LOCAL[name])
    assert found.note == f"{name} is a stand-in: 2 examples instead of {TASKS[name].examples:,}."


def test_another_split_and_a_part_are_stand_ins(tmp_path: Path) -> None:
    write_lines(tmp_path / "sciq.validation.jsonl", LOCAL["sciq"] * 500)
    assert read_local(tmp_path, "sciq").note == "sciq is a stand-in: the validation split instead of test."
    write_lines(tmp_path / "sciq.test.jsonl", LOCAL["sciq"] * 500)
    assert read_local(tmp_path, "sciq").note is None  # the split that the harness scores comes first
    write_lines(tmp_path / "hellaswag.validation4.jsonl", LOCAL["hellaswag"] * 2)
    assert read_local(tmp_path, "hellaswag").note == "hellaswag is a stand-in: 4 examples instead of 10,042."


def test_hellaswag_is_cleaned_once(tmp_path: Path) -> None:
    path = tmp_path / "hellaswag.validation.jsonl"
    write_lines(path, LOCAL["hellaswag"])
    assert read_local(tmp_path, "hellaswag").cleaned
    write_lines(path, HUB["hellaswag"])
    assert not read_local(tmp_path, "hellaswag").cleaned


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal"', "Line 2 of .* is no JSON;"),
        ('{"goal": "a", "sol1": "b", "label": 0}\n', "Line 1 of .* has no field sol2"),
        ("[1, 2]\n", "is no JSON object"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "piqa.validation.jsonl").write_text(content)
    with pytest.raises(FileProblem, match=said):
        read_local(tmp_path, "piqa")


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"no data for race; put race_high\.test\.jsonl there"):
        read_local(tmp_path, "race")
    with pytest.raises(FileProblem, match="There is no folder"):
        read_local(tmp_path / "no", "race")
