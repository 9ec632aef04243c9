"""The page as a reader's programs see it, its tables and rows, and its folder: all files, other folders refused."""

import csv
import io
import itertools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import ModelConfig
from loopformer.analysis import report as report_module
from loopformer.analysis.report import (
    CHANCE_AVERAGE,
    PART_NAMES,
    TOLERANCE,
    ReportData,
    check_folder,
    gaps,
    group_by_cost,
    join_words,
    render,
    schedule_figure_name,
    with_si_prefix,
    write_report,
)
from loopformer.errors import FileProblem
from loopformer.model.cost import Cost
from loopformer.plots import has_matplotlib

from .samples import make_data, make_model, make_report, make_run, make_training

STORED = Path(__file__).parent.parent / "fixtures" / "v1" / "report" / "report.json"
FIGURES = ("perplexity", "accuracy", "representations", "changes", "cka", "schedules-1-one", "schedules-2-two")
drawn = pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1190).to_bytes(4) + (500).to_bytes(4)


class Parsed(HTMLParser):
    """The tags of a page, checked to be closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def two() -> ReportData:
    second = make_model("two", level=50.0)
    second["training"] = {**second["training"], "elastic": False, "tokens_per_second": 1300.0}
    return make_data(make_model("one"), second)


def test_the_page_needs_nothing_beside_it_and_says_what_everything_is() -> None:
    text = render("html", two(), dict.fromkeys(FIGURES, PNG))
    page = Parsed(text)
    assert "http" not in text
    assert "<script" not in text
    assert not page.all("link")
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("img")) == len(FIGURES)
    for image in page.all("img"):
        assert str(image["src"]).startswith("data:image/png;base64,")
        assert len(str(image["alt"])) > 40
        assert image["style"] == "--width:59.5"
    assert {cell["scope"] for cell in page.all("th")} == {"col", "row", "rowgroup"}
    assert len(page.all("caption")) == len(page.all("table")) == text.count('role="region"')
    targets = {str(link["href"]).removeprefix("#") for link in page.all("a")}
    assert targets == {section["id"] for section in page.all("section")}


def test_every_part_of_the_report_is_there() -> None:
    text = render("md", two(), dict.fromkeys(FIGURES, PNG))
    for wanted in (
        "| one (1⊗4) | 1 | 1x / 1x |",
        "perplexity: news",
        "| guessing | – | 50.0 |",
        "stand-in: the validation split",
        "within 5 %",
        "about 1.5 where the loops",
        "loopformer report runs/one runs/two --out DIR --text news=news.jsonl",
        "`ffffffffffffffff`",
        "0.4.13",
        "![",
    ):
        assert wanted in text, wanted
    assert text.count("![") == len(FIGURES)
    assert "No figure is drawn" not in text


def test_rows_of_markdown_tables_are_as_long_as_their_heads() -> None:
    text = render("md", two(), dict.fromkeys(FIGURES, PNG))
    width = 0
    for line in text.splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (0, cells), line
        width = cells


def test_a_csv_file_has_the_numbers_themselves() -> None:
    found = two()
    rows = list(csv.DictReader(io.StringIO(found.tables["main"].to_csv().decode())))
    assert [row["ppl:a | b"] for row in rows] == ["39.0", "36.0", "49.0", "46.0"]
    assert float(rows[0]["flops_per_token"]) == found.models[0]["flops_per_token"]["1"]
    assert {"main", "scores", "metrics", "cka", "schedules", "training", "texts", "tasks"} <= found.tables.keys()


def test_names_are_only_text() -> None:
    name = "<b>*x*</b> | [y](z)"
    model = make_model(name, perplexity=[{**row, "text": name} for row in make_model("one")["perplexity"][:1]])
    data = make_data({**model, "missing": {"search": name}, "search": None})
    page = Parsed(render("html", data, dict.fromkeys(FIGURES, PNG)))
    assert not page.all("b")
    assert page.text.count(name) == 22
    assert name in str(page.all("img")[0]["alt"])
    text = render("md", data, dict.fromkeys(FIGURES, PNG))
    before_commands, _, after_commands = text.split("```")
    assert "<b>" not in (before_commands + after_commands).replace("\\<b\\>", "")
    assert "\\| \\[y\\]" in text
    assert "| – |" in text
    odd = make_data(make_model("a ` b"))  # a lone backtick does not begin code
    assert "# Report: a \\` b" in render("md", odd, {})
    assert "Report: a ` b" in Parsed(render("html", odd, {})).text


def test_what_is_missing_is_said_once_in_its_place() -> None:
    why = dict.fromkeys(PART_NAMES, "It rained.")
    nothing: dict[str, Any] = dict.fromkeys(PART_NAMES)
    alone = make_report(make_model("one", **nothing, missing=why))
    alone["tasks"] = None
    text = render("md", ReportData(alone), {})
    for what in PART_NAMES.values():
        assert text.count(f"{what}: It rained.") == 1
    assert "One model alone" in text
    assert "No perplexity and no task was measured" in text
    some = make_data(make_model("one"), make_model("two", search=None, missing={"search": "It rained."}))
    assert gaps(some.models, "search") == ["Schedules of two: It rained."]


def test_without_matplotlib_the_tables_remain() -> None:
    text = render("md", two(), {})
    assert "![" not in text
    assert text.count("No figure is drawn without matplotlib") == len(FIGURES)
    assert "| one (1⊗4) |" in text


def test_a_model_that_computes_no_numbers_is_named() -> None:
    broken = make_model("broken")
    broken["perplexity"] = [{**row, "perplexity": None, "bits_per_byte": None} for row in broken["perplexity"]]
    text = render("md", make_data(broken), {})
    assert "broken gives no finite numbers" in text


@drawn
def test_every_file_is_written(tmp_path: Path) -> None:
    found = make_report(make_model("one"), make_model("two", loops=8, level=90.0))
    files = write_report(found, tmp_path / "out")
    assert [file.name for file in files[:3]] == ["report.html", "report.md", "report.json"]
    assert all(file.stat().st_size for file in files)
    names = {str(file.relative_to(tmp_path / "out")) for file in files}
    assert names == {
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    for figure in ("perplexity", "accuracy", "representations", "changes", "cka", "schedules-1-one"):
        assert {f"figures/{figure}.png", f"figures/{figure}.svg"} <= names
    plain = json.loads(files[2].read_text())
    assert plain["models"] == json.loads(json.dumps(found["models"]))


@drawn
def test_a_report_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    write_report(make_report(make_model("old")), tmp_path)
    (tmp_path / "figures" / "mine.png").write_text("keep")
    (tmp_path / "notes.txt").write_text("keep")
    write_report(make_report(make_model("new", search=None, analysis=None)), tmp_path)
    left = {path.name for path in (tmp_path / "figures").iterdir()}
    assert left == {"mine.png", "perplexity.png", "perplexity.svg", "accuracy.png", "accuracy.svg"}
    assert not (tmp_path / "tables" / "schedules.csv").exists()
    assert (tmp_path / "notes.txt").read_text() == "keep"


@drawn
def test_a_listed_file_outside_the_report_is_never_removed(tmp_path: Path) -> None:
    out, small = tmp_path / "out", make_report(make_model("one", search=None, analysis=None, tasks=None))
    write_report(small, out)
    outside = [tmp_path / "a.txt", out / "b.txt"]
    for path in outside:
        path.write_text("keep")
    plain = json.loads((out / "report.json").read_text())
    wrong = ["../a.txt", "figures/../b.txt", "b.txt", str(tmp_path / "a.txt"), "figures/..", 7]
    (out / "report.json").write_text(json.dumps({**plain, "files": [*plain["files"], *wrong]}))
    write_report(small, out)
    assert all(path.exists() for path in outside)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(FileProblem, match="not empty and holds no report"):
        check_folder(tmp_path / "full")
    (tmp_path / "full" / "report.json").write_text('{"format": "another"}')
    with pytest.raises(FileProblem, match="not empty and holds no report"):
        check_folder(tmp_path / "full")
    (tmp_path / "full" / "report.json").write_text(json.dumps({"format": "loopformer-report", "files": 3}))
    check_folder(tmp_path / "full")
    check_folder(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists(), "a folder is made when there is something to put into it"


@drawn
def test_a_report_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    broken = make_report(make_model("one"))
    broken["models"][0]["analysis"] = {"damaged": True}
    with pytest.raises((KeyError, TypeError)):
        write_report(broken, tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    check_folder(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_report_that_is_stopped_while_written_is_the_old_one_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(report_module, "has_matplotlib", lambda: False)
    old, new = (make_report(make_model(name)) for name in ("old", "new"))
    for stop in (1, 2, 7, 10):
        out = tmp_path / str(stop)
        with _stopped(monkeypatch, call, stop), pytest.raises(KeyboardInterrupt):
            write_report(old, out / "deep")
        if call == "fsync":  # while files were written aside
            assert not out.exists()
        write_report(old, out / "deep")
        before = _contents(out)
        with _stopped(monkeypatch, call, stop), pytest.raises(KeyboardInterrupt):
            write_report(new, out / "deep")
        assert (_contents(out) == before) == (call == "fsync")
        check_folder(out / "deep")
        write_report(new, tmp_path / "whole")
        assert call == "fsync" or _contents(out / "deep") == _contents(tmp_path / "whole")


def test_what_a_killed_process_left_aside_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "report.json.tmp").write_text("{")
    check_folder(tmp_path)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _stopped(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> Iterator[None]:
    """Ctrl-C at the so many-th call of a function of `os`, which is once."""
    real, calls = getattr(os, name), itertools.count(1)

    def function(*args: Any) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, function)
        yield


def test_names_of_figures_are_names_of_files() -> None:
    assert schedule_figure_name(2, "a/b c") == "schedules-2-a-b-c"


def test_a_model_without_measurements_still_shows_what_it_costs() -> None:
    found = make_data(make_model("one", loops=8, perplexity=None, tasks=None))
    assert [row["budget"] for row in found.rows] == [1, 2, 4, 8]
    assert "scores" not in found.tables
    assert [column.heading for column in found.tables["main"].shown][-1] == "FLOP per token"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e12)), max_size=20),
    st.floats(0, 0.5),
)
def test_matched_rows_differ_by_the_tolerance_at_most(rows: list[tuple[str, float]], tolerance: float) -> None:
    groups = group_by_cost([{"model": model, "cost": cost} for model, cost in rows], "cost", tolerance)
    for group in groups:
        costs = [row["cost"] for row in group]
        assert max(costs) <= min(costs) * (1 + tolerance)
        assert len({row["model"] for row in group}) > 1
    least = [min(row["cost"] for row in group) for group in groups]
    assert least == sorted(least)
    assert len({id(row) for group in groups for row in group}) == sum(map(len, groups))


def test_models_of_the_same_stack_or_compute_stand_together() -> None:
    base = make_model("base", blocks=4, loops=1, level=35)
    found = make_data(make_model("loop", blocks=2, loops=2), base, make_model("other", blocks=2, loops=4))
    size, compute = found.tables["parameters_matched"], found.tables["flops_matched"]
    assert [{row["model"] for row in rows} for _, rows in size.groups] == [{"loop", "other"}]
    alike = [{(row["model"], row["budget"]) for row in rows} for _, rows in compute.groups]
    assert alike == [{("loop", 1), ("other", 1)}, {("loop", 2), ("base", 1)}]  # 2·1 blocks, then 2·2 and 4·1
    assert [compute.cells(row)[4] for row in compute.groups[1][1]] == ["38.00", "34.00"]
    assert TOLERANCE == 0.05
    assert "within 5 % of one another" in render("md", found, {})


def test_nothing_is_matched_where_nothing_matches() -> None:
    found = make_data(make_model("one", blocks=1, loops=1), make_model("two", blocks=7, loops=1))
    assert not {"parameters_matched", "flops_matched"} & found.tables.keys()


def test_training_shows_the_ratio_as_trained_and_by_the_formula() -> None:
    fixed = make_model("fixed", training=make_training(elastic=False))
    rows = make_data(make_model("elastic"), fixed).tables["training"].rows
    assert (rows[0]["overhead"], rows[1]["overhead"]) == (1.5, 1.0)
    formula = rows[0]["formula"]
    assert 1.5 < formula < 2
    assert "training" not in make_data(make_model("one", training=None)).tables


def test_numbers_are_written_for_people() -> None:
    assert [with_si_prefix(value) for value in (12, 1234, 3_244_032, 2e9)] == ["12", "1.234 k", "3.244 M", "2 G"]
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"]) == "a, b and c"


def test_a_stored_report_can_be_written_whatever_else_it_holds(tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    report = ReportData({**stored, "more": 1})
    (plain,) = stored["models"]
    assert [row["perplexity"] for row in report.tables["perplexity"].rows] == [
        row["perplexity"] for row in plain["perplexity"]
    ]
    assert f"the best is {plain['search']['best']['schedule']} with" in render("md", report, {})
    assert report.dynamics[0] == plain["analysis"]
    assert report.rows[-1]["flops_per_token"] == plain["flops_per_token"]["4"]
    assert write_report(stored, tmp_path)[0].is_file()
    damaged = make_report(make_model("one"))
    del damaged["models"][0]["perplexity"][0]["window"]
    with pytest.raises(KeyError, match="window"):
        ReportData(damaged)


def test_a_row_for_each_model_and_budget_holds_cost_and_quality() -> None:
    found = make_data(make_model("one", blocks=2, loops=4), make_model("two", loops=2, level=50))
    rows = found.rows
    assert [(row["model"], row["budget"]) for row in rows] == [("one", 1), ("one", 4), ("two", 1), ("two", 2)]
    cost = Cost(ModelConfig(blocks=2, loops=4, width=32, heads=4, ffn=80, context=32, vocab=96))
    assert rows[1]["paper_cost"] == "2x / 8x"
    assert rows[1]["flops_per_token"] == cost.forward_flops(4)
    assert rows[1]["parameters"] == cost.parameters.total
    assert rows[1]["ppl:news"] == 36.0
    assert found.texts == ["news", "a | b"]


def test_the_average_is_over_ten_with_arc_as_one() -> None:
    row = make_data(make_model("one")).rows[0]
    assert row["score:arc"] == pytest.approx(0.31)
    assert row["average"] == pytest.approx(0.31)
    error = 0.05
    assert row["error:arc"] == pytest.approx(error / math.sqrt(2))
    assert row["average_error"] == pytest.approx(math.sqrt(9 * error**2 + error**2 / 2) / 10)
    assert pytest.approx((3 / 2 + 5 / 4 + 1 / 3) / 10) == CHANCE_AVERAGE  # 3 of two choices, 5 of four, 1 of three


def test_other_tasks_have_their_own_names_and_a_mean_only_of_shares() -> None:
    run = make_run(1, 0.5)
    run |= {"paper": None, "tasks": {name: run["tasks"][name] for name in ("piqa", "copa")}}
    found = make_data(make_model("one", tasks=[run]))
    assert [score.label for score in found.scores] == ["piqa", "copa"]
    assert found.rows[0]["average"] == 0.5
    run["tasks"]["copa"]["metric"] = "perplexity"
    found = make_data(make_model("one", tasks=[run]))
    assert found.rows[0]["average"] is None
    assert "average" not in [column.key for column in found.tables["main"].columns]
    table = found.tables["scores"]
    assert [table.cells(row)[2] for row in table.rows] == ["50.0"]
