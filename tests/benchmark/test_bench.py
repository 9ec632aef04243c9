"""`loopformer bench` measures what it says, on a machine without a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loopformer import LoopedLM, LoopformerError
from loopformer.benchmark.machine import describe, source_commit
from loopformer.benchmark.train import train
from loopformer.cli import app
from loopformer.config import ModelConfig, load_run
from loopformer.config.run import paper_run
from loopformer.loading import save_model
from loopformer.model.cost import Cost

CPU = torch.device("cpu")


@pytest.mark.parametrize("loops", [1, 4])
@pytest.mark.parametrize("conditioning", ["trajectory", "none"])
def test_training_is_measured_by_every_way(tiny: ModelConfig, loops: int, conditioning: Any) -> None:
    run = paper_run(replace(tiny, loops=loops, conditioning=conditioning))
    report = train(run, [2], CPU, "float32", steps=2)
    ways = [(row["path"], row["routes"]) for row in report["rows"]]
    routes = ["objective", "full"] if loops > 1 else ["full"]
    assert ways[: 2 * len(routes)] == [(path, each) for path in ("naive", "plain") for each in routes]
    assert all(row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in report["rows"])


def test_the_objective_of_a_preset_is_measured(tiny: ModelConfig) -> None:
    run = replace(load_run("elastic")[0], model=replace(tiny, loops=8))
    (mixed, full) = train(run, [16], CPU, "float32", ["plain"], steps=2)["rows"]
    assert (mixed["routes"], full["routes"]) == ("objective", "full")
    cost, tokens = Cost(run.model), [row["tokens_per_second"] for row in (mixed, full)]
    per_token = [1e12 * row["tflops"] / rate for row, rate in zip((mixed, full), tokens, strict=True)]
    assert per_token[1] == pytest.approx(cost.training_flops())
    # Of 16 rows 8 take 8 loops, 2 take 4 to 7, 2 take 2 or 3, and 4 take one.
    low, high = (
        cost.training_flops(budgets=[8] * 8 + [a] * 2 + [b] * 2 + [1] * 4) / 16 for a, b in ((4, 2), (7, 3))
    )
    assert low <= per_token[0] <= high
    with pytest.raises(LoopformerError, match=r"rows 0.0625 of 8 rows is less than one row"):
        train(run, [8], CPU, "float32", ["plain"], steps=1)


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
        (["decode", "--int8"], "--int8 was removed; choose the dtype int8 on a CPU"),
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
    report = train(
        paper_run(tiny), [8], torch.device("cuda"), paths=["naive", "fused", "fused recomputed"], steps=1
    )
    peaks = {row["path"]: row["peak_gib"] for row in report["rows"] if row["routes"] == "objective"}
    assert peaks["fused recomputed"] < peaks["fused"] < peaks["naive"]
