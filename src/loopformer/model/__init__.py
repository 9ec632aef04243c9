"""The model family: block.py · conditioning.py · looped.py (embed → loop → head) · cost.py (FLOPs, bytes)."""

from loopformer.model.looped import LoopedLM, Output

__all__ = ["LoopedLM", "Output"]
