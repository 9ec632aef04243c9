"""Metrics of token states: geometry of a prompt, similarity of two states (CKA), and the logit lens.

    states = torch.randn(8, 128, 192)           # 8 prompts of T = 128 tokens, D = 192
    curvature(states)                           # [8], radians; one number per prompt
    movement(before, after)                     # [8], how far a loop moves the tokens

    cka = LinearCKA(states=5, width=192)
    for batch in batches: cka.add(batch)        # [S, n, D], n tokens from any prompts
    cka.matrix(), cka.matrix(debiased=True)     # [S, S]

    divergence, agreement = lens(model, states) # states [S, n, D] before the final norm, the final state last

Geometry is computed in float64, with one number per prompt. Means leave out zero vectors, which have no direction.
A mean over nothing is nan. docs/analysis.md has the formulas.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.scoring import head_chunks

if TYPE_CHECKING:
    from loopformer.model import LoopedLM

_TINY = 1e-300  # prevents a division by zero
_ROUNDING_ERROR = 1e-14  # of float64, with a margin
_MAX_LOGITS = 1 << 22  # logits in a chunk: 16 MB in float32


def curvature(states: Tensor) -> Tensor:
    """The mean angle between successive differences of token states, in radians [...].

    0 is a straight line through state space. π is a reversal at every token (Hosseini & Fedorenko 2023).
    """
    steps = states.double().diff(dim=-2)  # [..., T-1, D]
    lengths = _lengths(steps)
    units = steps / lengths.clamp_min(_TINY)[..., None]
    before, after = units[..., :-1, :], units[..., 1:, :]
    # arccos of a dot product loses half of its digits near 0 and π. This form of the angle loses none.
    angles = 2 * torch.atan2(_lengths(after - before), _lengths(after + before))
    moves = lengths > 0
    return _mean(angles, moves[..., :-1] & moves[..., 1:])


def anisotropy(states: Tensor) -> Tensor:
    """The mean cosine between two different tokens of a prompt [...]. States are not centred.

    1: all tokens have one direction. 0: directions are orthogonal or spread evenly (Godey et al. 2024).
    """
    units = _unit_rows(states.double())
    count = (units != 0).any(dim=-1).sum(dim=-1)  # tokens that have a direction
    # The sum over all pairs is |Σ u|², and each token paired with itself adds 1.
    return (units.sum(dim=-2).square().sum(dim=-1) - count) / (count * (count - 1))


def prompt_entropy(states: Tensor) -> Tensor:
    """The entropy of the spectrum of Z Zᵀ / tr(Z Zᵀ), divided by its maximum log min(T, D): 0 to 1 [...].

    0: all tokens lie on one line. 1: they spread evenly over as many dimensions as possible. As in Skean et al.
    2025, the rows of Z are the states, centred over the tokens of their prompt, then scaled to length 1.
    """
    z = states.double()
    centred = z - z.mean(dim=-2, keepdim=True)
    # A token that equals the mean still differs from it by rounding, which must not be scaled to length 1.
    differs = _lengths(centred) > _ROUNDING_ERROR * _lengths(z)
    z = _unit_rows(torch.where(differs[..., None], centred, 0.0))
    # Both products have the same spectrum. The smaller one is faster.
    gram = z @ z.mT if z.shape[-2] <= z.shape[-1] else z.mT @ z
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    shares = values / values.sum(dim=-1, keepdim=True).clamp_min(_TINY)
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy / math.log(min(z.shape[-2:]))


def movement(before: Tensor, after: Tensor) -> Tensor:
    """How far a loop moves tokens: the mean over the prompt of |after − before| / |before| [...]."""
    lengths = _lengths(before.double())
    moved = _lengths(after.double() - before.double())
    return _mean(moved / lengths.clamp_min(_TINY), lengths > 0)


def _lengths(z: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(z, dim=-1)
    return lengths


def _unit_rows(z: Tensor) -> Tensor:
    """Rows scaled to length 1; a zero row stays zero."""
    return z / _lengths(z).clamp_min(_TINY)[..., None]


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean over the last dimension where `counted` is true; nan where it never is."""
    return torch.where(counted, values, 0.0).sum(dim=-1) / counted.sum(dim=-1)


class LinearCKA:
    """Linear CKA between every two of S states of width D, accumulated over batches of tokens.

    1 is the same geometry up to rotation and scale (Kornblith et al. 2019). With fewer tokens than dimensions the
    plain estimate is far too high, but the debiased one (Song et al. 2012) is not. Both are computed exactly from
    D × D sums over tokens, so memory is 4·S·(S+1)·D² bytes in float64, whatever the number of tokens.
    """

    def __init__(self, states: int, width: int, device: str | torch.device = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.tokens = 0
        self._pairs = [(i, j) for i in range(states) for j in range(i + 1)]
        self._outer = [zeros(width, width) for _ in self._pairs]  # Σ xᵢ xⱼᵀ
        self._sums = zeros(states, width)  # Σ xᵢ
        self._norms = zeros(states)  # Σ |xᵢ|²
        self._norm_products = zeros(states, states)  # Σ |xᵢ|² |xⱼ|²
        self._weighted = zeros(states, states, width)  # Σ xᵢ |xⱼ|²
        self._shift: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Add tokens [S, n, D] to the sums."""
        x = states.to(self._sums.device, torch.float64)
        if self._shift is None:
            # CKA does not depend on a shift that all tokens share. Subtract the mean of the first batch: centring
            # the sums of states that lie far from 0, as `matrix` does, would lose digits.
            self._shift = x.mean(dim=1, keepdim=True)
        x = x - self._shift
        norms = x.square().sum(dim=-1)  # [S, n]
        self.tokens += x.shape[1]
        self._sums += x.sum(dim=1)
        self._norms += norms.sum(dim=1)
        self._norm_products += norms @ norms.T
        self._weighted += torch.einsum("ind,jn->ijd", x, norms)
        for (i, j), outer in zip(self._pairs, self._outer, strict=True):
            outer.addmm_(x[i].T, x[j])

    def matrix(self, debiased: bool = False) -> Tensor:
        """CKA of every two states [S, S], on the CPU. It is nan for a state that is the same for all tokens.

        Debiased values scatter around the true one and may be slightly negative. They need at least 4 tokens.
        """
        hsic = torch.zeros_like(self._norm_products, device="cpu")
        for (i, j), outer in zip(self._pairs, self._outer, strict=True):
            hsic[i, j] = hsic[j, i] = self._debiased(i, j, outer) if debiased else self._plain(i, j, outer)
        roots = torch.where(hsic.diag() > 0, hsic.diag(), torch.nan).sqrt()
        return hsic / torch.outer(roots, roots)

    def _plain(self, i: int, j: int, outer: Tensor) -> float:
        """|Xᵀ Y|² of the centred states."""
        centred = outer - torch.outer(self._sums[i], self._sums[j]) / self.tokens
        return float(centred.square().sum())

    def _debiased(self, i: int, j: int, outer: Tensor) -> float:
        """Song's U-statistic of HSIC, times n (n - 3).

        With K = X Xᵀ and L = Y Yᵀ without their diagonals, `trace` is tr(K L), `totals` are the sums of all entries
        of K and of L, and `rows` is the sum over tokens of (row sum of K) · (row sum of L).
        """
        n, sums, weighted, diagonal = self.tokens, self._sums, self._weighted, self._norm_products[i, j]
        trace = outer.square().sum() - diagonal
        totals = [sums[state].square().sum() - self._norms[state] for state in (i, j)]
        rows = sums[i] @ outer @ sums[j] - sums[i] @ weighted[i, j] - sums[j] @ weighted[j, i] + diagonal
        return float(trace + totals[0] * totals[1] / ((n - 1) * (n - 2)) - 2 * rows / (n - 2))


@torch.no_grad()
def lens(model: LoopedLM, states: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """How far the prediction after each loop is from the final one.

    Takes states [S, n, D] before the final norm. Returns KL(final ‖ state) in nats [S, n], and 1 where the most
    likely token is the same, else 0 [S, n]. Only the final logits and those of one state are in memory at a time.

    chunk  tokens at a time; by default the logits of a chunk take 16 MB
    """
    size = chunk or max(1, _MAX_LOGITS // model.config.vocab)
    divergence = torch.zeros(states.shape[:2], device=states.device)
    agreement = torch.ones_like(divergence)
    for part, final_logits in head_chunks(model, model.final_norm(states[-1]), size):
        final = final_logits.log_softmax(dim=-1)  # [c, V]
        for index, state in enumerate(states[:-1]):
            ((_, logits),) = head_chunks(model, model.final_norm(state[part]), size)
            early = logits.log_softmax(dim=-1)
            kl = F.kl_div(early, final, reduction="none", log_target=True).sum(dim=-1)
            divergence[index, part] = kl.clamp_min(0)  # only rounding can make it negative
            agreement[index, part] = (early.argmax(dim=-1) == final.argmax(dim=-1)).float()
    return divergence, agreement
