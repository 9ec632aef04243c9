"""What a report is asked for: read, named and refused."""

from pathlib import Path
from typing import Any

import pytest

from loopformer import LoopformerError, ModelConfig
from loopformer.analysis.dynamics import model_names, short_path
from loopformer.analysis.report.collect import Asked, Source, read_budgets, read_skip, read_texts


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert model_names(["runs/a/elastic", "runs/b/elastic"]) == ("a/elastic", "b/elastic")
    assert model_names(["runs/a/elastic", "runs/a/fixed"]) == ("elastic", "fixed")
    (tmp_path / "one").mkdir()
    with pytest.raises(LoopformerError, match="given twice"):
        model_names([str(tmp_path / "one"), f"{tmp_path}/one/../one"])


def test_paths_are_shown_without_their_place() -> None:
    assert short_path("/home/me/news.jsonl") == "news.jsonl"
    assert short_path("../news.jsonl") == "news.jsonl"
    assert short_path("runs/mine") == "runs/mine"
    assert short_path("hf:owner/texts") == "hf:owner/texts"


def test_texts_have_the_names_they_are_given(tmp_path: Path) -> None:
    file = tmp_path / "news=today.txt"
    file.write_text("x")
    assert read_texts(["my news=/far/news.txt", "stdlib", str(file)]) == (
        Source("my news", "/far/news.txt"),
        Source("stdlib", "stdlib"),
        Source("news=today.txt", str(file)),
    )


@pytest.mark.parametrize(
    ("given", "said"), [(["=x"], "NAME=SOURCE"), (["x="], "NAME=SOURCE"), (["a=x", "a=y"], "Two texts are named a")]
)
def test_texts_without_a_name_of_their_own_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        read_texts(given)


def test_budgets_are_sorted_and_each_once() -> None:
    assert read_budgets("4,1,4") == (1, 4)
    assert read_budgets(None) is None
    for wrong in ("", "many", "1,,2", "0,1"):
        with pytest.raises(LoopformerError, match="such as 1,2,4"):
            read_budgets(wrong)


def test_an_unknown_part_names_the_nearest() -> None:
    assert read_skip(" tasks, search ") == {"tasks", "search"}
    assert read_skip(None) == frozenset()
    with pytest.raises(LoopformerError, match="did you mean tasks"):
        read_skip("task")


def test_a_shallow_model_is_measured_where_it_can_be() -> None:
    asked = Asked(("a", "b"), budgets=(2, 8))
    asked.check_depths([1, 8])
    assert asked.budgets_of(ModelConfig(loops=8)) == [2, 8]
    assert asked.budgets_of(ModelConfig(loops=4)) == [2]
    assert asked.budgets_of(ModelConfig(loops=1)) == [1]
    assert Asked(("a",)).budgets_of(ModelConfig(loops=8)) == [1, 2, 4, 8]


@pytest.mark.parametrize("wrong", [{"budgets": (9,)}, {"search": 9}])
def test_a_budget_above_every_model_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LoopformerError, match="9 is above the 8 loops of b, the deepest model"):
        Asked(("a", "b"), **wrong).check_depths([4, 8])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"models": ()}, "at least one"),
        ({"prompts": 0}, "--prompts"),
        ({"limit": 0}, "--limit"),
        ({"search": 0}, "--search"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"search_tasks": True}, "--search-tasks"),
        ({"search_tasks": True, "tasks": "piqa", "skip": frozenset({"search"})}, "--search-tasks"),
    ],
)
def test_wrong_numbers_are_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        Asked(**{"models": ("a",), **wrong})


def test_the_data_alone_asks_for_the_papers_tasks() -> None:
    assert Asked(("a",)).wanted_tasks is None
    assert Asked(("a",), data=Path("eval")).wanted_tasks == "paper"
    assert Asked(("a",), data=Path("eval"), tasks="piqa").wanted_tasks == "piqa"
