"""How the next token is chosen from its logits.

choose(logits, Sampling(temperature=0.8, top_p=0.95), draw=0.37, history=ids)

Greedy by default. Temperature, repetition penalty, top-k, top-p and min-p apply in that order; one uniform number
per token decides, so a request's text follows from its own seed, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from loopformer.errors import require


def is_whole(value: object) -> bool:
    """Whether it is a whole number; NumPy's are too."""
    return isinstance(value, Integral)


@dataclass(frozen=True)
class Sampling:
    """The settings of one request."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # only the k most likely
    top_p: float = 1.0  # only the most likely that make up this probability
    min_p: float = 0.0  # only those at least this fraction as likely as the most likely
    repetition_penalty: float = 1.0  # above 1: tokens that stand in the text already become less likely
    seed: int | None = None  # None: a different text each time

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and math.isfinite(value)
            require(number, f"{name} must be a finite number, got {value!r}.")
        require(self.temperature >= 0, f"temperature must be 0 (greedy) or more, got {self.temperature}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            require(value is None or is_whole(value), f"{name} must be a whole number, got {value!r}.")
        require(self.top_k is None or self.top_k >= 1, f"top_k must be 1 or more, got {self.top_k}.")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}.")
        require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], got {self.min_p}.")
        require(self.repetition_penalty > 0, f"repetition_penalty must be positive, got {self.repetition_penalty}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def most_likely(self) -> bool:
        """Whether nothing but the largest logit decides."""
        return self.greedy and self.repetition_penalty == 1


def probabilities(logits: Tensor, sampling: Sampling, history: Sequence[int]) -> Tensor:
    """What is drawn from: logits [V] → probabilities [V] in fp64 on the CPU."""
    scores = logits.detach().to(torch.float64 if logits.device.type != "mps" else torch.float32).cpu().double()
    if sampling.repetition_penalty != 1 and history:
        seen = torch.tensor(sorted(set(history)))
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if sampling.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    likely = ((scores - scores.max()) / sampling.temperature).softmax(-1)  # finite for any temperature
    if sampling.top_k is not None and sampling.top_k < len(likely):
        likely = likely.where(likely >= likely.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1:
        ranked, order = likely.sort(descending=True)
        before = ranked.cumsum(-1) - ranked  # a token stays while those before it have not made up top_p
        keep = torch.zeros_like(likely, dtype=torch.bool)
        keep[order] = before < sampling.top_p * likely.sum()
        likely = likely.where(keep, 0.0)
    if sampling.min_p > 0:
        likely = likely.where(likely >= sampling.min_p * likely.max(), 0.0)
    return likely / likely.sum()


def choose(logits: Tensor, sampling: Sampling, draw: float, history: Sequence[int]) -> int:
    """The next token: logits [V], and a number drawn uniformly from [0, 1)."""
    if sampling.most_likely:
        return int(logits.argmax())
    return pick(probabilities(logits, sampling, history), draw)


def pick(likely: Tensor, draw: float) -> int:
    """The token that a uniform number falls on: probabilities [V]."""
    place = int(torch.searchsorted(likely.cumsum(-1), draw, right=True))
    return min(place, int(likely.nonzero()[-1]))  # rounding may leave the sum a hair below 1
