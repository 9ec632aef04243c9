"""What is compared with what, and how numbers are written."""

from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from loopformer import ModelConfig
from loopformer.analysis.report.tables import (
    TOLERANCE,
    counted,
    flops_table,
    listed,
    main_table,
    matched,
    parameter_table,
    score_table,
    slowdown,
    training_table,
)
from loopformer.analysis.results import TrainingFacts, entries

from .samples import make_model, make_results, make_training


def test_a_model_without_measurements_still_shows_what_it_costs() -> None:
    found = make_results(make_model("one", loops=8, perplexity=None, tasks=None))
    assert [row.budget for row in entries(found)] == [1, 2, 4, 8]
    assert score_table(found) is None
    assert [column.label for column in main_table(found).shown][-1] == "FLOP per token"


class _Costing(NamedTuple):
    model: str
    cost: float


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e12)), max_size=20),
    st.floats(0, 0.5),
)
def test_matched_rows_differ_by_the_tolerance_at_most(rows: list[tuple[str, float]], tolerance: float) -> None:
    groups = matched([_Costing(*row) for row in rows], lambda row: row.cost, tolerance)
    for group in groups:
        costs = [row.cost for row in group]
        assert max(costs) <= min(costs) * (1 + tolerance)
        assert len({row.model for row in group}) > 1
    least = [min(row.cost for row in group) for group in groups]
    assert least == sorted(least)
    assert len({id(row) for group in groups for row in group}) == sum(map(len, groups))


def test_models_of_the_same_stack_or_compute_stand_together() -> None:
    base = make_model("base", blocks=4, loops=1, level=35)
    found = make_results(make_model("loop", blocks=2, loops=2), base, make_model("other", blocks=2, loops=4))
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
    found = make_results(make_model("one", blocks=1, loops=1), make_model("two", blocks=7, loops=1))
    assert parameter_table(found) is None
    assert flops_table(found) is None


def test_slowdown_compares_runs_that_differ_in_the_objective_alone() -> None:
    config = ModelConfig()
    elastic, fixed = (TrainingFacts(**make_training(config, elastic=kind)) for kind in (True, False))
    assert slowdown(elastic, {"fixed": fixed}) == (1.3, "fixed")
    other = replace(fixed, same={"batch": 8, "threads": 2})
    assert slowdown(elastic, {"far": other, "fixed": fixed})[1] == "fixed"
    assert slowdown(elastic, {"far": other}) == (None, "far differs in batch and threads")
    wider = replace(fixed, model={**fixed.model, "width": 1})
    assert slowdown(elastic, {"wide": wider}) == (None, "wide differs in model.width")
    assert slowdown(elastic, {"other": elastic, "none": None})[1] == "there is no fixed-depth run beside it"
    assert slowdown(elastic, {"fixed": replace(fixed, tokens_per_second=None)})[0] is None


def test_training_shows_the_ratio_as_trained_and_by_the_formula() -> None:
    fixed = make_model("fixed")
    fixed["training"] = make_training(ModelConfig(), elastic=False, model=fixed["training"]["model"])
    table = training_table(make_results(make_model("elastic"), fixed))
    assert table is not None
    rows: list[Any] = list(table.groups[0].rows)
    assert (rows[0]["overhead"], rows[1]["overhead"]) == (1.5, 1.0)
    assert rows[0]["slowdown"] == 1.3
    assert rows[0]["compared_with"] == "fixed"
    formula = rows[0]["formula"]
    assert 1.5 < formula < 2
    assert training_table(make_results(make_model("one", training=None))) is None


def test_numbers_are_written_for_people() -> None:
    assert [counted(value) for value in (12, 1234, 3_244_032, 2e9)] == ["12", "1.234 k", "3.244 M", "2 G"]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
