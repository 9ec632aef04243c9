"""The presets that ship with the package, YAML in `loopformer/presets`.

load_preset("paper/loopformer-1x24")   # a preset, at one of the sizes its file lists
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from loopformer.config.schema import nearest
from loopformer.errors import FileProblem, LoopformerError


def preset_names() -> list[str]:
    """Every preset that ships with the package, each of its sizes included."""
    names: list[str] = []
    for name, file in _preset_files().items():
        names.append(name)
        names += [f"{name}-{size}" for size in read_yaml(file, name).get("sizes", [])]
    return names


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset by name, plain data: `demo`, `paper/loopformer`, `paper/loopformer-1x24`."""
    files = _preset_files()
    if name in files:
        settings = read_yaml(files[name], name)
        settings.pop("sizes", None)
        return settings
    family, _, size = name.rpartition("-")
    if family in files:
        settings = read_yaml(files[family], name)
        if size in settings.pop("sizes", []):
            blocks, loops = map(int, size.split("x"))
            settings["model"] |= {"blocks": blocks, "loops": loops}
            return settings
    raise LoopformerError(
        f"There is no preset {name!r}; {nearest(name, preset_names(), '`loopformer info` lists them.')}"
    )


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


def read_yaml(file: Traversable | Path, name: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileProblem(f"{name} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise FileProblem(f"{name} must hold a mapping of settings such as 'model:'.")
    return settings
