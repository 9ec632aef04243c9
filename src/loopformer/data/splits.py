"""Which text is trained on and which is held out: decided by a hash of the text, so never both.

    splitter = survey(read_texts, fraction=0.01)   # looks at the source first
    splitter.split(document)                       # [("train", "…"), ("val", "…"), …]

A document goes where its hash sends it, whatever its place and whatever else is in the source. A source of
few documents is cut at paragraph borders first, each paragraph goes where *its* hash sends it, and neighbours
that stay together are joined again. Then one paragraph is held out and one is trained on in any case.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loopformer.errors import LoopformerError, require

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

LONGEST = 1 << 20  # characters in a document; longer ones are cut, so that memory stays bounded
_WIDEST = 2 << 20  # bytes in a document, likewise
_FEW = 1000  # documents; below that, or below ten expected to be held out, a source is cut at paragraphs
_PIECES = 2000  # how many pieces such a source is cut into, about
_MARKS = ("\n\n", "\n", " ")  # what ends a paragraph, a line, a word
_SMALLEST, _LARGEST = 64, 1 << 16  # characters in such a piece


@dataclass(frozen=True)
class Splitter:
    """Text → split. `fraction` of the hashes is held out; see `survey` for the rest."""

    fraction: float
    piece: int = 0  # characters in a piece at least; 0 keeps documents whole
    held: Sequence[int] = ()  # hashes that are held out in any case
    kept: Sequence[int] = ()  # hashes that are trained on in any case

    def choose(self, text: str) -> Split:
        if not self.fraction:
            return "train"
        number = _number(text)
        if number in self.kept:
            return "train"
        return "val" if number in self.held or number < self.fraction * 2**64 else "train"

    def pieces(self, text: str) -> list[str]:
        return cut(text, self.piece, LONGEST) if self.piece else [text]

    def split(self, text: str) -> list[tuple[Split, str]]:
        chosen = ((self.choose(piece), piece) for piece in self.pieces(text))
        return [
            (split, "".join(piece for _, piece in group))
            for split, group in itertools.groupby(chosen, key=lambda pair: pair[0])
        ]


def survey(read: Callable[[], Iterator[str]], fraction: float, name: str, *, whole: bool = False) -> Splitter:
    """Look through a source, or through its beginning if it is long, for how to split it.

    `whole` forbids cutting (supervised examples).
    """
    check_fraction(fraction)
    few = max(_FEW, round(10 / fraction)) if fraction else 1
    count = size = 0
    for text in read():
        count, size = count + 1, size + len(text)
        if count == few:
            return Splitter(fraction)
    if not count:
        raise LoopformerError(f"{name} holds no text; check the path and the field.")
    cutter = Splitter(fraction, 0 if whole else min(max(size // _PIECES, _SMALLEST), _LARGEST))
    lowest, highest = 2**64, -1
    for text in read():
        for piece in cutter.pieces(text):
            number = _number(piece)
            lowest, highest = min(lowest, number), max(highest, number)
    if lowest == highest:
        raise LoopformerError(
            f"{name} has too little text for a training and a validation part; add text or use --val-fraction 0."
        )
    return Splitter(fraction, cutter.piece, (lowest,), (highest,))


def check_fraction(fraction: float) -> None:
    require(0 <= fraction < 1, f"The validation fraction must be at least 0 and below 1, got {fraction}.")


def agree(splitters: Sequence[Splitter]) -> list[Splitter]:
    """The splitters of sources that are prepared together, so that what one holds out no other trains on."""
    fraction = max(splitter.fraction for splitter in splitters)
    held = {number for splitter in splitters for number in splitter.held}
    kept = {number for splitter in splitters for number in splitter.kept} - held
    return [Splitter(fraction, each.piece, sorted(held), sorted(kept)) for each in splitters]


def clean(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def fits(text: str) -> bool:
    """Whether a text can be one document."""
    if 4 * len(text) <= _WIDEST:  # no character has more bytes, so most texts need not be encoded for this
        return True
    return len(text) <= LONGEST and len(text.encode()) <= _WIDEST


def documents(text: str) -> list[str]:
    """The text itself, or several documents where it is too long for one; none of white space alone."""
    pieces = [text] if len(text) <= LONGEST else cut(text, LONGEST // 2, LONGEST)
    fitting = (
        part for piece in pieces for part in ([piece] if fits(piece) else cut(piece, LONGEST // 4, LONGEST // 2))
    )
    return [part for part in fitting if not part.isspace()]


def cut(text: str, least: int, most: int) -> list[str]:
    """Cut into pieces of `least` to `most` characters that join to the same text; only the last may be shorter.

    Each ends after the first paragraph that is long enough; in a text of one paragraph after a line, in one of
    one line after a word. Only a piece that would be longer than `most` ends wherever it can.
    """
    last = len(text.rstrip())
    best = next((mark for mark in _MARKS if 0 <= text.find(mark) < last), None)
    pieces, start = [], 0
    while last - start > least:
        window = (start + least, min(start + most, last))
        end = _border(text, [best] if best else [], *window)
        if end is None:
            if len(text) - start <= most:
                break
            end = _border(text, _MARKS, *window) or start + most
        pieces.append(text[start:end])
        start = end
    while len(text) - start > most:  # white space at the end has no border
        pieces.append(text[start : start + most])
        start += most
    return [*pieces, text[start:]] if start < len(text) else pieces


def _border(text: str, marks: Sequence[str], least: int, most: int) -> int | None:
    """The end of the first mark that ends between `least` and `most`; an earlier kind of mark goes first."""
    for mark in marks:
        place = text.find(mark, max(0, least - len(mark)), most)
        if place >= 0:
            return place + len(mark)
    return None


def _number(text: str) -> int:
    """64 bits of the text's hash; white space around it does not count, so that a cut does not matter."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "big")
