"""`loopformer bench` measures what it says, on a machine without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loopformer import LoopedLM, LoopformerError
from loopformer.benchmark.decode import decode
from loopformer.benchmark.machine import best_of, describe
from loopformer.benchmark.memory import memory
from loopformer.benchmark.train import train
from loopformer.cli import app
from loopformer.config import ModelConfig
from loopformer.loading import save_model

CPU = torch.device("cpu")


def test_every_combination_is_measured_and_bytes_are_the_cost_models(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny).eval()
    said: list[object] = []
    report = decode(model, [1, 4], [1, 2], [8], tokens=2, say=said.append)
    assert [(row["batch"], row["budget"]) for row in report["rows"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert said == report["rows"]
    for row in report["rows"]:
        weights = model.cost.decode_bytes(row["budget"], 0, 4)
        assert row["bytes"] == weights + row["batch"] * 8 * model.cost.kv_bytes(row["budget"], 4)
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms_per_step"])
        assert row["mbu"] == pytest.approx(row["gb_per_second"] / report["copy_gb_per_second"])


def test_training_is_measured_by_every_way(tiny: ModelConfig) -> None:
    report = train(tiny, 2, CPU, "float32", compiled=False, steps=1)
    ways = [(row["path"], row["routes"]) for row in report["rows"]]
    assert ways[:4] == [
        ("naive", "full and short"),
        ("naive", "full"),
        ("ours", "full and short"),
        ("ours", "full"),
    ]
    assert all(row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in report["rows"])


def test_the_machine_is_named_and_time_is_the_least() -> None:
    machine = describe(CPU)
    assert machine["torch"] == torch.__version__
    assert machine["copy_gb_per_second"] > 0
    calls: list[int] = []
    assert best_of(3, CPU, lambda: calls.append(1)) >= 0
    assert len(calls) == 4


def test_the_command_prints_json_last_and_writes_it(tiny: ModelConfig, tmp_path: Path) -> None:
    save_model(LoopedLM(tiny), tmp_path / "m")
    asked = ["--model", str(tmp_path / "m"), "--device", "cpu"]
    found = CliRunner().invoke(
        app, ["bench", "decode", *asked, "--tokens", "2", "--budgets", "1,2", "--out", str(tmp_path / "d.json")]
    )
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "d.json").read_text())
    assert [row["budget"] for row in report["rows"]] == [1, 2]
    found = CliRunner().invoke(
        app, ["bench", "train", *asked, "--micro-batch", "1", "--steps", "1", "--no-compiled"]
    )
    assert json.loads(found.stdout.splitlines()[-1])["benchmark"] == "train"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["decode", "--budgets", "9"], "above the model's 4 loops"),
        (["decode", "--budgets", "two"], "such as 1,2,4"),
        (["decode", "--contexts", "32"], "do not fit the context of 32"),
        (["decode", "--dtype", "int3"], "Unknown dtype"),
        (["train", "--dtype", "float16"], "bfloat16 or float32"),
        (["train", "--micro-batch", "0"], "must be 1 or more"),
        (["memory"], "is measured on a GPU"),
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
    report = memory(tiny, [8], torch.device("cuda"), compiled=False)
    peaks = {row["path"]: row["peak_gib"] for row in report["rows"]}
    assert peaks["ours, loops recomputed"] < peaks["ours"]
