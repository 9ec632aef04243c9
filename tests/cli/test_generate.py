"""`loopformer generate`: its options are obeyed, or refused in one clear sentence."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.cli import app
from loopformer.data.tokenizer import Tokenizer
from loopformer.evaluation.store import weights_hash
from loopformer.lm import load
from loopformer.loading import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "m"
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 9, 280)
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=32, vocab=tokenizer.vocab_size)
    save_model(LoopedLM(config), folder)
    tokenizer.save(folder)
    return str(folder)


def ask(model: str, *words: str) -> Result:
    asked = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "4", *words]
    return CliRunner().invoke(app, asked)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--int8"], "--int8 goes with --fast."),
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


def test_fast_without_a_gpu_says_that_it_changes_nothing(model: str) -> None:
    plain, fast = ask(model), ask(model, "--fast")
    assert fast.stdout == plain.stdout
    assert "--fast changes nothing here" in fast.stderr
    assert "prompt included" in fast.stderr


def test_where_nothing_was_drafted_nothing_was_accepted(model: str) -> None:
    one = ["--draft", "1", "--max-tokens", "1"]
    assert "nothing was drafted" in ask(model, *one).stderr
    assert json.loads(ask(model, *one, "--json").stdout)["draft_acceptance"] is None
    assert "% of drafted tokens accepted" in ask(model, "--draft", "1").stderr


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
