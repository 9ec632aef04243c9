"""What the states of one model do along one trajectory, measured over prompts.

    found = analyze(lm.model, prompts, "runs/demo", trajectory="4-2-1-1")
    found.metrics["curvature"].mean       # [M + 1]: the embedding, then after each loop
    found.to_json(); Dynamics.from_json(plain)

Prompts run in batches; of each batch only numbers per prompt and the sums of CKA are kept, so memory does not grow
with the text.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from loopformer.analysis.lens import lens
from loopformer.analysis.metrics import anisotropy, curvature, movement, prompt_entropy
from loopformer.analysis.prompts import Prompts
from loopformer.analysis.similarity import LinearCKA
from loopformer.errors import LoopformerError, RunFailed
from loopformer.evaluation.store import weights_hash
from loopformer.model import LoopedLM
from loopformer.model.looped import Route
from loopformer.trajectory import Trajectory

States = Literal["before", "after"]
STATES: tuple[States, ...] = get_args(States)
Progress = Callable[[int, int], None]  # prompts done, prompts in all
Number = float | None  # None where a value has no meaning

DEFINITIONS = {
    "curvature": "mean angle between successive differences of token states, radians (Hosseini & Fedorenko 2023)",
    "anisotropy": "mean cosine between two different tokens of a prompt, states not centred (Godey et al. 2024)",
    "prompt_entropy": "entropy of the spectrum of the tokens' Gram matrix over log min(T, D), alpha = 1; "
    "tokens centred over their prompt, then of unit length (Skean et al. 2025)",
    "movement": "|h_i - h_(i-1)| / |h_(i-1)|, mean over tokens",
    "lens_divergence": "KL(final || after loop i) through final norm and head, nats per token",
    "lens_agreement": "share of tokens whose most likely next token is already the final one",
    "cka": "linear CKA between states, all tokens of all prompts pooled, float64 (Kornblith et al. 2019)",
    "cka_debiased": "the same with Song's unbiased HSIC",
}
_TOKENS = 2048  # in a batch: some hundred MB of states for the paper's models


@dataclass(frozen=True)
class Series:
    """A metric at the embedding and after each loop: mean and standard deviation over prompts."""

    mean: list[Number]  # [M + 1]
    std: list[Number]


@dataclass(frozen=True)
class Dynamics:
    """Everything measured for one model along one trajectory, and what it was measured on."""

    model: str
    shape: str  # k⊗L
    weights: str  # hash of settings and weights
    trajectory: str
    depth: list[float]  # i / M
    states: States  # geometry before or after the final norm; the lens always goes through it
    text: str
    part: str  # of the text
    prompts: int
    documents: int
    length: int
    tokens: int
    tokens_sha256: str  # of the prompts' ids as little-endian int32
    seed: None  # nothing is drawn
    device: str
    dtype: str
    seconds: float
    metrics: dict[str, Series]
    cka: list[list[Number]]  # [M + 1, M + 1]
    cka_debiased: list[list[Number]]

    @property
    def route(self) -> str:
        """The trajectory for people: M = 4, 2-1-1, or rounded steps where they have no short form."""
        if self.trajectory.isdigit():
            return f"M = {self.trajectory}"
        steps = Trajectory.parse(self.trajectory).steps
        if len(self.trajectory) <= 3 * len(steps):
            return self.trajectory
        return " ".join(f"{float(step):.2f}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Dynamics":
        metrics = {name: Series(**series) for name, series in plain["metrics"].items()}
        return cls(**{**plain, "metrics": metrics})


@torch.no_grad()
def analyze(
    model: LoopedLM,
    prompts: Prompts,
    name: str,
    trajectory: Route = None,
    *,
    states: str = "before",
    progress: Progress | None = None,
) -> Dynamics:
    """Run all prompts along a trajectory (None: the full one) and measure the state after each loop."""
    kind = checked_states(states)
    started = time.perf_counter()
    route = model.route(trajectory)
    device = model.tokens.weight.device
    exact = torch.device("cpu") if device.type == "mps" else device  # where float64 exists
    cka = LinearCKA(route.budget + 1, model.config.width, exact)
    found: list[dict[str, Tensor]] = []
    count, length = prompts.ids.shape
    rows = max(1, _TOKENS // length)
    for start in range(0, count, rows):
        seen = _states(model, prompts.ids[start : start + rows].to(device), route)  # [S, B, T, D]
        shown = model.final_norm(seen) if kind == "after" else seen
        said = _lens(model, seen)
        found.append(_geometry(shown.to(exact)) | said)
        cka.add(shown.flatten(1, 2))
        if progress:
            progress(min(start + rows, count), count)
    return Dynamics(
        model=name,
        shape=f"{model.config.blocks}⊗{model.config.loops}",
        weights=weights_hash(model),
        trajectory=str(route),
        depth=[i / route.budget for i in range(route.budget + 1)],
        states=kind,
        text=prompts.text,
        part=prompts.part,
        prompts=count,
        documents=prompts.documents,
        length=length,
        tokens=count * length,
        tokens_sha256=prompts.hash,
        seed=None,
        device=device.type,
        dtype=model.dtype_name,
        seconds=time.perf_counter() - started,
        metrics={name: _series(torch.cat([one[name] for one in found], dim=1)) for name in found[0]},
        cka=[_numbers(row) for row in cka.matrix()],
        cka_debiased=[_numbers(row) for row in cka.matrix(debiased=True)],
    )


def checked_states(given: str) -> States:
    """`before` or `after` (the final norm); anything else is refused."""
    for known in STATES:
        if given == known:
            return known
    raise LoopformerError(f"States are taken before or after the final norm; choose one of them, not {given!r}.")


def _states(model: LoopedLM, ids: Tensor, route: Route) -> Tensor:
    """ids [B, T] → the embedding and the state after each loop, before the final norm [S, B, T, D]."""
    embedded, _, _ = model.embed(ids)
    return torch.stack([embedded, *model(ids, route, logits=False, states=True).states])


def _geometry(states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] → each metric [S, B]; one state at a time, because float64 takes room."""
    start = torch.full(states.shape[1:2], math.nan, dtype=torch.float64)  # nothing moves before the first loop
    return {
        "curvature": torch.stack([curvature(one) for one in states]).cpu(),
        "anisotropy": torch.stack([anisotropy(one) for one in states]).cpu(),
        "prompt_entropy": torch.stack([prompt_entropy(one) for one in states]).cpu(),
        "movement": torch.stack([start, *(movement(*pair).cpu() for pair in pairwise(states))]),
    }


def _lens(model: LoopedLM, states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] before the final norm → both sides of the lens, means over the tokens of each prompt [S, B]."""
    divergence, agreement = (
        found.cpu().double().reshape(states.shape[:3]).mean(dim=-1) for found in lens(model, states.flatten(1, 2))
    )
    if not divergence.isfinite().all():  # which shows whatever is wrong with states, final norm and head
        raise RunFailed("This model gives no finite numbers; its weights are damaged or its training diverged.")
    return {"lens_divergence": divergence, "lens_agreement": agreement}


def _series(values: Tensor) -> Series:
    """[S, P] → mean and standard deviation over the prompts that have a value."""
    mean = values.nanmean(dim=1)
    count = (~values.isnan()).sum(dim=1)
    std = ((values - mean[:, None]).square().nansum(dim=1) / (count - 1)).sqrt()
    return Series(_numbers(mean), _numbers(torch.where(count > 1, std, math.nan)))


def _numbers(values: Tensor) -> list[Number]:
    """Plain numbers; JSON knows no nan."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
