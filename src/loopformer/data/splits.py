"""Which text is trained on and which is held out: decided by a hash of the text, so never both.

    splitter = survey(read_texts, fraction=0.01)   # reads the source first
    splitter.split(document)                       # [("train", "…"), ("val", "…"), …]

The hash of a document alone decides its split, not its place in the source or other documents. A source of few
documents is cut at paragraph borders first. The hash of each paragraph decides its split, and neighbours in the
same split are joined again. In such a source one paragraph is always held out and one is always trained on.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loopformer.errors import require

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

LONGEST = 1 << 20  # characters in a document; longer ones are cut, so that memory stays bounded
_MAX_BYTES = 2 << 20  # in a document, for the same reason
_FEW = 1000  # documents; a source with fewer, or with fewer than ten expected to be held out, is cut
_PIECES = 2000  # roughly how many pieces such a source is cut into
_MIN_PIECE, _MAX_PIECE = 64, 1 << 16  # characters in such a piece
_MARKS = ("\n\n", "\n", " ")  # the end of a paragraph, a line, a word


@dataclass(frozen=True)
class Splitter:
    """Decides the split of texts: `fraction` of all hashes is held out."""

    fraction: float
    piece: int = 0  # minimum characters in a piece; 0 leaves documents uncut
    held: Sequence[int] = ()  # hashes that are always held out
    kept: Sequence[int] = ()  # hashes that are always trained on

    def choose(self, text: str) -> Split:
        if not self.fraction or (number := _hash(text)) in self.kept:
            return "train"
        return "val" if number in self.held or number < self.fraction * 2**64 else "train"

    def pieces(self, text: str) -> list[str]:
        return cut(text, self.piece, LONGEST) if self.piece else [text]

    def split(self, text: str) -> list[tuple[Split, str]]:
        """The parts of a text in their order, each with its split."""
        groups = itertools.groupby(self.pieces(text), key=self.choose)
        return [(split, "".join(pieces)) for split, pieces in groups]


def make_splitter(
    read: Callable[[], Iterator[str]], fraction: float, name: str, *, can_cut: bool = True
) -> Splitter:
    """The splitter of a source, after reading all of it or, if it is long, its beginning.

    Without `can_cut` documents are not cut, as supervised examples must not be.
    """
    check_fraction(fraction)
    few = max(_FEW, round(10 / fraction)) if fraction else 1
    count = size = 0
    for text in read():
        count, size = count + 1, size + len(text)
        if count == few:
            return Splitter(fraction)
    require(count > 0, f"{name} holds no text; check the path and the field.")
    cutter = Splitter(fraction, min(max(size // _PIECES, _MIN_PIECE), _MAX_PIECE) if can_cut else 0)
    lowest, highest = 2**64, -1
    for text in read():
        numbers = [_hash(piece) for piece in cutter.pieces(text)]
        lowest, highest = min([lowest, *numbers]), max([highest, *numbers])
    advice = "add text or use --val-fraction 0"
    require(lowest != highest, f"{name} has too little text for a training and a validation part; {advice}.")
    return Splitter(fraction, cutter.piece, (lowest,), (highest,))


def check_fraction(fraction: float) -> None:
    require(0 <= fraction < 1, f"The validation fraction must be at least 0 and below 1, got {fraction}.")


def reconcile(splitters: Sequence[Splitter]) -> list[Splitter]:
    """The splitters of sources that are prepared together: no source trains on what another holds out."""
    fraction = max(splitter.fraction for splitter in splitters)
    held = {number for splitter in splitters for number in splitter.held}
    kept = {number for splitter in splitters for number in splitter.kept} - held
    return [Splitter(fraction, each.piece, sorted(held), sorted(kept)) for each in splitters]


def clean(text: str) -> str:
    """The text with halves of surrogate pairs replaced, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def fits(text: str) -> bool:
    """Whether a text can be one document."""
    if 4 * len(text) <= _MAX_BYTES:  # a character has at most four bytes, so most texts need not be encoded
        return True
    return len(text) <= LONGEST and len(text.encode()) <= _MAX_BYTES


def documents(text: str) -> list[str]:
    """The text itself, or several documents if it is too long for one; none is white space alone."""
    pieces: list[str] = []
    for piece in [text] if len(text) <= LONGEST else cut(text, LONGEST // 2, LONGEST):
        pieces += [piece] if fits(piece) else cut(piece, LONGEST // 4, LONGEST // 2)
    return [document for document in pieces if not document.isspace()]


def cut(text: str, least: int, most: int) -> list[str]:
    """Pieces of `least` to `most` characters that join to the same text; only the last may be shorter.

    A piece ends after the first paragraph that makes it long enough; in a text of a single paragraph after a line,
    in a text of a single line after a word. Only a piece that would be longer than `most` ends anywhere.
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
    """The end of the first mark that ends between `least` and `most`; earlier kinds of marks are preferred."""
    for mark in marks:
        index = text.find(mark, max(0, least - len(mark)), most)
        if index >= 0:
            return index + len(mark)
    return None


def _hash(text: str) -> int:
    """64 bits of the text's hash; white space around it does not count, so that a cut does not matter."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "big")
