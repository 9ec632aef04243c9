"""One validated tree of settings, and the presets that ship with the package.

ModelConfig()                          # the paper's LoopFormer 3⊗8
load_preset("paper/loopformer-1x24")   # a preset, at one of its sizes
from_mapping(ModelConfig, {"blocks": 2}, "model")

Unknown keys, wrong types and impossible values are one clear sentence that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from loopformer.errors import FileProblem, LoopformerError

T = TypeVar("T")

Conditioning = Literal["none", "index", "time", "step", "trajectory"]


@dataclass(frozen=True)
class ModelConfig:
    """Any model of the family, k⊗L. The defaults are the paper's LoopFormer 3⊗8."""

    conditioning: Conditioning = "trajectory"  # what a pass is told: nothing, its index, t, Δ, or (t, Δ)
    blocks: int = 3  # k, blocks in the shared stack
    loops: int = 8  # L, passes of the longest trajectory
    width: int = 2048  # d
    heads: int = 32
    ffn: int = 5120
    context: int = 1024
    vocab: int = 50257  # ids the model accepts
    padded_vocab: int | None = None  # rows of the embedding; None: `vocab` rounded up to a multiple of 64
    positions: Literal["learned", "rotary"] = "learned"
    modulator_start: Literal["zero", "normal", "one"] = "zero"
    time_scale: float = 1.0  # multiplies t and Δ before their Fourier features
    residual_init: Literal["blocks", "depth"] = (
        "blocks"  # residual projections start at 0.02/√(2k) or /√(2kL)
    )

    def __post_init__(self) -> None:
        check_types(self, "model")
        for name in ("blocks", "loops", "width", "heads", "ffn", "context", "vocab"):
            require(getattr(self, name) >= 1, f"model.{name} must be 1 or more, got {getattr(self, name)}.")
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
            self.padded_vocab is None or self.padded_vocab >= self.vocab,
            f"model.padded_vocab {self.padded_vocab} is smaller than model.vocab {self.vocab}.",
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and width of the logits."""
        return self.padded_vocab if self.padded_vocab is not None else -(-self.vocab // 64) * 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise LoopformerError(sentence)


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """Build a settings dataclass from plain data; an unknown key is an error that names the nearest valid one."""
    if not isinstance(values, Mapping):
        raise LoopformerError(f"{where} must be a mapping of settings, got {values!r}.")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise LoopformerError(f"Unknown setting {where}.{key}; {nearest(str(key), known)}")
    return cls(**values)


def nearest(word: str, known: list[str]) -> str:
    """A hint for a misspelt word: the nearest valid one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"valid are {', '.join(known)}."


def check_types(settings: Any, where: str) -> None:
    """Check every field of a settings dataclass against its annotation; whole floats pass for ints and back."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if float in _choices(hint) and type(value) is int:
            object.__setattr__(settings, field.name, float(value))
        elif not _fits(value, hint):
            raise LoopformerError(f"{where}.{field.name} must be {_describe(hint)}, got {value!r}.")


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is int:
        return type(value) is int
    return isinstance(value, get_origin(hint) or hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if hint is type(None):
        return "null"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))


def preset_names() -> list[str]:
    """Every preset that ships with the package, each of its sizes included."""
    names: list[str] = []
    for name, file in _preset_files().items():
        names.append(name)
        names += [f"{name}-{size}" for size in _read_yaml(file, name).get("sizes", [])]
    return names


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset by name, plain data: `demo`, `paper/loopformer`, `paper/loopformer-1x24`."""
    files = _preset_files()
    if name in files:
        settings = _read_yaml(files[name], name)
        settings.pop("sizes", None)
        return settings
    family, _, size = name.rpartition("-")
    if family in files:
        settings = _read_yaml(files[family], name)
        if size in settings.pop("sizes", []):
            blocks, loops = map(int, size.split("x"))
            settings["model"] |= {"blocks": blocks, "loops": loops}
            return settings
    raise LoopformerError(f"There is no preset {name!r}; {nearest(name, preset_names())}")


def _preset_files() -> dict[str, Traversable]:
    root = resources.files("loopformer") / "presets"

    def walk(folder: Traversable, prefix: str) -> dict[str, Traversable]:
        found: dict[str, Traversable] = {}
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.is_dir():
                found |= walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml"):
                found[prefix + entry.name.removesuffix(".yaml")] = entry
        return found

    return walk(root, "")


def _read_yaml(file: Traversable | Path, name: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileProblem(f"{name} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise FileProblem(f"{name} must hold a mapping of settings such as 'model:'.")
    return settings
