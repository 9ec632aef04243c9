"""How the next token is chosen from its logits, for a whole batch at once.

choices = sample(logits, [Draw(Sampling(temperature=0.8, top_p=0.95), seed=3, position=17), …])    # logits [B, V]

Greedy by default. Repetition penalty, temperature, top-k, top-p and min-p apply in that order. What is drawn is the
largest of log-probability plus Gumbel noise, and the noise of a token follows from (seed, position, token) alone:
so a request's text follows from its own seed, whatever else is in the batch and whichever path computes the logits,
and a draft that draws with the same noise as the model it drafts for is right as often as the two agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.device import sent
from loopformer.errors import LoopformerError
from loopformer.model.noise import GOLDEN, MIX_1, MIX_2, hashed, shifted, signed

_64_BITS = (1 << 64) - 1


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
            if not _is_finite(value):
                raise LoopformerError(f"{name} must be a finite number, got {value!r}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not (value is None or is_whole(value)):
                raise LoopformerError(f"{name} must be a whole number, got {value!r}.")
        if self.temperature < 0:
            raise LoopformerError(f"temperature must be 0 (greedy) or more, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise LoopformerError(f"top_k must be 1 or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise LoopformerError(f"top_p must lie in (0, 1], got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise LoopformerError(f"min_p must lie in [0, 1], got {self.min_p}.")
        if self.repetition_penalty <= 0:
            raise LoopformerError(f"repetition_penalty must be positive, got {self.repetition_penalty}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def most_likely(self) -> bool:
        """Whether nothing but the largest logit decides."""
        return self.greedy and self.repetition_penalty == 1


class Draw(NamedTuple):
    """What decides the next token of a row, besides its logits."""

    sampling: Sampling
    seed: int = 0
    position: int = 0  # tokens before it
    history: tuple[int, ...] = ()  # these tokens, where a repetition penalty asks for them


class Choice(NamedTuple):
    """A token, and the log-probability that the model gives it before any sampling."""

    token: int
    logprob: float


def is_whole(value: object) -> bool:
    """Whether it is a whole number; NumPy's are too."""
    return isinstance(value, Integral)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


GREEDY = Draw(Sampling())


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """The next token of each row of logits [B, V]. Where logits are not numbers, nor is the log-probability."""
    tokens, logprobs = choose(logits, draws)
    return [Choice(token, logprob) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def choose(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The same where the logits are, tokens and log-probabilities [B]; a GPU is not waited for."""
    scores = logits
    if not all(draw.sampling.most_likely for draw in draws):
        scores = log_probabilities(logits, draws)
        drawn = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
        if drawn:
            keys = [_key(draws[row].seed, draws[row].position) for row in drawn]
            noise = gumbel_noise(keys, logits.shape[-1], logits.device).to(scores.dtype)
            scores.index_add_(0, sent(drawn, logits.device), noise)
    tokens = scores.argmax(-1)
    return tokens, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def log_probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What each row is drawn from: logits [B, V] → log-probabilities [B, V], -inf for tokens that are left out.

    Those of greedy rows are not normalised.
    """
    device, vocab = logits.device, logits.shape[-1]
    scores = logits.detach().to(torch.float32 if device.type == "mps" else torch.float64, copy=True)

    seen = [
        (row, token, draw.sampling.repetition_penalty)
        for row, draw in enumerate(draws)
        if draw.sampling.repetition_penalty != 1
        for token in sorted(set(draw.history))
    ]
    if seen:
        rows, tokens, penalties = zip(*seen, strict=True)
        penalty = sent(penalties, device, scores.dtype)
        where = sent(rows, device), sent(tokens, device)
        before = scores[where]
        scores[where] = torch.where(before > 0, before / penalty, before * penalty)

    rules = sent([rule(draw.sampling, vocab) for draw in draws], device, scores.dtype)  # [B, 4]
    temperature, top_k, top_p, least = rules[:, :, None].unbind(1)  # [B, 1] each
    samplings = [draw.sampling for draw in draws]
    # Less the largest, so that any temperature gives finite numbers; greedy rows keep their order.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.masked_fill(temperature == 0, 1.0)
    if any(sampling.top_k is not None or sampling.top_p < 1 for sampling in samplings):
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        last = ranked.gather(1, top_k.long() - 1)
        scores = scores.masked_fill(scores < last, -math.inf)
        likely = ranked.masked_fill(ranked < last, -math.inf).softmax(-1)
        # A token stays while those before it have not made up top_p.
        within = likely.cumsum(-1) - likely < top_p
        scores = scores.masked_fill(~torch.zeros_like(within).scatter(1, order, within), -math.inf)
    if any(sampling.min_p > 0 for sampling in samplings):
        scores = scores.masked_fill(scores < least, -math.inf)  # the most likely has 0
    return scores.log_softmax(-1) if not all(sampling.greedy for sampling in samplings) else scores


def gumbel_noise(keys: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise [B, V] in fp64, each number a function of its row's key and its token alone."""
    where = torch.device("cpu") if device.type == "mps" else device
    key = sent([signed(key) for key in keys], where)[:, None]
    bits = hashed(key + torch.arange(vocab, device=where) * signed(GOLDEN))
    uniform = (shifted(bits, 12).double() + 0.5) * 2.0**-52  # never 0 and never 1
    noise = -(-uniform.log()).log()
    return noise.float().to(device) if device.type == "mps" else noise


def rule(sampling: Sampling, vocab: int) -> tuple[float, float, float, float]:
    """The settings as numbers, here and for kernels: temperature, top-k, top-p and the logarithm of min-p."""
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return sampling.temperature, min(sampling.top_k or vocab, vocab), sampling.top_p, least


def hashed_seed(seed: int) -> int:
    """A seed's 64 bits as a tensor of int64 holds them, far from those of the seeds beside it."""
    return signed(_mixed(seed & _64_BITS))


def _key(seed: int, position: int) -> int:
    """64 bits for a place in a text: two places share them about as seldom as random numbers do."""
    return _mixed((hashed_seed(seed) + position * GOLDEN) & _64_BITS)


def _mixed(bits: int) -> int:
    """`hashed` of a plain number."""
    bits = ((bits ^ (bits >> 30)) * MIX_1) & _64_BITS
    bits = ((bits ^ (bits >> 27)) * MIX_2) & _64_BITS
    return bits ^ (bits >> 31)
