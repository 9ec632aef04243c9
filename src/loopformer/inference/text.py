"""Tokens to text as they come: whole characters only, and nothing beyond a stop string.

stream = TextStream(tokenizer, stops=["\\n\\n"], after=prompt)
piece = stream.push(token)     # what can be shown now; "" while a character or a stop string may be half there
piece = stream.finish()        # what was held back

Many tokenizers write a space only between two words of what they decode at once, so a token is always decoded
together with those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BROKEN = "\ufffd"  # what decoding half a character gives


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of one request, piece by piece."""

    def __init__(self, tokenizer: Decoder, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after`: the tokens that the text follows."""
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._ids = list(after)  # what is decoded: the last tokens with settled text, then those not yet settled
        self._done = len(after)  # how many of them are settled; a token may end in the middle of a character
        self._known = tokenizer.decode(self._ids) if after else ""  # what is settled of their text
        self._text = ""  # settled text
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far that belongs to the result."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token and return what can be shown."""
        self._ids.append(token)
        self._settle(whole=False)
        return self._show(self._held())

    def finish(self) -> str:
        """Show what is left."""
        if not self.stopped:
            self._settle(whole=True)
        return self._show(0)

    def _settle(self, whole: bool) -> None:
        """Take over the text of new tokens, up to a character that is not whole yet."""
        new = self._tokenizer.decode(self._ids)
        clear = new if whole else new.rstrip(BROKEN)
        before = max(0, len(self._text) - max((len(stop) for stop in self._stops), default=1) + 1)
        # What they follow may itself end in the middle of a character, which the new ones make whole.
        known = self._known if clear.startswith(self._known) else self._known.rstrip(BROKEN)
        self._text += clear[len(known) :]
        if clear != new:
            self._known = self._known if self._known.startswith(clear) else clear
        elif new != self._known:  # a token without text is nothing that the next one could follow
            self._ids = self._ids[self._done :]
            self._done, self._known = len(self._ids), self._tokenizer.decode(self._ids)
        found = [place for stop in self._stops if (place := self._text.find(stop, before)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(1, min(len(stop), len(self._text) + 1)):
                if self._text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def _show(self, held: int) -> str:
        end = max(self._shown, len(self._text) - held)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece
