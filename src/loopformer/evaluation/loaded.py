"""A model under evaluation: its weights and tokenizer, and the store of its finished results.

loaded = LoadedModel.open("runs/mine")
loaded.trajectories("1,2,4", ["2-1-2-3"], schedule="best")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopformer.config import parse_counts
from loopformer.config.run import validation_budgets
from loopformer.device import choose_device, dtype_of
from loopformer.evaluation.store import JsonDict, Store, device_and_dtype, scheduled_trajectory, weights_hash
from loopformer.lm import LM, load
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class LoadedModel:
    """A model under evaluation, the hash of its weights, and the store of its finished results."""

    source: str
    lm: LM
    weights: str  # hash of the weights as loaded, before the cast to `dtype`
    store: Store

    @classmethod
    def open(cls, source: str, device: str = "auto", dtype: str = "float32") -> LoadedModel:
        """Load a run, a model folder or published weights onto a device."""
        torch_dtype, torch_device = dtype_of(dtype), choose_device(device)  # fail on these before the slow load
        lm = load(source)
        weights = weights_hash(lm.model)  # before the cast, so that all dtypes share one hash
        return cls(source, lm.to(torch_device, torch_dtype), weights, Store.beside(source))

    @property
    def model(self) -> LoopedLM:
        return self.lm.model

    @property
    def identity(self) -> JsonDict:
        """Keys of stored answers that depend on the model: its weights, tokenizer, dtype and device."""
        return {"weights": self.weights, "tokenizer": self.lm.need_tokenizer().hash, **device_and_dtype(self.model)}

    def describe(self, trajectories: Sequence[Trajectory]) -> JsonDict:
        """The model as plain data, with its FLOPs per token along each trajectory."""
        config, cost = self.model.config, self.model.cost
        return {
            "path": self.source,
            "shape": f"{config.blocks}⊗{config.loops}",
            "context": config.context,
            **self.identity,
            "flops_per_token": {str(each): cost.forward_flops(each.budget) for each in trajectories},
        }

    def trajectories(
        self,
        budgets: str | None = None,
        trajectories: Sequence[str] = (),
        schedule: str = "uniform",
        default: Sequence[int] | None = None,
        beyond: bool = False,
    ) -> list[Trajectory]:
        """The trajectories of budgets such as "1,2,4" along their uniform or best schedules, then `trajectories`.

        If neither is given, the budgets are `default`, or 1, L/4, L/2 and L. `beyond` allows more loops than L.
        """
        numbers = [] if trajectories else default or validation_budgets(self.model.config.loops)
        if budgets is not None:
            numbers = parse_counts(budgets, "--budgets")
        scheduled = (
            self.model.resolve(number, beyond)
            if schedule == "uniform"
            else scheduled_trajectory(self.source, self.model, number, schedule, self.weights)
            for number in numbers
        )
        return list(dict.fromkeys([*scheduled, *(self.model.resolve(each, beyond) for each in trajectories)]))
