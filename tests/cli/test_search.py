"""`loopformer search` as a user meets it: by perplexity, by tasks, by both."""

import json
from pathlib import Path

import pytest
from evaluation.examples import write_local

from loopformer.errors import LoopformerError
from loopformer.evaluation import schedules

from .process import invoke


def test_the_best_schedule_is_found_saved_and_used(model: str, text: str, tmp_path: Path) -> None:
    picture = tmp_path / "s.png"
    words = ["--model", model, "--device", "cpu"]
    found = invoke("search", *words, "--budget", "2", "--text", text, "--figure", str(picture))
    assert "all 3 schedules in steps of 1/4" in found.stdout
    assert "use it with --schedule best" in found.stderr
    assert picture.stat().st_size > 1000
    best = json.loads((Path(model) / "schedules.json").read_text())["2"]["trajectory"]
    evaluated = invoke("eval", "text", *words, "--text", text, "--budgets", "1,2", "--schedule", "best", "--json")
    assert [row["trajectory"] for row in json.loads(evaluated.stdout)["perplexity"]] == ["1", best]
    written = invoke(
        "generate", *words, "its", "--budget", "2", "--schedule", "best", "--max-tokens", "2", "--json"
    )
    assert json.loads(written.stdout)["trajectory"] == best
    report = json.loads(invoke("search", *words, "--budget", "2", "--text", text, "--json").stdout)
    assert report["chosen"]["trajectory"] == best


def test_schedules_by_tasks(model: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    common = ["--model", model, "--device", "cpu", "--budget", "2", "--tasks", "copa,piqa"]
    common += ["--data", str(write_local(tmp_path / "d"))]
    both = json.loads(invoke("search", *common, "--text", text, "--json").stdout)
    assert both["by"] == "both"
    assert {"perplexity", "accuracy"} <= set(both["best"])
    assert both["tasks"]["names"] == ["copa", "piqa"]
    assert json.loads((Path(model) / "schedules.json").read_text())["2"]["tasks"] == ["copa", "piqa"]
    table = invoke("search", *common, "--by", "accuracy").stdout
    assert "accuracy" in table
    assert "perplexity" not in table


def test_options_that_belong_together(model: str, text: str, tmp_path: Path) -> None:
    common = ["--model", model, "--device", "cpu", "--budget", "2", "--text", text]
    with pytest.raises(LoopformerError, match="--data and --examples go with --tasks"):
        invoke("search", *common, "--examples", "5")
    with pytest.raises(LoopformerError, match="Ranking by accuracy needs tasks; give --tasks"):
        invoke("search", *common, "--by", "accuracy")
    with pytest.raises(LoopformerError, match="end the name with"):
        invoke("search", *common, "--figure", str(tmp_path / "schedules.doc"))
    assert not (Path(model) / "evaluation").exists()  # refused before the work


def test_a_gain_within_noise_is_said_and_equal_steps_are_saved(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["search", "--model", model, "--device", "cpu", "--budget", "2", "--text", text]
    for is_significant, said, saved in (
        (False, "within the 0.70 % that the best of 3 may gain by chance, so equal steps are as good", "2"),
        (True, "more than the 0.70 % that the best of 3 may gain by chance", "1-3"),
    ):
        gain = {"nats_per_token": 0.005, "stderr": 0.002, "needed": 3.5, "is_significant": is_significant}
        monkeypatch.setattr(schedules, "best_gain", lambda *_, gain=gain: gain)
        found = invoke(*words)
        assert f"1-3 has 0.50 % less perplexity than equal steps, {said}" in found.stdout
        name = "1-3" if is_significant else "the schedule of equal steps"
        assert f"{name} saved in {Path(model) / 'schedules.json'}; use it with --schedule best" in found.stderr
        assert json.loads((Path(model) / "schedules.json").read_text())["2"]["trajectory"] == saved
