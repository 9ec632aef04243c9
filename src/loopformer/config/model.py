"""The settings of a model (k shared blocks, applied up to L times), and the checks that all settings share.

ModelConfig(blocks=2, loops=4)
from_mapping(ModelConfig, {"blocks": 2, "loops": 4}, "model")   # from YAML or JSON data

Settings are frozen dataclasses. Each field declares its default, help text and bounds, and `check_settings` checks
them all. An unknown key is an error that names the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformer.errors import LoopformerError, nearest, require

Conditioning = Literal["none", "index", "time", "step", "trajectory"]
FORMAT, VERSION = "loopformer-model", 1  # what config.json of a model folder says
BOX = "box"  # name of the bundled model, and its folder in the package
FOURIER_WIDTH = 256  # Fourier features of t, and of Δ
T = TypeVar("T")
UNIONS = (Union, types.UnionType)

# Keys of files that earlier versions wrote. Reading accepts them, writing uses the current key.
RENAMED_KEYS = {
    "route_draws": "trajectory_groups",  # objective
    "during": "active_range",  # each of objective.trajectories
    "way": "execution_mode",  # state.json of a checkpoint
}
# Former keys of an entry of objective.trajectories, at the value that had no effect. Reading drops these.
REMOVED_KEYS = {"chance": 1}


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a settings dataclass.

    minimum, maximum   inclusive bounds
    above=0, below     exclusive bounds
    beyond_paper       True for a setting that the paper does not have; files leave it out at its default
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def setting_names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that any version wrote, with the keys of this version."""
    for old, new in RENAMED_KEYS.items():
        require(not {old, new} <= values.keys(), f"{old} is the former name of {new}; leave one of them out.")
    values = {key: value for key, value in values.items() if key not in REMOVED_KEYS or value != REMOVED_KEYS[key]}
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """A settings dataclass from plain data. `where` is its name in errors."""
    if not isinstance(values, Mapping):
        raise LoopformerError(f"{where} must be a mapping of settings, got {values!r}.")
    values = with_current_keys(values)
    check_keys(values, setting_names(cls), f"{where}.")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_value = field.name in values or field.default is not dataclasses.MISSING
        require(has_value, f"{where} must have its {field.name}.")
    return cls(**values)


def check_keys(values: Mapping[str, Any], known: list[str], prefix: str = "") -> None:
    """Raise an error for the first unknown key, with the nearest known one."""
    for key in values:
        if key not in known:
            hint = nearest(str(key), known)
            if prefix.removesuffix(".").isidentifier():  # a section, so a user can copy the whole name
                hint = hint.replace("did you mean ", f"did you mean {prefix}")
            raise LoopformerError(f"Unknown setting {prefix}{key}; {hint}")


def check_settings(settings: Any, where: str) -> None:
    """Check every field against its annotation and bounds, and store it converted to the annotated type."""
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
    """The value converted to its annotation where possible: YAML and JSON have neither tuples nor dataclasses."""
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
    low = "positive" if minimum is None else f"{minimum} or more"  # `above` is always 0
    high = "" if maximum is None else f" and at most {maximum:,}"
    high = high if below is None else f" and below {below:,}"
    is_low = (minimum is not None and value < minimum) or (above is not None and value <= above)
    is_high = (maximum is not None and value > maximum) or (below is not None and value >= below)
    require(not is_low and not is_high, f"{name} must be {low}{high}, got {value}.")


def as_number(value: Any) -> float | None:
    """An int, a float or numeric text as a float, else None. YAML 1.1 reads 6e-4 as text."""
    try:
        return float(value) if type(value) in (float, int, str) else None
    except (ValueError, OverflowError):  # OverflowError: a whole number of more than 308 digits
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
    return type(value) is int if hint is int else isinstance(value, hint)  # isinstance would take a bool for an int


def _describe(hint: Any) -> str:
    kind = get_origin(hint)
    if kind in UNIONS:
        return " or ".join(map(_describe, get_args(hint)))
    if kind is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    names |= {tuple: "a list", type(None): "null"}
    return names.get(kind or hint, str(hint))


def bundled_model_dir() -> Path:
    """The folder of the bundled model."""
    return Path(str(resources.files("loopformer") / BOX))


def parse_counts(text: str, option: str) -> list[int]:
    """The whole numbers in the text of an option, such as 1,2,4. Each must be 1 or more."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]  # refused below
    require(min(numbers) >= 1, f"{option} takes whole numbers of 1 or more, such as 1,2,4, not {text!r}.")
    return numbers


def parse_names(text: str) -> list[str]:
    """The names in the text of an option, such as piqa,arc_easy."""
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True)
class ModelConfig:
    """Any model of the family. The defaults are the paper's LoopFormer 3⊗8.

    The upper bounds lie far above any real model. They stop a damaged file from allocating terabytes.
    """

    conditioning: Conditioning = setting("trajectory", "What a loop knows about its time t and step size Δ.")  # noqa: RUF009
    blocks: int = setting(3, "Blocks in the shared stack (k).", minimum=1, maximum=4096)
    loops: int = setting(8, "Loops of the longest trajectory (L).", minimum=1, maximum=4096)
    width: int = setting(2048, "Width of the residual stream, a multiple of heads.", minimum=1, maximum=1 << 17)
    heads: int = setting(32, "Attention heads.", minimum=1, maximum=1 << 13)
    ffn: int = setting(5120, "Hidden units of the feed-forward layer.", minimum=1, maximum=1 << 20)
    context: int = setting(1024, "Longest sequence in tokens.", minimum=1, maximum=1 << 22)
    vocab: int = setting(50257, "Token ids that the model accepts.", minimum=1, maximum=1 << 24)
    padded_vocab: int | None = setting(
        None, "Rows of the embedding; null rounds vocab up to a multiple of 64.", minimum=1, maximum=1 << 25
    )
    positions: Literal["learned", "rotary"] = setting("learned", "Position embeddings.")
    modulator_start: Literal["zero", "normal", "one"] = setting("zero", "Initial gates: closed, random or open.")
    time_scale: float = setting(1.0, "Factor on t and Δ before their Fourier features.", above=0)
    residual_init: Literal["blocks", "depth"] = setting("blocks", "Residual init std: 0.02/√(2k) or 0.02/√(2kL).")
    inject: Literal["none", "gated", "adapter"] = setting(
        "none", "How the embedding is injected into each loop.", beyond_paper=True
    )
    start: Literal["embedding", "normed", "random"] = setting(
        "embedding", "Initial state, before the first loop.", beyond_paper=True
    )
    norms: Literal["pre", "sandwich"] = setting(
        "pre", "Norms before each layer; sandwich: also after each sum.", beyond_paper=True
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")
        width, heads, vocab, rows = self.width, self.heads, self.vocab, self.vocab_rows
        require(width % heads == 0, f"model.width {width} must be a multiple of model.heads {heads}.")
        has_even_heads = self.positions != "rotary" or self.head_width % 2 == 0
        require(has_even_heads, "Rotary positions need an even width/heads; change model.heads.")
        has_gate = self.inject != "gated" or self.conditioning != "none"
        require(has_gate, "model.inject gated needs conditioning; give model.conditioning another value than none.")
        sees_tokens = self.start != "random" or self.inject == "adapter"
        require(sees_tokens, "model.start random needs tokens to be injected; set model.inject to adapter.")
        require(rows >= vocab, f"model.padded_vocab {rows} is smaller than model.vocab {vocab}; raise it.")

    def plain(self) -> dict[str, Any]:
        """The settings as they are written to files. Settings beyond the paper are left out at their defaults.

        So a model of the paper has the same file and the same hash in every version.
        """
        paper = [field.name for field in dataclasses.fields(self) if "beyond_paper" not in field.metadata]
        return {name: getattr(self, name) for name in (*paper, *self.non_paper_settings)}

    @property
    def non_paper_settings(self) -> list[str]:
        """The settings beyond the paper that are not at their defaults."""
        fields = [field for field in dataclasses.fields(self) if "beyond_paper" in field.metadata]
        return [field.name for field in fields if getattr(self, field.name) != field.default]

    @property
    def fused_unsupported(self) -> str | None:
        """The name of a setting that the fused decoding kernels do not support, or None."""
        works = {"inject": self.inject == "gated", "start": self.start == "normed" and self.positions == "rotary"}
        return next((name for name in self.non_paper_settings if not works.get(name)), None)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and width of the logits."""
        return self.padded_vocab if self.padded_vocab is not None else -(-self.vocab // 64) * 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads
