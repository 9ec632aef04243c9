"""A report as Markdown, with figures and tables beside it: to_markdown(document)."""

import re
from itertools import count

from loopformer.analysis.report.document import Block, Commands, Document, Figure, Heading, Items, Table


def to_markdown(document: Document) -> str:
    """The text of report.md."""
    tables, figures = count(1), count(1)
    parts = [f"# {_inline(document.title)}", _inline(document.lead)]
    for section in document.sections:
        parts.append(f"## {_inline(section.title)}")
        for block in section.blocks:
            number = next(tables) if isinstance(block, Table) else next(figures) if isinstance(block, Figure) else 0
            parts.append(_block(block, number))
    return "\n\n".join(parts) + "\n"


def _block(block: Block, number: int) -> str:
    match block:
        case Table():
            return _table(block, number)
        case Figure():
            image = f"![{_inline(block.alt)}](figures/{block.name}.png)"
            return f"{image}\n\n*Figure {number}. {_inline(block.caption)}*"
        case Items():
            return "\n".join(f"- {_inline(item)}" for item in block.items)
        case Commands():
            return "\n".join(["```sh", *block.lines, "```"])
        case Heading():
            return f"### {_inline(block.text)}"
        case _:
            return _inline(block)


def _table(table: Table, number: int) -> str:
    columns = table.shown
    lines = [
        f"**Table {number}.** {_inline(table.caption)} ([CSV](tables/{table.name}.csv))",
        "",
        _row([_inline(column.label) for column in columns]),
        _row(["---" if column.text else "---:" for column in columns]),
    ]
    for group in table.groups:
        if group.title:
            lines.append(_row([f"**{_inline(group.title)}**", *[""] * (len(columns) - 1)]))
        for cells in table.cells(group):
            lines.append(_row([f"**{_inline(text)}**" if best else _inline(text) for text, best in cells]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(text: str) -> str:
    """Plain text with `code`, where nothing else has a meaning."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick is none of ours
        return _escaped(text)
    return "".join(f"`{part}`" if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = re.sub(r"([\\`*<>|\[\]~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside a word it is a letter
