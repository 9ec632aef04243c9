"""`loopformer search` with benchmarks: ranked by both, and by accuracy without any text."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopformer import LM
from loopformer.cli import app
from loopformer.errors import LoopformerError
from loopformer.loading import save_model

from .examples import write_local


def search(*words: str) -> str:
    done = CliRunner().invoke(app, ["search", *words, "--device", "cpu"])
    if isinstance(done.exception, LoopformerError):
        raise done.exception
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_schedules_by_tasks(lm: LM, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model = tmp_path / "model"
    save_model(lm.model, model)
    lm.need_tokenizer().save(model)
    common = [
        "--model",
        str(model),
        "--budget",
        "2",
        "--tasks",
        "copa,piqa",
        "--data",
        str(write_local(tmp_path / "d")),
    ]
    both = json.loads(search(*common, "--text", str(file), "--json"))
    assert both["by"] == "both"
    assert {"perplexity", "accuracy"} <= set(both["best"])
    assert both["tasks"]["names"] == ["copa", "piqa"]
    assert json.loads((model / "schedules.json").read_text())["2"]["tasks"] == ["copa", "piqa"]
    table = search(*common, "--by", "accuracy")
    assert "accuracy" in table
    assert "perplexity" not in table


def test_options_that_belong_together(lm: LM, file: Path, tmp_path: Path) -> None:
    save_model(lm.model, tmp_path / "model")
    lm.need_tokenizer().save(tmp_path / "model")
    common = ["--model", str(tmp_path / "model"), "--budget", "2", "--text", str(file)]
    with pytest.raises(LoopformerError, match="--data and --examples go with --tasks"):
        search(*common, "--examples", "5")
    with pytest.raises(LoopformerError, match="Ranking by accuracy needs tasks; give --tasks"):
        search(*common, "--by", "accuracy")
    with pytest.raises(LoopformerError, match="end the name with"):
        search(*common, "--figure", str(tmp_path / "schedules.doc"))
    assert not (tmp_path / "model" / "evaluation").exists()  # refused before the work
