"""What a model says of given tokens: the next one after each loop, and how likely it found each.

    lens(model, ids, trajectory, top=5)      # after each pass the most likely next tokens, with log-probabilities
    ranked(model, ids, trajectory, top=5)    # of each token its log-probability, and what was likelier

Both run the tokens once, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.inference.score import head_chunks
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Alternatives = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the most likely first


class Ranked(NamedTuple):
    """A token's log-probability given those before it, and the most likely ones there; the first token has none."""

    logprob: float | None
    alternatives: Alternatives


@torch.no_grad()
def lens(model: LoopedLM, ids: Sequence[int], trajectory: Trajectory, top: int) -> list[Alternatives]:
    """The next token's distribution if the model stopped after each pass, its `top` most likely ones."""
    states = model(_batch(model, ids), trajectory, logits=False, states=True).states
    last = model.final_norm(torch.stack([state[0, -1] for state in states]))  # [M, D]
    return [row for _, logits in head_chunks(model, last) for row in _alternatives(logits.log_softmax(-1), top)]


@torch.no_grad()
def ranked(model: LoopedLM, ids: Sequence[int], trajectory: Trajectory, top: int) -> list[Ranked]:
    """Every token as the model found it, beside the `top` most likely."""
    if len(ids) < 2:
        return [Ranked(None, ()) for _ in ids]
    hidden = model(_batch(model, ids[:-1]), trajectory, logits=False).hidden[0]  # [T - 1, D]
    targets = torch.tensor(ids[1:], device=hidden.device)
    rows = [Ranked(None, ())]
    for part, logits in head_chunks(model, hidden):
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(1, targets[part, None])[:, 0].tolist()
        rows += map(Ranked, own, _alternatives(logprobs, top))
    return rows


def _batch(model: LoopedLM, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=model.tokens.weight.device)


def _alternatives(logprobs: Tensor, top: int) -> list[Alternatives]:
    values, tokens = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return [
        tuple(zip(row, likely, strict=True)) for row, likely in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
