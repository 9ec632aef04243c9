"""Models and budgets that can be compared because they cost the same, within a stated tolerance.

    matched(rows, "flops_per_token")     # groups of rows of different models, the cheapest group first

A group begins with its smallest value and goes up to TOLERANCE above it, so no two rows of it differ by more. Only
groups with at least two models say anything.
"""

from collections.abc import Sequence
from typing import Any

TOLERANCE = 0.05

Row = dict[str, Any]


def matched(rows: Sequence[Row], key: str, tolerance: float = TOLERANCE) -> list[list[Row]]:
    """Groups of rows whose `key` is the same within the tolerance, with more than one model in them."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: float(row[key])):
        if groups and row[key] <= groups[-1][0][key] * (1 + tolerance):
            groups[-1].append(row)
        else:
            groups.append([row])
    several = [group for group in groups if len({row["model"] for row in group}) > 1]
    order = {id(row): place for place, row in enumerate(rows)}
    return [sorted(group, key=lambda row: order[id(row)]) for group in several]
