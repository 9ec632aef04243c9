"""Against lm-evaluation-harness: its own scores, its own requests, its own metrics."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError, RunFailed
from loopformer.evaluation.store import LoadedModel, Store, weights_hash
from loopformer.evaluation.tasks import (
    PAPER,
    TASKS,
    Answers,
    Query,
    TaskAnswers,
    encode_pairs,
    model_facts,
    read_answers,
    read_requests,
    run_requests,
    write_answers,
    write_requests,
)
from loopformer.loading import save_model
from loopformer.scoring import Span

from .examples import HUB, LOCAL, write_lines, write_local
from .small import make_model

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from loopformer.lm_eval import LoopformerLM, RecordedAnswers, Suite

CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{goal}}}}"
doc_to_choice: "{{{{[sol1, sol2]}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model folder; the context holds every continuation here but not every prompt."""
    place = tmp_path_factory.mktemp("models") / "mine"
    save_model(make_model(tokenizer, context=72), place)
    tokenizer.save(place)
    return place


def _requests(queries: list[Any]) -> list[Any]:
    return [SimpleNamespace(args=query.arguments, task_name=None) for query in queries]


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> HFLM:
    """The harness's own HF path, on the exported model at a budget of 3."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from loopformer.hf.export import export

    out = tmp_path_factory.mktemp("hf") / "exported"
    export(folder, out, budget=3)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu", batch_size=4)


@pytest.mark.parametrize("name", TASKS)
def test_scores_equal_the_hf_path_of_the_harness(folder: Path, theirs: HFLM, tmp_path: Path, name: str) -> None:
    suite = Suite.load([name], data=write_local(tmp_path))
    asked = _requests(suite.queries[name])
    ours = LoopformerLM(str(folder), budget=3, device="cpu").loglikelihood(asked, disable_tqdm=True)
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in expected], abs=2e-4)


def test_texts_equal_the_hf_path_of_the_harness(folder: Path, theirs: HFLM) -> None:
    ours = LoopformerLM(str(folder), budget=3, device="cpu")
    text = "every pass is told its time and its step, naïve café ☕ " * 5
    rolling = [SimpleNamespace(args=(one,)) for one in (text, "its", text[:80])]
    assert ours.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3
    )
    settings = {"until": ["i", "日"], "max_gen_toks": 24}
    prompts = [SimpleNamespace(args=(one, settings)) for one in ("its", text, "every pass is", "日本語")]
    assert ours.generate_until(prompts, disable_tqdm=True) == theirs.generate_until(prompts, disable_tqdm=True)


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_pairs_are_split_as_the_harness_splits_them(tokenizer: Tokenizer, context: str, continuation: str) -> None:
    seen: list[Span] = []

    class Template(lm_eval.api.model.TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.eot
        loglikelihood_rolling = generate_until = None

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            seen.extend(Span((*before, *scored), len(scored)) for _, before, scored in requests)

    continuation = f" x{continuation}"
    context = (
        "a" + context if not context.strip() and context else context
    )  # the harness has no case for spaces only
    Template().loglikelihood([SimpleNamespace(args=(context, continuation))], disable_tqdm=True)
    assert encode_pairs(tokenizer, [(context, continuation)]) == seen


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(2, 20))
def test_long_texts_are_cut_as_the_harness_cuts_them(tokens: list[int], limit: int) -> None:
    windows = Span((100, *tokens), len(tokens)).windows(limit, reach_back=True)
    expected = map(make_disjoint_window, get_rolling_token_windows(tokens, 100, limit, context_len=1))
    found = [((*window.inputs, window.targets[-1]), window.targets) for window in windows]
    assert found == [((*before, *scored), tuple(scored)) for before, scored in expected]


def _own_task(folder: Path) -> TaskManager:
    data = write_lines(folder / "choice.jsonl", LOCAL["piqa"])
    (folder / "choice.yaml").write_text(CHOICE.format(data=data, cache=folder / "cache"))
    return TaskManager(include_path=str(folder), include_defaults=False)


def test_simple_evaluate_and_another_budget(lm: LM, tmp_path: Path) -> None:
    ours = LoopformerLM(lm, trajectory="2-1-1")
    manager = _own_task(tmp_path)
    found = {}
    for adapter in (ours, ours.at(1)):
        results = lm_eval.simple_evaluate(
            model=adapter, tasks=["own_choice"], task_manager=manager, bootstrap_iters=0
        )
        found[str(adapter.trajectory)] = [one["resps"] for one in results["samples"]["own_choice"]]
        assert results["config"]["trajectory"] == str(adapter.trajectory)
    assert found["2-1-1"] != found["1"]
    assert ours.at(1).lm is ours.lm  # no weights are loaded again
    ((total, _),) = ours.loglikelihood([SimpleNamespace(args=("", "its step"))], disable_tqdm=True)
    assert total == pytest.approx(lm.score(["its step"], trajectory="2-1-1")[0].total, abs=1e-5)


@pytest.mark.slow
def test_the_command_line_of_the_harness_has_our_model(folder: Path, tmp_path: Path) -> None:
    _own_task(tmp_path)
    given = f"path={folder},trajectory=2-1-1"
    words = ["--model", "loopformer", "--model_args", given, "--tasks", str(tmp_path / "choice.yaml")]
    done = subprocess.run(
        [sys.executable, "-m", "loopformer.lm_eval", *words, "--output_path", str(tmp_path / "out")],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "own_choice" in done.stdout
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["trajectory"] == "2-1-1"


def test_wrong_model_arguments_are_one_sentence(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="Unknown model argument bugdet; did you mean budget"):
        LoopformerLM(lm, bugdet=2)
    with pytest.raises(LoopformerError, match="Say which model"):
        LoopformerLM()
    with pytest.raises(LoopformerError, match="not both"):
        LoopformerLM(lm, budget=2, trajectory="2-1-1")
    with pytest.raises(LoopformerError, match="Budget 5 is above the model's 4 loops"):
        LoopformerLM(lm, budget=5)


OWN = """
task: own_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {settings}
metric_list: [{{metric: {metric}, aggregation: {aggregation}, higher_is_better: true}}]
"""


def random_answers(queries: list[Query], seed: int = 0) -> TaskAnswers:
    draw = random.Random(seed)
    return TaskAnswers([(-10 * draw.random(), draw.random() < 0.5) for _ in queries], 0, 0, 0.0)


def original(name: str, folder: Path) -> Any:
    """The harness's own task on the Hub's form of the data, as it documents it: a YAML that includes its own."""
    import lm_eval.tasks

    task = TASKS[name]
    data = write_lines(folder / f"{name}.jsonl", HUB[name])
    definition = Path(lm_eval.tasks.__file__).parent / task.folder
    (yaml,) = (path for path in definition.glob("*.yaml") if f"task: {name}\n" in path.read_text())
    others = {"training_split", "validation_split"} - {f"{task.split}_split"}
    changes = "".join(f"{split}: null\n" for split in others)
    (folder / f"{name}.yaml").write_text(
        f"include: {yaml}\ntask: original_{name}\ndataset_path: json\ndataset_name: null\n{changes}"
        f'dataset_kwargs: {{data_files: {{{task.split}: "{data}"}}, cache_dir: "{folder / "cache"}"}}\n'
    )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = manager.load([f"original_{name}"])["tasks"][f"original_{name}"]
    found.build_all_requests()
    return found


@pytest.mark.parametrize("name", TASKS)
def test_local_tasks_equal_the_harness_on_the_original_data(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "yaml"
    folder.mkdir()
    theirs = original(name, folder)
    suite = Suite.load([name], data=write_local(tmp_path / "local"))
    expected = [Query(one.request_type, tuple(one.args)) for one in theirs.instances]
    assert suite.queries[name] == expected
    assert len({query.line for query in expected}) == len(expected)
    for seed in range(3):  # the same answers get the same marks
        answered = random_answers(expected, seed)
        task = f"original_{name}"
        results = evaluate(
            RecordedAnswers({task: expected}, {task: answered}), {"tasks": {task: theirs}}, bootstrap_iters=10
        )["results"][task]
        found = suite.metrics({name: answered})[0][name]
        assert found[TASKS[name].metric] == results[f"{TASKS[name].metric},none"]
        assert f"{TASKS[name].metric}_stderr" in found


def test_hellaswag_in_the_hubs_form_is_prepared_by_the_harness(tmp_path: Path) -> None:
    ours = Suite.load(["hellaswag"], data=write_local(tmp_path / "local"))
    theirs = Suite.load(["hellaswag"], data=write_local(tmp_path / "hub", HUB))
    assert ours.queries == theirs.queries
    assert ours.queries["hellaswag"][0].arguments[1] == " clean. Now  rest."


def test_the_paper_is_eleven_tasks_with_their_facts(tmp_path: Path) -> None:
    suite = Suite.load(["paper"], data=write_local(tmp_path), limit=1)
    assert list(suite.tasks) == list(TASKS)
    assert not suite.groups
    facts = suite.facts
    for name in TASKS:
        one = facts["tasks"][name]
        assert (one["examples"], one["of"]) == (1, 2)
        assert len(one["data"]["sha256"]) == 64
        assert one["requests"] == len(suite.queries[name])
    assert len(facts["notes"]) == len(TASKS)
    answered = {name: random_answers(queries) for name, queries in suite.queries.items()}
    found, groups = suite.metrics(answered)
    assert {name: suite.metric(name, found[name]) for name in TASKS} == {n: t.metric for n, t in TASKS.items()}
    assert not groups


def own_task(folder: Path, kind: str, metric: str, aggregation: str = "mean", settings: str = "null") -> str:
    data = write_lines(
        folder / f"{kind}.jsonl",
        [{"question": "every pass is told", "answer": "its time"}, {"question": "naïve", "answer": "café"}],
    )
    fill = {"name": kind, "kind": kind, "metric": metric, "aggregation": aggregation, "settings": settings}
    (folder / f"{kind}.yaml").write_text(OWN.format(data=data, cache=folder / "cache", **fill))
    return f"own_{kind}"


def test_tasks_of_ones_own_of_every_kind(tmp_path: Path) -> None:
    names = [
        own_task(tmp_path, "generate_until", "exact_match", settings='{until: ["\\n"], max_gen_toks: 4}'),
        own_task(tmp_path, "loglikelihood_rolling", "bits_per_byte", "bits_per_byte"),
    ]
    suite = Suite.load(names, include=tmp_path)
    texts, totals = (suite.queries[name] for name in names)
    assert texts[0].arguments == ("every pass is told", {"until": ["\n"], "max_gen_toks": 4})
    answered = {
        names[0]: TaskAnswers(["its time", "tea"], 0, 0, 0.0),
        names[1]: TaskAnswers([-8.0, -4.0], 0, 0, 0.0),
    }
    found, _ = suite.metrics(answered)
    assert found[names[0]]["exact_match"] == 0.5
    assert found[names[1]]["bits_per_byte"] == pytest.approx(12 / 0.6931471805599453 / len("its timecafé".encode()))
    assert [suite.metric(name, found[name]) for name in names] == ["exact_match", "bits_per_byte"]
    assert [query.kind for query in totals] == ["loglikelihood_rolling"] * 2


def test_wrong_input_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoopformerError, match="--limit must be 1 or more"):
        Suite.load(["paper"], limit=0)
    with pytest.raises(LoopformerError, match="--tasks is empty"):
        Suite.load([])
    with pytest.raises(FileProblem, match="no data for copa"):
        Suite.load(["paper"], data=tmp_path)
    with pytest.raises(FileProblem, match="There is no folder"):
        Suite.load(["copa"], include=tmp_path / "no")
    good = {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "label": 0}
    for examples in ([{**good, "question": "why"}], [good, {**good, "question": "why"}]):
        write_lines(tmp_path / "copa.validation.jsonl", examples)
        with pytest.raises(FileProblem, match=r"An example in copa\.validation\.jsonl is none of copa \(KeyError"):
            Suite.load(["copa"], data=tmp_path)
    own_task(tmp_path, "generate_until", "exact_match")
    (tmp_path / "generate_until.jsonl").unlink()
    with pytest.raises(RunFailed, match="The task own_generate_until cannot be loaded"):
        Suite.load(["own_generate_until"], include=tmp_path)


@pytest.mark.slow
def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(LoopformerError, match="There is no task hellaswg; did you mean hellaswag"):
        Suite.load(["hellaswg"])


# Several trajectories: one load, answers stored, and the same numbers by way of files.


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite.load(["paper"], data=write_local(tmp_path_factory.mktemp("data")))


@pytest.fixture
def loaded(lm: LM, tmp_path: Path) -> LoadedModel:
    return LoadedModel("models/mine", lm, weights_hash(lm.model), Store(tmp_path / "kept"))


def test_every_number_has_its_facts(loaded: LoadedModel, suite: Suite) -> None:
    runs = run_requests(loaded, suite.queries, loaded.trajectories("1,4", ["2-1-1"]))
    found = json.loads(json.dumps(suite.results(model_facts(loaded, runs), runs)))  # plain data
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
    first = run_requests(loaded, {"copa": queries["copa"]}, loaded.trajectories("1,2"))
    passes()
    extended = run_requests(loaded, queries, loaded.trajectories("1,2,4"))
    assert passes() > 0
    assert run_requests(loaded, queries, loaded.trajectories("1,2,4")) == extended
    assert passes() == 0
    assert {name: run["copa"] for name, run in extended.items() if name != "4"} == {
        name: run["copa"] for name, run in first.items()
    }
    run_requests(replace(loaded, weights="others"), {"copa": queries["copa"]}, loaded.trajectories("1"))
    assert passes() > 0


def test_by_way_of_files_every_digit_is_the_same(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectories = loaded.trajectories("1,3")
    runs = run_requests(loaded, suite.queries, trajectories)
    direct = suite.results(model_facts(loaded, runs), runs)

    write_requests(tmp_path / "requests.jsonl", suite)
    asked = read_requests(tmp_path / "requests.jsonl")
    elsewhere = replace(loaded, store=Store(None))
    again = run_requests(elsewhere, asked.queries, trajectories)
    write_answers(tmp_path / "answers.jsonl", Answers(asked.facts, model_facts(elsewhere, again), again))
    collected = suite.collect(read_answers(tmp_path / "answers.jsonl"))

    read = read_answers(tmp_path / "answers.jsonl").runs
    for one, other in zip(direct["runs"], collected["runs"], strict=True):
        for name in TASKS:
            assert read[one["trajectory"]][name].values == runs[one["trajectory"]][name].values
            assert one["tasks"][name]["metrics"] == other["tasks"][name]["metrics"]
        assert one["paper"] == other["paper"]


def test_answers_to_other_requests_are_refused(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    other = write_local(tmp_path / "other", {**LOCAL, "piqa": LOCAL["piqa"][::-1]})
    runs = run_requests(loaded, suite.queries, loaded.trajectories("1"))
    answers = Answers(suite.facts, model_facts(loaded, runs), runs)
    with pytest.raises(FileProblem, match="other requests of piqa"):
        Suite.load(["paper"], data=other).collect(answers)


def test_a_part_of_the_answers_is_refused(loaded: LoadedModel, suite: Suite) -> None:
    runs = run_requests(loaded, suite.queries, loaded.trajectories("1,2"))
    model = model_facts(loaded, runs)
    short = replace(runs["2"]["piqa"], values=runs["2"]["piqa"].values[:-1])
    without = {task: one for task, one in runs["2"].items() if task != "piqa"}
    for part in ({**runs["2"], "piqa": short}, without):
        with pytest.raises(FileProblem, match="not all answers to piqa"):
            suite.collect(Answers(suite.facts, model, {**runs, "2": part}))
    with pytest.raises(FileProblem, match="no answers"):
        suite.collect(Answers(suite.facts, model, {}))


def test_a_trajectory_has_one_score(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectory = loaded.model.resolve("2-1-1")
    runs = run_requests(loaded, suite.queries, [trajectory])
    (row,) = suite.results(model_facts(loaded, runs), runs)["runs"]
    assert suite.accuracy(loaded)([trajectory]) == {trajectory: row["paper"]["average"]}
    two = Suite.load(["copa", "piqa"], data=write_local(tmp_path))
    values = [row["tasks"][name]["value"] for name in ("copa", "piqa")]
    assert two.accuracy(loaded)([trajectory]) == {trajectory: sum(values) / 2}


def test_a_score_needs_an_accuracy(loaded: LoadedModel, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "texts.jsonl", [{"text": one["text"]} for one in HUB["lambada_openai"]])
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n"
    )
    suite = Suite.load(["own"], include=tmp_path)
    with pytest.raises(LoopformerError, match="own has bits_per_byte and no accuracy"):
        suite.accuracy(loaded)([loaded.model.resolve(1)])
