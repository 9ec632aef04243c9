"""The model family: looped.py (embed → loop → head) · block.py · conditioning.py · cache.py · cost.py."""

from loopformer.model.looped import LoopedLM, Output

__all__ = ["LoopedLM", "Output"]
