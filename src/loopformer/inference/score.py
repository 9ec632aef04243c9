"""How likely a model finds given texts, along a trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopformer.errors import require
from loopformer.inference.decode import padded
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

BATCH_TOKENS = 16384  # that run at once, padding included


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens, each given those before it; the first token has none."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of ids[1:]

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float | None:
        """None for a text of one token."""
        return math.exp(-self.total / len(self.logprobs)) if self.logprobs else None


@torch.no_grad()
def score(model: LoopedLM, texts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]) -> list[Score]:
    """Score token sequences, each along its own trajectory; as many at once as memory is spent on readily."""
    context = model.config.context
    for ids in texts:
        require(len(ids) > 0, "A text to score is empty; give at least one character.")
        require(len(ids) <= context, f"A text has {len(ids)} tokens but the context is {context}; shorten it.")
    batch = max(1, BATCH_TOKENS // max(map(len, texts), default=1))
    scores: list[Score] = []
    for first in range(0, len(texts), batch):
        scores += _score_batch(model, texts[first : first + batch], trajectories[first : first + batch])
    return scores


def _score_batch(
    model: LoopedLM, texts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]
) -> list[Score]:
    filled, _ = padded(model, texts)
    hidden = model(filled, list(trajectories), logits=False).hidden
    scores = []
    for row, ids in enumerate(texts):
        logits = model.head(hidden[row, : len(ids) - 1])[:, : model.config.vocab].float()
        chosen = logits.log_softmax(-1).gather(1, filled[row, 1 : len(ids), None])[:, 0]
        scores.append(Score(tuple(ids), tuple(chosen.tolist())))
    return scores
