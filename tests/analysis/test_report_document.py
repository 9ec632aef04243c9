"""The page as a reader's programs see it: Markdown, HTML and CSV of the same document."""

import csv
import io
from html.parser import HTMLParser
from typing import Any

from loopformer.analysis.report.content import NO_FIGURES, WHAT, compose, gaps
from loopformer.analysis.report.document import Column, Document, Figure, Group, Items, Section, Table
from loopformer.analysis.report.html import to_html
from loopformer.analysis.report.markdown import to_markdown

from .samples import make_model, make_report

FIGURES = ("perplexity", "accuracy", "representations", "changes", "cka", "schedules-1-one", "schedules-2-two")
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1190).to_bytes(4) + (500).to_bytes(4)


class Page(HTMLParser):
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


def two() -> dict[str, Any]:
    second = make_model("two", level=50.0)
    second["training"] = {**second["training"], "elastic": False, "tokens_per_second": 1300.0}
    return make_report(make_model("one"), second)


def test_the_page_needs_nothing_beside_it_and_says_what_everything_is() -> None:
    document = compose(two(), FIGURES)
    text = to_html(document, dict.fromkeys(FIGURES, PNG))
    page = Page(text)
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
    assert float(rows[0]["flops_per_token"]) == found["models"][0]["flops_per_token"]["1"]
    names = [table.name for table in compose(found, ()).tables]
    assert len(set(names)) == len(names)
    assert {"main", "scores", "metrics", "cka", "schedules", "training", "texts", "tasks"} <= set(names)


def test_names_are_only_text() -> None:
    name = "<b>*x*</b> | [y](z) `"
    table = Table("t", "c", [Column("a", "a", text=True), Column("b", "b")], [Group([{"a": name, "b": None}])])
    document = Document(name, name, [Section("s", name, [name, table, Items([name]), Figure("f", name, name)])])
    page = Page(to_html(document, {"f": PNG}))
    assert not page.all("b")
    assert page.text.count(name) == 9
    text = to_markdown(document)
    assert "<b>" not in text.replace("\\<b\\>", "")
    assert "\\| \\[y\\]" in text
    assert "| – |" in text


def test_what_is_missing_is_said_once_in_its_place() -> None:
    why = dict.fromkeys(WHAT, "It rained.")
    nothing: dict[str, Any] = dict.fromkeys(WHAT)
    alone = make_report(make_model("one", **nothing, missing=why))
    alone["tasks"] = None
    text = to_markdown(compose(alone, ()))
    for what in WHAT.values():
        assert text.count(f"{what}: It rained.") == 1
    assert "One model alone" in text
    assert "No perplexity and no benchmark was measured" in text
    some = make_report(make_model("one"), make_model("two", search=None, missing={"search": "It rained."}))
    assert gaps(some, "search") == ["Schedules of two: It rained."]


def test_without_matplotlib_the_tables_remain() -> None:
    text = to_markdown(compose(two(), ()))
    assert "![" not in text
    assert text.count(NO_FIGURES) == len(FIGURES)
    assert "| one (1⊗4) |" in text


def test_a_model_that_computes_no_numbers_is_named() -> None:
    broken = make_model("broken")
    broken["perplexity"] = [{**row, "perplexity": None, "bits_per_byte": None} for row in broken["perplexity"]]
    text = to_markdown(compose(make_report(broken), ()))
    assert "broken gives no finite numbers" in text


def test_a_run_without_a_twin_says_so() -> None:
    text = to_markdown(compose(make_report(make_model("one")), ()))
    assert "The overhead of one in wall-clock time is not known: there is no fixed-depth run beside it." in text
