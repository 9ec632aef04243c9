"""`loopformer eval` as a user meets it: perplexity, tasks with and without the harness, and state tracking."""

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation.examples import write_local

from loopformer.errors import LoopformerError
from loopformer.plots import has_matplotlib

from .models import save_small
from .process import invoke, run


def test_a_table_then_json_from_what_is_kept(model: str, text: str, tmp_path: Path) -> None:
    words = ["eval", "text", model, "--text", text, "--device", "cpu"]
    first = invoke(*words, "--budgets", "1,2", "--trajectory", "3-1")
    assert "207 bytes, 1 document, each on its own, windows of 16, no overlap, float32 on cpu" in first.stdout
    assert [line.split()[:2] for line in first.stdout.splitlines()[3:]] == [
        ["1", "uniform"],
        ["2", "uniform"],
        ["2", "3-1"],
    ]
    assert f"kept in {Path(model) / 'evaluation'}" in first.stderr
    out = tmp_path / "deep" / "out.json"
    again = invoke(*words, "--budgets", "2,4", "--out", str(out), "--json")
    report = json.loads(again.stdout)
    assert json.loads(out.read_text()) == report
    assert [(row["budget"], row["reused"]) for row in report["perplexity"]] == [(2, True), (4, False)]
    assert f"{report['perplexity'][0]['perplexity']:.3f}" in first.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budgets", "5"], "Budget 5 is above the model's 4 loops"),
        (["--budgets", "1,x"], "--budgets takes whole numbers of 1 or more, such as 1,2,4, not '1,x'"),
        (["--trajectory", "a-b"], "Cannot read 'a-b' as a trajectory"),
        (["--budgets", "2", "--schedule", "best"], "No best schedule of budget 2 is saved"),
        (["--stride", "17"], "--stride must be 1 to the window of 16, got 17"),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more, got 0"),
        (["--dtype", "float8"], "There is no dtype 'float8'"),
        (["--text", "opnwebtext"], "did you mean openwebtext"),
        (["--text", "nope.txt"], "There is no file, folder or text nope.txt; check the path"),
        (["--certainty", "0.5,x"], "--certainty takes numbers above 0 and up to 1, such as 0.5,0.9, not '0.5,x'"),
        (["--certainty", "0.5,2"], "--certainty takes numbers above 0 and up to 1, such as 0.5,0.9, not '0.5,2'"),
    ],
)
def test_what_is_wrong_is_one_sentence(model: str, text: str, words: list[str], sentence: str) -> None:
    given = [] if "--text" in words else ["--text", text]
    with pytest.raises(LoopformerError, match=sentence):
        invoke("eval", "text", model, "--device", "cpu", *given, *words)


def test_fewer_tokens_than_a_window_are_scored_if_asked_for(model: str, text: str) -> None:
    words = ["eval", "text", model, "--text", text, "--device", "cpu", "--budgets", "2", "--json"]
    (row,) = json.loads(invoke(*words, "--max-tokens", "3").stdout)["perplexity"]
    assert (row["tokens"], row["window"]) == (3, 3)
    assert row["perplexity"] > 1


def test_certainty_stands_beside_the_fixed_budgets(model: str, text: str) -> None:
    budgets = ["--budgets", "1,3", "--certainty", "1e-3,1"]
    words = ["eval", "text", model, "--text", text, "--device", "cpu", *budgets]
    shown = invoke(*words).stdout.splitlines()
    assert shown[2].split()[:4] == ["budget", "schedule", "certainty", "loops"]
    assert [line.split()[:4] for line in shown[3:]] == [
        ["1", "uniform", "-", "1.00"],
        ["3", "uniform", "-", "3.00"],
        ["3", "uniform", "0.001", "1.00"],
        ["3", "uniform", "1", "3.00"],
    ]
    fixed, sure, never = json.loads(invoke(*words, "--json").stdout)["perplexity"][1:]
    assert (sure["mean_passes"], never["mean_passes"]) == (1, 3)
    assert never["nats"] == fixed["nats"]
    assert sure["flops_per_token"] < never["flops_per_token"]
    assert never["flops_per_token"] > fixed["flops_per_token"]  # the head looked after every pass


def test_without_text_only_a_run_can_be_evaluated(model: str) -> None:
    with pytest.raises(LoopformerError, match="has no prepared data of its own; say what to measure on"):
        invoke("eval", "text", model, "--device", "cpu")


def test_a_folder_is_no_file_to_write(model: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match="--out names a file to write"):
        invoke("eval", "text", model, "--text", text, "--out", str(tmp_path))
    assert not (Path(model) / "evaluation").exists()  # said before any work


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose context holds the questions of tasks."""
    return save_small(tmp_path_factory.mktemp("models") / "mine", context=64)


def _numbers(found: dict[str, Any]) -> list[Any]:
    return [[task["metrics"] for task in run["tasks"].values()] for run in found["tasks"]["runs"]]


def test_direct_and_by_way_of_a_machine_without_the_harness(tmp_path: Path, wide: str) -> None:
    pytest.importorskip("lm_eval")
    data = ["--data", str(write_local(tmp_path / "data"))]
    common = [wide, "--budgets", "1,4", "--device", "cpu"]
    direct = invoke("eval", "tasks", *common, "--tasks", "paper", *data, "--out", str(tmp_path / "direct.json"))
    assert "average of 10" in direct.stdout
    assert "ARC, mean of both" in direct.stdout
    assert "hellaswag is a stand-in: 2 examples instead of 10,042." in direct.stdout
    assert "race: 2 of 2 examples, race_high.test.jsonl sha256 " in direct.stdout

    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    invoke("eval", "tasks", "--tasks", "paper", *data, "--export-requests", str(requests))
    run("eval", "tasks", *common, "--score-requests", str(requests), "--out", str(answers), bare=True)
    collected = json.loads(invoke("eval", "tasks", "--aggregate", str(answers), *data, "--json").stdout)
    assert _numbers(collected) == _numbers(json.loads((tmp_path / "direct.json").read_text()))


def test_without_the_harness_it_says_what_to_install(wide: str) -> None:
    error = run("eval", "tasks", wide, "--tasks", "paper", code=2, bare=True).stderr
    assert "lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'." in error


def test_wrong_usage_is_one_sentence(tmp_path: Path, wide: str) -> None:
    for words, said in (
        (["--tasks", "paper", "--aggregate", "a"], "--aggregate and --tasks exclude each other"),
        (["--limit", "5", "--score-requests", "a"], "--score-requests and --limit exclude each other"),
        (["--score-requests", "a", "--aggregate", "b"], "--score-requests and --aggregate exclude each other"),
        (["--score-requests", "a", "--data", str(tmp_path)], "--score-requests and --data exclude each other"),
        ([wide, "--model", wide], "The model was given twice"),
        ([wide, "--limit", "0"], "--limit must be 1 or more"),
        ([wide, "--data", str(tmp_path / "no")], "There is no folder"),
        ([wide, "--data", str(tmp_path)], "has no data for copa"),
        ([wide, "--score-requests", str(tmp_path / "no"), "--device", "cpu"], "cannot be read"),
        (["--aggregate", str(tmp_path / "no")], "cannot be read"),
    ):
        with pytest.raises(LoopformerError, match=said):
            invoke("eval", "tasks", *words)
    data = str(write_local(tmp_path / "data"))
    with pytest.raises(LoopformerError, match="Budget 5 is above the model's 4 loops"):
        invoke("eval", "tasks", wide, "--tasks", "copa", "--data", data, "--budgets", "5")


def test_the_earlier_form_is_translated(model: str, text: str, wide: str, tracker: str, tmp_path: Path) -> None:
    budget = ["--budgets", "1", "--device", "cpu", "--json"]
    earlier = invoke("eval", "--model", model, "--text", text, *budget)
    assert f"Note: eval has subcommands; use `loopformer eval text --model {model} --text" in earlier.stderr
    now = invoke("eval", "text", model, "--text", text, *budget)
    assert "Note" not in now.stderr
    nats = [json.loads(done.stdout)["perplexity"][0]["nats"] for done in (earlier, now)]
    assert nats[0] == nats[1]
    few = ["--sequences", "4", *budget]
    for words in ([], ["--states", "S3"], ["--states=S3"]):  # a run that tracks states needs no --states
        done = invoke("eval", f"--model={tracker}", *words, *few)
        assert "use `loopformer eval states" in done.stderr
        assert json.loads(done.stdout)["states"]["sequences"] == 4
    with pytest.raises(LoopformerError, match="cannot be read"):
        invoke("eval", "-m", wide, "--score-requests", str(tmp_path / "no"), "--device", "cpu")
    with pytest.raises(LoopformerError, match="Texts and tasks are two commands"):
        invoke("eval", "--model", model, "--text", text, "--tasks", "paper")


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps."""
    out = str(tmp_path_factory.mktemp("runs") / "s3")
    small = ["model.width=16", "model.heads=2", "model.ffn=32", "model.loops=3", "training.batch=4"]
    steps = ["training.steps=2", "training.warmup=1", "training.validation_windows=2", "training.device=cpu"]
    assert invoke("train", "states", *small, *steps, "--out", out, "--json").exit_code == 0
    return out


def test_a_run_is_measured_on_its_own_group(tracker: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "map.png"
    words = ["eval", "states", tracker, "--device", "cpu", "--sequences", "32", "--seed", "5"]
    drawn = ["--figure", str(picture)] if has_matplotlib() else []
    shown = invoke(*words, "--out", str(out), *drawn).stdout
    assert "products over S3 (6 elements, chance 16.7 %), 32 words of 16, seed 5, float32 on cpu" in shown
    assert "early exit" in shown
    found = json.loads(out.read_text())["states"]
    assert [row["budget"] for row in found["trajectories"]] == [1, 2, 3]
    assert all(len(row["right"]) == 16 for row in found["trajectories"])
    assert picture.is_file() == has_matplotlib()
    more = invoke(*words, "--group", "S3", "--budgets", "2,5", "--trajectory", "2-1", "--beyond", "--json").stdout
    again = json.loads(more)["states"]["trajectories"]
    assert [row["trajectory"] for row in again] == ["2", "5", "2-1"]
    assert again[0] == found["trajectories"][1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--group", "S4"], "There is no group 'S4'; choose S3, A5 or S5"),
        (["--budgets", "4"], "Budget 4 is above the model's 3 loops"),
        (["--sequences", "0"], "--sequences must be 1 or more"),
        (["--group", "A5"], "The model's tokens are not the elements of A5"),
        (["--figure", "map.bmp"], "No picture can be drawn as map.bmp"),
    ],
)
def test_what_is_wrong_in_tracking_is_one_sentence(tracker: str, words: list[str], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        invoke("eval", "states", tracker, "--device", "cpu", *words)


def test_tracking_needs_a_group(model: str) -> None:
    with pytest.raises(LoopformerError, match="was not trained to track states; name a group with --group"):
        invoke("eval", "states", model)


def test_other_commands_say_that_there_is_no_text(tracker: str) -> None:
    with pytest.raises(LoopformerError, match="was trained on words over S3, not on text"):
        invoke("search", "--model", tracker, "--budget", "2", "--device", "cpu")
    with pytest.raises(LoopformerError, match=f"loopformer eval states {tracker}"):
        invoke("eval", "text", tracker, "--device", "cpu")
