"""Every schedule is a bar with its steps, the best on top."""

from pathlib import Path
from typing import Any

import pytest

from loopformer.analysis.plots import draw_schedules, schedules_figure
from loopformer.errors import LoopformerError
from loopformer.evaluation.schedules import describe
from loopformer.trajectory import Trajectory

pytest.importorskip("matplotlib")


def found(loops: int, budget: int, accuracy: bool = False) -> dict[str, Any]:
    measured: dict[Trajectory, dict[str, float]] = {}
    uniform = Trajectory.uniform(budget)
    for trajectory in [*Trajectory.enumerate(loops, budget), uniform]:
        measured[trajectory] = {"perplexity": 20 - float(trajectory.steps[0])}
        if accuracy:
            measured[trajectory]["accuracy"] = float(trajectory.steps[0]) / 2
    facts = {"budget": budget, "loops": loops, "method": "all", "by": "perplexity"}
    return {**facts, **describe(measured, uniform, "perplexity", loops)}


def test_bars_are_the_steps_in_order_of_quality() -> None:
    result = found(8, 4, accuracy=True)
    axes = schedules_figure(result).axes
    bars = axes[0].patches
    assert len(bars) == 35 * 4
    for number, row in enumerate(result["schedules"]):
        own = sorted(
            (bar for bar in bars if bar.get_y() < number < bar.get_y() + bar.get_height()), key=lambda b: b.get_x()
        )
        assert [bar.get_width() for bar in own] == pytest.approx(row["steps"])
    assert axes[0].get_yticklabels()[0].get_text() == "5-1-1-1"
    shown = [label.get_text() for label in axes[1].get_legend().get_texts()]
    assert shown == ["best 19.38", "uniform 19.75", "worst 19.88"]
    assert axes[2].get_xlabel().startswith("accuracy")


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_files_of_any_kind(tmp_path: Path, ending: str) -> None:
    path = draw_schedules(found(8, 3), tmp_path / f"s.{ending}")
    assert path.stat().st_size > 1000


def test_many_schedules_and_wrong_endings(tmp_path: Path) -> None:
    many = found(10, 5)  # 126 of them, too many for names
    assert draw_schedules(many, tmp_path / "s.png").stat().st_size > 1000
    with pytest.raises(LoopformerError, match=r"end the name with \.png, \.pdf or \.svg"):
        draw_schedules(many, tmp_path / "s.doc")
