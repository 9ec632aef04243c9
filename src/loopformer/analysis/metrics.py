"""Geometry of the token states of a prompt: curvature, anisotropy, prompt entropy, movement.

    states = torch.randn(8, 128, 192)     # 8 prompts of T = 128 tokens, D = 192
    curvature(states)                     # [8], radians; one number per prompt
    movement(before, after)               # [8], how far a loop moves the tokens

Every function takes [..., T, D], computes in float64 and gives one number per prompt [...]. What has no direction
(a zero vector) is left out of a mean; a mean over nothing is nan. docs/analysis.md has the formulas.
"""

import math

import torch
from torch import Tensor

from loopformer.errors import require

_TINY = 1e-300  # instead of a division by zero
_ROUNDING = 1e-14  # of float64, with some room


def curvature(states: Tensor) -> Tensor:
    """The mean angle between successive differences of token states, in radians [...].

    0 is a straight line through state space, π turns back at every token (Hosseini & Fedorenko 2023).
    """
    _need(states, 3, "Curvature")
    steps = states.double().diff(dim=-2)  # [..., T-1, D]
    lengths = _lengths(steps)
    units = steps / lengths.clamp_min(_TINY)[..., None]
    before, after = units[..., :-1, :], units[..., 1:, :]
    # arccos of a dot product loses half of the digits near 0 and π; this form of the angle loses none.
    angles = 2 * torch.atan2(_lengths(after - before), _lengths(after + before))
    moves = lengths > 0
    return _mean(angles, moves[..., :-1] & moves[..., 1:])


def anisotropy(states: Tensor) -> Tensor:
    """The mean cosine between two different tokens of a prompt, states not centred [...].

    1 is one direction for all tokens, 0 directions that are spread evenly or orthogonal (Godey et al. 2024).
    """
    _need(states, 2, "Anisotropy")
    units = _unit_rows(states.double())
    count = (units != 0).any(dim=-1).sum(dim=-1)  # tokens that have a direction
    # The sum over all pairs is |Σ u|², of which each token with itself is 1.
    return (units.sum(dim=-2).square().sum(dim=-1) - count) / (count * (count - 1))


def prompt_entropy(states: Tensor, *, centre: bool = True, unit_rows: bool = True) -> Tensor:
    """The entropy of the spectrum of K = Z Zᵀ / tr, over its largest value log min(T, D): 0 to 1 [...].

    0 is one dimension for all tokens, 1 tokens spread evenly over as many as there can be. The defaults are those
    of Skean et al. 2025: states centred over the tokens of their prompt, then each of length 1.
    """
    _need(states, 2, "Prompt entropy")
    z = states.double()
    require(z.shape[-1] > 1, "Prompt entropy needs states of 2 dimensions or more.")
    if centre:
        z = z - z.mean(dim=-2, keepdim=True)
        differs = _lengths(z) > _ROUNDING * _lengths(states.double())  # tokens equal to the mean do by rounding
        z = torch.where(differs[..., None], z, 0.0)
    if unit_rows:
        z = _unit_rows(z)
    gram = z @ z.mT if z.shape[-2] <= z.shape[-1] else z.mT @ z  # the same spectrum; the smaller is quicker
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    shares = values / values.sum(dim=-1, keepdim=True).clamp_min(_TINY)
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy / math.log(min(z.shape[-2:]))


def movement(before: Tensor, after: Tensor) -> Tensor:
    """How far tokens move in one loop, |after − before| / |before|, mean over the prompt [...]."""
    _need(before, 1, "Movement")
    lengths = _lengths(before.double())
    moved = _lengths(after.double() - before.double())
    return _mean(moved / lengths.clamp_min(_TINY), lengths > 0)


def _lengths(z: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(z, dim=-1)
    return lengths


def _unit_rows(z: Tensor) -> Tensor:
    """Each row of length 1; zero stays zero."""
    return z / _lengths(z).clamp_min(_TINY)[..., None]


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of what counts over the last dimension; nan where nothing does."""
    return torch.where(counted, values, 0.0).sum(dim=-1) / counted.sum(dim=-1)


def _need(states: Tensor, tokens: int, what: str) -> None:
    require(
        states.ndim >= 2 and states.shape[-2] >= tokens,
        f"{what} needs states [..., T, D] of {tokens} tokens or more, got {list(states.shape)}.",
    )
