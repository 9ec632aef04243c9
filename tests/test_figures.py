"""The figures of README and docs/box.md are those of the stored results."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = runpy.run_path(str(ROOT / "tools" / "fill_figures.py"))
FIGURES, NUMBERS, PAGES, PART, fill = (PROGRAM[name] for name in ("FIGURES", "NUMBERS", "PAGES", "PART", "fill"))
NO_RESULTS = {  # numbers outside the written parts: versions, names, sizes, options and thresholds
    "README.md": {"3.11", "2602.11451"},
    "docs/box.md": {"0.8", "0.95", "0.9", "128"},
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_the_figures_of_the_results(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert fill(text) == text, "run python tools/fill_figures.py"


def test_every_written_part_is_on_a_page() -> None:
    parts = [part[2] for name in PAGES for part in PART.finditer((ROOT / name).read_text("utf-8"))]
    assert sorted(parts) == sorted(FIGURES)


@pytest.mark.parametrize("name", PAGES)
def test_no_other_figure_stands_on_a_page(name: str) -> None:
    """A figure outside the written parts would stay as it is when a result changes."""
    text = PART.sub("", (ROOT / name).read_text("utf-8"))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)  # commands, names and addresses
    figures = re.findall(r"\d+\.\d+|\b\d{2,}(?= (?:%|M\b|tokens|times|ms))|\b\d+(?= %)", text)
    assert set(figures) <= NO_RESULTS[name]
    numbers = "|".join([*NUMBERS, "half", "twice"])
    assert not re.findall(
        rf"\b(?:{numbers})\s+(?:seconds?|minutes?|hours?|days?|seeds?|times|points?|percent|of)\b",
        text,
        re.IGNORECASE,
    )


def test_a_changed_figure_is_written_again() -> None:
    text = (ROOT / PAGES[0]).read_text("utf-8")
    changed = text.replace("| 1 | 46.", "| 1 | 45.", 1)
    assert changed != text
    assert fill(changed) == text
