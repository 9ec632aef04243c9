"""Hugging Face: configuration.py, modeling.py (our model as a Transformers model) · export.py (a folder that
Transformers loads).

    import loopformer.hf                                            # registers the model with Transformers
    AutoModelForCausalLM.from_pretrained("exported", budget=4)
"""

from loopformer.errors import LoopformerError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    absent = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
    reason = "is not installed; run: pip install 'loopformer[hf]'." if absent else f"cannot be imported: {error}"
    raise LoopformerError(f"Transformers {reason}") from error

from loopformer.hf.configuration import LoopFormerConfig
from loopformer.hf.modeling import LoopFormerForCausalLM

AutoConfig.register(LoopFormerConfig.model_type, LoopFormerConfig, exist_ok=True)
AutoModelForCausalLM.register(LoopFormerConfig, LoopFormerForCausalLM, exist_ok=True)

__all__ = ["LoopFormerConfig", "LoopFormerForCausalLM"]
