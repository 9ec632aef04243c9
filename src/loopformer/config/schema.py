"""Settings as dataclasses: built from plain data, checked against their annotations.

An unknown key, a wrong type or an impossible value is one clear sentence that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformer.errors import LoopformerError

T = TypeVar("T")


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise LoopformerError(sentence)


def whole_numbers(given: str, option: str) -> list[int]:
    """Numbers of 1 or more in an option's text, such as 1,2,4."""
    try:
        found = [int(part) for part in given.split(",")]
    except ValueError:
        found = [0]
    require(min(found) >= 1, f"{option} takes whole numbers of 1 or more, such as 1,2,4, not {given!r}.")
    return found


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """Build a settings dataclass from plain data; an unknown key names the nearest valid one."""
    if not isinstance(values, Mapping):
        raise LoopformerError(f"{where} must be a mapping of settings, got {values!r}.")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise LoopformerError(f"Unknown setting {where}.{key}; {nearest(str(key), known)}")
    return cls(**values)


def nearest(word: str, known: list[str], otherwise: str | None = None) -> str:
    """A hint for a misspelt word: the nearest valid one, else `otherwise` or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise or f"valid are {', '.join(known)}."


def check_types(settings: Any, where: str) -> None:
    """Check every field of a settings dataclass against its annotation; a number passes for a float."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if float in _choices(hint) and (number := _number(value)) is not None:
            object.__setattr__(settings, field.name, value := number)
        if not _fits(value, hint):
            raise LoopformerError(f"{where}.{field.name} must be {_describe(hint)}, got {value!r}.")


def _number(value: Any) -> float | None:
    """An int where a float is meant, or text that is a number: YAML 1.1 reads 6e-4 as text."""
    try:
        return float(value) if type(value) in (int, str) else None
    except ValueError:
        return None


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is int:
        return type(value) is int
    if hint is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, get_origin(hint) or hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if hint is type(None):
        return "null"
    return {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}.get(
        hint, str(hint)
    )
