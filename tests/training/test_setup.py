"""Runs whose passes are fused: the same training, and a sentence where they cannot be."""

from pathlib import Path

import pytest
import torch

from loopformer import LoopformerError
from loopformer.config import load_run
from loopformer.training.distributed import Ranks
from loopformer.training.launch import launch
from loopformer.training.setup import fused_precision

from .runs import Small, go_back
from .runs import training_losses as losses


def test_a_fused_run_trains_what_a_plain_one_does(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "plain", quiet=True)
    launch("demo", small(training__fused="true"), tmp_path / "fused", quiet=True)
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "plain"), abs=2e-5)


def test_a_plain_run_goes_on_fused(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "whole", quiet=True)
    launch("demo", small(), tmp_path / "cut", quiet=True)
    go_back(tmp_path / "cut", 2)
    launch(None, ["training.fused=true"], tmp_path / "cut", resume=True, quiet=True)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), abs=2e-5)


def test_fp8_learns(small: Small, tmp_path: Path) -> None:
    steps = {"training__steps": 12, "training__learning_rate": 0.003, "training__min_learning_rate": 0.003}
    launch("demo", small(**steps), tmp_path / "fp32", quiet=True)
    launch("demo", small(**steps, training__dtype="float8"), tmp_path / "fp8", quiet=True)
    exact, low = losses(tmp_path / "fp32"), losses(tmp_path / "fp8")
    assert low[-1] < low[0] - 0.5
    assert low == pytest.approx(exact, abs=0.1)
    assert low != exact


def test_what_is_refused_leaves_nothing_behind(small: Small, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match=r"float8 needs training\.fused"):
        launch("demo", small(training__dtype="float8", training__fused="false"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert launch("demo", small(), tmp_path / "run", quiet=True)["finished"]


def precision(device: str, world: int = 1, *overrides: str) -> object:
    ranks = Ranks(0, world, torch.device(device))
    return fused_precision(load_run("demo", list(overrides))[0], ranks)


def test_auto_is_for_gpus_and_what_cannot_be_is_said() -> None:
    assert precision("cpu", 1, "training.dtype=bfloat16") is None
    assert precision("cuda", 1, "training.dtype=float32") is None
    assert precision("cpu", 1, "training.fused=true") is not None
    assert precision("cpu", 1, "training.dtype=float8") is not None
    with pytest.raises(LoopformerError, match=r"float8 needs training\.fused"):
        precision("cpu", 1, "training.dtype=float8", "training.fused=false")
    with pytest.raises(LoopformerError, match="multiples of 16"):
        precision("cpu", 1, "training.dtype=float8", "model.ffn=200")
    with pytest.raises(LoopformerError, match="use ddp"):
        precision("cpu", 2, "training.fused=true", "training.strategy=fsdp")
    with pytest.raises(LoopformerError, match="not on mps"):
        precision("mps", 1, "training.fused=true")
