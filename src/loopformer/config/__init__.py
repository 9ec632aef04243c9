"""Settings: model.py (how settings are checked, and those of a model) · run.py (a whole run, presets).

ModelConfig()                                       # the paper's LoopFormer 3⊗8
from_mapping(ModelConfig, {"blocks": 2}, "model")   # from plain data, checked
load_preset("paper/loopformer-1x24")                # a preset in one of its sizes
"""

from loopformer.config.model import Conditioning as Conditioning
from loopformer.config.model import ModelConfig as ModelConfig
from loopformer.config.model import from_mapping as from_mapping
from loopformer.config.model import parse_counts as parse_counts
from loopformer.config.run import DEFAULT_PRESET as DEFAULT_PRESET
from loopformer.config.run import DataConfig as DataConfig
from loopformer.config.run import ObjectiveConfig as ObjectiveConfig
from loopformer.config.run import RunConfig as RunConfig
from loopformer.config.run import TrainingConfig as TrainingConfig
from loopformer.config.run import load_preset as load_preset
from loopformer.config.run import load_run as load_run
from loopformer.config.run import preset_names as preset_names
from loopformer.config.run import run_from_mapping as run_from_mapping
from loopformer.config.run import run_to_mapping as run_to_mapping
from loopformer.config.run import run_to_yaml as run_to_yaml
from loopformer.config.run import with_expected_vocab as with_expected_vocab
