"""Rows of tokens of different lengths as one tensor: padded at the end, where no earlier token can see it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loopformer.model import LoopedLM


def padded(model: LoopedLM, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """ids [B, longest] on the model's device, and how many tokens of each row count."""
    counts = [len(row) for row in rows]
    filled = [[*row, *[0] * (max(counts) - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=model.tokens.weight.device), counts


def ends(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """Of padded rows [B, T, D] the last one that counts, each [B, D]."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[rows, torch.tensor(counts, device=hidden.device) - 1]
