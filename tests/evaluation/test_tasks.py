"""The paper's tasks and their files, requests and our answers, and both as files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.tasks import (
    PAPER,
    TASKS,
    Answers,
    Query,
    Requests,
    TaskAnswers,
    answer_requests,
    encode_pairs,
    encode_texts,
    hash_requests,
    paper_scores,
    read_answers,
    read_examples,
    read_requests,
    write_answers,
    write_requests,
)
from loopformer.scoring import loglikelihoods
from loopformer.trajectory import Trajectory

from .examples import HUB, LOCAL, write_lines, write_local
from .small import make_model


def test_ten_scores_and_their_average() -> None:
    values = {name: number / 100 for number, name in enumerate(TASKS)}
    scores = paper_scores(values)
    assert scores is not None
    assert len(PAPER) == 10
    assert scores["arc"] == pytest.approx((values["arc_easy"] + values["arc_challenge"]) / 2)
    assert scores["average"] == pytest.approx(sum(scores[name] for name in PAPER) / 10)
    assert paper_scores({name: 0.5 for name in TASKS if name != "sciq"}) is None


def test_every_task_is_in_one_benchmark() -> None:
    assert sorted(task for benchmark in PAPER.values() for task in benchmark.tasks) == sorted(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_files_are_read_with_their_hash(tmp_path: Path, name: str) -> None:
    folder = write_local(tmp_path)
    found = read_examples(folder, name)
    assert found.sha256 == hashlib.sha256((folder / found.file).read_bytes()).hexdigest()
    assert len(found.examples) == len(LOCAL[name])
    assert found.note == f"{name} is a stand-in: 2 examples instead of {TASKS[name].examples:,}."


def test_another_split_and_a_part_are_stand_ins(tmp_path: Path) -> None:
    write_lines(tmp_path / "sciq.validation.jsonl", LOCAL["sciq"] * 500)
    assert read_examples(tmp_path, "sciq").note == "sciq is a stand-in: the validation split instead of test."
    write_lines(tmp_path / "sciq.test.jsonl", LOCAL["sciq"] * 500)
    assert read_examples(tmp_path, "sciq").note is None  # the split that the harness scores comes first
    write_lines(tmp_path / "hellaswag.validation4.jsonl", LOCAL["hellaswag"] * 2)
    assert read_examples(tmp_path, "hellaswag").note == "hellaswag is a stand-in: 4 examples instead of 10,042."


def test_hellaswag_is_cleaned_once(tmp_path: Path) -> None:
    path = tmp_path / "hellaswag.validation.jsonl"
    write_lines(path, LOCAL["hellaswag"])
    assert read_examples(tmp_path, "hellaswag").cleaned
    write_lines(path, HUB["hellaswag"])
    assert not read_examples(tmp_path, "hellaswag").cleaned


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal"', "Line 2 of .* is no JSON;"),
        ('{"goal": "a", "sol1": "b", "label": 0}\n', "Line 1 of .* has no field sol2"),
        ("[1, 2]\n", "is no JSON object"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "piqa.validation.jsonl").write_text(content)
    with pytest.raises(FileProblem, match=said):
        read_examples(tmp_path, "piqa")


@pytest.mark.parametrize(
    ("name", "field", "label", "allowed"),
    [
        ("piqa", "label", -1, "0, 1"),
        ("piqa", "label", "0", "0, 1"),
        ("piqa", "label", True, "0, 1"),
        ("hellaswag", "label", "", '0, 1, 2, 3, "0", "1", "2", "3"'),
        ("copa", "label", 7, "0, 1"),
        ("copa", "label", None, "0, 1"),
        ("copa", "label", "x", "0, 1"),
        ("social_iqa", "label", "0", '1, 2, 3, "1", "2", "3"'),
        ("winogrande", "answer", "", '"1", "2"'),
        ("arc_easy", "answerKey", "E", '"A", "B", "C", "D"'),
        ("openbookqa", "answerKey", None, '"A", "B", "C", "D"'),
    ],
)
def test_an_example_says_which_choice_is_right(
    tmp_path: Path, name: str, field: str, label: Any, allowed: str
) -> None:
    first, second = LOCAL[name]
    file = tmp_path / f"{name}.{TASKS[name].split}.jsonl"
    write_lines(file, [second, {**first, field: label}])
    with pytest.raises(FileProblem) as caught:
        read_examples(tmp_path, name)
    said = f"Line 2 of {file} has the {field} {json.dumps(label)}, which is none of {allowed}; take a split"
    assert str(caught.value).startswith(said)


def test_hellaswag_as_on_the_hub_has_labels_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "hellaswag.validation.jsonl", [{**HUB["hellaswag"][0], "label": ""}])
    with pytest.raises(FileProblem, match=r'Line 1 of .* has the label ""'):
        read_examples(tmp_path, "hellaswag")


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"no data for race; put race_high\.test\.jsonl there"):
        read_examples(tmp_path, "race")
    with pytest.raises(FileProblem, match="There is no folder"):
        read_examples(tmp_path / "no", "race")


ROUTE = Trajectory.parse("2-1-1")


def _text(lm: LM, prompt: str, **settings: Any) -> str:
    (value,) = answer_requests(lm, [Query("generate_until", (prompt, settings))], [ROUTE])[ROUTE].values
    assert isinstance(value, str)
    return value


def test_kinds_may_be_mixed(lm: LM, tokenizer: Tokenizer) -> None:
    queries = [
        Query("generate_until", ("its step", {"until": ["\n"], "max_gen_toks": 4})),
        Query("loglikelihood", ("its", " step")),
        Query("loglikelihood_rolling", ("every pass is told its time " * 3,)),
        Query("loglikelihood", ("its", " time")),
    ]
    found = answer_requests(lm, queries, [ROUTE])[ROUTE]
    assert found.values[0] == lm.generate("its step", trajectory="2-1-1", max_tokens=4, stops="\n").text
    pairs = encode_pairs(tokenizer, [("its", " step"), ("its", " time")])
    expected = loglikelihoods(lm.model, pairs, [ROUTE])[ROUTE].answers
    assert [found.values[1], found.values[3]] == [list(one) for one in expected]
    texts = encode_texts(tokenizer, [queries[2].arguments[0]])
    ((total, _),) = loglikelihoods(lm.model, texts, [ROUTE])[ROUTE].answers
    assert found.values[2] == total
    assert found.cut == 0  # a rolling text is read in parts
    assert found.seconds > 0


def test_generation_follows_its_settings(tokenizer: Tokenizer) -> None:
    lm = LM(make_model(tokenizer, context=64), tokenizer)
    plain = lm.generate("every pass", trajectory="2-1-1", max_tokens=12).text
    assert _text(lm, "every pass", max_gen_toks=12) == plain
    assert _text(lm, "every pass", max_tokens=12, do_sample=False, temperature=0.9) == plain
    stop = plain[4:6]
    assert _text(lm, "every pass", max_gen_toks=12, until=stop) == plain[: plain.index(stop)]
    sampled = _text(lm, "every pass", max_gen_toks=12, do_sample=True, temperature=5.0, top_k=50)
    assert sampled != plain
    assert sampled == _text(lm, "every pass", max_gen_toks=12, do_sample=True, temperature=5.0, top_k=50)
    assert isinstance(_text(lm, "", max_gen_toks=3), str)


def test_long_prompts_lose_their_beginning(lm: LM) -> None:
    prompt = "every pass is told its time and its step"
    query = Query("generate_until", (prompt, {"until": [], "max_gen_toks": 6}))
    kept = lm.need_tokenizer().decode(lm.need_tokenizer().encode(prompt)[-10:])
    found = answer_requests(lm, [query], [ROUTE])[ROUTE]
    assert found.values == [lm.generate(kept, trajectory="2-1-1", max_tokens=6).text]
    assert found.cut == 1


def test_a_batch_gives_what_each_would_alone(lm: LM) -> None:
    queries = [
        Query("generate_until", (prompt, {"until": ["t"], "max_gen_toks": 5}))
        for prompt in ("its", "every pass is", "日本語", "its step")
    ]
    alone = [answer_requests(lm, [query], [ROUTE])[ROUTE].values[0] for query in queries]
    assert answer_requests(lm, queries, [ROUTE], batch_tokens=32)[ROUTE].values == alone


def test_the_hash_follows_the_requests() -> None:
    queries = [Query("loglikelihood", ("a", " b")), Query("generate_until", ("a", {"until": ["x"], "top_k": 1}))]
    again = [Query("loglikelihood", ("a", " b")), Query("generate_until", ("a", {"top_k": 1, "until": ["x"]}))]
    assert hash_requests(queries) == hash_requests(again)
    assert hash_requests(queries) != hash_requests(queries[::-1])


def test_what_cannot_be_generated_is_one_sentence(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="256 new tokens but the context is 16"):
        _text(lm, "its", until=["\n"])
    with pytest.raises(LoopformerError, match="num_beams"):
        _text(lm, "its", max_gen_toks=4, num_beams=4)
    with pytest.raises(LoopformerError, match="sets guidance for generation"):
        _text(lm, "its", max_gen_toks=4, guidance=1)
    with pytest.raises(LoopformerError, match="'multiply' are not supported"):
        answer_requests(lm, [Query("multiply", ("a",))], [ROUTE])


def _requests(texts: list[str]) -> Requests:
    queries = {
        "one": [Query("loglikelihood", (text, " x")) for text in texts],
        "two": [Query("generate_until", ("a", {"until": texts, "temperature": 0.5}))],
    }
    facts = {"tasks": {task: {"requests_sha256": hash_requests(asked)} for task, asked in queries.items()}}
    return Requests(facts, queries)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_requests_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    file = tmp_path_factory.mktemp("exchange") / "requests.jsonl"
    requests = _requests(texts)
    write_requests(file, requests)
    assert read_requests(file) == requests


def test_answers_come_back_to_the_last_digit(tmp_path: Path) -> None:
    answered = TaskAnswers([[-0.1 - 0.2, True], [-1e-17, False]], tokens=7, cut=1, seconds=0.25)
    texts = TaskAnswers(["a\u2028b\n"], 3, 0, 0.5)
    answers = Answers(
        {"tasks": {}}, {"path": "m"}, {"1": {"one": answered}, "2-1-1": {"one": answered, "two": texts}}
    )
    write_answers(tmp_path / "new" / "answers.jsonl", answers)
    assert read_answers(tmp_path / "new" / "answers.jsonl") == answers


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    with pytest.raises(FileProblem, match="cannot be read"):
        read_requests(file)
    write_requests(file, _requests(["a", "b"]))
    with pytest.raises(FileProblem, match="no file of answers"):
        read_answers(file)
    lines = file.read_text().splitlines(keepends=True)
    for damage in ("".join(lines[:-1]), "".join(lines)[:-9], "", lines[0], "".join([*lines, "[]\n"])):
        file.write_text(damage)
        with pytest.raises(FileProblem, match=r"damaged|no file of requests"):
            read_requests(file)
    head = json.loads(lines[0])
    file.write_text(json.dumps({**head, "version": 9}) + "\n")
    with pytest.raises(FileProblem, match="has version 9"):
        read_requests(file)
