"""Models on disk: find.py (whatever it is) · folder.py (ours) · runs.py (training runs) · published.py (the
authors' weights) · tensors.py (reading files safely) · build.py (settings and tensors to a model)."""

from loopformer.loading.folder import load_model, save_model
from loopformer.loading.published import find_config, find_model, from_state_dict, load_published

__all__ = ["find_config", "find_model", "from_state_dict", "load_model", "load_published", "save_model"]
