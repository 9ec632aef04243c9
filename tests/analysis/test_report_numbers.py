"""Rows, averages, errors, matched groups and the cost of training, as numbers."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import ModelConfig
from loopformer.analysis.report.collect import listed, slowdown
from loopformer.analysis.report.tables import (
    CHANCE_AVERAGE,
    TOLERANCE,
    benchmarks,
    counted,
    entries,
    flops_table,
    main_table,
    matched,
    parameter_table,
    score_table,
    texts,
    training_table,
)
from loopformer.model.cost import Cost

from .samples import make_model, make_report, make_run, make_training


def test_a_row_for_each_model_and_budget_holds_cost_and_quality() -> None:
    found = make_report(make_model("one", blocks=2, loops=4), make_model("two", loops=2, level=50))
    rows = entries(found)
    assert [(row["model"], row["budget"]) for row in rows] == [("one", 1), ("one", 4), ("two", 1), ("two", 2)]
    cost = Cost(ModelConfig(blocks=2, loops=4, width=32, heads=4, ffn=80, context=32, vocab=96))
    assert rows[1]["paper_cost"] == "2x / 8x"
    assert rows[1]["flops_per_token"] == cost.forward_flops(4)
    assert rows[1]["parameters"] == cost.parameters.total
    assert rows[1]["ppl:news"] == 36.0
    assert texts(found) == ["news", "a | b"]


def test_the_average_is_over_ten_with_arc_as_one() -> None:
    row = entries(make_report(make_model("one")))[0]
    assert row["score:arc"] == pytest.approx(0.31)
    assert row["average"] == pytest.approx(0.31)
    error = 0.05
    assert row["error:arc"] == pytest.approx(error / math.sqrt(2))
    assert row["average_error"] == pytest.approx(math.sqrt(9 * error**2 + error**2 / 2) / 10)
    assert pytest.approx((3 / 2 + 5 / 4 + 1 / 3) / 10) == CHANCE_AVERAGE  # 3 of two choices, 5 of four, 1 of three


def test_other_tasks_have_their_own_names_and_a_mean_only_of_shares() -> None:
    run = make_run(1, 0.5)
    run |= {"paper": None, "tasks": {name: run["tasks"][name] for name in ("piqa", "copa")}}
    found = make_report(make_model("one", tasks=[run]))
    assert [one.label for one in benchmarks(found)] == ["piqa", "copa"]
    assert entries(found)[0]["average"] == 0.5
    run["tasks"]["copa"]["metric"] = "perplexity"
    assert "average" not in entries(found)[0]
    table = score_table(found)
    assert table is not None
    assert [cells[2][0] for cells in table.cells(table.groups[0])] == ["50.0"]


def test_a_model_without_measurements_still_shows_what_it_costs() -> None:
    found = make_report(make_model("one", loops=8, perplexity=None, tasks=None))
    assert [row["budget"] for row in entries(found)] == [1, 2, 4, 8]
    assert score_table(found) is None
    assert [column.label for column in main_table(found).shown][-1] == "FLOP per token"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e12)), max_size=20),
    st.floats(0, 0.5),
)
def test_matched_rows_differ_by_the_tolerance_at_most(rows: list[tuple[str, float]], tolerance: float) -> None:
    given = [{"model": model, "cost": cost} for model, cost in rows]
    groups = matched(given, "cost", tolerance)
    for group in groups:
        costs = [row["cost"] for row in group]
        assert max(costs) <= min(costs) * (1 + tolerance)
        assert len({row["model"] for row in group}) > 1
    least = [min(row["cost"] for row in group) for group in groups]
    assert least == sorted(least)
    assert len({id(row) for group in groups for row in group}) == sum(map(len, groups))


def test_models_of_the_same_stack_or_compute_stand_together() -> None:
    base = make_model("base", blocks=4, loops=1, level=35)
    found = make_report(make_model("loop", blocks=2, loops=2), base, make_model("other", blocks=2, loops=4))
    size, compute = parameter_table(found), flops_table(found)
    assert size is not None
    assert compute is not None
    assert [{row["model"] for row in group.rows} for group in size.groups] == [{"loop", "other"}]
    alike = [{(row["model"], row["budget"]) for row in group.rows} for group in compute.groups]
    assert alike == [{("loop", 1), ("other", 1)}, {("loop", 2), ("base", 1)}]  # 2·1 blocks, then 2·2 and 4·1
    best = [cells[4] for cells in compute.cells(compute.groups[1])]
    assert best == [("38.00", False), ("34.00", True)]
    assert TOLERANCE == 0.05
    assert "5 %" in compute.caption


def test_nothing_is_matched_where_nothing_matches() -> None:
    found = make_report(make_model("one", blocks=1, loops=1), make_model("two", blocks=7, loops=1))
    assert parameter_table(found) is None
    assert flops_table(found) is None


def test_slowdown_compares_runs_that_differ_in_the_objective_alone() -> None:
    config = ModelConfig()
    elastic, fixed = make_training(config), make_training(config, elastic=False)
    assert slowdown(elastic, {"fixed": fixed}) == (1.3, "fixed")
    other = {**fixed, "same": {"batch": 8, "threads": 2}}
    assert slowdown(elastic, {"far": other, "fixed": fixed})[1] == "fixed"
    assert slowdown(elastic, {"far": other}) == (None, "far differs in batch and threads")
    wider = {**fixed, "model": {**fixed["model"], "width": 1}}
    assert slowdown(elastic, {"wide": wider}) == (None, "wide differs in model.width")
    assert slowdown(elastic, {"other": elastic, "none": None})[1] == "there is no fixed-depth run beside it"
    assert slowdown(elastic, {"fixed": {**fixed, "tokens_per_second": None}})[0] is None


def test_training_shows_the_ratio_as_trained_and_by_the_formula() -> None:
    fixed = make_model("fixed")
    fixed["training"] = make_training(ModelConfig(), elastic=False, model=fixed["training"]["model"])
    table = training_table(make_report(make_model("elastic"), fixed))
    assert table is not None
    rows: list[Any] = list(table.groups[0].rows)
    assert (rows[0]["overhead"], rows[1]["overhead"]) == (1.5, 1.0)
    assert rows[0]["slowdown"] == 1.3
    assert rows[0]["compared_with"] == "fixed"
    formula = rows[0]["formula"]
    assert 1.5 < formula < 2
    assert training_table(make_report(make_model("one", training=None))) is None


def test_numbers_are_written_for_people() -> None:
    assert [counted(value) for value in (12, 1234, 3_244_032, 2e9)] == ["12", "1.234 k", "3.244 M", "2 G"]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
