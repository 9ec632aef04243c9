"""`loopformer calibrate`, and `generate --adaptive` with what it found, as a user meets them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .models import save_small

Run = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """The command, in a folder with two models and two texts."""
    for name, std in (("one", 0.3), ("two", 0.31)):
        save_small(tmp_path / name, context=16, std=std)
    (tmp_path / "text.txt").write_text("every pass is told its time and its step, " * 40)
    (tmp_path / "short.txt").write_text("no")
    monkeypatch.chdir(tmp_path)

    return command


def test_calibrate_then_generate(run: Run, tmp_path: Path) -> None:
    words = ("calibrate", "-m", "one", "--text", "text.txt", "--mean-budget", "2.5", "--out", "found")
    code, out, _ = run(*words)
    assert code == 0
    assert "at fixed budgets" in out
    assert (tmp_path / "found" / "calibration.png").is_file()
    content = json.loads(run(*words, "--json")[1])
    assert content["mean_budget_where_picked"] <= 2.5
    assert content["against_fixed"]["passes"]["outcome"] in ("better", "worse", "equal")
    code, out, _ = run("generate", "every pass", "-m", "one", "--adaptive", "found", "--max-tokens", "4", "--json")
    report = json.loads(out)["adaptive"]
    assert code == 0
    assert sum(report["chosen"].values()) == report["tokens"] > 0
    code, _, err = run("generate", "every pass", "-m", "one", "--adaptive", "found/calibration.json")
    assert "passes and" in err
    code, _, err = run("generate", "every pass", "-m", "two", "--adaptive", "found")
    assert code == 1
    assert "made for other weights" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--mean-budget", "0"), 2, "must lie in 1 to 4"),
        (("--mean-budget", "nan"), 2, "must lie in 1 to 4"),
        (("--mean-budget", "2", "--text", "short.txt"), 2, "windows of 16 tokens, but 4 are needed"),
        (("--mean-budget", "2", "--text", "nothing.txt"), 1, "no file, folder or text"),
        (
            ("--mean-budget", "2", "--choices", "1;2"),
            2,
            "--choices takes whole numbers of 1 or more, such as 1,2,4",
        ),
        (("--mean-budget", "2", "--measure", "entropi"), 2, "did you mean entropy"),
        (("--mean-budget", "2", "--fill", "guess"), 2, "valid are exact, copy"),
        (("--mean-budget", "2", "--out", "text.txt"), 1, "text.txt"),
        (("--mean-budget", "2", "--windows", "0"), 2, "--windows must be 1 or more"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, words: tuple[str, ...], code: int, said: str) -> None:
    defaults = [] if "--out" in words else ["--out", "found"]
    defaults += [] if "--text" in words else ["--text", "text.txt"]
    left, _, err = run("calibrate", "-m", "one", *defaults, *words)
    assert left == code
    assert said in err
    assert "Traceback" not in err
