"""A small model and its tokenizer as a folder, which the commands are given; and the seal of a checkpoint."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopformer import LoopedLM, ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.files import sha256_of
from loopformer.loading import save_model
from loopformer.loading.folder import CHECKSUMS

SENTENCE = "every pass is told its time and its step"


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.train([SENTENCE] * 9, 280)


def save_small(
    folder: Path,
    *,
    context: int,
    loops: int = 4,
    with_tokenizer: bool = True,
    std: float | None = None,
    **settings: Any,
) -> str:
    """A model 1⊗L of seed 0, with weights spread by `std` if that is given; its folder."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"blocks": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": _tokenizer().vocab_size}
    model = LoopedLM(ModelConfig(loops=loops, context=context, **sizes, **settings))
    if std is not None:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=std)
    save_model(model, folder)
    if with_tokenizer:
        _tokenizer().save(folder)
    return str(folder)


def seal(checkpoint: Path) -> Path:
    """Write the checksums of all files, as training does, or as it would of files that were changed since."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    sums = {str(path.relative_to(checkpoint)): sha256_of(path) for path in files}
    (checkpoint / CHECKSUMS).write_text(json.dumps(sums))
    return checkpoint
