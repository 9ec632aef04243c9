"""A report on disk: report.md, report.html, report.json, tables/*.csv and figures/*.png, *.svg.

    check_folder(out)                  # before the work: is it free, or an earlier report?
    files = write_report(found, out)   # found: what collect.collect returned

An earlier report in the folder is replaced; of it only the files that it lists are removed.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from loopformer.analysis.plots import draw_all
from loopformer.analysis.report.collect import FORMAT
from loopformer.analysis.report.content import compose
from loopformer.analysis.report.html import to_html
from loopformer.analysis.report.markdown import to_markdown
from loopformer.errors import FileProblem
from loopformer.evaluation.store import Piece
from loopformer.files import write_atomic

REPORT, FIGURES, TABLES = "report.json", "figures", "tables"


def check_folder(out: Path) -> None:
    """Make the folder, or refuse it: something else is in it, or it cannot be written."""
    if out.exists() and not out.is_dir():
        raise FileProblem(f"{out} is a file; give a folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise FileProblem(f"The folder {out} cannot be written to; choose another with --out.")
    if any(out.iterdir()) and _earlier(out) is None:
        raise FileProblem(f"The folder {out} is not empty and holds no report of ours; choose another with --out.")


def write_report(found: Piece, out: Path) -> list[Path]:
    """Draw the figures and write everything; the files, report.html first."""
    check_folder(out)
    before = list((_earlier(out) or {}).get("files", []))
    _write_json(found, before, out)  # first, so that a report that was stopped here is known as ours
    drawn = draw_all(found, out / FIGURES) if find_spec("matplotlib") else []
    document = compose(found, drawn)
    pictures = {name: (out / FIGURES / f"{name}.png").read_bytes() for name in drawn}
    contents = {
        "report.html": to_html(document, pictures),
        "report.md": to_markdown(document),
        **{f"{TABLES}/{table.name}.csv": table.to_csv() for table in document.tables},
    }
    files = [*contents, *(f"{FIGURES}/{name}.{ending}" for name in drawn for ending in ("png", "svg"))]
    (out / TABLES).mkdir(exist_ok=True)
    for name, text in contents.items():
        write_atomic(out / name, text.encode())
    _write_json(found, files, out)
    _remove(out, [name for name in before if name not in files])
    return [out / name for name in ["report.html", "report.md", REPORT, *files[2:]]]


def _write_json(found: Piece, files: list[Any], out: Path) -> None:
    plain = json.dumps({**found, "files": files}, indent=1, ensure_ascii=False)
    write_atomic(out / REPORT, (plain + "\n").encode())


def _earlier(out: Path) -> dict[str, Any] | None:
    """The report that is in a folder."""
    try:
        found = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _remove(out: Path, names: list[Any]) -> None:
    """Remove what an earlier report had and this one has not; never anything outside its own two folders."""
    for name in names:
        path = PurePosixPath(str(name))
        if len(path.parts) == 2 and path.parts[0] in (FIGURES, TABLES) and path.parts[1] != "..":
            (out / path).unlink(missing_ok=True)
