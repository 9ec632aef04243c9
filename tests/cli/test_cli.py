"""The command line as a user meets it: a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopformer.cli import app
from loopformer.errors import LoopformerError

REFERENCE = Path(__file__).parent.parent / "reference"


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "loopformer", *words], capture_output=True, text=True, env=None, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    started = time.perf_counter()
    assert "info" in run("--help").stdout
    assert time.perf_counter() - started < 3  # under 1 s on a quiet machine; the real check is the next one
    code = "import sys, loopformer.cli; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_info_of_a_preset_counts_what_the_paper_has() -> None:
    report = json.loads(run("info", "--model", "paper/loopformer", "--json").stdout)
    assert report["shape"] == "3⊗8"
    assert report["parameters"]["total"] == 278_169_600
    assert report["training_gflops_per_token"]["overhead"] == pytest.approx(1.55, abs=0.005)
    assert [row["budget"] for row in report["budgets"]] == list(range(1, 9))
    assert "278,169,600" in run("info", "--model", "paper/loopformer").stdout
    assert "small/tmlt" in run("info").stdout.split()


def _weights(tmp_path: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(REFERENCE / "loopformer.safetensors")
    file = tmp_path / "published.safetensors"
    save_file({n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}, file)
    return file


def test_import_then_info(tmp_path: Path) -> None:
    file, out = _weights(tmp_path), tmp_path / "model"
    assert "2⊗8" in run("import", str(file), str(out), "--heads", "4", "--loops", "8").stdout
    assert json.loads(run("info", "--model", str(out), "--json").stdout)["settings"]["loops"] == 8
    assert (
        json.loads(run("info", "--model", str(file), "--heads", "4", "--loops", "6", "--json").stdout)["settings"][
            "loops"
        ]
        == 6
    )
    assert (
        "already holds a model" in run("import", str(file), str(out), "--heads", "4", "--loops", "8", code=2).stderr
    )
    run("import", str(file), str(out), "--heads", "4", "--loops", "4", "--force")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("info", "--model", "paper/loopfromer"), 1, "did you mean paper/loopformer"),
        (("info", "--model", "/no/such/place"), 1, "no file or folder"),
        (("info", "--model", "demo", "--context", "0"), 2, "--context must be 1 or more"),
        (("import", "/no/such/file.pt", "/tmp/out"), 1, "no file or folder"),
        (("inof",), 2, "No such command"),
    ],
)
def test_mistakes_are_one_sentence_and_no_traceback(words: tuple[str, ...], code: int, said: str) -> None:
    error = run(*words, code=code).stderr
    assert said in error
    assert "Traceback" not in error


def test_generate_streams_text_and_prints_json(tmp_path: Path) -> None:
    from loopformer import LoopedLM, ModelConfig
    from loopformer.data.tokenizer import Tokenizer
    from loopformer.loading import save_model

    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 9, 280)
    config = ModelConfig(blocks=1, loops=4, width=16, heads=2, ffn=32, context=32, vocab=tokenizer.vocab_size)
    save_model(LoopedLM(config), tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    model = ["--model", str(tmp_path / "m"), "--device", "cpu", "--max-tokens", "4"]
    found = json.loads(run("generate", "every pass", *model, "--trajectory", "2-1-1", "--json").stdout)
    assert (found["trajectory"], found["new_tokens"]) == ("2-1-1", 4)
    drafted = json.loads(
        run("generate", "every pass", *model, "--trajectory", "2-1-1", "--draft", "1", "--json").stdout
    )
    assert drafted["text"] == found["text"]
    assert 0 <= drafted["draft_acceptance"] <= 1
    shown = run("generate", "every pass", *model, "--trajectory", "2-1-1", "--draft", "1", "--draft-length", "2")
    assert shown.stdout == found["text"] + "\n"
    assert "goes with --draft" in run("generate", "a", *model, "--draft-length", "2", code=2).stderr
    assert run("generate", "every pass", *model, "--budget", "2").stdout.endswith("\n")
    rows = json.loads(run("generate", "every pass", *model, "--compare", "1,4", "--json").stdout)
    assert [row["budget"] for row in rows] == [1, 4]
    piped = subprocess.run(
        [sys.executable, "-m", "loopformer", "generate", *model, "--max-flops", "1e12"],
        input="every pass\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "budget 4 of 4" in piped.stderr
    assert "Give one of" in run("generate", "a", *model, "--budget", "1", "--compare", "1,2", code=2).stderr
    mistakes: list[tuple[list[str], bytes, str]] = [
        (["a", "--compare", "1,2", "--schedule", "best"], b"", "--schedule goes with --budget"),
        ([], b"caf\xe9", "not UTF-8"),
        (["caf\udce9"], b"", "not UTF-8"),
        ([], b"\n", "prompt is empty"),
    ]
    for words, given, said in mistakes:
        error = CliRunner().invoke(app, ["generate", *words, *model], input=given).exception
        assert isinstance(error, LoopformerError)
        assert said in str(error)
