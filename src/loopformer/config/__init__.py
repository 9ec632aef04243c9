"""Settings: model.py (the family) · schema.py (checking) · presets.py (what ships with the package).

ModelConfig()                                       # the paper's LoopFormer 3⊗8
from_mapping(ModelConfig, {"blocks": 2}, "model")   # from plain data, checked
load_preset("paper/loopformer-1x24")                # a preset, at one of its sizes
"""

from loopformer.config.model import Conditioning, ModelConfig
from loopformer.config.presets import load_preset, preset_names, read_yaml
from loopformer.config.schema import check_types, from_mapping, nearest, require

__all__ = [
    "Conditioning",
    "ModelConfig",
    "check_types",
    "from_mapping",
    "load_preset",
    "nearest",
    "preset_names",
    "read_yaml",
    "require",
]
