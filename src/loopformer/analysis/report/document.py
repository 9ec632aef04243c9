"""What a report is made of, whatever it is written as: sections of paragraphs, tables, figures, lists and commands.

    columns = [Column("model", "model", text=True), Column("ppl", "perplexity", "{:.2f}".format, best=min)]
    table = Table("main", "Perplexity by budget.", columns, [Group([{"model": "a", "ppl": 12.3}])])
    Document("Report", "One model.", (Section("results", "Results", ("A sentence.", table)),))

Text is plain, with `code` between backticks. A table holds the raw values, which its CSV file gets; the page shows
them as its columns say.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = "–"  # a cell without a value


@dataclass(frozen=True)
class Column:
    """One column: its name in the CSV file, its heading on the page, and how a value is shown."""

    key: str
    label: str
    show: Callable[[Any], str] = str
    best: Callable[[Sequence[float]], float] | None = None  # min or max: which value of a group is set in bold
    text: bool = False  # words, not numbers
    hidden: bool = False  # only in the CSV file


@dataclass(frozen=True)
class Group:
    """Rows that belong together, under a title of their own where there are several groups."""

    rows: Sequence[Mapping[str, Any]]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table; `name` is that of its CSV file. The first column says what a row is about."""

    name: str
    caption: str
    columns: Sequence[Column]
    groups: Sequence[Group]

    @property
    def shown(self) -> list[Column]:
        return [column for column in self.columns if not column.hidden]

    def cells(self, group: Group) -> Iterator[list[tuple[str, bool]]]:
        """The cells of each row of a group as text, and whether they are the best of their column."""
        best = {column.key: _best(column, group.rows) for column in self.shown}
        for row in group.rows:
            values = [(column, row.get(column.key)) for column in self.shown]
            yield [
                (NOTHING, False) if value is None else (column.show(value), value == best[column.key])
                for column, value in values
            ]

    def to_csv(self) -> str:
        """All columns with their raw values; what is not known is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        titled = any(group.title for group in self.groups)
        writer.writerow([*(["group"] if titled else []), *(column.key for column in self.columns)])
        for group in self.groups:
            for row in group.rows:
                writer.writerow(
                    [*([group.title] if titled else []), *(row.get(column.key) for column in self.columns)]
                )
        return text.getvalue()


@dataclass(frozen=True)
class Figure:
    """A drawn figure, figures/NAME.png; `alt` says in words what it shows."""

    name: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines to type."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str


Block = str | Table | Figure | Items | Commands | Heading


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    id: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report; `files` are tables that have a CSV file but no place on the page."""

    title: str
    lead: str
    sections: Sequence[Section]
    files: Sequence[Table] = field(default=())

    @property
    def tables(self) -> list[Table]:
        """Every table, those that are not on the page as well."""
        shown = [block for section in self.sections for block in section.blocks if isinstance(block, Table)]
        return [*shown, *self.files]


def _best(column: Column, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The value to set in bold, where there is something to compare."""
    values = [row[column.key] for row in rows if row.get(column.key) is not None]
    return column.best(values) if column.best and len(values) > 1 else None
