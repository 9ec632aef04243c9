"""experiments/paper_judge.py: verdicts by two standard errors, and tables that stand where they are asked for."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "experiments"))  # as for a program there
JUDGE = runpy.run_path(str(ROOT / "experiments" / "paper_judge.py"))


def test_a_sign_needs_two_standard_errors() -> None:
    value = JUDGE["Value"]
    assert [value(1.0, 0.6).sign, value(1.0, 0.5).sign, value(-3.0, 0.5).sign] == [0, 1, -1]


def test_coarse_early_schedules_are_held_against_their_mirror_images() -> None:
    run = {"schedules": [{"schedules": [{"schedule": name, "perplexity": 1.0} for name in ("3-1", "1-3", "2-2")]}]}
    run["schedules"][0]["schedules"][1]["perplexity"] = 2.718281828459045
    assert [round(one, 6) for one in JUDGE["mirrored"](run)] == [-1.0]


def test_the_documents_have_what_the_results_say(tmp_path: Path) -> None:
    results = JUDGE["Results"](ROOT / "results" / "paper_claims")
    for document in ("docs/paper-claims.md", "results/paper_claims/README.md"):
        written = (ROOT / document).read_text("utf-8")
        copy = tmp_path / "copy.md"
        copy.write_text(written, encoding="utf-8")
        JUDGE["fill"](copy, results)
        assert copy.read_text("utf-8") == written
