"""`loopformer analyze` as a user meets it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .models import save_small
from .process import press_control_c

Run = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """The command, in a folder with two models of different depth, one without a tokenizer, and a text."""
    for name, loops in (("one", 4), ("two", 2), ("mute", 4)):
        save_small(
            tmp_path / name, context=24, loops=loops, with_tokenizer=name != "mute", modulator_start="normal"
        )
    (tmp_path / "text.txt").write_text("every pass is told its time and its step, " * 40)
    (tmp_path / "short.txt").write_text("no")
    monkeypatch.chdir(tmp_path)

    return partial(command, "analyze")


def test_models_and_budgets_become_files(run: Run, tmp_path: Path) -> None:
    text = ("--text", "text.txt", "--prompts", "5", "--length", "12")
    code, out, _ = run("-m", "one", "-m", "two", *text, "--budget", "1,2", "--out", "found", "--json")
    found = json.loads(out)
    names = [(one["model"], one["shape"], one["trajectory"]) for one in found["results"]]
    assert code == 0
    assert names == [
        (name, f"1⊗{loops}", trajectory) for name, loops in (("one", 4), ("two", 2)) for trajectory in "12"
    ]
    assert {one["tokens"] for one in found["results"]} == {60}
    assert len(found["files"]) == 9
    assert all((tmp_path / file).is_file() for file in found["files"])
    assert json.loads((tmp_path / "found/analysis.json").read_text())["results"] == found["results"]


def test_models_without_data_of_their_own_are_told_what_they_are_measured_on(run: Run) -> None:
    code, out, err = run("-m", "two", "--prompts", "2", "--length", "8")
    assert code == 0
    assert "No model here has data of its own; using stdlib. Choose a text with --text." in err
    assert "documents of stdlib" in out


def test_the_full_trajectory_is_the_default_and_a_schedule_can_be_asked_for(run: Run) -> None:
    text = ("--text", "text.txt", "--prompts", "2")
    code, out, _ = run("-m", "one", "-m", "two", *text)
    assert code == 0
    assert "2 prompts of 24 tokens" in out
    assert "M = 4" in out
    assert "M = 2" in out
    _, out, _ = run("-m", "one", *text, "--states", "after", "--trajectory", "2-1-1")
    assert "states after the final norm" in " ".join(out.split())
    assert "one 1⊗4, 2-1-1" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-m", "one", "--budget", "5"], 2, "one: budget 5 is above the model's 4 loops"),
        (["-m", "one", "-m", "two", "--budget", "4"], 2, "two: budget 4 is above the model's 2 loops"),
        (["-m", "one", "--budget", "0"], 2, "1 or more"),
        (["-m", "one", "--budgets", "1,many"], 2, "not '1,many'"),
        (["-m", "mute"], 2, "came without a tokenizer"),
        (["-m", "one", "--prompts", "0"], 2, "number of prompts must be 1 or more"),
        (["-m", "one", "--states", "between", "--prompts", "2"], 2, "before or after the final norm"),
        (["-m", "one", "--length", "25"], 2, "above the context of 24 tokens"),
        (["-m", "one", "--prompts", "500"], 2, "500 prompts were asked for"),
        (["-m", "one", "--text", "short.txt"], 2, "no document of 24 tokens"),
        (["-m", "one", "--text", "none.txt"], 1, "none.txt"),
        (["-m", "one", "-m", "./one"], 2, "given twice"),
        (["-m", "nothing"], 1, "no file or folder"),
        (["-m", "one", "--out", "text.txt/in"], 1, "text.txt"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, words: list[str], code: int, said: str) -> None:
    text = [] if "--text" in words else ["--text", "text.txt"]
    left, _, error = run(*words, *text)
    assert left == code
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_budgets_that_a_model_lacks_are_left_out(run: Run) -> None:
    words = ["-m", "one", "-m", "two", "--budgets", "2,4", "--text", "text.txt", "--prompts", "2"]
    code, out, error = run(*words)
    assert code == 0
    assert error.strip() == "two: budget 4 is above the model's 2 loops. Left out."
    shown = [line for line in out.splitlines() if "⊗" in line]
    assert shown == ["one 1⊗4, M = 2", "one 1⊗4, M = 4", "two 1⊗2, M = 2"]


def test_control_c_says_that_the_analysis_starts_again(run: Run, tmp_path: Path) -> None:
    words = ["analyze", "-m", "one", "-m", "two", "--text", "text.txt", "--prompts", "2", "--out", "deep/out"]
    error = press_control_c("loopformer.analysis.dynamics.analyze", 2, *words)
    # On a slow machine lines about the progress come before.
    assert error.endswith(
        "loopformer: stopped; an analysis is written when all is measured, the same command starts again.\n"
    )
    assert not (tmp_path / "deep").exists()
