"""Tasks at several budgets: one load, pieces kept, and the same numbers by way of files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loopformer import LM
from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.benchmarks import LoadedModel, accuracy, ask, collect, model_facts, results
from loopformer.evaluation.store import Store, weights_hash
from loopformer.evaluation.tasks import (
    PAPER,
    TASKS,
    Answers,
    read_answers,
    read_requests,
    write_answers,
    write_requests,
)

from .examples import HUB, LOCAL, write_lines, write_local

pytest.importorskip("lm_eval")

from loopformer.evaluation.harness import Suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite.load(["paper"], data=write_local(tmp_path_factory.mktemp("data")))


@pytest.fixture
def loaded(lm: LM, tmp_path: Path) -> LoadedModel:
    return LoadedModel("models/mine", lm, weights_hash(lm.model), Store(tmp_path / "kept"))


def test_every_number_has_its_facts(loaded: LoadedModel, suite: Suite) -> None:
    runs = ask(loaded, suite.queries, loaded.trajectories("1,4", ["2-1-1"]))
    found = json.loads(json.dumps(results(suite, model_facts(loaded, runs), runs)))  # plain data
    assert [run["trajectory"] for run in found["runs"]] == ["1", "4", "2-1-1"]
    assert [run["budget"] for run in found["runs"]] == [1, 4, 3]
    for run in found["runs"]:
        assert set(run["tasks"]) == set(TASKS)
        for name, task in run["tasks"].items():
            assert task["metric"] == TASKS[name].metric
            assert 0 <= task["value"] <= 1
            assert task["examples"] == len(LOCAL[name])
            assert task["stderr"] is not None
            assert task["seconds"] > 0
            assert task["tokens"] > 0
        assert set(run["paper"]) == {*PAPER, "average"}
        values = {name: task["value"] for name, task in run["tasks"].items()}
        assert run["paper"]["arc"] == (values["arc_easy"] + values["arc_challenge"]) / 2
    assert found["runs"][0]["flops_per_token"] < found["runs"][1]["flops_per_token"]
    assert found["model"]["weights"] == loaded.weights
    assert found["tasks"]["race"]["data"]["file"] == "race_high.test.jsonl"


def test_finished_pieces_are_kept(loaded: LoadedModel, suite: Suite, passes: Callable[[], int]) -> None:
    queries = {name: suite.queries[name] for name in ("copa", "piqa")}
    first = ask(loaded, {"copa": queries["copa"]}, loaded.trajectories("1,2"))
    passes()
    extended = ask(loaded, queries, loaded.trajectories("1,2,4"))
    assert passes() > 0
    assert ask(loaded, queries, loaded.trajectories("1,2,4")) == extended
    assert passes() == 0
    assert {name: run["copa"] for name, run in extended.items() if name != "4"} == {
        name: run["copa"] for name, run in first.items()
    }
    ask(replace(loaded, weights="others"), {"copa": queries["copa"]}, loaded.trajectories("1"))
    assert passes() > 0


def test_by_way_of_files_every_digit_is_the_same(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectories = loaded.trajectories("1,3")
    runs = ask(loaded, suite.queries, trajectories)
    direct = results(suite, model_facts(loaded, runs), runs)

    write_requests(tmp_path / "requests.jsonl", suite.requests)
    asked = read_requests(tmp_path / "requests.jsonl")
    elsewhere = replace(loaded, store=Store(None))
    again = ask(elsewhere, asked.queries, trajectories)
    write_answers(tmp_path / "answers.jsonl", Answers(asked.facts, model_facts(elsewhere, again), again))
    collected = collect(suite, read_answers(tmp_path / "answers.jsonl"))

    read = read_answers(tmp_path / "answers.jsonl").runs
    for one, other in zip(direct["runs"], collected["runs"], strict=True):
        for name in TASKS:
            assert read[one["trajectory"]][name].values == runs[one["trajectory"]][name].values
            assert one["tasks"][name]["metrics"] == other["tasks"][name]["metrics"]
        assert one["paper"] == other["paper"]


def test_answers_to_other_requests_are_refused(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    other = write_local(tmp_path / "other", {**LOCAL, "piqa": LOCAL["piqa"][::-1]})
    runs = ask(loaded, suite.queries, loaded.trajectories("1"))
    answers = Answers(suite.facts, model_facts(loaded, runs), runs)
    with pytest.raises(FileProblem, match="other requests of piqa"):
        collect(Suite.load(["paper"], data=other), answers)


def test_a_part_of_the_answers_is_refused(loaded: LoadedModel, suite: Suite) -> None:
    runs = ask(loaded, suite.queries, loaded.trajectories("1,2"))
    model = model_facts(loaded, runs)
    short = replace(runs["2"]["piqa"], values=runs["2"]["piqa"].values[:-1])
    without = {task: one for task, one in runs["2"].items() if task != "piqa"}
    for part in ({**runs["2"], "piqa": short}, without):
        with pytest.raises(FileProblem, match="not all answers to piqa"):
            collect(suite, Answers(suite.facts, model, {**runs, "2": part}))
    with pytest.raises(FileProblem, match="no answers"):
        collect(suite, Answers(suite.facts, model, {}))


def test_a_trajectory_has_one_score(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectory = loaded.model.resolve("2-1-1")
    runs = ask(loaded, suite.queries, [trajectory])
    (row,) = results(suite, model_facts(loaded, runs), runs)["runs"]
    assert accuracy(loaded, suite)([trajectory]) == {trajectory: row["paper"]["average"]}
    two = Suite.load(["copa", "piqa"], data=write_local(tmp_path))
    values = [row["tasks"][name]["value"] for name in ("copa", "piqa")]
    assert accuracy(loaded, two)([trajectory]) == {trajectory: sum(values) / 2}


def test_a_score_needs_an_accuracy(loaded: LoadedModel, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "texts.jsonl", [{"text": one["text"]} for one in HUB["lambada_openai"]])
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n"
    )
    suite = Suite.load(["own"], include=tmp_path)
    with pytest.raises(LoopformerError, match="own has bits_per_byte and no accuracy"):
        accuracy(loaded, suite)([loaded.model.resolve(1)])
