"""How a loop knows where it is on the trajectory: a table of modulations, computed once per trajectory.

Each scalar (time t, step size Δ or loop index) becomes Fourier features, and a 2-layer SiLU MLP turns them into a
vector [D]. The sum of these vectors goes through one modulator per block, which gives gates α₁, α₂ and scales γ₁,
γ₂. All of it depends on (t, Δ) alone, not on the tokens. So it is computed once per trajectory as a table
[M, k, 4, D]. In training all rows of a pass are computed together, even if some follow the same trajectory.

With `model.inject` gated, the same sum also gives a gate [D] per loop. It says how much of the token embedding is
added to the state before that loop.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformer.config.model import FOURIER_WIDTH, ModelConfig
from loopformer.trajectory import Trajectory

MAX_PERIOD = 10_000.0


class Condition(NamedTuple):
    """Modulation and injection of the N loops of a trajectory, or of N rows of a batch in the same loop."""

    modulation: Tensor | None = None  # [N, k, 4, D]; None: the norms have learned weights
    injection: Tensor | None = None  # [N, D]; None: nothing is injected

    def at(self, index: int | slice) -> "Condition":
        """The condition of a single loop (without the dimension N), or of a slice of the loops."""
        return self.map(lambda part: part[index])

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Condition":
        """The condition with `fn` applied to each tensor."""
        return Condition(*(None if part is None else fn(part) for part in self))

    @property
    def tensors(self) -> list[Tensor]:
        return [part for part in self if part is not None]

    def select(self, index: Tensor) -> "Condition":
        """The conditions of the loops in `index` [n], in this order; a loop may appear several times.

        It is a lookup in an embedding table, whose backward adds up repeated loops in a fixed order. That of plain
        indexing does not, so a resumed run would differ in its last bits.
        """
        return self.map(lambda part: F.embedding(index, part.flatten(1)).view(len(index), *part.shape[1:]))

    def split(self, counts: Sequence[int]) -> list["Condition"]:
        """The conditions of the first counts[0] rows, of the next counts[1], and so on."""
        sizes = list(counts)
        parts = [[None] * len(sizes) if part is None else part.split_with_sizes(sizes) for part in self]
        return [Condition(*each) for each in zip(*parts, strict=True)]

    @staticmethod
    def cat(conditions: Sequence["Condition"]) -> "Condition":
        """The conditions of several trajectories, one after another.

        Either all of them have a modulation or none has, and the same for the injection.
        """
        present = ([part for part in parts if part is not None] for parts in zip(*conditions, strict=True))
        return Condition(*(torch.cat(tensors) if tensors else None for tensors in present))


@lru_cache(maxsize=4096)
def loop_scalars(trajectory: Trajectory, scale: float) -> list[tuple[float, float, float]]:
    """Time, step size and index of each loop. Only the first two are scaled: indices span 0…L-1 as they are."""
    steps = zip(trajectory.times, trajectory.steps, strict=True)
    return [(scale * float(time), scale * float(step), float(index)) for index, (time, step) in enumerate(steps)]


class ZeroLinear(nn.Linear):
    """A linear map initialised to zero.

    It draws no random numbers, so a model with this layer gets the same initial weights as one without it.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ScalarEmbedding(nn.Module):
    """M scalars → vectors [M, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(FOURIER_WIDTH, width)
        self.out = nn.Linear(width, width)

    def forward(self, scalars: Tensor) -> Tensor:
        features = fourier_features(scalars).to(self.up.weight.dtype)
        out: Tensor = self.out(F.silu(self.up(features)))
        return out


class Conditioner(nn.Module):
    """Turns a trajectory into the condition of its loops.

    It holds only the scalar embeddings that `model.conditioning` uses.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.conditioning
        # With kind "index", `time` embeds the loop index in place of t.
        self.time = ScalarEmbedding(config.width) if self.kind in ("index", "time", "trajectory") else None
        self.step = ScalarEmbedding(config.width) if self.kind in ("step", "trajectory") else None
        self.modulators = nn.ModuleList(nn.Linear(config.width, 4 * config.width) for _ in range(config.blocks))
        self.injector = ZeroLinear(config.width, config.width) if config.inject == "gated" else None

    def forward(self, scalars: Tensor) -> Condition:
        """The condition of N loops from their scalars [N, 3] (`loop_scalars`).

        Modulations are [N, k, 4, D], and with gated injection injections [N, D]. The four vectors of a block are
        its two gates and then its two scales.
        """
        times, sizes, indices = scalars.unbind(1)
        signal: Tensor | None = None
        if self.time is not None:
            signal = self.time(indices if self.kind == "index" else times)
        if self.step is not None:
            steps = self.step(sizes)
            signal = steps if signal is None else signal + steps
        assert signal is not None
        active = F.silu(signal)  # [N, D]; all modulators share this nonlinearity
        per_block = [modulator(active).unflatten(1, (4, -1)) for modulator in self.modulators]
        return Condition(torch.stack(per_block, dim=1), None if self.injector is None else self.injector(active))

    @torch.no_grad()
    def initialise(self, start: str) -> None:
        """Set the modulators to `zero`, `normal` (std 0.02) or `one` (gates at 1: the unmodulated backbone)."""
        for modulator in self.modulators:
            assert isinstance(modulator, nn.Linear)
            nn.init.zeros_(modulator.bias)
            if start == "normal":
                nn.init.normal_(modulator.weight, std=0.02)
            else:
                nn.init.zeros_(modulator.weight)
            if start == "one":
                modulator.bias.view(4, -1)[:2].fill_(1.0)  # the two gates


def fourier_features(scalars: Tensor) -> Tensor:
    """[M] → [M, 256] in fp32: 128 cosines, then 128 sines. Frequencies fall from 1 to about 1 / MAX_PERIOD."""
    half = FOURIER_WIDTH // 2
    exponents = torch.arange(half, dtype=torch.float32, device=scalars.device) / half
    angles = scalars[:, None] * torch.exp(-math.log(MAX_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
