"""Text from tokens as they arrive: complete characters only, up to the first stop string.

stream = TextStream(tokenizer, stops=["\\n\\n"], after=prompt_ids)
print(stream.push(token))      # the text to show now; "" while a character or a stop string may be incomplete
print(stream.push(5, 9))       # several tokens at once give the same text
print(stream.finish())         # the text that was held back, once no more tokens come
stream.text, stream.stopped    # all of the text, and whether a stop string ended it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT_CHARACTER = "\ufffd"  # an incomplete UTF-8 character decodes to it
MIN_CONTEXT_TOKENS = 8  # of a prompt to decode with what follows, whose text depends on the prompt's last word


class Detokenizer(Protocol):
    """The part of a tokenizer that decodes tokens and knows the end token."""

    @property
    def eot(self) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of a growing sequence of tokens, of which each piece is returned once.

    The text of a token depends on the tokens before it. Many tokenizers write a space only between two words that
    they decode together, and a character may be spread over several tokens. So new tokens are decoded together with
    earlier ones (the window), and their text is what they add to the window's. It is appended once no later token
    can change it, so the text never ends inside a character.
    """

    def __init__(self, tokenizer: Detokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after`: the tokens before the text."""
        self._tokenizer = tokenizer
        # The tokens that are decoded together, and the part of their text that is not new.
        self._window, self._window_text = _last_words(tokenizer, after)
        self._complete_count = len(self._window)  # how many tokens of the window have all their text there
        self._text = ""  # the text of all tokens after `after`, as far as no later token can change it
        self.shown = 0  # how many characters of the text have been returned
        self._stops = tuple(stop for stop in stops if stop)
        self._stop_starts = (0,) * len(self._stops)  # the first position in `_text` where each stop may begin
        self.stopped = False

    def copy(self) -> TextStream:
        """An independent stream: a shallow copy will do, because no attribute is changed in place."""
        other = object.__new__(TextStream)  # copy.copy takes five times as long, at every token of every sequence
        other.__dict__.update(self.__dict__)
        return other

    @property
    def text(self) -> str:
        """The text so far, including what is held back."""
        return self._text

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text to show. It ends before a stop string, even if more tokens follow."""
        if not tokens or self.stopped:
            return ""
        self._window = (*self._window, *tokens)
        self._append_new_text(at_end=False)
        return self._release(len(self._text) if self.stopped else min(self._stop_starts, default=len(self._text)))

    def finish(self) -> str:
        """Return the remaining text after the last token, including an incomplete character."""
        if not self.stopped:
            self._append_new_text(at_end=True)
        return self.flush()

    def flush(self) -> str:
        """Return the text that was held back so far."""
        return self._release(len(self._text))

    def _append_new_text(self, at_end: bool) -> None:
        """Append what the last tokens add to the window's text, up to a character that is still incomplete."""
        decoded = self._tokenizer.decode(self._window)
        complete = decoded if at_end else decoded.rstrip(REPLACEMENT_CHARACTER)
        before = self._window_text
        if not complete.startswith(before):  # the prompt ended inside a character, which the new tokens complete
            before = before.rstrip(REPLACEMENT_CHARACTER)
        self._text += complete[len(before) :]
        if complete != decoded:
            # A character is incomplete: the next tokens must be decoded with those of its first bytes.
            if not self._window_text.startswith(complete):
                self._window_text = complete
        elif decoded != self._window_text:
            # Drop the older tokens, so that the window stays short. The new ones stay, because the next token's
            # space may depend on them. If they added no text, the old ones stay: the space depends on those then.
            self._window = self._window[self._complete_count :]
            self._complete_count, self._window_text = len(self._window), self._tokenizer.decode(self._window)
        self._cut_at_stop()

    def _cut_at_stop(self) -> None:
        """Cut the text at the first stop string in it, or else update where each stop string may begin."""
        if not self._stops:
            return
        text = self._text
        # More text never makes an earlier position the start of a stop string, so each search goes on where it was.
        starts = [_find_stop_start(text, *search) for search in zip(self._stops, self._stop_starts, strict=True)]
        self._stop_starts = tuple(starts)
        whole = [start for stop, start in zip(self._stops, starts, strict=True) if start + len(stop) <= len(text)]
        if whole:
            self._text, self.stopped = text[: min(whole)], True

    def _release(self, end: int) -> str:
        """The text up to `end` that was not shown yet."""
        piece = self._text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece


def _last_words(tokenizer: Detokenizer, ids: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """The last tokens with some text, and this text. Decoding all of a long prompt would take long."""
    last, text = tuple(ids[-MIN_CONTEXT_TOKENS:]), ""
    while last:
        text = tokenizer.decode(last)
        if len(last) == len(ids) or text.replace(REPLACEMENT_CHARACTER, "").strip():
            break
        last = tuple(ids[-8 * len(last) :])
    return last, text


def _find_stop_start(text: str, stop: str, start: int) -> int:
    """The first position from `start` on where `stop` is, or may be once there is more text; else the end."""
    start = text.find(stop[0], start)
    while start >= 0 and not (text.startswith(stop, start) or stop.startswith(text[start:])):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
