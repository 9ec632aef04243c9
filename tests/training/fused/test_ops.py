"""Every operation of fused passes has a kernel of the same name, and needs no Triton to be imported."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

from loopformer.training.fused import ops


def test_every_operation_has_a_launcher_with_the_same_parameters() -> None:
    tree = ast.parse(Path(ops.__file__).with_name("kernels.py").read_text(encoding="utf-8"))
    launchers = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    chosen = {name: twin for name, twin in vars(ops).items() if hasattr(twin, "__wrapped__")}
    assert len(chosen) == 8
    for name, twin in chosen.items():
        names = [argument.arg for argument in launchers[name].args]
        names += [launchers[name].vararg.arg] if launchers[name].vararg else []  # type: ignore[union-attr]
        assert names == list(inspect.signature(twin).parameters)


def test_the_trainer_imports_without_triton_and_its_kernels() -> None:
    program = """
import sys
sys.modules["triton"] = None
import loopformer.training.launch
assert "loopformer.training.fused.kernels" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
