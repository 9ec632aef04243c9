"""Elastic-depth language models: one shared stack of blocks, any compute budget.

import loopformer as lf
lf.Trajectory.parse("4-2-1-1")        # what a budget and a schedule are: loopformer/trajectory.py
lm = lf.load("runs/demo")             # a folder of ours, or the authors' published weights
lm.model(ids, lf.Trajectory.uniform(4)).logits
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.config import ModelConfig
    from loopformer.inference.draft import Draft
    from loopformer.lm import LM, load, load_official
    from loopformer.model import LoopedLM

__version__ = "0.1.0"
__all__ = [
    "LM",
    "Draft",
    "LoopedLM",
    "LoopformerError",
    "ModelConfig",
    "Trajectory",
    "load",
    "load_official",
]

_LAZY = {
    "Draft": "loopformer.inference.draft",
    "LM": "loopformer.lm",
    "load": "loopformer.lm",
    "load_official": "loopformer.lm",
    "LoopedLM": "loopformer.model",
    "ModelConfig": "loopformer.config",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that `loopformer --help` stays quick."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'loopformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
