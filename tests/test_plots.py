"""Lines, maps and files of pictures: what is given is drawn, in one style, and nothing is left behind."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from loopformer.errors import LoopformerError
from loopformer.plots import (
    COLOURS,
    Line,
    Panel,
    check_drawing,
    figure_bytes,
    has_matplotlib,
    line_figure,
    map_figure,
    needs_log_axis,
    save,
)

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")  # comes with it


def _points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    line = Line("a", [1, 2, 3, 4], [None, 0.0, 3.0, 40.0], errors=[0.0, 1.0, 1.0, 0.0])
    plain, log = line_figure([Panel([line]), Panel([line], log_y=True)]).axes
    assert _points(plain.get_lines()[0]) == [(2, 0), (3, 3), (4, 40)]
    assert _points(log.get_lines()[0]) == [(3, 3), (4, 40)]
    assert log.get_yscale() == "log"
    (empty,) = line_figure([Panel([Line("a", [1], [None])], log_y=True)]).axes
    assert not empty.get_lines()


def test_a_line_keeps_its_colour_where_others_are_missing() -> None:
    panel = Panel([Line("b", [1.0], [2.0], colour=1), Line("free", [1.0], [3.0])])
    (axis,) = line_figure([panel]).axes
    first, second = axis.get_lines()
    assert (first.get_color(), first.get_marker()) == (COLOURS[1], "s")
    assert (second.get_color(), second.get_marker()) == (COLOURS[1], "s")


def test_markers_are_drawn_only_where_there_is_room() -> None:
    few, many = (Line(str(count), range(count), [1.0] * count) for count in (10, 100))
    (axis,) = line_figure([Panel([few, many])]).axes
    assert [line.get_marker() for line in axis.get_lines()] == ["o", ""]


def test_points_may_have_names() -> None:
    (axis,) = line_figure([Panel([Line("a", [1, 2], [5.0, 4.0], names=["M=1", "M=2"])])]).axes
    assert [text.get_text() for text in axis.texts] == ["M=1", "M=2"]


def test_a_panel_in_which_nothing_is_seen_is_left_out() -> None:
    full, empty = Panel([Line("loss", [1, 2], [3.0, 2.0])], "full"), Panel([Line("loss", [1], [None])], "empty")
    assert [axis.get_title() for axis in line_figure([empty, full]).axes] == ["full"]
    assert [axis.get_title() for axis in line_figure([empty]).axes] == ["empty"]


def test_a_map_of_eight_loops_has_its_numbers_and_a_scale_of_its_values() -> None:
    values = [[1 - 0.04 * abs(row - column) for column in range(9)] for row in range(9)]
    axis, _ = map_figure([("eight", values)], label="CKA").axes
    assert [text.get_text() for text in axis.texts[:3]] == ["1.00", ".96", ".92"]
    assert axis.images[0].get_clim() == (0.6, 1)


def test_one_legend_names_every_line_once_and_panels_may_have_their_own() -> None:
    panels = [Panel([Line("a", [1], [2])]), Panel([Line("a", [1], [2]), Line("b", [1], [2])])]
    together = line_figure(panels, legend="both")
    assert [text.get_text() for text in together.legends[0].get_texts()] == ["a", "b"]
    assert together.legends[0].get_title().get_text() == "both"
    apart = line_figure(panels, legend=None)
    assert not apart.legends
    assert all(axis.get_legend() is not None for axis in apart.axes)


def test_steps_are_whole_numbers_and_wide_values_want_a_log_axis() -> None:
    (axis,) = line_figure([Panel([Line("a", [2, 3, 4], [1.0, 2.0, 3.0])])]).axes
    assert all(float(tick).is_integer() for tick in axis.get_xticks())
    assert needs_log_axis([1.0, None, 5.0])
    assert not needs_log_axis([2.0, 5.0])
    assert not needs_log_axis([])


def test_the_same_figure_is_the_same_file() -> None:
    panel = Panel([Line("a", [1, 2], [3.0, 4.0])])
    for ending in (".png", ".svg", ".pdf"):
        assert figure_bytes(line_figure([panel]), ending) == figure_bytes(line_figure([panel]), ending)
    assert Image.open(io.BytesIO(figure_bytes(line_figure([panel]), ".png", dpi=100))).size[0] == 460


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    figure = line_figure([Panel([Line("a", [1], [2])])])
    with pytest.raises(LoopformerError, match=r"end the name with \.png, \.pdf or \.svg"):
        save(figure, tmp_path / "new" / "a.doc")
    assert not list(tmp_path.iterdir())
    assert save(figure, tmp_path / "new" / "a.png").is_file()


def test_without_matplotlib_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not has_matplotlib()
    for draw in (lambda: check_drawing("a.png"), lambda: line_figure([Panel([])])):
        with pytest.raises(LoopformerError, match=r"^Figures need matplotlib; pip install 'loopformer\[plot\]'\.$"):
            draw()
