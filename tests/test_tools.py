"""tools/mutate.py: which faults it puts into a source, and that each leaves valid Python."""

import ast
import random
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTATE = runpy.run_path(str(ROOT / "tools" / "mutate.py"))

SOURCE = '''
def count(rows: list[int], limit: int = 3) -> int:
    """Rows below the limit."""
    assert rows
    found = 0
    for row in rows[1:]:
        if row < limit and not row % 2:
            found += 1
        found = min(found, limit)
    if found == limit:
        raise ValueError(f"{found + 1} rows")
    return found
'''


def test_each_operator_finds_its_faults() -> None:
    nodes = MUTATE["mutable_nodes"](ast.parse(SOURCE))
    faults = {
        (operator, ast.unparse(node), after)
        for each in nodes
        for operator, node, after in MUTATE["faults_of"](each)
    }
    assert faults == {
        ("off by one", "3", "4"),
        ("off by one", "0", "1"),
        ("off by one", "1", "2"),
        ("off by one", "2", "3"),
        ("dropped bound", "1", ""),
        ("swapped and/or", "row < limit and (not row % 2)", "(row < limit or not row % 2)"),
        ("swapped comparison", "row < limit", "(row <= limit)"),
        ("swapped comparison", "found == limit", "(found != limit)"),
        ("negated condition", "row < limit and (not row % 2)", "(not (row < limit and (not row % 2)))"),
        ("swapped arithmetic", "row % 2", "(row * 2)"),
        ("opposite function", "min", "max"),
        ("dropped statement", "found += 1", "pass"),
        ("dropped statement", "found = min(found, limit)", "pass"),
        ("return None", "return found", "return None"),
    }


def test_mutants_are_python_and_their_tests_exist() -> None:
    mutants = [mutant for module in MUTATE["TARGETS"] for mutant in MUTATE["find_mutants"](module)]
    assert len({mutant.name for mutant in mutants}) == len(mutants) > 1000
    for mutant in random.Random(0).sample(mutants, 100):
        source = (ROOT / MUTATE["SOURCE"] / mutant.module).read_bytes()
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.stop :]
        assert changed != source
        ast.parse(changed)


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(
        SystemExit, match=r"^src/loopformer/nothing.py is missing; correct TARGETS in tools/mutate.py.$"
    ):
        MUTATE["find_mutants"]("nothing.py")
