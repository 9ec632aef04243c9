"""Stored results: what README and the guides cite exists, and every file says how it was made."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
INDEX = RESULTS / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.rglob("README.md"))]
FILES = [file for file in sorted(RESULTS.rglob("*.json")) if file.name != "tokenizer.json"]
FACTS = {  # the keys that record each fact
    "command": ("command",),
    "hardware": ("hardware", "device", "machine"),
    "seed": ("seed",),
    "commit": ("commit",),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cited_results_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cited = {ROOT / path.rstrip(".") for path in re.findall(r"(?<![\w/])(?:\.\./)*(results/[\w./-]*)", text)}
    if page.is_relative_to(RESULTS):
        cited |= {page.parent / path for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    assert not [str(path) for path in cited if not path.exists()]


def test_index_lists_every_result() -> None:
    linked = {(RESULTS / path).resolve() for path in re.findall(r"\]\(([\w./-]+)\)", INDEX.read_text("utf-8"))}
    # A folder with a README or a report describes its own files.
    described = {page.parent for page in linked if page.name in ("README.md", "report.html")}
    files = [file for file in RESULTS.rglob("*") if file.is_file() and file != INDEX]
    assert not [
        str(file.relative_to(RESULTS))
        for file in files
        if file.resolve() not in linked and not any(folder in file.resolve().parents for folder in described)
    ]


def test_results_say_how_they_were_made() -> None:
    """Command, hardware, seed and commit; what was not recorded is listed in the index."""
    gaps = {str(file.relative_to(RESULTS)): _missing(json.loads(file.read_text("utf-8"))) for file in FILES}
    rows = re.findall(r"^\| `([\w./-]+)` \| ([a-z, ]+) \|$", INDEX.read_text("utf-8"), flags=re.MULTILINE)
    known = {file: facts.split(", ") for file, facts in rows}
    assert {file: facts for file, facts in gaps.items() if facts} == known


def _missing(result: dict[str, Any]) -> list[str]:
    return [fact for fact, keys in FACTS.items() if not _is_recorded(result, fact, keys)]


def _is_recorded(result: dict[str, Any], fact: str, keys: tuple[str, ...]) -> bool:
    """Whether the file records the fact, as a whole or for each of its runs."""
    values = [result[key] for key in keys if key in result]
    if values:
        # A seed of null means that nothing was random. An unknown commit needs a note that says so.
        is_known = fact == "seed" or any(value not in (None, "", "unknown") for value in values)
        return is_known or f"{fact}_note" in result
    groups = [value if isinstance(value, list) else [value] for value in result.values()]
    runs = [[run for run in group if isinstance(run, dict)] for group in groups]
    return any(group and all(_is_recorded(run, fact, keys) for run in group) for group in runs)
