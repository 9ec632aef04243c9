"""Many trajectories over the same tokens: what their first steps have in common is computed once.

    walker = Walker(model, Trajectory.enumerate(8, 4))
    for trajectory, hidden in walker.walk(ids): ...      # hidden [B, T, D] after the final norm
    shared_passes(walker.routes)                         # 90, where each on its own would take 140

A pass is told only its (t, Δ), so trajectories that begin with the same steps share the states after them exactly.
They are walked as a tree, depth first; only the states on the current path are kept, M + 1 of them.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from loopformer.model import LoopedLM
from loopformer.model.block import Rotary
from loopformer.trajectory import Trajectory


class Walker:
    """A model and the trajectories to follow, their modulations computed once for any number of batches."""

    @torch.no_grad()
    def __init__(self, model: LoopedLM, routes: Iterable[Trajectory]) -> None:
        self.model = model
        self.routes = sorted(set(routes), key=lambda route: route.steps)  # equal beginnings side by side
        self._told: dict[tuple[Fraction, Fraction], Tensor | None] = {}  # (t, Δ) → modulation [1, k, 4, D]
        for route in self.routes:
            places = list(zip(route.times, route.steps, strict=True))
            if not self._told.keys() >= set(places):
                self._told.update(zip(places, model.passes(route, 1).modulations, strict=True))

    @torch.no_grad()
    def walk(self, ids: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """Each trajectory with the hidden states [B, T, D] of ids [B, T] at its end."""
        yield from self.walk_from(*self.model.embed(ids))

    @torch.no_grad()
    def walk_from(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None
    ) -> Iterator[tuple[Trajectory, Tensor]]:
        """The same from the state before the first pass [B, T, D]."""
        path: list[Tensor] = [x]  # path[i]: the state after i steps of `before`
        before: tuple[Fraction, ...] = ()
        for route in self.routes:
            del path[1 + _common(before, route.steps) :]
            for number in range(len(path) - 1, len(route)):
                told = self._told[route.times[number], route.steps[number]]
                path.append(self.model.stack(path[-1], told, rotary, mask))
            before = route.steps
            yield route, self.model.final_norm(path[-1])


def shared_passes(routes: Iterable[Trajectory]) -> int:
    """Passes through the stack that these trajectories take together."""
    return len({route.steps[:length] for route in routes for length in range(1, len(route) + 1)})


def _common(one: tuple[Fraction, ...], other: tuple[Fraction, ...]) -> int:
    """How many first steps are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
