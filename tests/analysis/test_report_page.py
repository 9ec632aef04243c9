"""The page as a reader's programs see it, and its folder: all files, an earlier report replaced, others refused."""

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopformer.analysis.report import page as page_module
from loopformer.analysis.report.content import (
    NO_FIGURES,
    PART_NAMES,
    Items,
    Page,
    Picture,
    Section,
    compose,
    gaps,
    schedule_name,
)
from loopformer.analysis.report.page import (
    accuracy_figure,
    check_folder,
    perplexity_figure,
    to_html,
    to_markdown,
    write_report,
)
from loopformer.analysis.report.tables import Column, RowGroup, Table
from loopformer.analysis.results import ReportResults
from loopformer.errors import FileProblem
from loopformer.plots import available

from .samples import make_model, make_report, make_results

FIGURES = ("perplexity", "accuracy", "representations", "changes", "cka", "schedules-1-one", "schedules-2-two")
drawn = pytest.mark.skipif(not available(), reason="needs matplotlib")
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


def two() -> ReportResults:
    second = make_model("two", level=50.0)
    second["training"] = {**second["training"], "elastic": False, "tokens_per_second": 1300.0}
    return make_results(make_model("one"), second)


def test_the_page_needs_nothing_beside_it_and_says_what_everything_is() -> None:
    document = compose(two(), FIGURES)
    text = to_html(document, dict.fromkeys(FIGURES, PNG))
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
    text = to_markdown(compose(two(), FIGURES))
    for wanted in (
        "| one (1⊗4) | 1 | 1x / 1x |",
        "perplexity: news",
        "| guessing | – | 50.0 |",
        "stand-in: the validation split",
        "within 5 %",
        "about 1.5 where the loops",
        "1.30 times slower than two",
        "loopformer report runs/one runs/two --out DIR --text news=news.jsonl",
        "`ffffffffffffffff`",
        "0.4.13",
        "![",
    ):
        assert wanted in text, wanted
    assert text.count("![") == len(FIGURES)
    assert NO_FIGURES not in text


def test_rows_of_markdown_tables_are_as_long_as_their_heads() -> None:
    text = to_markdown(compose(two(), FIGURES))
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
    (table,) = (table for table in compose(found, ()).tables if table.name == "main")
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["ppl:a | b"] for row in rows] == ["39.0", "36.0", "49.0", "46.0"]
    assert float(rows[0]["flops_per_token"]) == found.models[0].flops_per_token[1]
    names = [table.name for table in compose(found, ()).tables]
    assert len(set(names)) == len(names)
    assert {"main", "scores", "metrics", "cka", "schedules", "training", "texts", "tasks"} <= set(names)


def test_names_are_only_text() -> None:
    name = "<b>*x*</b> | [y](z) `"
    table = Table("t", "c", [Column("a", "a", text=True), Column("b", "b")], [RowGroup([{"a": name, "b": None}])])
    document = Page(name, name, [Section("s", name, [name, table, Items([name]), Picture("f", name, name)])])
    page = Parsed(to_html(document, {"f": PNG}))
    assert not page.all("b")
    assert page.text.count(name) == 9
    text = to_markdown(document)
    assert "<b>" not in text.replace("\\<b\\>", "")
    assert "\\| \\[y\\]" in text
    assert "| – |" in text


def test_what_is_missing_is_said_once_in_its_place() -> None:
    why = dict.fromkeys(PART_NAMES, "It rained.")
    nothing: dict[str, Any] = dict.fromkeys(PART_NAMES)
    alone = make_report(make_model("one", **nothing, missing=why))
    alone["tasks"] = None
    text = to_markdown(compose(ReportResults.from_json(alone), ()))
    for what in PART_NAMES.values():
        assert text.count(f"{what}: It rained.") == 1
    assert "One model alone" in text
    assert "No perplexity and no benchmark was measured" in text
    some = make_results(make_model("one"), make_model("two", search=None, missing={"search": "It rained."}))
    assert gaps(some, "search") == ["Schedules of two: It rained."]


def test_without_matplotlib_the_tables_remain() -> None:
    text = to_markdown(compose(two(), ()))
    assert "![" not in text
    assert text.count(NO_FIGURES) == len(FIGURES)
    assert "| one (1⊗4) |" in text


def test_a_model_that_computes_no_numbers_is_named() -> None:
    broken = make_model("broken")
    broken["perplexity"] = [{**row, "perplexity": None, "bits_per_byte": None} for row in broken["perplexity"]]
    text = to_markdown(compose(make_results(broken), ()))
    assert "broken gives no finite numbers" in text


def test_a_run_without_a_twin_says_so() -> None:
    text = to_markdown(compose(make_results(make_model("one")), ()))
    assert "The overhead of one in wall-clock time is not known: there is no fixed-depth run beside it." in text


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
    with pytest.raises(FileProblem, match="is a file"):
        check_folder(tmp_path / "full" / "thesis.txt")
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
    monkeypatch.setattr(page_module, "available", lambda: False)
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


@drawn
def test_curves_have_a_point_for_each_budget_and_a_line_for_each_model() -> None:
    unmeasured = make_model("none", perplexity=None, tasks=None)
    found = make_results(make_model("one"), make_model("two", loops=8, level=90.0), unmeasured)
    figure = perplexity_figure(found)
    assert [axis.get_title() for axis in figure.axes] == ["news", "a | b"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one (1⊗4)", "two (1⊗8)"]
    assert np.asarray(lines[1].get_ydata()).tolist() == [89.0, 82.0]
    assert "FLOP per token" in figure.axes[0].get_xlabel()
    (axis,) = accuracy_figure(found).axes
    points = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.get_lines()]).round(6).tolist()
    assert {31.0, 34.0, 38.0} <= set(points)
    assert any(text.get_text() == "guessing" for text in axis.texts)


def test_names_of_figures_are_names_of_files() -> None:
    assert schedule_name(2, "a/b c") == "schedules-2-a-b-c"
