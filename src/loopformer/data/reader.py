"""Reads sentences back into events by a world's own templates.

    reader = Reader(book)
    list(reader.read(ids))       # [(("be", {"a": "Mia", "place": "barn"}), 6), (None, 9), …] and where each ends

All templates are one tree of tokens and gaps, so a sentence is read in one walk. A pronoun at the beginning stands
for the person of the sentence before, as in the phrasebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loopformer.data.phrasebook import Gap, Phrasebook, Template, WorldEvent


@dataclass
class _Node:
    """What may follow in the tree: a token, a word in a gap, or the end of these templates."""

    tokens: dict[int, _Node] = field(default_factory=dict)
    gaps: dict[tuple[str, frozenset[int]], _Node] = field(default_factory=dict)
    ends: list[tuple[str, Template]] = field(default_factory=list)


class Reader:
    """Finds the event of each sentence."""

    def __init__(self, book: Phrasebook) -> None:
        self._book, self._root = book, _Node()
        for section, templates in book.templates.items():
            for template in templates:
                node = self._root
                for index, piece in enumerate(template.pieces):
                    if isinstance(piece, Gap):
                        ids = set(piece.ids.values())
                        if index == 0 and template.begins_with_actor:
                            ids |= book.subjects.keys()
                        node = node.gaps.setdefault((piece.name, frozenset(ids)), _Node())
                    else:
                        node = node.tokens.setdefault(piece, _Node())
                node.ends.append((section, template))

    def read(self, ids: Sequence[int]) -> Iterator[tuple[WorldEvent | None, int]]:
        """The event and the end of each sentence. There is no event in a sentence of no template."""
        start, alone = 0, ""
        while start < len(ids):
            found = self._match(ids, start, alone)
            if found is None:
                start = next((end for end in range(start, len(ids)) if ids[end] in self._book.stops), len(ids)) + 1
                alone = ""
                yield None, min(start, len(ids))
                continue
            start, event, template = found
            alone = event[1]["a"] if template.is_about_actor else ""
            yield event, start

    def _match(self, ids: Sequence[int], start: int, alone: str) -> tuple[int, WorldEvent, Template] | None:
        """The longest sentence that begins here, with or without a connective."""
        starts = {start}
        for connective in self._book.connectives:
            if tuple(ids[start : start + len(connective)]) == connective:
                starts.add(start + len(connective))
        best = None
        for first in starts:
            paths = [(self._root, first)]
            while paths:
                node, end = paths.pop()
                for section, template in node.ends:
                    fillers = self._fillers(template, ids[first:end], alone)
                    if fillers is not None and (best is None or end > best[0]):
                        best = end, (section, fillers), template
                if end < len(ids):
                    if ids[end] in node.tokens:
                        paths.append((node.tokens[ids[end]], end + 1))
                    paths += [(after, end + 1) for (_, allowed), after in node.gaps.items() if ids[end] in allowed]
        return best

    def _fillers(self, template: Template, ids: Sequence[int], alone: str) -> dict[str, str] | None:
        """The words in the gaps, or None if they do not go together, as in `Mia … his`."""
        gaps = [(piece, token) for piece, token in zip(template.pieces, ids, strict=True) if isinstance(piece, Gap)]
        fillers = dict[str, str]()
        if template.begins_with_actor and (pronouns := self._book.subjects.get(ids[0])):
            if alone not in pronouns:
                return None
            fillers["a"] = alone
            gaps = gaps[1:]
        for gap, token in gaps:
            if not gap.form:
                fillers.setdefault(gap.name, self._book.words_by_id[token])
        is_whole = all(gap.name in fillers and gap.ids[fillers[gap.name]] == token for gap, token in gaps)
        return fillers if is_whole else None
