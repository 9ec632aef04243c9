"""Sampling: the next token of every row of a batch from its logits.

choices = sample(logits, [Draw(Sampling(temperature=0.8, top_p=0.95), seed=3, position=17), …])    # logits [B, V]

Greedy by default. Repetition penalty, temperature, top-k, top-p and min-p apply in that order. A token is drawn by
adding Gumbel noise to the log-probabilities and taking the argmax. The noise depends only on the seed, the position
and the token. So the text of a request does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loopformer.device import to_device_async
from loopformer.inference.request import Choice, Draw, Sampling
from loopformer.model.noise import GOLDEN, as_int64, hashed, logical_shift
from loopformer.scoring import most_likely

_64_BITS = (1 << 64) - 1
GREEDY = Draw(Sampling())


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """The next token of each row of logits [B, V]. Waits for their device. Where logits are NaN, so is the
    log-probability."""
    return to_choices(sample_async(logits, draws))


def to_choices(chosen: Tensor) -> list[Choice]:
    """The choices in a tensor [B, 2 + 2N] that `sample_async` returned. Waits for its device."""
    count = chosen.shape[1] // 2 - 1
    if not count:
        return [Choice(int(token), logprob) for token, logprob in chosen.tolist()]
    choices = []
    for token, logprob, *others in chosen.tolist():
        top_logprobs = tuple(zip(map(int, others[:count]), others[count:], strict=True))
        choices.append(Choice(int(token), logprob, top_logprobs))
    return choices


def sample_async(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What `sample` returns, as one tensor [B, 2 + 2N] on the device of the logits, without waiting for the device.

    Each row has the token and its log-probability, then the N most likely tokens and their log-probabilities, where
    N is the largest `top_logprobs` of `draws`. fp32 holds every token id exactly.
    """
    scores = logits
    if not all(draw.sampling.is_argmax for draw in draws):
        scores = log_probabilities(logits, draws)
        sampled_rows = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
        if sampled_rows:
            keys = _noise_keys([draws[row] for row in sampled_rows])
            noise = gumbel_noise(keys, logits.shape[-1], logits.device).to(scores.dtype)
            scores.index_add_(0, to_device_async(sampled_rows, logits.device), noise)
    tokens = scores.argmax(-1, keepdim=True)
    logprobs = logits.float().log_softmax(-1)
    columns = [tokens.float(), logprobs.gather(1, tokens)]
    if count := max(draw.top_logprobs for draw in draws):
        likely, values = most_likely(logprobs, count)
        columns += [likely.float(), values]
    return torch.cat(columns, 1)


def log_probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The distribution of each row: logits [B, V] → log-probabilities [B, V], with -inf for excluded tokens.

    Greedy rows are not normalised.
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
        penalty = to_device_async(penalties, device, scores.dtype)
        index = to_device_async(rows, device), to_device_async(tokens, device)
        unpenalised = scores[index]
        scores[index] = torch.where(unpenalised > 0, unpenalised / penalty, unpenalised * penalty)

    settings = to_device_async([kernel_settings(draw.sampling, vocab) for draw in draws], device, scores.dtype)
    temperature, top_k, top_p, log_min_p = settings[:, :, None].unbind(1)  # [B, 1] each
    samplings = [draw.sampling for draw in draws]
    # Subtract the largest score before dividing. Otherwise a very low temperature would overflow to infinity.
    # Greedy rows are divided by 1.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.masked_fill(temperature == 0, 1.0)
    if any(sampling.top_k is not None or sampling.top_p < 1 for sampling in samplings):
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        kth_largest = ranked.gather(1, top_k.long() - 1)
        scores = scores.masked_fill(scores < kth_largest, -math.inf)
        probabilities = ranked.masked_fill(ranked < kth_largest, -math.inf).softmax(-1)
        # A token stays if the more likely tokens together have less than top_p. The most likely one always stays.
        in_nucleus = probabilities.cumsum(-1) - probabilities < top_p
        scores = scores.masked_fill(~torch.zeros_like(in_nucleus).scatter(1, order, in_nucleus), -math.inf)
    if any(sampling.min_p > 0 for sampling in samplings):
        scores = scores.masked_fill(scores < log_min_p, -math.inf)  # the largest score is 0
    return scores.log_softmax(-1) if not all(sampling.greedy for sampling in samplings) else scores


def gumbel_noise(keys: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise [B, V] in fp64 (fp32 on MPS). It depends only on the row's key and the token."""
    compute = torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64
    key = to_device_async([as_int64(key & _64_BITS) for key in keys], compute)[:, None]
    bits = hashed(key + torch.arange(vocab, device=compute) * as_int64(GOLDEN))
    uniform = (logical_shift(bits, 12).double() + 0.5) * 2.0**-52  # never 0 and never 1
    noise = -(-uniform.log()).log()
    return noise.float().to(device) if device.type == "mps" else noise


def kernel_settings(sampling: Sampling, vocab: int) -> tuple[float, float, float, float]:
    """The settings as the numbers that kernels read: temperature, top-k, top-p and log of min-p."""
    log_min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return sampling.temperature, min(sampling.top_k or vocab, vocab), sampling.top_p, log_min_p


def hashed_seed(seed: int) -> int:
    """A seed as 64 random-looking bits in an int64, so that neighbouring seeds have unrelated noise."""
    return int(hashed(torch.tensor(as_int64(seed & _64_BITS))))


def _noise_keys(draws: Sequence[Draw]) -> list[int]:
    """A 64-bit key for the noise of each draw. Keys collide about as rarely as random numbers."""
    seeds = torch.tensor([as_int64(draw.seed & _64_BITS) for draw in draws])
    positions = torch.tensor([draw.position for draw in draws])
    keys: list[int] = hashed(hashed(seeds) + positions * as_int64(GOLDEN)).tolist()
    return keys
