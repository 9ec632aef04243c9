"""`loopformer generate`: its options are obeyed, or refused in one clear sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from loopformer import LoopformerError
from loopformer.cli import app
from loopformer.evaluation.store import weights_hash
from loopformer.lm import load

from .models import save_small
from .process import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small(tmp_path_factory.mktemp("model") / "m", context=32)


def ask(model: str, *words: str) -> Result:
    asked = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "4", *words]
    return CliRunner().invoke(app, asked)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--int8", "--no-fast"], "Give --int8 or --no-fast, not both."),
        (["--fast"], "fast needs a CUDA device and Triton; leave it out."),
        (["--fast", "--certainty", "0.5"], "fast has no kernels for certainty; leave it out."),
        (["--certainty", "2"], "certainty must lie in (0, 1], got 2.0"),
        (["--certainty", "0.5", "--compare", "1,2"], "--certainty goes without --compare"),
        (["--certainty", "0.5", "--max-flops", "1e9"], "which are for fixed budgets"),
        (["--certainty", "0.5", "--fast", "--int8"], "int8 has no kernels for certainty"),
        (["--fast", "--int8"], "int8 needs a CUDA device and Triton"),
        (["--fast", "--int8", "--draft", "1"], "int8 needs a CUDA device and Triton"),
        (["--fast", "--max-ms-per-token", "5"], "which measures the plain path"),
        (["--dtype", "float33"], "There is no dtype 'float33'; did you mean float32?"),
        (["--budget", "2", "--draft", "2"], "A draft at budget 2 gains nothing for a text at budget 2"),
        (["--budget", "2", "--draft", "4"], "A draft at budget 4 gains nothing for a text at budget 2"),
    ],
)
def test_mistakes_are_one_clear_sentence(model: str, words: list[str], said: str) -> None:
    found = ask(model, *words)
    assert isinstance(found.exception, LoopformerError)
    assert said in str(found.exception)


def test_the_dtype_is_what_is_asked_for(model: str) -> None:
    texts = [json.loads(ask(model, "--json", *words).stdout) for words in ([], ["--dtype", "float32"])]
    assert texts[0]["logprobs"] == texts[1]["logprobs"]
    rounded = json.loads(ask(model, "--json", "--dtype", "bfloat16").stdout)
    assert rounded["logprobs"] != texts[0]["logprobs"]
    assert rounded["logprobs"][0] == pytest.approx(texts[0]["logprobs"][0], abs=0.1)


def test_what_was_found_for_the_weights_holds_in_any_dtype(model: str) -> None:
    entry = {"trajectory": "3-1", "weights": weights_hash(load(model).model)}
    (Path(model) / "schedules.json").write_text(json.dumps({"2": entry}))
    for dtype in ("float32", "bfloat16"):
        found = ask(model, "--budget", "2", "--schedule", "best", "--dtype", dtype, "--json")
        assert json.loads(found.stdout)["trajectory"] == "3-1"


def test_certainty_says_how_many_passes_it_took(model: str) -> None:
    assert "; 1.00 passes each; the limit" in ask(model, "--certainty", "1e-3").stderr
    assert "; 3.00 passes each; the limit" in ask(model, "--certainty", "1", "--budget", "3").stderr
    assert "passes" not in ask(model).stderr
    found = [json.loads(ask(model, "--json", *words).stdout) for words in ([], ["--certainty", "1e-3"])]
    assert [one["mean_passes"] for one in found] == [4, 1]
    drafted = ask(model, "--certainty", "1", "--draft", "1")
    assert drafted.stdout == ask(model).stdout
    assert "4.00 passes each; " in drafted.stderr


def test_where_nothing_was_drafted_nothing_was_accepted(model: str) -> None:
    one = ["--draft", "1", "--max-tokens", "1"]
    assert "nothing was drafted" in ask(model, *one).stderr
    assert json.loads(ask(model, *one, "--json").stdout)["draft_acceptance"] is None
    assert "% of drafted tokens accepted" in ask(model, "--draft", "1").stderr


def test_generate_streams_text_and_prints_json(model: str) -> None:
    on = ["--model", model, "--device", "cpu", "--max-tokens", "4"]
    found = json.loads(run("generate", "every pass", *on, "--trajectory", "2-1-1", "--json").stdout)
    assert (found["trajectory"], found["new_tokens"]) == ("2-1-1", 4)
    drafted = json.loads(
        run("generate", "every pass", *on, "--trajectory", "2-1-1", "--draft", "1", "--json").stdout
    )
    assert drafted["text"] == found["text"]
    assert 0 <= drafted["draft_acceptance"] <= 1
    shown = run("generate", "every pass", *on, "--trajectory", "2-1-1", "--draft", "1", "--draft-length", "2")
    assert shown.stdout == found["text"] + "\n"
    assert "goes with --draft" in run("generate", "a", *on, "--draft-length", "2", code=2).stderr
    assert run("generate", "every pass", *on, "--budget", "2").stdout.endswith("\n")
    rows = json.loads(run("generate", "every pass", *on, "--compare", "1,4", "--json").stdout)
    assert [row["budget"] for row in rows] == [1, 4]
    piped = subprocess.run(
        [sys.executable, "-m", "loopformer", "generate", *on, "--max-flops", "1e12"],
        input="every pass\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "budget 4 of 4" in piped.stderr
    assert "Give one of" in run("generate", "a", *on, "--budget", "1", "--compare", "1,2", code=2).stderr
    mistakes: list[tuple[list[str], bytes, str]] = [
        (["a", "--compare", "1,2", "--schedule", "best"], b"", "--schedule goes with --budget"),
        ([], b"caf\xe9", "not UTF-8"),
        (["caf\udce9"], b"", "not UTF-8"),
        ([], b"\n", "prompt is empty"),
    ]
    for words, given, said in mistakes:
        error = CliRunner().invoke(app, ["generate", *words, *on], input=given).exception
        assert isinstance(error, LoopformerError)
        assert said in str(error)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_on_a_gpu_reads_bfloat16_or_int8(model: str) -> None:
    pytest.importorskip("triton")
    fast = ["--device", "cuda", "--fast", "--json"]
    found = [json.loads(ask(model, *fast, *words).stdout) for words in ([], ["--dtype", "bfloat16"])]
    assert found[0]["logprobs"] == found[1]["logprobs"]
    for words in (["--int8"], ["--int8", "--draft", "1"]):
        assert json.loads(ask(model, *fast, *words).stdout)["new_tokens"] == found[0]["new_tokens"]
    assert "prompt and compilation included" in ask(model, "--device", "cuda", "--fast").stderr
