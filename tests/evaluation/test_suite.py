"""Tasks with local data ask and judge exactly as the harness's own tasks do."""

import random
from pathlib import Path
from typing import Any

import pytest

from loopformer.errors import FileProblem, LoopformerError, RunFailed
from loopformer.evaluation.tasks import TASKS, Answered, Query

from .examples import HUB, write_lines, write_local

pytest.importorskip("lm_eval")

from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from loopformer.evaluation.harness import Recorded, Suite

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


def random_answers(queries: list[Query], seed: int = 0) -> Answered:
    draw = random.Random(seed)
    return Answered([(-10 * draw.random(), draw.random() < 0.5) for _ in queries], 0, 0, 0.0)


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
            Recorded({task: expected}, {task: answered}), {"tasks": {task: theirs}}, bootstrap_iters=10
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
    answered = {names[0]: Answered(["its time", "tea"], 0, 0, 0.0), names[1]: Answered([-8.0, -4.0], 0, 0, 0.0)}
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
