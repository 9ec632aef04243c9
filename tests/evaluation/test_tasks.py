"""The paper's tasks and their files, requests and our answers, and both as files."""

import hashlib
import json
from pathlib import Path

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


def test_ten_scores_and_their_average() -> None:
    values = {name: number / 100 for number, name in enumerate(TASKS)}
    scores = paper_scores(values)
    assert scores is not None
    assert len(PAPER) == 10
    assert PAPER["arc"] == ["arc_easy", "arc_challenge"]
    assert scores["arc"] == pytest.approx((values["arc_easy"] + values["arc_challenge"]) / 2)
    assert scores["average"] == pytest.approx(sum(scores[name] for name in PAPER) / 10)
    assert paper_scores({name: 0.5 for name in TASKS if name != "sciq"}) is None


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
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal"', "Line 2 of .* is no JSON object"),
        ("[1, 2]\n", "Line 1 of .* is no JSON object"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "piqa.validation.jsonl").write_text(content)
    with pytest.raises(FileProblem, match=said):
        read_examples(tmp_path, "piqa")


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"no data for race; put race_high\.test\.jsonl there"):
        read_examples(tmp_path, "race")
    with pytest.raises(FileProblem, match="There is no folder"):
        read_examples(tmp_path / "no", "race")


ROUTE = Trajectory.parse("2-1-1")


def test_kinds_may_be_mixed(lm: LM, tokenizer: Tokenizer) -> None:
    queries = [
        Query("loglikelihood", ("its", " step")),
        Query("loglikelihood_rolling", ("every pass is told its time " * 3,)),
        Query("loglikelihood", ("its", " time")),
    ]
    found = answer_requests(lm, queries, [ROUTE])[ROUTE]
    pairs = encode_pairs(tokenizer, [("its", " step"), ("its", " time")])
    expected = loglikelihoods(lm.model, pairs, [ROUTE])[ROUTE].answers
    assert [found.values[0][1], found.values[2][1]] == [greedy for _, greedy in expected]
    assert [found.values[0][0], found.values[2][0]] == pytest.approx([total for total, _ in expected], abs=1e-5)
    texts = encode_texts(tokenizer, [queries[1].arguments[0]])
    ((total, _),) = loglikelihoods(lm.model, texts, [ROUTE])[ROUTE].answers
    assert found.values[1] == pytest.approx(total, abs=1e-5)
    assert found.cut == 0  # a rolling text is read in parts
    assert found.seconds > 0
    long = Query("loglikelihood", ("every pass is told its time " * 3, " step"))
    assert answer_requests(lm, [long, *queries], [ROUTE])[ROUTE].cut == 1


def test_a_pair_is_cut_from_one_token_beyond_the_context(lm: LM, tokenizer: Tokenizer) -> None:
    """A pair of context + 1 tokens fits, because its last token is only a target."""
    limit, sizes = lm.model.config.context + 1, set[int]()
    for words in range(1, limit + 5):
        pair = ("x" * words, " step")
        (span,) = encode_pairs(tokenizer, [pair])
        sizes.add(len(span.tokens))
        found = answer_requests(lm, [Query("loglikelihood", pair)], [ROUTE])[ROUTE]
        assert found.cut == (len(span.tokens) > limit)
    assert {limit - 1, limit, limit + 1} <= sizes


def test_the_hash_follows_the_requests() -> None:
    queries = [Query("loglikelihood", ("a", " b")), Query("loglikelihood_rolling", ("a",))]
    assert hash_requests(queries) == hash_requests([*queries])
    assert hash_requests(queries) != hash_requests(queries[::-1])


@pytest.mark.parametrize("kind", ["generate_until", "multiply"])
def test_what_is_no_log_likelihood_is_refused(kind: str) -> None:
    with pytest.raises(LoopformerError, match=f"'{kind}' are not supported.*`loopformer export`.*`lm_eval"):
        Query(kind, ("a",))


def _requests(texts: list[str]) -> Requests:
    queries = {
        "one": [Query("loglikelihood", (text, " x")) for text in texts],
        "two": [Query("loglikelihood_rolling", (text,)) for text in texts],
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
    texts = TaskAnswers([-0.1 - 0.2], 3, 0, 0.5)
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
    with pytest.raises(FileProblem, match="no file of requests of this version"):
        read_requests(file)
