"""Models on disk: folder.py (ours) · published.py (the authors' weights) · tensors.py (reading files safely)."""

from loopformer.loading.folder import load_model, save_model
from loopformer.loading.published import from_state_dict, load_published

__all__ = ["from_state_dict", "load_model", "load_published", "save_model"]
