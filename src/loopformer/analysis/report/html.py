"""A report as one HTML page that needs nothing beside it: to_html(document, {"compute": png}).

Figures are embedded, the style is its own, there is no script. Readable on a phone (wide tables and figures scroll
in their own frames) and in print (light, figures and tables are not torn apart); tables say what their rows and
columns are about.
"""

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from itertools import count

from loopformer.analysis.report.document import Block, Commands, Document, Figure, Heading, Items, Table

_DOTS = 20  # of a figure in a rem: one scale for all figures, so that their text is of one size
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; padding-top: .4rem; border-top: 1px solid #ccc; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p, ul, ol { max-width: 46rem; }
a { color: #00508f; }
nav ol { margin: 0; padding-left: 1.4rem; columns: 2 16rem; }
code { font: .88em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; max-width: min(46rem, calc(100vw - 2rem)); }
th, td { padding: .28rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid #e2e2e2; }
td { white-space: nowrap; }
th { font-weight: 600; }
tbody th { font-weight: 400; white-space: nowrap; }
th:first-child { position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 2px solid #555; vertical-align: bottom; }
tbody th[scope=rowgroup] { font-weight: 600; background: #f3f3f3; white-space: normal; }
th.text, td.text, tbody th { text-align: left; }
figure { margin: 1.4rem 0; }
img { width: calc(var(--width) * 1rem); max-width: 100%; height: auto; display: block; }
figcaption { font-size: .92rem; margin-top: .4rem; max-width: 46rem; }
@media (max-width: 40rem) {
  figure { overflow-x: auto; }
  img { max-width: none; width: calc(var(--width) * .57rem); }
  figcaption { position: sticky; left: 0; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  nav { display: none; }
  .wide { overflow: visible; }
  caption { max-width: none; }
  table { font-size: 7.5pt; }
  th:first-child { position: static; }
  th, td { padding: .15rem .3rem; }
  td.text { white-space: normal; }
  figure { overflow: visible; }
  img { width: calc(var(--width) / 60 * 100%); max-width: 100%; }
  tr, figure, pre, .wide { break-inside: avoid; }
  h2, h3, caption { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
}
"""


def to_html(document: Document, pictures: Mapping[str, bytes]) -> str:
    """The text of report.html; `pictures` are the PNG files of the figures by name."""
    tables, figures = count(1), count(1)
    contents = "".join(f'<li><a href="#{one.id}">{_inline(one.title)}</a></li>' for one in document.sections)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<header>\n<h1>{_inline(document.title)}</h1>\n<p>{_inline(document.lead)}</p>\n</header>",
        f'<nav aria-label="Contents">\n<ol>{contents}</ol>\n</nav>\n<main>',
    ]
    for section in document.sections:
        parts.append(f'<section id="{section.id}">\n<h2>{_inline(section.title)}</h2>')
        for block in section.blocks:
            number = next(tables) if isinstance(block, Table) else next(figures) if isinstance(block, Figure) else 0
            parts.append(_block(block, number, pictures))
        parts.append("</section>")
    return "\n".join([*parts, "</main>\n</body>\n</html>"]) + "\n"


def _block(block: Block, number: int, pictures: Mapping[str, bytes]) -> str:
    match block:
        case Table():
            return _table(block, number)
        case Figure():
            picture = pictures[block.name]
            data, width = (
                b64encode(picture).decode(),
                int.from_bytes(picture[16:20]) / _DOTS,
            )  # from the PNG's header
            image = (
                f'<img src="data:image/png;base64,{data}" style="--width:{width:.1f}" alt="{escape(block.alt)}">'
            )
            return (
                f"<figure>\n{image}\n<figcaption>Figure {number}. {_inline(block.caption)}</figcaption>\n</figure>"
            )
        case Items():
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
        case Commands():
            return "<pre><code>" + "\n".join(map(escape, block.lines)) + "</code></pre>"
        case Heading():
            return f"<h3>{_inline(block.text)}</h3>"
        case _:
            return f"<p>{_inline(block)}</p>"


def _table(table: Table, number: int) -> str:
    columns = table.shown
    head = "".join(f'<th scope="col"{_kind(column.text)}>{_inline(column.label)}</th>' for column in columns)
    parts = [
        f'<div class="wide" role="region" tabindex="0" aria-label="Table {number}">\n<table>',
        f"<caption><strong>Table {number}.</strong> {_inline(table.caption)}</caption>",
        f"<thead><tr>{head}</tr></thead>",
    ]
    for group in table.groups:
        parts.append("<tbody>")
        if group.title:
            title = _inline(group.title)
            parts.append(f'<tr><th scope="rowgroup" colspan="{len(columns)}">{title}</th></tr>')
        for (first, _), *rest in table.cells(group):
            cells = "".join(
                f"<td{_kind(column.text)}>{f'<strong>{_inline(text)}</strong>' if best else _inline(text)}</td>"
                for column, (text, best) in zip(columns[1:], rest, strict=True)
            )
            parts.append(f'<tr><th scope="row">{_inline(first)}</th>{cells}</tr>')
        parts.append("</tbody>")
    return "\n".join([*parts, "</table>\n</div>"])


def _kind(text: bool) -> str:
    return ' class="text"' if text else ""


def _inline(text: str) -> str:
    """Plain text with `code`."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick is none of ours
        return escape(text)
    return "".join(
        f"<code>{escape(part)}</code>" if place % 2 else escape(part) for place, part in enumerate(parts)
    )
