"""What earlier versions wrote loads, resumes, and is found again; see fixtures/make.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make

from loopformer import load
from loopformer.errors import FileProblem

V1 = Path(__file__).parent / "fixtures" / "v1"
EXPECTED: dict[str, Any] = json.loads((V1 / "reference.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, to work in."""
    folder = tmp_path / "v1"
    shutil.copytree(V1, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def kept() -> dict[str, bytes]:
    """The finished pieces beside the run."""
    return {path.name: path.read_bytes() for path in Path("run", "evaluation").iterdir()}


def reported() -> dict[str, Any]:
    """What the report says of the run, without the time that it took to put schedules together."""
    (model,) = json.loads(Path("report", "report.json").read_text(encoding="utf-8"))["models"]
    assert all(model[part] for part in ("training", "perplexity", "search", "analysis"))
    del model["search"]["seconds"]
    return dict(model)


@pytest.mark.parametrize("source", ["run", "model", "exported"])
def test_models_load_and_compute_the_same(source: str) -> None:
    assert_close(make.logits(source), EXPECTED["logits"][source])


def test_an_export_keeps_its_default_trajectory() -> None:
    assert str(load("exported").default_trajectory) == "2-1-1"
    assert load("run").default_trajectory is None


@pytest.mark.parametrize("step", make.KEPT)
def test_every_checkpoint_is_a_model(step: int) -> None:
    text = load(f"run/checkpoints/step-{step:08d}").generate(make.PROMPT, max_tokens=2)
    assert text.reason == "length"


def test_a_killed_run_goes_on_as_if_nothing_had_happened() -> None:
    done = make.loopformer("train", "--resume", "--out", "run")
    assert (done["step"], done["finished"]) == (make.STEPS, True)
    ended = make.ended("run")
    assert_close(ended["losses"], EXPECTED["whole_run"]["losses"])
    assert_close(ended["weights"], EXPECTED["whole_run"]["weights"])
    lines = Path("run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert steps == list(range(1, make.STEPS + 1))


def test_stored_results_are_found_again() -> None:
    before = kept()
    rows, expected = make.loopformer(*make.EVAL)["perplexity"], EXPECTED["eval"]["perplexity"]
    assert all(row["reused"] for row in rows)
    for name in ("trajectory", "text", "sha256", "tokens", "perplexity", "bits_per_byte"):
        assert [row[name] for row in rows] == [row[name] for row in expected]
    found = make.loopformer(*make.SEARCH)
    assert found["schedules"] == EXPECTED["search"]["schedules"]
    assert found["best"] == EXPECTED["search"]["best"]
    assert kept() == before


def test_numbers_are_the_same_when_measured_again() -> None:
    shutil.rmtree("run/evaluation")
    rows, expected = make.loopformer(*make.EVAL)["perplexity"], EXPECTED["eval"]["perplexity"]
    assert not any(row["reused"] for row in rows)
    assert_close([row["perplexity"] for row in rows], [row["perplexity"] for row in expected])


def test_stored_answers_to_tasks_are_found_again() -> None:
    pytest.importorskip("lm_eval")
    before = kept()
    runs, expected = make.loopformer(*make.EVAL_TASKS)["tasks"]["runs"], EXPECTED["eval_tasks"]["tasks"]["runs"]
    assert [run["tasks"] for run in runs] == [run["tasks"] for run in expected]
    assert kept() == before


def test_a_report_takes_over_what_is_stored() -> None:
    before, earlier = kept(), reported()
    del earlier["training"]["model"], earlier["training"]["same"]  # no longer part of a report
    make.loopformer(*make.REPORT)
    now = reported()
    assert now["search"].pop("chosen") == now["search"]["best"]  # new since; earlier results have no blocks to test
    assert now["search"].pop("gain") is None
    # The same sentence in other words.
    assert (now["missing"].pop("tasks")[:8], earlier["missing"].pop("tasks")[:13]) == ("No tasks", "No benchmarks")
    assert now == earlier
    assert kept() == before


def test_the_best_schedule_is_followed() -> None:
    entry = json.loads(Path("run", "schedules.json").read_text(encoding="utf-8"))["2"]
    found = make.loopformer(*make.BEST)
    assert found["trajectory"] == EXPECTED["best"]["trajectory"] == entry["trajectory"]
    assert_close(found["logprobs"], EXPECTED["best"]["logprobs"])
    (row,) = make.loopformer("eval", "--model", "run", "--budgets", "2", "--schedule", "best")["perplexity"]
    assert row["trajectory"] == entry["trajectory"]
    assert_close(row["perplexity"], entry["perplexity"])


def test_an_analysis_is_repeated() -> None:
    (stored,) = json.loads(Path("analysis", "analysis.json").read_text(encoding="utf-8"))["results"]
    (again,) = make.loopformer(*make.ANALYZE)["results"]
    assert again["tokens_sha256"] == stored["tokens_sha256"]
    assert again["metrics"].keys() == stored["metrics"].keys()
    for name in ("curvature", "anisotropy", "prompt_entropy", "lens_divergence"):
        assert_close(again["metrics"][name], stored["metrics"][name])
    assert_close(again["cka"], stored["cka"])


def test_a_run_is_used_from_anywhere(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings name the data as the user wrote it, from the folder that the run was started in."""
    monkeypatch.chdir(tmp_path)
    run, stored = str(here / "run"), json.loads((here / "analysis" / "analysis.json").read_text(encoding="utf-8"))

    def there(words: list[str]) -> list[str]:
        return [run if word == "run" else word for word in words]

    rows, expected = make.loopformer(*there(make.EVAL))["perplexity"], EXPECTED["eval"]["perplexity"]
    assert [row["sha256"] for row in rows] == [row["sha256"] for row in expected]
    assert [row["text"] for row in rows] == ["v1/prepared"] * len(rows)
    assert make.loopformer(*there(make.SEARCH))["best"] == EXPECTED["search"]["best"]
    (analysed,) = make.loopformer(*there(make.ANALYZE))["results"]
    assert analysed["tokens_sha256"] == stored["results"][0]["tokens_sha256"]
    make.loopformer(*there(make.REPORT))
    reported()
    assert make.loopformer("train", "--resume", "--out", run)["finished"]


def test_an_analysis_does_not_take_another_text(here: Path) -> None:
    shutil.rmtree("prepared")
    with pytest.raises(FileProblem, match=r"The data that run was trained on cannot be found; give .* --text"):
        make.loopformer(*make.ANALYZE)


def test_an_export_runs_without_the_package(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = f"""
import json, sys
sys.modules["loopformer"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
ids = torch.tensor([{make.IDS}])
print(json.dumps([model(input_ids=ids, budget=budget).logits[0, -1].tolist() for budget in (1, 2, 4)]))
print(json.dumps(model(input_ids=ids).logits[0, -1].tolist()))
"""
    places = {"HF_HOME": str(tmp_path / "hf"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **places}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    budgets, default = map(json.loads, done.stdout.splitlines())
    assert_close(budgets, EXPECTED["logits"]["exported"])
    lm = load("exported")
    with torch.no_grad():
        ours = lm.model(torch.tensor([make.IDS]), "2-1-1").logits[0, -1, : lm.model.config.vocab]
    assert_close(default, ours.tolist())
