"""`loopformer report` as a user meets it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .models import save_small

Run = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """The command, in a folder with models of the same name in two places, and a text."""
    for name, loops in (("a/net", 4), ("b/net", 2)):
        save_small(tmp_path / name, context=24, loops=loops, modulator_start="normal")
    (tmp_path / "text.txt").write_text("every pass is told its time and its step, " * 40)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("x")
    monkeypatch.chdir(tmp_path)

    return partial(command, "report")


def test_one_command_makes_the_whole_folder(run: Run, tmp_path: Path) -> None:
    words = ("a/net", "b/net", "--out", "out", "--text", "mine=text.txt", "--prompts", "4")
    code, out, err = run(*words, "--json")
    assert code == 0
    files = json.loads(out)
    assert files[0] == "out/report.html"
    assert all((tmp_path / file).is_file() for file in files)
    assert "not in the report: Tasks: No tasks were asked for" in err
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| a/net (1⊗4) | 4 |" in text
    assert "| b/net (1⊗2) | 2 |" in text
    assert "Tasks: No tasks were asked for" in text
    code, out, _ = run(*words, "--skip", "search,analysis")
    assert (code, out.strip()) == (0, "out/report.html")
    assert "--skip search" in (tmp_path / "out" / "report.md").read_text()
    for file in (tmp_path / "out").rglob("*.*"):
        assert str(tmp_path).encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nothing"], 1, "no file or folder"),
        (["a/net", "./a/net"], 2, "given twice"),
        (["a/net", "--skip", "task"], 2, "did you mean tasks"),
        (["a/net", "--budgets", "1,5"], 2, "5 is above the 4 loops of the deepest model; choose 1 to 4"),
        (["a/net", "--budgets", "0"], 2, "1 or more"),
        (["a/net", "--search", "5"], 2, "above the 4 loops"),
        (["a/net", "--out", "thesis"], 1, "not empty and holds no report"),
        (["a/net", "--out", "text.txt"], 1, "is a file"),
        (["a/net", "--text", "none.txt"], 1, "none.txt"),
        (["a/net", "--text", "x=none.txt"], 1, "none.txt"),
        (["a/net", "--data", "nowhere"], 1, "no folder nowhere"),
        (["a/net", "--prompts", "0"], 2, "--prompts"),
        (["a/net", "--limit", "0"], 2, "--limit"),
        (["a/net", "--search-tasks"], 2, "--search-tasks"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, words: list[str], code: int, said: str) -> None:
    words = words + ([] if "--out" in words else ["--out", "out"])
    left, out, error = run(*words, *([] if "--text" in words else ["--text", "text.txt"]))
    assert left == code
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not out
