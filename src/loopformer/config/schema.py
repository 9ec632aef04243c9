"""Settings are frozen dataclasses. Each field declares its default, help text and bounds; one walker checks them.

@dataclass(frozen=True)
class ModelConfig:
    blocks: int = setting(3, "Blocks in the shared stack.", minimum=1, maximum=4096)

    def __post_init__(self) -> None:
        check_settings(self, "model")

from_mapping(ModelConfig, {"blocks": 2}, "model")   # from plain data; an unknown key names the nearest valid one
describe_settings(ModelConfig)                      # ("blocks", "3", "Blocks in the shared stack.") and so on
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformer.errors import LoopformerError, nearest, require

T = TypeVar("T")
UNIONS = (Union, types.UnionType)

# Keys of files that earlier versions wrote. Reading accepts them, writing uses the current key.
RENAMED_KEYS = {
    "route_draws": "trajectory_groups",  # objective
    "during": "active_range",  # each of objective.trajectories
    "way": "execution_mode",  # state.json of a checkpoint
}
REMOVED_KEYS = {"chance": 1}  # of trajectories: the only value that has the same meaning without the key


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a settings dataclass.

    minimum, maximum   the smallest and the largest allowed number
    above, below       bounds that are not allowed themselves
    beyond_paper       True for a setting that files leave out while it has its default
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def setting_names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of any version with the keys of this one."""
    for old, new in RENAMED_KEYS.items():
        require(not {old, new} <= values.keys(), f"{old} is the former name of {new}; leave one of them out.")
    values = {key: value for key, value in values.items() if key not in REMOVED_KEYS or value != REMOVED_KEYS[key]}
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """A settings dataclass from plain data. `where` is its name in errors."""
    if not isinstance(values, Mapping):
        raise LoopformerError(f"{where} must be a mapping of settings, got {values!r}.")
    values, known = with_current_keys(values), setting_names(cls)
    for key in values:
        if key not in known:
            raise LoopformerError(f"Unknown setting {where}.{key}; {nearest(str(key), known)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(field.name in values or not needed, f"{where} must have its {field.name}.")
    return cls(**values)


def check_settings(settings: Any, where: str) -> None:
    """Check every field against its annotation and bounds, and store its value as annotated."""
    hints = get_type_hints(type(settings))
    prefix = f"{where}." if where.isidentifier() else f"{where}: "
    for field in dataclasses.fields(settings):
        name, hint = prefix + field.name, hints[field.name]
        value = _converted(getattr(settings, field.name), hint, name)
        if not _matches(value, hint):
            raise LoopformerError(f"{name} must be {_describe(hint)}, got {value!r}.")
        if isinstance(value, int | float):
            _check_bounds(value, name, field.metadata)
        object.__setattr__(settings, field.name, value)


def _converted(value: Any, hint: Any, name: str) -> Any:
    """The value as annotated, where it can be read so: YAML and JSON know neither tuples nor dataclasses."""
    choices = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    for choice in choices:
        if get_origin(choice) is tuple and isinstance(value, list | tuple):
            return tuple(_converted(item, get_args(choice)[0], f"each of {name}") for item in value)
        if dataclasses.is_dataclass(choice) and not isinstance(value, choice):  # type: ignore[arg-type]
            return from_mapping(choice, value, name)  # type: ignore[arg-type]
    number = as_number(value) if float in choices else None
    return value if number is None else number


def _check_bounds(value: float, name: str, bounds: Mapping[str, Any]) -> None:
    minimum, maximum, above, below = map(bounds.get, ("minimum", "maximum", "above", "below"))
    if below is not None or (above is not None and maximum is not None):
        low = f"[{minimum}" if above is None else f"({above}"
        high = f"{maximum}]" if below is None else f"{below})"
        allowed = f"lie in {low}, {high}, got {value}."
    elif maximum is not None:
        allowed = f"be {minimum} or more, and {maximum:,} at most; got {value}."
    else:
        allowed = f"be {'positive' if minimum is None else f'{minimum} or more'}, got {value}."
    is_low = (minimum is not None and value < minimum) or (above is not None and value <= above)
    is_high = (maximum is not None and value > maximum) or (below is not None and value >= below)
    require(not is_low and not is_high, f"{name} must {allowed}")


def as_number(value: Any) -> float | None:
    """The number that an int, a float or text means, as YAML 1.1 reads 6e-4 as text; None for anything else."""
    try:
        return float(value) if type(value) in (float, int, str) else None
    except ValueError:
        return None


def _matches(value: Any, hint: Any) -> bool:
    kind = get_origin(hint)
    if kind in UNIONS:
        return any(_matches(value, choice) for choice in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind is tuple:
        return isinstance(value, tuple) and all(_matches(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, float) and math.isfinite(value)
    return type(value) is int if hint is int else isinstance(value, hint)  # a bool is an instance of int


def _describe(hint: Any) -> str:
    kind = get_origin(hint)
    if kind in UNIONS:
        return " or ".join(map(_describe, get_args(hint)))
    if kind is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    names |= {tuple: "a list", type(None): "null"}
    return names.get(kind or hint, str(hint))


def parse_counts(text: str, option: str) -> list[int]:
    """The numbers of 1 or more in an option's text, such as 1,2,4."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    require(min(numbers) >= 1, f"{option} takes whole numbers of 1 or more, such as 1,2,4, not {text!r}.")
    return numbers
