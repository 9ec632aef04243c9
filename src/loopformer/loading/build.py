"""From settings and tensors to a model, with every tensor accounted for."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.errors import FileProblem
from loopformer.model import LoopedLM


def build(config: ModelConfig, tensors: Mapping[str, Tensor], called: Callable[[str], str] = str) -> LoopedLM:
    """A model that owns these tensors, in fp32 on their device.

    `called` turns our name of a tensor into that of the file, so that an error names what the user can look for.
    """
    with torch.device("meta"):
        model = LoopedLM(config)
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in tensors:
            raise FileProblem(f"The weights lack the tensor {called(name)}; the file is not whole.")
        if tensors[name].shape != tensor.shape:
            raise FileProblem(
                f"The tensor {called(name)} has shape {list(tensors[name].shape)} where {list(tensor.shape)} is "
                "expected from the model's sizes; the file is damaged or mixes models."
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise FileProblem(f"The tensor {called(extra[0])} does not belong to a {config.conditioning!r} model.")
    # Copies, not views of the file: CPU kernels round differently on memory that is not aligned as fresh tensors
    # are, and a resumed run must repeat every bit.
    owned = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(owned, assign=True)
    return model.requires_grad_(True)
