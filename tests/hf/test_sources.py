"""Flattened source files import each other, and nothing of the package."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from loopformer import LoopformerError
from loopformer.hf.export import CONFIGURATION, MODELING, flatten

PACKAGE = {
    "__init__.py": "",
    "words.py": "HELLO, WORLD, UNUSED = 'hello', 'world', 'unused'\n",
    "inner/__init__.py": (
        "from loopformer.inner.deep import greet\nfrom loopformer.inner.big import huge as large\n"
    ),
    "inner/deep.py": (
        '"""Not an import: from loopformer.words import HELLO."""\n'
        "from __future__ import annotations\n"
        "from loopformer.words import (\n    HELLO,\n    WORLD as PLANET,  # renamed\n)\n"
        "def greet() -> str:\n    from loopformer.inner import large\n    return f'{HELLO} {PLANET} {large}'\n"
    ),
    "inner/big.py": "huge = 3\n",
    "inner/never.py": "raise RuntimeError\n",
    "top.py": "import math\nfrom loopformer.inner import greet\nanswer = greet() + str(math.floor(1.5))\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "loopformer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_small_package_works_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = flatten(["loopformer.top"], write(tmp_path, PACKAGE))
    assert sorted(files) == [f"loopformer_{one}.py" for one in ("inner_big", "inner_deep", "top", "words")]
    flat = tmp_path / "flat_for_test"
    flat.mkdir()
    (flat / "__init__.py").touch()
    for name, text in files.items():
        (flat / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loopformer")  # the one in tmp_path would be found instead, and break
    assert importlib.import_module("flat_for_test.loopformer_top").answer == "hello world 31"
    assert "loopformer" not in sys.modules
    assert "Not an import: from loopformer.words import HELLO" in files["loopformer_inner_deep.py"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import loopformer.words", "write `from … import` instead"),
        ("from . import words", "only absolute imports by name"),
        ("from loopformer.words import *", "only absolute imports by name"),
        ("from loopformer.inner import never", "not passed on by the package loopformer.inner"),
    ],
)
def test_what_cannot_be_flattened_is_said(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        flatten(["loopformer.top"], write(tmp_path, {**PACKAGE, "top.py": line + "\n"}))


def test_the_model_needs_few_files_and_nothing_of_the_package() -> None:
    files = flatten([CONFIGURATION, MODELING])
    assert {"loopformer_model_looped.py", "loopformer_trajectory.py", "loopformer_hf_modeling.py"} <= set(files)
    assert not any(
        name.startswith(("loopformer_data", "loopformer_loading", "loopformer_training")) for name in files
    )
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 or f"{node.module}.py" in files
                names = [node.module or ""] if node.level == 0 else []
            assert not any(name.split(".")[0] == "loopformer" for name in names)
