"""Linear CKA between all states of a model, summed up over batches in bounded memory.

    cka = LinearCKA(states=5, width=192)
    for batch in batches: cka.add(batch)        # [S, n, D], n tokens of any number of prompts
    cka.matrix(), cka.matrix(debiased=True)     # [S, S]

Kornblith et al. 2019: 1 is the same geometry up to rotation and scale. With fewer tokens than dimensions the plain
estimate is far too high; the debiased one (Song et al. 2012) is not. Both follow exactly from sums over tokens of
D × D products, so nothing is kept per token: 4·S·(S+1)·D² bytes, whatever the text.
"""

import torch
from torch import Tensor

from loopformer.errors import require


class LinearCKA:
    """Sums in float64 over tokens of S states of width D."""

    def __init__(self, states: int, width: int, device: str | torch.device = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.tokens = 0
        self._shape = (states, width)
        self._pairs = [(i, j) for i in range(states) for j in range(i + 1)]
        self._products = [zeros(width, width) for _ in self._pairs]  # Σ xᵢ xⱼᵀ
        self._sums = zeros(states, width)  # Σ xᵢ
        self._norms = zeros(states)  # Σ |xᵢ|²
        self._norm_products = zeros(states, states)  # Σ |xᵢ|² |xⱼ|²
        self._weighted = zeros(states, states, width)  # Σ xᵢ |xⱼ|²
        self._shift: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Count tokens [S, n, D] in."""
        require(
            states.ndim == 3 and (states.shape[0], states.shape[2]) == self._shape and states.shape[1] > 0,
            f"CKA of {self._shape[0]} states of width {self._shape[1]} cannot take {list(states.shape)}.",
        )
        x = states.to(self._sums.device, torch.float64)
        if self._shift is None:
            # CKA does not see a shift; near the mean the sums below lose nothing when they are centred.
            self._shift = x.mean(dim=1, keepdim=True)
        x = x - self._shift
        norms = x.square().sum(dim=-1)  # [S, n]
        self.tokens += x.shape[1]
        self._sums += x.sum(dim=1)
        self._norms += norms.sum(dim=1)
        self._norm_products += norms @ norms.T
        self._weighted += torch.einsum("ind,jn->ijd", x, norms)
        for (i, j), product in zip(self._pairs, self._products, strict=True):
            product.addmm_(x[i].T, x[j])

    def matrix(self, debiased: bool = False) -> Tensor:
        """CKA of every two states [S, S], symmetric, on the CPU; nan for a state that is the same for all tokens.

        Debiased values are estimates around the true one and may be slightly negative; they need 4 tokens.
        """
        require(self.tokens > (3 if debiased else 1), f"CKA of {self.tokens} tokens says nothing; give more.")
        found = torch.zeros(self._shape[0], self._shape[0], dtype=torch.float64)
        for (i, j), product in zip(self._pairs, self._products, strict=True):
            one = self._debiased(i, j, product) if debiased else self._plain(i, j, product)
            found[i, j] = found[j, i] = one
        sizes = torch.where(found.diag() > 0, found.diag(), torch.nan).sqrt()
        return found / torch.outer(sizes, sizes)

    def _plain(self, i: int, j: int, product: Tensor) -> float:
        """|Xᵀ Y|² of the centred states."""
        centred = product - torch.outer(self._sums[i], self._sums[j]) / self.tokens
        return float(centred.square().sum())

    def _debiased(self, i: int, j: int, product: Tensor) -> float:
        """Song's U-statistic of HSIC, times n (n - 3): kernels X Xᵀ and Y Yᵀ without their diagonals."""
        n, sums, weighted, both = self.tokens, self._sums, self._weighted, self._norm_products[i, j]
        trace = product.square().sum() - both
        totals = [sums[one].square().sum() - self._norms[one] for one in (i, j)]
        rows = sums[i] @ product @ sums[j] - sums[i] @ weighted[i, j] - sums[j] @ weighted[j, i] + both
        return float(trace + totals[0] * totals[1] / ((n - 1) * (n - 2)) - 2 * rows / (n - 2))
