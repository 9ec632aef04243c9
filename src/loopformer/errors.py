"""Errors for users: one sentence that says what is wrong and what to do.

    require(steps >= 1, f"training.steps must be 1 or more, got {steps}.")
    raise FileProblem(f"There is no file {path}; check the path.")

The command line prints the sentence and exits with the error's `exit_code`. `require` builds the sentence even if
nothing is wrong. So use `if` and `raise` for one that is costly to build, such as one with `nearest(…)`.
"""

from __future__ import annotations

import difflib
import errno
import re
from importlib import import_module
from typing import Any

NO_TOKENIZER = "This model came without a tokenizer; put its tokenizer.json beside its weights."
# Options and commands of earlier versions: that they were removed, and what to use instead.
REMOVED = {
    "adaptive": "adaptive was removed, as it never beat a fixed budget; use --budget.",
    "calibrate": "calibrate was removed, as adaptive budgets never beat fixed ones; use generate --budget.",
    "certainty": "certainty was removed from generation, where every token takes all loops of its budget; "
    "`loopformer eval text --certainty` measures early exit.",
    "draft": "draft was removed, as it made generation no faster; leave it out, the text is the same.",
    "draft-length": "draft-length was removed together with --draft; leave it out, the text is the same.",
    "int8": "int8 was removed; choose the dtype int8 on a CPU, or bfloat16 on a GPU.",
    "bench memory": "bench memory was removed; use bench train, whose rows have the peak memory.",
}
MAX_CHARS = 1000  # of a sentence
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}


class LoopformerError(ValueError):
    """Wrong input: text, an option, a setting. The message is one sentence: what is wrong, what to do.

    A long one, which repeats a value of the user's, is cut in the middle.
    """

    exit_code = 2

    def __init__(self, sentence: str) -> None:
        if len(sentence) > MAX_CHARS:
            sentence = f"{sentence[: MAX_CHARS // 2]}…{sentence[-MAX_CHARS // 2 :]}"
        super().__init__(sentence)


class RunFailed(LoopformerError):
    """Valid input, but the work failed: too little memory, a loss that is not finite."""

    exit_code = 1


class FileProblem(LoopformerError):
    """A file or folder that is missing, unreadable, damaged or not what it should be."""

    exit_code = 1


def require(condition: bool, sentence: str) -> None:
    """Raise a LoopformerError with the sentence unless the condition holds."""
    if not condition:
        raise LoopformerError(sentence)


def nearest(word: str, known: list[str], otherwise: str | None = None) -> str:
    """A hint for a misspelt word: the nearest valid word, else `otherwise` or all valid words."""
    close = difflib.get_close_matches(word[:100], known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise or f"valid are {', '.join(known)}."


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """An optional module. Without it, the error names the extra of the package that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise LoopformerError(f"{purpose} needs {missing}; pip install 'loopformer[{extra}]'.") from error


def unreadable(name: object, error: OSError) -> FileProblem:
    return FileProblem(f"{name} cannot be read: {error.strerror or error}; {remedy(error)}.")


def remedy(error: BaseException) -> str:
    """What to do about a file that cannot be read or written, depending on the errno."""
    number = getattr(error, "errno", None)
    # Libraries written in Rust give the errno only in the message.
    if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
    if number in _DISK_FULL:
        return "make room"
    return (
        "change its permissions or choose another path" if number in _NO_ACCESS else "check the path and the disk"
    )
