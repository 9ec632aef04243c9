"""From settings to what a run trains with: the model, the precision of fused passes, the micro-batch."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from loopformer.config import RunConfig
from loopformer.device import available_bytes
from loopformer.errors import require
from loopformer.loading import find_model
from loopformer.model import LoopedLM
from loopformer.training.distributed import Ranks
from loopformer.training.fused.passes import obstacle
from loopformer.training.fused.types import Precision
from loopformer.training.objective import Divisors, Objective, autocast
from loopformer.training.plan import estimated_micro_batch, memory_bytes, micro_batch_sizes
from loopformer.trajectory import Trajectory


def make_model(run: RunConfig) -> LoopedLM:
    """The starting weights, on the CPU: the same for any device and number of ranks."""
    if run.init_from is not None:
        return find_model(run.init_from)[0]
    torch.manual_seed(run.training.seed)
    return LoopedLM(run.model)


def fused_precision(run: RunConfig, ranks: Ranks) -> Precision | None:
    """What the matmuls of fused passes run in; None where passes are not fused."""
    training, kind = run.training, ranks.device.type
    fp8 = training.dtype == "float8"
    precision = Precision(torch.float32 if training.dtype == "float32" else torch.bfloat16, fp8)
    why = obstacle(run.model, ranks.device, fp8)
    if ranks.world > 1 and training.sharded:
        why = "with training.strategy=fsdp weights are gathered inside the stack; use ddp"
    if training.fused is True or fp8:
        require(training.fused is not False, "training.dtype=float8 needs training.fused; set it to true or auto.")
        require(why is None, f"{'float8' if fp8 else 'training.fused'} cannot be used: {why}.")
        return precision
    wanted = training.fused == "auto" and kind == "cuda" and training.dtype != "float32"
    return precision if wanted and why is None else None


def compile_step(run: RunConfig, model: LoopedLM, device: torch.device, fused: bool) -> None:
    """Compile the step where it is wanted; a fused one is not run by the compiler."""
    if device.type == "cuda" and not fused if run.training.compile == "auto" else run.training.compile:
        model.compile()


def choose_micro_batch(run: RunConfig, objective: Objective, ranks: Ranks, say: Callable[[str], None]) -> int:
    """The largest micro-batch that fits: tried on a GPU, estimated elsewhere."""
    sizes, fused = micro_batch_sizes(run, ranks.world), objective.fused is not None
    if ranks.device.type != "cuda":
        chosen = estimated_micro_batch(run, 0.6 * available_bytes(ranks.device), ranks.world, fused)
    else:
        likely = 1.5 * available_bytes(ranks.device)  # far beyond it a try is a waste of time
        tried = (size for size in sizes if memory_bytes(run, size, ranks.world, fused) < likely)
        chosen = next((size for size in tried if _fits(run, objective, ranks.device, size)), 1)
    chosen = ranks.smallest(chosen)
    say(f"micro-batch {chosen}: {run.training.batch // (chosen * ranks.world)} per step on each device")
    return chosen


def _fits(run: RunConfig, objective: Objective, device: torch.device, rows: int) -> bool:
    """Run the costliest micro-batch once, forward and backward."""
    loops = run.model.loops
    ids = torch.zeros(rows, run.model.context, dtype=torch.long, device=device)
    short = Trajectory.uniform(loops - 1) if run.objective.elastic else None
    documents = torch.zeros_like(ids) if run.data.documents else None
    spare = None
    try:
        # Moments, and gradients of the micro-batches before, are not there yet; hold their place.
        spare = [torch.empty_like(p) for p in objective.parameters() for _ in range(3)]
        with autocast(device, run):
            losses = objective(ids, ids, documents, Divisors(1.0, 1.0), None, short, tuple(range(rows)))
        losses.total.backward()
        torch.cuda.synchronize(device)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        del spare
        objective.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
