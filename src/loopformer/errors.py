"""What a user can get wrong: one sentence that says what is wrong and what to do.

    require(steps >= 1, f"training.steps must be 1 or more, got {steps}.")
    raise FileProblem(f"There is no file {path}; check the path.")

The command line prints the sentence and exits with the error's `exit_code`. A sentence that is costly to build,
such as one with `nearest(…)`, is raised with `if`, since `require` builds it also where nothing is wrong.
"""

from __future__ import annotations

import difflib
import errno
import re

REMOVED_CERTAINTY = (
    "certainty was removed from generation, where every token takes all loops of its budget; "
    "`loopformer eval text --certainty` reports early exit."
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class LoopformerError(ValueError):
    """Wrong input: text, an option, a setting. The message is one sentence: what is wrong, what to do."""

    exit_code = 2


class RunFailed(LoopformerError):
    """Work that was asked for rightly and could not be done: not enough memory, a loss that is not finite."""

    exit_code = 1


class FileProblem(LoopformerError):
    """A file or folder that is missing, unreadable, damaged or not what it should be."""

    exit_code = 1


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise LoopformerError(sentence)


def nearest(word: str, known: list[str], otherwise: str | None = None) -> str:
    """A hint for a misspelt word: the nearest valid one, else `otherwise` or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise or f"valid are {', '.join(known)}."


def unreadable(name: object, error: OSError) -> FileProblem:
    return FileProblem(f"{name} cannot be read: {error.strerror or error}; {remedy(error)}.")


def remedy(error: BaseException) -> str:
    """What to do about a file that cannot be read or written: room and permission are told apart."""
    number = getattr(error, "errno", None)
    if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):  # libraries written in Rust
        number = int(match[1])
    if number in _NO_ROOM:
        return "make room"
    return (
        "change its permissions or choose another place" if number in _FORBIDDEN else "check the path and the disk"
    )
