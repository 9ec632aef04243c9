"""Names, stored numbers as dataclasses, and the rows that tables and figures are made of."""

import json
import math
from pathlib import Path

import pytest

from loopformer import LoopformerError, ModelConfig
from loopformer.analysis.report.tables import CHANCE_AVERAGE, main_table, score_table
from loopformer.analysis.results import ReportResults, entries, model_names, score_columns, short_path
from loopformer.model.cost import Cost

from .samples import make_model, make_report, make_results, make_run

STORED = Path(__file__).parent.parent / "fixtures" / "v1" / "report" / "report.json"


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


def test_a_stored_report_becomes_typed_whatever_else_it_holds() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    (model,) = ReportResults.from_json({**stored, "more": 1}).models
    (plain,) = stored["models"]
    assert [row.perplexity for row in model.perplexity] == [row["perplexity"] for row in plain["perplexity"]]
    assert model.search is not None
    assert model.analysis is not None
    assert model.search.best.schedule == plain["search"]["best"]["schedule"]
    assert model.analysis.to_json() == plain["analysis"]
    assert model.flops_per_token[4] == plain["flops_per_token"]["4"]
    damaged = make_report(make_model("one"))
    del damaged["models"][0]["perplexity"][0]["window"]
    with pytest.raises(KeyError, match="window"):
        ReportResults.from_json(damaged)


def test_a_row_for_each_model_and_budget_holds_cost_and_quality() -> None:
    found = make_results(make_model("one", blocks=2, loops=4), make_model("two", loops=2, level=50))
    rows = entries(found)
    assert [(row.model, row.budget) for row in rows] == [("one", 1), ("one", 4), ("two", 1), ("two", 2)]
    cost = Cost(ModelConfig(blocks=2, loops=4, width=32, heads=4, ffn=80, context=32, vocab=96))
    assert rows[1].paper_cost == "2x / 8x"
    assert rows[1].flops_per_token == cost.forward_flops(4)
    assert rows[1].parameters == cost.parameters.total
    assert rows[1].perplexity["news"] == 36.0
    assert found.texts == ["news", "a | b"]


def test_the_average_is_over_ten_with_arc_as_one() -> None:
    row = entries(make_results(make_model("one")))[0]
    assert row.scores["arc"] == pytest.approx(0.31)
    assert row.average == pytest.approx(0.31)
    error = 0.05
    assert row.errors["arc"] == pytest.approx(error / math.sqrt(2))
    assert row.average_error == pytest.approx(math.sqrt(9 * error**2 + error**2 / 2) / 10)
    assert pytest.approx((3 / 2 + 5 / 4 + 1 / 3) / 10) == CHANCE_AVERAGE  # 3 of two choices, 5 of four, 1 of three


def test_other_tasks_have_their_own_names_and_a_mean_only_of_shares() -> None:
    run = make_run(1, 0.5)
    run |= {"paper": None, "tasks": {name: run["tasks"][name] for name in ("piqa", "copa")}}
    found = make_results(make_model("one", tasks=[run]))
    assert [column.label for column in score_columns(found)] == ["piqa", "copa"]
    assert entries(found)[0].average == 0.5
    run["tasks"]["copa"]["metric"] = "perplexity"
    found = make_results(make_model("one", tasks=[run]))
    assert entries(found)[0].average is None
    assert "average" not in [column.key for column in main_table(found).columns]
    table = score_table(found)
    assert table is not None
    assert [cells[2][0] for cells in table.cells(table.groups[0])] == ["50.0"]
