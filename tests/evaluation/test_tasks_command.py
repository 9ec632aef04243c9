"""`loopformer eval --tasks` as a user meets it: a process of its own, with and without the harness."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopformer import LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import save_model

from .examples import write_local

# A machine that has only what loopformer itself needs.
BARE = "import sys; [sys.modules.__setitem__(m, None) for m in ('lm_eval', 'datasets', 'transformers')]; "
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(*words: str, code: int = 0, bare: bool = False) -> subprocess.CompletedProcess[str]:
    start = f"{BARE if bare else ''}from loopformer.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "eval", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **OFFLINE},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 9, 280)
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=64, vocab=tokenizer.vocab_size)
    folder = tmp_path_factory.mktemp("models") / "mine"
    save_model(LoopedLM(config), folder)
    tokenizer.save(folder)
    return str(folder)


def _numbers(found: dict[str, Any]) -> list[Any]:
    return [[task["metrics"] for task in run["tasks"].values()] for run in found["tasks"]["runs"]]


def test_direct_and_by_way_of_a_machine_without_the_harness(tmp_path: Path, model: str) -> None:
    pytest.importorskip("lm_eval")
    data = ["--data", str(write_local(tmp_path / "data"))]
    common = ["--model", model, "--budgets", "1,4", "--device", "cpu"]
    direct = run(*common, "--tasks", "paper", *data, "--out", str(tmp_path / "direct.json"))
    assert "average of 10" in direct.stdout
    assert "ARC, mean of both" in direct.stdout
    assert "hellaswag is a stand-in: 2 examples instead of 10,042." in direct.stdout
    assert "race: 2 of 2 examples, race_high.test.jsonl sha256 " in direct.stdout

    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    run("--tasks", "paper", *data, "--export-requests", str(requests))
    run(*common, "--score-requests", str(requests), "--out", str(answers), bare=True)
    collected = json.loads(run("--aggregate", str(answers), *data, "--json").stdout)
    assert _numbers(collected) == _numbers(json.loads((tmp_path / "direct.json").read_text()))


def test_without_the_harness_it_says_what_to_install(model: str) -> None:
    error = run("--model", model, "--tasks", "paper", code=2, bare=True).stderr
    assert "lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'." in error


def test_wrong_usage_is_one_sentence(tmp_path: Path, model: str) -> None:
    from typer.testing import CliRunner

    from loopformer.cli import app

    for words, said in (
        (["--export-requests", "a"], "Say what to export with --tasks"),
        (["--tasks", "paper", "--aggregate", "a"], "leave out --tasks"),
        (["--score-requests", "a", "--aggregate", "b"], "Give one of --export-requests"),
        (["--limit", "5"], "--limit goes with --tasks"),
        (["--data", str(tmp_path)], "--data goes with --tasks"),
        (["--tasks", "paper", "--limit", "0"], "--limit must be 1 or more"),
        (["--tasks", "paper", "--data", str(tmp_path / "no")], "There is no folder"),
        (["--tasks", "paper", "--data", str(tmp_path)], "has no data for copa"),
        (["--score-requests", str(tmp_path / "no")], "Say which model"),
        (["--model", model, "--score-requests", str(tmp_path / "no"), "--device", "cpu"], "cannot be read"),
        (["--aggregate", str(tmp_path / "no")], "cannot be read"),
    ):
        error = CliRunner().invoke(app, ["eval", *words]).exception
        assert said in str(error), words
    data = str(write_local(tmp_path / "data"))
    error = (
        CliRunner()
        .invoke(app, ["eval", "-m", model, "--tasks", "copa", "--data", data, "--budgets", "5"])
        .exception
    )
    assert "Budget 5 is above the model's 4 loops" in str(error)
