"""Validation loss at several budgets, each rank its share, with nothing drawn from any random generator.

    validate(parallel, validation_windows(data, context), budgets=[1, 4], rows=8, run=run)[4]     # nats per token

The loss is that of `loopformer eval text --join` on the same windows (scoring.py), not the objective's, whose
softmax has the rows that pad the vocabulary in it, as the paper's has.
"""

import math

import torch
import torch.nn.functional as F

from loopformer.config import RunConfig
from loopformer.data.loader import NO_LOSS, Batch, Windows
from loopformer.data.states import StateWindows
from loopformer.training.distributed import Parallel
from loopformer.training.objective import autocast
from loopformer.trajectory import Trajectory


@torch.no_grad()
def validate(
    parallel: Parallel, windows: Windows | StateWindows, budgets: list[int], rows: int, run: RunConfig
) -> dict[int, float]:
    """Mean cross-entropy per token at each budget, over the same windows for any number of ranks."""
    ranks = parallel.ranks
    batches = math.ceil(len(windows) / rows)
    sums = torch.zeros(len(budgets) + 1, dtype=torch.float64)
    # Every rank makes the same number of calls, because sharded weights are gathered together.
    for turn in range(math.ceil(batches / ranks.world)):
        number = turn * ranks.world + ranks.rank
        batch = _filled(windows.batch(number * rows, (number + 1) * rows), rows)
        targets = batch.targets
        sums[-1] += float((targets != NO_LOSS).sum())
        for place, budget in enumerate(budgets):
            with autocast(ranks.device, run):
                logprobs = parallel.objective.logprobs(
                    batch.inputs.to(ranks.device),
                    targets.to(ranks.device),
                    None if batch.documents is None else batch.documents.to(ranks.device),
                    Trajectory.uniform(budget),
                )
            sums[place] -= logprobs.cpu().double().sum()
    total = ranks.sum(sums.to(torch.float32 if ranks.device.type == "mps" else torch.float64).to(ranks.device))
    return {budget: float(total[place] / total[-1]) for place, budget in enumerate(budgets)}


def _filled(batch: Batch, rows: int) -> Batch:
    """As many rows as the others have, since another shape would be another graph; what is added does not count."""
    missing = rows - len(batch)
    if not missing:
        return batch
    inputs = F.pad(batch.inputs, (0, 0, 0, missing))
    targets = F.pad(batch.targets, (0, 0, 0, missing), value=NO_LOSS)
    documents = None if batch.documents is None else F.pad(batch.documents, (0, 0, 0, missing))
    return Batch(inputs, targets, documents)
