"""`loopformer eval` and `loopformer search` as a user meets them."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from loopformer import LoopedLM, ModelConfig
from loopformer.cli import app
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.loading import save_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["its time and its step"] * 20, 280)
    config = ModelConfig(
        blocks=1,
        loops=4,
        width=16,
        heads=2,
        ffn=32,
        context=16,
        vocab=tokenizer.vocab_size,
        modulator_start="normal",
    )
    save_model(LoopedLM(config), tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    return str(tmp_path / "m")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("its time and its step, " * 9)
    return str(tmp_path / "a.txt")


def run(*words: str) -> Result:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_table_then_json_from_what_is_kept(model: str, text: str, tmp_path: Path) -> None:
    words = ["eval", "--model", model, "--text", text, "--device", "cpu"]
    first = run(*words, "--budgets", "1,2", "--trajectory", "3-1")
    assert "207 bytes, 1 document, each on its own, windows of 16, no overlap, float32 on cpu" in first.stdout
    assert [line.split()[:2] for line in first.stdout.splitlines()[3:]] == [
        ["1", "uniform"],
        ["2", "uniform"],
        ["2", "3-1"],
    ]
    assert f"kept in {Path(model) / 'evaluation'}" in first.stderr
    out = tmp_path / "deep" / "out.json"
    again = run(*words, "--budgets", "2,4", "--out", str(out), "--json")
    report = json.loads(again.stdout)
    assert json.loads(out.read_text()) == report
    assert [(row["budget"], row["reused"]) for row in report["perplexity"]] == [(2, True), (4, False)]
    assert f"{report['perplexity'][0]['perplexity']:.3f}" in first.stdout


def test_the_best_schedule_is_found_saved_and_used(model: str, text: str, tmp_path: Path) -> None:
    picture = tmp_path / "s.png"
    words = ["--model", model, "--device", "cpu"]
    found = run("search", *words, "--budget", "2", "--text", text, "--figure", str(picture))
    assert "all 3 schedules in steps of 1/4" in found.stdout
    assert "use it with --schedule best" in found.stderr
    assert picture.stat().st_size > 1000
    best = json.loads((Path(model) / "schedules.json").read_text())["2"]["trajectory"]
    evaluated = run("eval", *words, "--text", text, "--budgets", "1,2", "--schedule", "best", "--json")
    assert [row["trajectory"] for row in json.loads(evaluated.stdout)["perplexity"]] == ["1", best]
    written = run("generate", *words, "its", "--budget", "2", "--schedule", "best", "--max-tokens", "2", "--json")
    assert json.loads(written.stdout)["trajectory"] == best
    report = json.loads(run("search", *words, "--budget", "2", "--text", text, "--json").stdout)
    assert report["best"]["trajectory"] == best


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budgets", "5"], "Budget 5 is above the model's 4 loops"),
        (["--budgets", "1,x"], "--budgets takes whole numbers of 1 or more, such as 1,2,4, not '1,x'"),
        (["--trajectory", "a-b"], "Cannot read 'a-b' as a trajectory"),
        (["--budgets", "2", "--schedule", "best"], "No best schedule of budget 2 is saved"),
        (["--stride", "17"], "--stride must be 1 to the window of 16, got 17"),
        (["--max-tokens", "3"], "has 3 tokens to score, fewer than one window of 16"),
        (["--dtype", "float8"], "There is no dtype 'float8'"),
        (["--text", "opnwebtext"], "did you mean openwebtext"),
    ],
)
def test_what_is_wrong_is_one_sentence(model: str, text: str, words: list[str], sentence: str) -> None:
    given = [] if "--text" in words else ["--text", text]
    with pytest.raises(LoopformerError, match=sentence):
        run("eval", "--model", model, "--device", "cpu", *given, *words)


def test_without_text_only_a_run_can_be_evaluated(model: str) -> None:
    with pytest.raises(LoopformerError, match="has no prepared data of its own; say what to measure on"):
        run("eval", "--model", model, "--device", "cpu")


def test_a_folder_is_no_file_to_write(model: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match="--out names a file to write"):
        run("eval", "--model", model, "--text", text, "--out", str(tmp_path))
    assert not (Path(model) / "evaluation").exists()  # said before any work
