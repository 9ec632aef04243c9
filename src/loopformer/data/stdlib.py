"""The embedded corpus: the prose of the Python standard library, found on every machine, about 2 MB.

for document in stdlib_documents(): ...

One document per module, its docstrings in the order of the source, each docstring once in the whole corpus;
then one per topic of `help()`. The modules are parsed, never imported. What comes out depends on the Python
version; the order does not depend on the machine.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def stdlib_documents() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            if fresh:
                documents.append("\n\n".join(fresh) + "\n")
    return documents + list(dict.fromkeys(_topics(root / "pydoc_data" / "topics.py")))


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _docstrings(path: Path) -> Iterator[str]:
    tree = _parse(path)
    if tree is None:
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield text.strip()


def _topics(path: Path) -> Iterator[str]:
    tree = _parse(path)
    for statement in tree.body if tree else []:
        if isinstance(statement, ast.Assign):
            topics = ast.literal_eval(statement.value)
            yield from (topics[name].strip() + "\n" for name in sorted(topics))
