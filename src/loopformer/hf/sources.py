"""The model's own source files in one flat folder, for places where loopformer is not installed.

    files = flatten(["loopformer.hf.modeling"])      # {"loopformer_hf_modeling.py": "…", "loopformer_errors.py": …}

Transformers loads such code by copying a file and, from `from .name import …`, the files beside it. So each module
that is needed becomes a file named after it, and our imports become relative. A name that a package only passes on
is taken from the module that has it, so that nothing else of the package comes along.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from loopformer.errors import LoopformerError

PACKAGE = "loopformer"
CONFIGURATION, MODELING = f"{PACKAGE}.hf.configuration", f"{PACKAGE}.hf.modeling"
_ROOT = Path(__file__).parents[2]
_HEADER = f"# A module of {PACKAGE} (MIT licence), copied by `{PACKAGE} export`; only its imports are changed.\n"


def flat(module: str) -> str:
    """The name of a module's copy."""
    return module.replace(".", "_")


def flatten(modules: Iterable[str], root: Path = _ROOT) -> dict[str, str]:
    """The modules and all of ours that they import, as files by name; `root` is the folder of the package."""
    texts: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in texts:
            texts[module], needed = _rewritten(module, root)
            waiting += needed
    files = {f"{flat(module)}.py": _HEADER + text for module, text in sorted(texts.items())}
    if len(files) < len(texts):
        raise LoopformerError(f"Two of the modules {', '.join(sorted(texts))} would have the same flat name.")
    return files


def _rewritten(module: str, root: Path) -> tuple[str, list[str]]:
    """A module's text with its imports of ours made relative, and the modules these are."""
    text = _path(module, root).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    needed: list[str] = []
    for node in sorted(_imports(text, module), key=lambda node: -node.lineno):  # from the end, so that numbers stay
        homes: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = _home(node.module or "", alias.name, root)
            known_as = alias.asname or alias.name
            homes.setdefault(home, []).append(name if name == known_as else f"{name} as {known_as}")
        indent = " " * node.col_offset
        new = [f"{indent}from .{flat(home)} import {', '.join(names)}\n" for home, names in homes.items()]
        lines[node.lineno - 1 : node.end_lineno] = new
        needed += homes
    return "".join(lines), needed


def _imports(text: str, module: str) -> list[ast.ImportFrom]:
    """The imports of ours in a module, wherever they stand."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise LoopformerError(f"{module} says `import {node.names[0].name}`; write `from … import` instead.")
        if isinstance(node, ast.ImportFrom) and (node.level or _is_ours(node.module or "")):
            if node.level or any(alias.name == "*" for alias in node.names):
                raise LoopformerError(f"{module}, line {node.lineno}: only absolute imports by name can be copied.")
            found.append(node)
    return found


def _home(module: str, name: str, root: Path) -> tuple[str, str]:
    """Where a name that is imported from a module is: packages pass on what their modules have."""
    path = _path(module, root)
    if path.name != "__init__.py":
        return module, name
    for node in _imports(path.read_text(encoding="utf-8"), module):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return _home(node.module or "", alias.name, root)
    raise LoopformerError(f"{name} is not passed on by the package {module}, so it cannot be copied.")


def _path(module: str, root: Path) -> Path:
    place = root.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE
