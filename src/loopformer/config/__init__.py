"""Settings: schema.py (how they are checked) · model.py (the model) · run.py (a whole run, presets).

ModelConfig()                                       # the paper's LoopFormer 3⊗8
from_mapping(ModelConfig, {"blocks": 2}, "model")   # from plain data, checked
load_preset("paper/loopformer-1x24")                # a preset in one of its sizes
"""

from loopformer.config.model import Conditioning, ModelConfig
from loopformer.config.run import (
    DEFAULT_PRESET,
    DataConfig,
    ObjectiveConfig,
    RunConfig,
    TrainingConfig,
    load_preset,
    load_run,
    preset_names,
    run_from_mapping,
    run_to_mapping,
    run_to_yaml,
    with_expected_vocab,
)
from loopformer.config.schema import from_mapping, parse_counts

__all__ = [
    "DEFAULT_PRESET",
    "Conditioning",
    "DataConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RunConfig",
    "TrainingConfig",
    "from_mapping",
    "load_preset",
    "load_run",
    "parse_counts",
    "preset_names",
    "run_from_mapping",
    "run_to_mapping",
    "run_to_yaml",
    "with_expected_vocab",
]
