"""Elastic-depth language models: one shared stack of blocks, any compute budget.

import loopformer as lf
lf.Trajectory.parse("2-1-2-3")        # a schedule; its length is the budget
lm = lf.load("runs/demo")             # a run, a model folder, or published weights
lm.generate("Once upon a time", budget=4).text
lm.model(ids, lf.Trajectory.uniform(4)).logits
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopformer.errors import LoopformerError
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.config import ModelConfig as ModelConfig
    from loopformer.inference.engine import Engine as Engine
    from loopformer.inference.request import Request as Request
    from loopformer.inference.request import Result as Result
    from loopformer.inference.request import Sampling as Sampling
    from loopformer.lm import LM as LM
    from loopformer.lm import load as load
    from loopformer.lm import load_official as load_official
    from loopformer.model import LoopedLM as LoopedLM

__version__ = "0.2.0"
_LAZY = {
    "Engine": "loopformer.inference.engine",
    "LM": "loopformer.lm",
    "LoopedLM": "loopformer.model",
    "ModelConfig": "loopformer.config",
    "Request": "loopformer.inference.request",
    "Result": "loopformer.inference.request",
    "Sampling": "loopformer.inference.request",
    "load": "loopformer.lm",
    "load_official": "loopformer.lm",
}
__all__ = ["LoopformerError", "Trajectory", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import on first use, because torch takes seconds to import and `loopformer --help` must be quick."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'loopformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
