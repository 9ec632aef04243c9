"""States over depth, CKA maps and schedules, as they are drawn."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopformer import LM, LoopedLM, LoopformerError
from loopformer.analysis.dynamics import Prompts, analyze, write_results
from loopformer.analysis.figures import (
    CHANGES,
    REPRESENTATIONS,
    accuracy_figure,
    cka_figure,
    line_labels,
    metrics_figure,
    perplexity_figure,
    search_figure,
    state_figures,
    trajectory_name,
)
from loopformer.analysis.report import CHANCE_AVERAGE
from loopformer.evaluation.schedules import describe
from loopformer.evaluation.store import JsonDict
from loopformer.plots import save
from loopformer.trajectory import Trajectory

from .samples import make_data, make_model

pytest.importorskip("matplotlib")


@pytest.fixture
def results(lm: LM, prompts: Prompts) -> list[JsonDict]:
    first = [analyze(lm.model, prompts, "one", trajectory) for trajectory in (4, "2-1-1")]
    return [*first, {**first[0], "model": "two"}]


def _lines(axis: Any) -> list[list[tuple[float, float]]]:
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axis.get_lines()]


def _images(figure: Any) -> list[Any]:
    return [image for axis in figure.axes for image in axis.get_images()]


def test_lines_show_the_numbers_and_are_told_apart(results: list[JsonDict]) -> None:
    figure = metrics_figure(results, REPRESENTATIONS)
    for axis, metric in zip(figure.axes, REPRESENTATIONS, strict=True):
        for line, result in zip(_lines(axis), results, strict=True):
            series = result["metrics"][metric]
            assert line == list(zip(result["depth"], series["mean"], strict=True))
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 3
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()  # by model
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "one (1⊗4, M = 4)",
        "one (1⊗4, 2-1-1)",
        "two (1⊗4, M = 4)",
    ]
    assert line_labels([results[0], results[2]]) == ["one (1⊗4)", "two (1⊗4)"]
    assert line_labels([results[1]]) == ["one (1⊗4, 2-1-1)"]
    assert trajectory_name(str(Trajectory.parse("cosine:2"))) == "0.71 0.29"


def test_changes_leave_out_what_has_no_value(results: list[JsonDict]) -> None:
    movement, divergence, agreement = (_lines(axis)[0] for axis in metrics_figure(results[:1], CHANGES).axes)
    assert [x for x, _ in movement] == [0.25, 0.5, 0.75, 1]
    assert [x for x, _ in divergence] == [0, 0.25, 0.5, 0.75]
    assert agreement[-1] == (1, 100)


def test_maps_share_one_scale(results: list[JsonDict]) -> None:
    images = _images(cka_figure(results))
    lowest = min(value for result in results for row in result["cka"] for value in row if value is not None)
    (low, high), *others = (image.get_clim() for image in images)
    assert low <= lowest < low + 0.1
    assert high == 1
    assert others == [(low, high)] * 2
    for image, result in zip(images, results, strict=True):
        assert image.get_array().tolist() == result["cka"]
    assert _images(cka_figure(results, debiased=True))[0].get_array().tolist() == results[0]["cka_debiased"]


@pytest.mark.parametrize("count", [1, 4])
def test_files_are_written_and_no_text_is_small(results: list[JsonDict], tmp_path: Path, count: int) -> None:
    chosen = (results * 2)[:count]
    files = write_results(chosen, tmp_path, state_figures(chosen))[3:]
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in ("representations", "changes", "cka") for kind in ("png", "svg")
    }
    assert all(file.stat().st_size > 5000 for file in files)
    figures: list[Any] = [metrics_figure(chosen, CHANGES), cka_figure(chosen)]
    for figure in figures:
        figure.draw_without_rendering()  # makes the labels of the ticks
        texts = [text for text in figure.findobj(lambda one: hasattr(one, "get_fontsize")) if text.get_text()]
        assert len(texts) > 10
        assert min(text.get_fontsize() for text in texts) >= 8


def test_a_model_that_does_not_move_can_be_drawn(lm: LM, tmp_path: Path) -> None:
    """Fresh weights of the paper: all gates are zero. And tokens that are all the same have no direction."""
    same = Prompts(torch.ones(2, 8, dtype=torch.int64), "ones", "all of it", 1)
    config = dataclasses.replace(lm.model.config, positions="rotary", modulator_start="zero")
    found = analyze(LoopedLM(config), same, "still")
    assert found["metrics"]["movement"]["mean"] == [None, 0, 0, 0, 0]
    assert set(found["metrics"]["curvature"]["mean"]) == {None}
    assert len(write_results([found], tmp_path, state_figures([found]))) == 9


def searched(loops: int, budget: int, accuracy: bool = False) -> dict[str, Any]:
    measured: dict[Trajectory, dict[str, float]] = {}
    uniform = Trajectory.uniform(budget)
    for trajectory in [*Trajectory.enumerate(loops, budget), uniform]:
        measured[trajectory] = {"perplexity": 20 - float(trajectory.steps[0])}
        if accuracy:
            measured[trajectory]["accuracy"] = float(trajectory.steps[0]) / 2
    facts = {"budget": budget, "loops": loops, "method": "all", "by": "perplexity"}
    return {**facts, **describe(measured, uniform, "perplexity", loops)}


def test_bars_are_the_steps_in_order_of_quality() -> None:
    result = searched(8, 4, accuracy=True)
    axes: list[Any] = search_figure(result).axes
    bars = axes[0].patches
    assert len(bars) == 35 * 4
    for number, row in enumerate(result["schedules"]):
        steps = sorted(
            (bar for bar in bars if bar.get_y() < number < bar.get_y() + bar.get_height()), key=lambda b: b.get_x()
        )
        assert [bar.get_width() for bar in steps] == pytest.approx(row["steps"])
    assert axes[0].get_yticklabels()[0].get_text() == "5-1-1-1"
    shown = [label.get_text() for label in axes[1].get_legend().get_texts()]
    assert shown == ["best 19.38", "uniform 19.75", "worst 19.88"]
    assert axes[2].get_xlabel().startswith("accuracy")


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_files_of_any_kind(tmp_path: Path, ending: str) -> None:
    path = save(search_figure(searched(8, 3)), tmp_path / f"s.{ending}")
    assert path.stat().st_size > 1000


def test_many_schedules_and_wrong_endings(tmp_path: Path) -> None:
    many = search_figure(searched(10, 5))  # 126 of them, too many for names
    assert save(many, tmp_path / "s.png").stat().st_size > 1000
    with pytest.raises(LoopformerError, match=r"end the name with \.png, \.pdf or \.svg"):
        save(many, tmp_path / "s.doc")


def test_curves_have_a_point_for_each_budget_and_a_line_for_each_model() -> None:
    unmeasured = make_model("none", perplexity=None, tasks=None)
    found = make_data(make_model("one"), make_model("two", loops=8, level=90.0), unmeasured)
    figure = perplexity_figure(found.rows, found.texts)
    assert [axis.get_title() for axis in figure.axes] == ["news", "a | b"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one (1⊗4)", "two (1⊗8)"]
    assert np.asarray(lines[1].get_ydata()).tolist() == [89.0, 82.0]
    assert "FLOP per token" in figure.axes[0].get_xlabel()
    (axis,) = accuracy_figure(found.rows, CHANCE_AVERAGE).axes
    points = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.get_lines()]).round(6).tolist()
    assert {31.0, 34.0, 38.0} <= set(points)
    assert "guessing" in [line.get_label() for line in axis.get_lines()]
