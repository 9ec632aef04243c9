"""A report on disk: all files, an earlier one replaced, anything else refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from loopformer.analysis.plots import draw_accuracy, draw_perplexity, schedule_name
from loopformer.analysis.report.folder import check_folder, write_report
from loopformer.errors import FileProblem

from .samples import make_model, make_report

pytest.importorskip("matplotlib")


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


def test_a_report_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    write_report(make_report(make_model("old")), tmp_path)
    (tmp_path / "figures" / "mine.png").write_text("keep")
    (tmp_path / "notes.txt").write_text("keep")
    write_report(make_report(make_model("new", search=None, analysis=None)), tmp_path)
    left = {path.name for path in (tmp_path / "figures").iterdir()}
    assert left == {"mine.png", "perplexity.png", "perplexity.svg", "accuracy.png", "accuracy.svg"}
    assert not (tmp_path / "tables" / "schedules.csv").exists()
    assert (tmp_path / "notes.txt").read_text() == "keep"


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


def test_a_report_that_was_stopped_while_written_is_known_as_ours(tmp_path: Path) -> None:
    broken = make_report(make_model("one"))
    broken["models"][0]["analysis"] = {"damaged": True}
    with pytest.raises((KeyError, TypeError)):
        write_report(broken, tmp_path)
    check_folder(tmp_path)


def test_curves_have_a_point_for_each_budget_and_a_line_for_each_model() -> None:
    unmeasured = make_model("none", perplexity=None, tasks=None)
    found = make_report(make_model("one"), make_model("two", loops=8, level=90.0), unmeasured)
    figure = draw_perplexity(found)
    assert [axis.get_title() for axis in figure.axes] == ["news", "a | b"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one (1⊗4)", "two (1⊗8)"]
    assert np.asarray(lines[1].get_ydata()).tolist() == [89.0, 82.0]
    assert "FLOP per token" in figure.axes[0].get_xlabel()
    (axis,) = draw_accuracy(found).axes
    points = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.get_lines()]).round(6).tolist()
    assert {31.0, 34.0, 38.0} <= set(points)
    assert any(text.get_text() == "guessing" for text in axis.texts)


def test_names_of_figures_are_names_of_files() -> None:
    assert schedule_name(2, "a/b c") == "schedules-2-a-b-c"
