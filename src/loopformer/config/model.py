"""What a model is: the settings of the whole family k⊗L, and how settings of any kind are checked.

    ModelConfig(blocks=2, loops=4)
    from_mapping(ModelConfig, {"blocks": 2, "loops": 4}, "model")

Settings are frozen dataclasses, checked against their annotations. An unknown key, a wrong type or an impossible
value is one sentence that names the key.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformer.errors import LoopformerError, nearest, require

T = TypeVar("T")
Conditioning = Literal["none", "index", "time", "step", "trajectory"]
FORMAT, VERSION = "loopformer-model", 1  # how the config.json of a model folder says that it is ours
BOX = "box"  # the name of the model that comes with the package
MOST = {  # far above any model; what a damaged file asks for must not be built
    "blocks": 4096,
    "loops": 4096,
    "width": 1 << 17,
    "heads": 1 << 13,
    "ffn": 1 << 20,
    "context": 1 << 22,
    "vocab": 1 << 24,
}


def box_folder() -> Path:
    """Where the model that comes with the package is."""
    return Path(str(resources.files("loopformer") / BOX))


def beyond_paper(default: Any) -> Any:
    """A setting that the paper's models do not have: at its default, nothing that is written mentions it."""
    return dataclasses.field(default=default, metadata={"beyond_paper": True})


@dataclass(frozen=True)
class ModelConfig:
    """Any model of the family, k⊗L. The defaults are the paper's LoopFormer 3⊗8."""

    conditioning: Conditioning = "trajectory"  # what a pass is told: none, index, time (t), step (Δ), or both
    blocks: int = 3  # k, blocks in the shared stack
    loops: int = 8  # L, passes of the longest trajectory
    width: int = 2048  # d
    heads: int = 32  # of attention
    ffn: int = 5120  # units between the two products of a block's second half
    context: int = 1024  # tokens that are seen at a time
    vocab: int = 50257  # ids the model accepts
    padded_vocab: int | None = None  # rows of the embedding; None: `vocab` rounded up to a multiple of 64
    positions: Literal["learned", "rotary"] = "learned"  # how a token knows its place
    modulator_start: Literal["zero", "normal", "one"] = "zero"  # gates closed, drawn, or open at first
    time_scale: float = 1.0  # multiplies t and Δ before their Fourier features
    residual_init: Literal["blocks", "depth"] = "blocks"  # residual projections start at 0.02/√(2k) or /√(2kL)
    inject: Literal["none", "gated", "adapter"] = beyond_paper("none")  # how passes get the embedding again
    start: Literal["embedding", "normed", "random"] = beyond_paper("embedding")  # the state before the first pass
    norms: Literal["pre", "sandwich"] = beyond_paper("pre")  # sandwich: a learned norm also after each sum

    def __post_init__(self) -> None:
        check_types(self, "model")
        for name, most in MOST.items():
            value = getattr(self, name)
            require(1 <= value <= most, f"model.{name} must be 1 or more, and {most:,} at most; got {value}.")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} must be a multiple of model.heads {self.heads}.",
        )
        if self.positions == "rotary":
            require(
                self.width // self.heads % 2 == 0,
                "Rotary positions need an even width/heads; change model.heads.",
            )
        require(self.time_scale > 0, f"model.time_scale must be positive, got {self.time_scale}.")
        require(
            self.inject != "gated" or self.conditioning != "none",
            "model.inject gated follows what a pass is told; give model.conditioning another value than none.",
        )
        require(
            self.start != "random" or self.inject == "adapter",
            "With model.start random the tokens are met in the injection alone; set model.inject to adapter.",
        )
        require(
            self.padded_vocab is None or self.padded_vocab >= self.vocab,
            f"model.padded_vocab {self.padded_vocab} is smaller than model.vocab {self.vocab}; "
            "raise it, or leave it out.",
        )

    def plain(self) -> dict[str, Any]:
        """As files hold it: every setting, but those beyond the paper only where they are not at their defaults.

        So a model without them has the same file and the same hash in every version, before they came and after.
        """
        known = [each.name for each in dataclasses.fields(self) if "beyond_paper" not in each.metadata]
        return {name: getattr(self, name) for name in (*known, *self.additions)}

    @property
    def additions(self) -> list[str]:
        """The settings beyond the paper that are not at their defaults."""
        known = [each for each in dataclasses.fields(self) if "beyond_paper" in each.metadata]
        return [each.name for each in known if getattr(self, each.name) != each.default]

    @property
    def plain_only(self) -> str | None:
        """The setting that keeps a model from the fused kernels of decoding; None where there is none."""
        fused = {"inject": self.inject == "gated", "start": self.start == "normed" and self.positions == "rotary"}
        return next((name for name in self.additions if not fused.get(name)), None)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and width of the logits."""
        return self.padded_vocab if self.padded_vocab is not None else -(-self.vocab // 64) * 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """Build a settings dataclass from plain data; an unknown key names the nearest valid one."""
    if not isinstance(values, Mapping):
        raise LoopformerError(f"{where} must be a mapping of settings, got {values!r}.")
    known = setting_names(cls)
    for key in values:
        if key not in known:
            raise LoopformerError(f"Unknown setting {where}.{key}; {nearest(str(key), known)}")
    for name, parameter in inspect.signature(cls).parameters.items():
        require(name in values or parameter.default is not parameter.empty, f"{where} must have its {name}.")
    return cls(**values)


def setting_names(cls: type[Any]) -> list[str]:
    """The keys that a settings dataclass is made from."""
    return list(inspect.signature(cls).parameters)


def check_types(settings: Any, where: str) -> None:
    """Check every field of a settings dataclass against its annotation; a number passes for a float."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if float in _choices(hint) and (number := as_number(value)) is not None:
            object.__setattr__(settings, field.name, value := number)
        if not _fits(value, hint):
            raise LoopformerError(f"{where}.{field.name} must be {_describe(hint)}, got {value!r}.")


def as_number(value: Any) -> float | None:
    """What is meant as a number: an int too, and text, since YAML 1.1 reads 6e-4 as text; else None."""
    try:
        return float(value) if type(value) in (float, int, str) else None
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
    if get_origin(hint) is tuple:
        return "a list"
    return {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}.get(
        hint, str(hint)
    )


def whole_numbers(text: str, option: str) -> list[int]:
    """The numbers of 1 or more in an option's text, such as 1,2,4."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    require(min(numbers) >= 1, f"{option} takes whole numbers of 1 or more, such as 1,2,4, not {text!r}.")
    return numbers
