"""The house rules: imports go one way, files stay short, types have names of their own."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "loopformer"
ORDER = [
    "errors",
    "files",
    "device",
    "cuda_graphs",
    "trajectory",
    "plots",
    "config",
    "model",
    "data",
    "loading",
    "scoring",
    "inference",
    "training",
    "lm",
]
ORDER += ["evaluation", "lm_eval", "analysis", "benchmark", "hf", "serving", "cli"]


def _part(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[0] == "loopformer" else None


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            # Names taken from the package itself hide where they live; only the command line needs its version.
            assert node.module != "loopformer", f"{file}: import from the module that has it"
            found.add(node.module)
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path) -> None:
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    assert own in ORDER, f"{own} has no place in the order of imports"
    for module in _imports(file):
        part = _part(module)
        assert part is None or ORDER.index(part) <= ORDER.index(own), f"{own} may not import {module}"


def test_module_docstrings_name_files_that_exist() -> None:
    """Relative to the module's folder or to one above it, up to the package's."""
    missing = []
    for file in PACKAGE.rglob("*.py"):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        folders = [folder for folder in file.parents if folder.is_relative_to(PACKAGE)]
        names = re.findall(r"[\w./]*\w\.py\b", text)
        missing += [
            f"{file.relative_to(PACKAGE)}: {name}"
            for name in names
            if not any((folder / name).is_file() for folder in folders)
        ]
    assert missing == []


def test_no_file_is_long() -> None:
    folders = [PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "experiments", ROOT / "tools"]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    long = {str(file): lines for file in files if (lines := len(file.read_text().splitlines())) > 600}
    assert not long


def test_public_types_have_names_of_their_own() -> None:
    """A reader who meets a type in two files must not wonder which one it is."""
    homes: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                assigned = [target.id for target in node.targets if isinstance(target, ast.Name)]
                names = [name for name in assigned if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)]
            for name in names:
                if not name.startswith("_"):
                    homes.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}
