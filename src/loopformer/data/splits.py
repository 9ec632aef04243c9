"""Train and validation splits by a hash of the text, so that the same text is never in both.

    splitter = make_splitter(read_texts, 0.01, "stdlib")   # reads the source first
    splitter.split(document)                               # [("train", "…"), ("val", "…"), …]

The split of a document depends only on its hash, not on its position in the source or on other documents. A source
of few documents is cut at paragraph borders first. The hash of each paragraph decides its split, and neighbours in
the same split are joined again. Such a source always has at least one paragraph in each split.
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

MAX_CHARS = 1 << 20  # in a document; longer ones are cut, so that memory stays bounded
_MAX_BYTES = 2 << 20  # in a document, for the same reason
_MIN_DOCUMENTS = 1000  # sources with fewer are cut, and those where fewer than ten are likely to be held out
_TARGET_PIECES = 2000  # roughly how many pieces such a source is cut into
_MIN_PIECE, _MAX_PIECE = 64, 1 << 16  # characters in such a piece
_SEPARATORS = ("\n\n", "\n", " ")  # the end of a paragraph, a line, a word


@dataclass(frozen=True)
class Splitter:
    """Assigns texts to splits: the lowest `fraction` of all hash values is held out."""

    fraction: float
    piece: int = 0  # minimum characters in a piece; 0 leaves documents uncut
    held: Sequence[int] = ()  # hashes that are always held out
    kept: Sequence[int] = ()  # hashes that are always trained on

    def choose(self, text: str) -> Split:
        if not self.fraction or (number := _hash(text)) in self.kept:
            return "train"
        return "val" if number in self.held or number < self.fraction * 2**64 else "train"

    def pieces(self, text: str) -> list[str]:
        return cut(text, self.piece, MAX_CHARS) if self.piece else [text]

    def split(self, text: str) -> list[tuple[Split, str]]:
        """The parts of a text in their order, each with its split."""
        groups = itertools.groupby(self.pieces(text), key=self.choose)
        return [(split, "".join(pieces)) for split, pieces in groups]


def make_splitter(
    read: Callable[[], Iterator[str]], fraction: float, name: str, *, can_cut: bool = True
) -> Splitter:
    """The splitter of a source. It reads all of a short source and the beginning of a long one.

    Without `can_cut` documents are not cut, as supervised examples must not be.
    """
    check_fraction(fraction)
    enough = max(_MIN_DOCUMENTS, round(10 / fraction)) if fraction else 1
    count = size = 0
    for text in read():
        count, size = count + 1, size + len(text)
        if count == enough:
            return Splitter(fraction)
    require(count > 0, f"{name} holds no text; check the path and the field.")
    cutter = Splitter(fraction, min(max(size // _TARGET_PIECES, _MIN_PIECE), _MAX_PIECE) if can_cut else 0)
    # A few hashes may all fall on the same side of `fraction`. Forcing the lowest into validation and the highest
    # into training leaves neither split empty.
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
    """The text with unpaired surrogates replaced, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def fits(text: str) -> bool:
    """Whether a text is short enough for a single document."""
    if 4 * len(text) <= _MAX_BYTES:  # a character has at most four bytes, so most texts need not be encoded
        return True
    return len(text) <= MAX_CHARS and len(text.encode()) <= _MAX_BYTES


def documents(text: str) -> list[str]:
    """The text as a single document, or cut into several if it is too long; blank documents are dropped."""
    pieces: list[str] = []
    for piece in [text] if len(text) <= MAX_CHARS else cut(text, MAX_CHARS // 2, MAX_CHARS):
        pieces += [piece] if fits(piece) else cut(piece, MAX_CHARS // 4, MAX_CHARS // 2)
    return [document for document in pieces if not document.isspace()]


def cut(text: str, least: int, most: int) -> list[str]:
    """Pieces of `least` to `most` characters that join to the same text; only the last may be shorter.

    A piece ends after the first paragraph that makes it long enough. If the text is a single paragraph, it ends
    after a line. If the text is a single line, it ends after a word. Only a piece that
    would exceed `most` ends in mid-word.
    """
    last = len(text.rstrip())
    preferred = next((mark for mark in _SEPARATORS if 0 <= text.find(mark) < last), None)
    pieces, start = [], 0
    while last - start > least:
        window = (start + least, min(start + most, last))
        end = _border(text, [preferred] if preferred else [], *window)
        if end is None:
            if len(text) - start <= most:
                break
            end = _border(text, _SEPARATORS, *window) or start + most
        pieces.append(text[start:end])
        start = end
    while len(text) - start > most:  # trailing white space is cut anywhere
        pieces.append(text[start : start + most])
        start += most
    return [*pieces, text[start:]] if start < len(text) else pieces


def _border(text: str, marks: Sequence[str], least: int, most: int) -> int | None:
    """The end of the first mark that ends between `least` and `most`; marks listed earlier are preferred."""
    for mark in marks:
        index = text.find(mark, max(0, least - len(mark)), most)
        if index >= 0:
            return index + len(mark)
    return None


def _hash(text: str) -> int:
    """A 64-bit hash of the stripped text, as the white space around a piece depends on where it was cut."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "big")
