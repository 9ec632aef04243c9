"""Against lm-evaluation-harness: its own scores, its own requests, its own metrics."""

import json
import random
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
from loopformer.evaluation.loaded import LoadedModel
from loopformer.evaluation.store import Store, weights_hash
from loopformer.evaluation.tasks import (
    PAPER,
    TASKS,
    Query,
    Requests,
    TaskAnswers,
    answer_requests,
    encode_pairs,
    read_answers,
    read_requests,
    run_requests,
    write_answers,
    write_requests,
)
from loopformer.lm import load
from loopformer.loading import save_model
from loopformer.scoring import Span
from loopformer.trajectory import Trajectory

from .examples import HUB, LOCAL, write_lines, write_local
from .small import make_model

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from loopformer.lm_eval import RecordedAnswers, Suite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model folder; the context holds every continuation here but not every prompt."""
    place = tmp_path_factory.mktemp("models") / "mine"
    save_model(make_model(tokenizer, context=72), place)
    tokenizer.save(place)
    return place


def _requests(queries: list[Query]) -> list[Any]:
    return [SimpleNamespace(args=query.arguments) for query in queries]


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


ROUTE = Trajectory.uniform(3)  # the budget of the exported model


@pytest.mark.parametrize("name", TASKS)
def test_scores_equal_the_hf_path_of_the_harness(folder: Path, theirs: HFLM, tmp_path: Path, name: str) -> None:
    queries = Suite.load([name], data=write_local(tmp_path)).queries[name]
    ours = answer_requests(load(str(folder)), queries, [ROUTE])[ROUTE].values
    expected = theirs.loglikelihood(_requests(queries), disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in expected], abs=2e-4)


def test_texts_equal_the_hf_path_of_the_harness(folder: Path, theirs: HFLM) -> None:
    text = "every pass is told its time and its step, naïve café ☕ " * 5
    queries = [Query("loglikelihood_rolling", (one,)) for one in (text, "its", text[:80])]
    assert answer_requests(load(str(folder)), queries, [ROUTE])[ROUTE].values == pytest.approx(
        theirs.loglikelihood_rolling(_requests(queries), disable_tqdm=True), abs=1e-3
    )


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
        found = suite.compute_metrics({name: answered})[0][name]
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
    found, groups = suite.compute_metrics(answered)
    assert {name: suite.main_metric(name, found[name]) for name in TASKS} == {n: t.metric for n, t in TASKS.items()}
    assert not groups


def own_task(folder: Path, kind: str, metric: str, aggregation: str = "mean", settings: str = "null") -> str:
    data = write_lines(
        folder / f"{kind}.jsonl",
        [{"question": "every pass is told", "answer": "its time"}, {"question": "naïve", "answer": "café"}],
    )
    fill = {"name": kind, "kind": kind, "metric": metric, "aggregation": aggregation, "settings": settings}
    (folder / f"{kind}.yaml").write_text(OWN.format(data=data, cache=folder / "cache", **fill))
    return f"own_{kind}"


def test_tasks_of_ones_own_that_score_whole_texts(tmp_path: Path) -> None:
    name = own_task(tmp_path, "loglikelihood_rolling", "bits_per_byte", "bits_per_byte")
    suite = Suite.load([name], include=tmp_path)
    found, _ = suite.compute_metrics({name: TaskAnswers([-8.0, -4.0], 0, 0, 0.0)})
    assert found[name]["bits_per_byte"] == pytest.approx(12 / 0.6931471805599453 / len("its timecafé".encode()))
    assert suite.main_metric(name, found[name]) == "bits_per_byte"
    assert [query.kind for query in suite.queries[name]] == ["loglikelihood_rolling"] * 2


def test_tasks_that_generate_are_refused(tmp_path: Path) -> None:
    name = own_task(tmp_path, "generate_until", "exact_match", settings='{until: ["\\n"], max_gen_toks: 4}')
    with pytest.raises(LoopformerError, match=r"'generate_until'.*loopformer export.*lm_eval --model hf"):
        Suite.load([name], include=tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "label"),
    [
        ("piqa", "label", -1),
        ("piqa", "label", "0"),
        ("hellaswag", "label", ""),
        ("copa", "label", -1),
        ("copa", "label", None),
        ("social_iqa", "label", "0"),
        ("winogrande", "answer", ""),
        ("arc_easy", "answerKey", "E"),
        ("openbookqa", "answerKey", None),
    ],
)
def test_an_example_says_which_choice_is_right(tmp_path: Path, name: str, field: str, label: Any) -> None:
    first, second = LOCAL[name]
    file = write_lines(tmp_path / f"{name}.{TASKS[name].split}.jsonl", [second, {**first, field: label}])
    with pytest.raises(FileProblem, match=rf"An example in {file.name} does not fit {name} \("):
        Suite.load([name], data=tmp_path)


def test_hellaswag_as_on_the_hub_has_labels_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "hellaswag.validation.jsonl", [{**HUB["hellaswag"][0], "label": ""}])
    with pytest.raises(FileProblem, match=r"An example in hellaswag\.validation\.jsonl does not fit hellaswag \("):
        Suite.load(["hellaswag"], data=tmp_path)


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
    short = {name: value for name, value in good.items() if name != "choice2"}
    for examples in ([{**good, "question": "why"}], [good, {**good, "question": "why"}], [short]):
        write_lines(tmp_path / "copa.validation.jsonl", examples)
        with pytest.raises(
            FileProblem, match=r"An example in copa\.validation\.jsonl does not fit copa \(KeyError"
        ):
            Suite.load(["copa"], data=tmp_path)
    name = own_task(tmp_path, "loglikelihood_rolling", "bits_per_byte", "bits_per_byte")
    (tmp_path / "loglikelihood_rolling.jsonl").unlink()
    with pytest.raises(RunFailed, match="The task own_loglikelihood_rolling cannot be loaded"):
        Suite.load([name], include=tmp_path)


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
    answers = run_requests(loaded, suite, loaded.trajectories("1,4", ["2-1-1"]))
    found = json.loads(json.dumps(suite.results(answers)))  # plain data
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


def test_finished_pieces_are_kept(loaded: LoadedModel, suite: Suite, loops_run: Callable[[], int]) -> None:
    copa = Requests({}, {"copa": suite.queries["copa"]})
    both = Requests({}, {**copa.queries, "piqa": suite.queries["piqa"]})
    first = run_requests(loaded, copa, loaded.trajectories("1,2")).runs
    loops_run()
    extended = run_requests(loaded, both, loaded.trajectories("1,2,4")).runs
    assert loops_run() > 0
    assert run_requests(loaded, both, loaded.trajectories("1,2,4")).runs == extended
    assert loops_run() == 0
    assert {name: run["copa"] for name, run in extended.items() if name != "4"} == {
        name: run["copa"] for name, run in first.items()
    }
    run_requests(replace(loaded, weights="others"), copa, loaded.trajectories("1"))
    assert loops_run() > 0


def test_by_way_of_files_every_digit_is_the_same(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectories = loaded.trajectories("1,3")
    answers = run_requests(loaded, suite, trajectories)
    direct = suite.results(answers)

    write_requests(tmp_path / "requests.jsonl", suite)
    elsewhere = replace(loaded, store=Store(None))
    again = run_requests(elsewhere, read_requests(tmp_path / "requests.jsonl"), trajectories)
    write_answers(tmp_path / "answers.jsonl", again)
    read = read_answers(tmp_path / "answers.jsonl")
    collected = suite.results(read)

    for one, other in zip(direct["runs"], collected["runs"], strict=True):
        for name in TASKS:
            assert read.runs[one["trajectory"]][name].values == answers.runs[one["trajectory"]][name].values
            assert one["tasks"][name]["metrics"] == other["tasks"][name]["metrics"]
        assert one["paper"] == other["paper"]


def test_answers_to_other_requests_are_refused(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    other = write_local(tmp_path / "other", {**LOCAL, "piqa": LOCAL["piqa"][::-1]})
    answers = run_requests(loaded, suite, loaded.trajectories("1"))
    with pytest.raises(FileProblem, match="other requests of piqa"):
        Suite.load(["paper"], data=other).results(answers)


def test_a_part_of_the_answers_is_refused(loaded: LoadedModel, suite: Suite) -> None:
    answers = run_requests(loaded, suite, loaded.trajectories("1,2"))
    run = answers.runs["2"]
    short = replace(run["piqa"], values=run["piqa"].values[:-1])
    without = {task: one for task, one in run.items() if task != "piqa"}
    for part in ({**run, "piqa": short}, without):
        with pytest.raises(FileProblem, match="requests of piqa, or some are missing"):
            suite.results(replace(answers, runs={**answers.runs, "2": part}))
    with pytest.raises(FileProblem, match="some are missing"):
        suite.results(replace(answers, runs={}))


def test_a_trajectory_has_one_score(loaded: LoadedModel, suite: Suite, tmp_path: Path) -> None:
    trajectory = loaded.model.resolve("2-1-1")
    (row,) = suite.results(run_requests(loaded, suite, [trajectory]))["runs"]
    assert suite.accuracy(loaded, [trajectory]) == {trajectory: row["paper"]["average"]}
    two = Suite.load(["copa", "piqa"], data=write_local(tmp_path))
    values = [row["tasks"][name]["value"] for name in ("copa", "piqa")]
    assert two.accuracy(loaded, [trajectory]) == {trajectory: sum(values) / 2}


def test_a_score_needs_an_accuracy(loaded: LoadedModel, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "texts.jsonl", [{"text": one["text"]} for one in HUB["lambada_openai"]])
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n"
    )
    suite = Suite.load(["own"], include=tmp_path)
    with pytest.raises(LoopformerError, match="own has bits_per_byte and no accuracy"):
        suite.accuracy(loaded, [loaded.model.resolve(1)])
