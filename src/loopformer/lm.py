"""What a user holds: a model and its tokenizer.

lm = load("runs/demo")                      # a run, a model folder, or the authors' published weights
lm.model(ids, "4-2-1-1").logits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import find_model
from loopformer.model import LoopedLM


@dataclass
class LM:
    """A model with what belongs to it. `tokenizer` is None where the weights came without one."""

    model: LoopedLM
    tokenizer: Tokenizer | None = None

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> LM:
        """Move the model, in place, to a device and dtype."""
        self.model.to(device=device, dtype=dtype)
        return self


def load(source: str | Path) -> LM:
    """Load a run, a model folder of ours or the authors' weights (file, folder or Hub id), fp32 on the CPU."""
    return _lm(*find_model(source))


def load_official(source: str | Path, heads: int | None = None, loops: int | None = None) -> LM:
    """Load the authors' weights; `heads` and `loops` are needed only where no config stands beside them."""
    return _lm(*find_model(source, heads, loops))


def _lm(model: LoopedLM, tokenizer: Path | None) -> LM:
    return LM(model.eval(), Tokenizer.load(tokenizer) if tokenizer else None)
