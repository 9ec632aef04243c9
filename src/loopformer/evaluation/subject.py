"""What an evaluation is of: a loaded model, the hash of its weights, and where finished pieces are kept.

    subject = Subject.open("runs/mine", device="cuda", dtype="bfloat16")
    subject.routes("1,2,4", ["4-2-1-1"])                 # trajectories that this model can follow
    perplexity(subject.model, text, routes, weights=subject.weights, store=subject.store)

The hash is that of the weights as they are on disk, whatever the dtype they are then cast to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loopformer.config import whole_numbers
from loopformer.config.run import validation_budgets
from loopformer.device import choose_device, dtype_of
from loopformer.evaluation.schedules import scheduled
from loopformer.evaluation.store import Store, weights_hash
from loopformer.lm import LM, load
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class Subject:
    """A model under evaluation."""

    source: str
    lm: LM
    weights: str
    store: Store

    @classmethod
    def open(cls, source: str, device: str = "auto", dtype: str = "float32") -> "Subject":
        """Load a run, a model folder or published weights onto a device."""
        wanted = dtype_of(dtype)
        where = choose_device(device)
        lm = load(source)
        weights = weights_hash(lm.model)
        return cls(source, lm.to(where, wanted), weights, Store.beside(source))

    @property
    def model(self) -> LoopedLM:
        return self.lm.model

    def trajectories(
        self, budgets: str | None = None, trajectories: Sequence[str] = (), schedule: str = "uniform"
    ) -> list[Trajectory]:
        """Budgets such as "1,2,4" at uniform or best schedules, and trajectories; 1, L/4, L/2 and L by default."""
        numbers = [] if trajectories else validation_budgets(self.model.config.loops)
        if budgets is not None:
            numbers = whole_numbers(budgets, "--budgets")
        found = [scheduled(self.source, self.model, number, schedule, self.weights) for number in numbers]
        return list(dict.fromkeys([*found, *(self.model.resolve(one) for one in trajectories)]))
