"""Whether a pass can be fused here."""

from importlib.util import find_spec

import torch

from loopformer.config import ModelConfig

LEAST_CAPABILITY_FOR_FP8 = (8, 9)


def obstacle(config: ModelConfig, device: torch.device, fp8: bool) -> str | None:
    """What is in the way of fused passes of a model on a device, and what to do; None if nothing is."""
    if device.type not in ("cpu", "cuda"):
        return f"it runs on CUDA and the CPU, not on {device.type}"
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed; install it"
    if not fp8:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY_FOR_FP8:
        return "this GPU has no fp8 products; use bfloat16"
    if any(getattr(config, name) % 16 for name in ("width", "ffn", "context")):
        return "its products need multiples of 16 for model.width, ffn and context; use bfloat16"
    return None
