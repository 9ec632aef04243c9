"""What tests ask of a run."""

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch

from loopformer.config.run import TrainedTrajectory
from loopformer.loading.folder import checkpoints, step_of
from loopformer.training.reporting import read_metrics
from loopformer.training.trainer import Trainer

Small = Callable[..., list[str]]  # the fixture of conftest.py
PAIR = "[{budget: full}, {budget: short, sampler: compositions, weight: 0.1, match: 0.1}]"  # the paper's


def pair(weight: float = 0.1, match: float = 0.1, rows: float = 1.0) -> tuple[TrainedTrajectory, ...]:
    """The full trajectory and a short one."""
    return TrainedTrajectory("full"), TrainedTrajectory("short", "compositions", weight, match, rows)


def overriding(base: dict[str, object]) -> Small:
    """What makes overrides of these settings, and of more as section__key=value."""

    def overrides(**more: object) -> list[str]:
        merged = base | {name.replace("__", "."): value for name, value in more.items()}
        return [f"{name}={value}" for name, value in merged.items()]

    return overrides


def weights(run: Path) -> bytes:
    """Of the newest checkpoint."""
    return (checkpoints(run)[-1] / "model.safetensors").read_bytes()


def training_losses(run: Path, trajectory: str = "full") -> list[float]:
    return [record[f"loss_{trajectory}"] for record in read_metrics(run) if record["kind"] == "train"]


def make_gradients_bad(monkeypatch: pytest.MonkeyPatch, steps: Container[int]) -> None:
    """In these steps, which may change later, the gradient of the embedding is not a number."""
    run_pass = Trainer._run_pass

    def sometimes(self: Trainer, *arguments: Any) -> torch.Tensor:
        terms = run_pass(self, *arguments)
        if self.state.step + 1 in steps:
            torch.nn.init.constant_(self.model.tokens.weight.grad, torch.nan)  # type: ignore[arg-type]
        return terms

    monkeypatch.setattr(Trainer, "_run_pass", sometimes)


def go_back(run: Path, step: int) -> None:
    """Take away the checkpoints after a step, as if the run had been stopped there."""
    for path in checkpoints(run):
        if step_of(path) > step:
            path.rename(run.parent / f"gone-{run.name}-{path.name}")
