"""`loopformer bench` measures what it says, on a machine without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loopformer import LoopedLM, LoopformerError
from loopformer.benchmark.machine import describe, source_commit
from loopformer.benchmark.train import train
from loopformer.cli import app
from loopformer.config import ModelConfig
from loopformer.loading import save_model

CPU = torch.device("cpu")


def test_training_is_measured_by_every_way(tiny: ModelConfig) -> None:
    report = train(tiny, [2], CPU, "float32", steps=1)
    ways = [(row["path"], row["routes"]) for row in report["rows"]]
    assert ways[:4] == [
        ("naive", "full and short"),
        ("naive", "full"),
        ("plain", "full and short"),
        ("plain", "full"),
    ]
    assert all(row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in report["rows"])


def test_the_machine_and_the_commit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = describe(CPU)
    assert machine["torch"] == torch.__version__
    assert {"python", "triton", "transformers", "peak_tflops", "commit"} <= set(machine)
    assert machine["copy_gb_per_second"] > 0
    monkeypatch.setenv("PATH", "")  # no git
    assert source_commit() is None


def test_the_command_prints_lines_or_json_and_writes_it(tiny: ModelConfig, tmp_path: Path) -> None:
    save_model(LoopedLM(tiny), tmp_path / "m")
    asked = ["--model", str(tmp_path / "m"), "--device", "cpu"]
    few = ["--tokens", "2", "--budgets", "1,2", "--paths", "plain, naive", "--out", str(tmp_path / "d.json")]
    found = CliRunner().invoke(app, ["bench", "decode", *asked, *few])
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "d.json").read_text())
    assert [(row["path"], row["budget"]) for row in report["rows"]] == [("plain", 1), ("plain", 2), ("naive", 2)]
    *lines, machine, _ = found.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "plain", "naive"]
    assert max(map(len, lines)) <= 80
    assert all(word in machine for word in (report["device"], "float32", f"torch {torch.__version__}"))
    found = CliRunner().invoke(app, ["bench", "decode", *asked, *few, "--json"])
    assert json.loads(found.stdout)["rows"][0]["path"] == "plain"
    assert found.stderr.startswith("plain")
    found = CliRunner().invoke(app, ["bench", "train", *asked, "--micro-batch", "1", "--steps", "1", "--json"])
    assert json.loads(found.stdout)["benchmark"] == "train"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["decode", "--budgets", "9"], "above the model's 4 loops"),
        (["decode", "--budgets", "two"], "such as 1,2,4"),
        (["decode", "--contexts", "32"], "do not fit the context of 32; ask for fewer with --contexts or --tokens"),
        (["decode", "--contexts", "28", "--tokens", "2"], "28 tokens, 4 to warm up and 2 new ones do not fit"),
        (["engine", "--paths", "static"], "The path static was removed"),
        (
            ["engine", "--tokens", "2", "--paths", "plane"],
            "There is no path 'plane' of the engine; did you mean plain?",
        ),
        (
            ["engine", "--context", "32"],
            "32 prompt tokens and up to 128 new ones (twice --tokens) do not fit the context of 32",
        ),
        (["decode", "--dtype", "int3"], "There is no dtype 'int3'"),
        (["decode", "--int8"], "--int8 was removed; leave it out"),
        (
            ["decode", "--tokens", "2", "--paths", "plane"],
            "There is no path 'plane' of decoding; did you mean plain?",
        ),
        (["decode", "--tokens", "2", "--paths", "fused"], "fused: it needs a CUDA device"),
        (["train", "--dtype", "float16"], "bfloat16 or float32"),
        (["train", "--paths", "fast"], "no path 'fast' of training"),
        (["train", "--paths", ","], "Name a path of training to measure"),
        (["train", "--paths", "fused fp8"], "measured with --dtype bfloat16"),
        (["train", "--micro-batch", "0"], "--micro-batches takes"),
        (["memory", "--micro-batches", "4"], "bench memory was removed; use bench train"),
    ],
)
def test_mistakes_are_one_clear_sentence(tiny: ModelConfig, tmp_path: Path, options: list[str], said: str) -> None:
    save_model(LoopedLM(tiny), tmp_path / "m")
    verb, *rest = options
    found = CliRunner().invoke(app, ["bench", verb, "--model", str(tmp_path / "m"), "--device", "cpu", *rest])
    assert isinstance(found.exception, LoopformerError)
    assert said in str(found.exception)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recomputing_loops_takes_less_memory(tiny: ModelConfig) -> None:
    report = train(tiny, [8], torch.device("cuda"), paths=["naive", "fused", "fused recomputed"], steps=1)
    peaks = {row["path"]: row["peak_gib"] for row in report["rows"] if row["routes"] == "full and short"}
    assert peaks["fused recomputed"] < peaks["fused"] < peaks["naive"]
