"""`loopformer eval --states` as a user meets it."""

import json
from pathlib import Path

import pytest

from loopformer.errors import LoopformerError
from loopformer.plots import available

from .models import save_small
from .process import invoke


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps."""
    out = str(tmp_path_factory.mktemp("runs") / "s3")
    small = ["model.width=16", "model.heads=2", "model.ffn=32", "model.loops=3", "training.batch=4"]
    steps = ["training.steps=2", "training.warmup=1", "training.validation_windows=2", "training.device=cpu"]
    assert invoke("train", "states", *small, *steps, "--out", out, "--json").exit_code == 0
    return out


def test_a_run_is_measured_on_its_own_group(tracker: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "map.png"
    words = ["eval", "--model", tracker, "--device", "cpu", "--sequences", "32", "--seed", "5"]
    drawn = ["--figure", str(picture)] if available() else []
    shown = invoke(*words, "--out", str(out), *drawn).stdout
    assert "products over S3 (6 elements, chance 16.7 %), 32 words of 16, seed 5, float32 on cpu" in shown
    assert "early exit" in shown
    found = json.loads(out.read_text())["states"]
    assert [row["budget"] for row in found["trajectories"]] == [1, 2, 3]
    assert all(len(row["right"]) == 16 for row in found["trajectories"])
    assert picture.is_file() == available()
    more = invoke(*words, "--states", "S3", "--budgets", "2,5", "--trajectory", "2-1", "--beyond", "--json").stdout
    again = json.loads(more)["states"]["trajectories"]
    assert [row["trajectory"] for row in again] == ["2", "5", "2-1"]
    assert again[0] == found["trajectories"][1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--states", "S4"], "There is no group 'S4'; choose S3, A5 or S5"),
        (["--budgets", "4"], "Budget 4 is above the model's 3 loops"),
        (["--sequences", "0"], "--sequences must be 1 or more"),
        (["--states", "A5"], "The model's tokens are not the elements of A5"),
        (["--states", "S3", "--tasks", "paper"], "--states is measured on its own"),
        (["--schedule", "best"], "--schedule is for texts and tasks"),
        (["--window", "8"], "--window is for texts; leave it out"),
        (["--stride", "8"], "--stride is for texts"),
        (["--join"], "--join is for texts"),
        (["--states", "S3", "--max-tokens", "8"], "--max-tokens is for texts"),
        (["--field", "body"], "--field is for texts"),
        (["--figure", "map.bmp"], "No picture can be drawn as map.bmp"),
    ],
)
def test_what_is_wrong_is_one_sentence(tracker: str, words: list[str], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        invoke("eval", "--model", tracker, "--device", "cpu", *words)


def test_options_of_tracking_go_with_it(tmp_path: Path) -> None:
    model = save_small(tmp_path / "text", context=16)
    for words in (["--sequences", "5"], ["--seed", "1"], ["--beyond"], ["--figure", "a.png"]):
        with pytest.raises(LoopformerError, match=f"{words[0]} goes with --states"):
            invoke("eval", "--model", model, *words)


def test_other_commands_say_that_there_is_no_text(tracker: str) -> None:
    with pytest.raises(LoopformerError, match="was trained on words over S3, not on text"):
        invoke("search", "--model", tracker, "--budget", "2", "--device", "cpu")
