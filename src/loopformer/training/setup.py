"""AdamW with decay on matrices only, and a learning rate that warms up and follows a cosine down.

From settings to the things a run is made of: data, model, objective, micro-batch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopformer.config import ModelConfig, RunConfig, TrainingConfig
from loopformer.data.shards import TokenData
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import available_bytes
from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.loading import find_config, find_model
from loopformer.model import LoopedLM
from loopformer.training.distributed import Ranks
from loopformer.training.fused.passes import obstacle
from loopformer.training.fused.types import Precision
from loopformer.training.objective import Divisors, Objective
from loopformer.training.plan import estimated_micro_batch, memory_bytes, micro_batches
from loopformer.trajectory import Trajectory


def make_optimizer(model: nn.Module, config: TrainingConfig, fused: bool) -> torch.optim.AdamW:
    """Matrices decay, vectors (norms, biases) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of optimizer step `step`, counted from 1: linear warmup, then a cosine to the minimum."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * cosine


def settle_run(run: RunConfig, given: set[str], data: TokenData) -> RunConfig:
    """Fill in what the data and the starting model decide: the vocabulary, or all model settings."""
    if run.init_from is not None:
        model, tokenizer = find_config(run.init_from)
        _check_same_tokenizer(tokenizer, model, data)
        check_given(run.model, model, given)
        run = replace(run, model=model)
    elif "model.vocab" not in given:
        run = replace(run, model=replace(run.model, vocab=data.vocab_size))
    if run.model.vocab < data.vocab_size:
        raise LoopformerError(
            f"The data's tokenizer has {data.vocab_size} tokens but model.vocab is {run.model.vocab}; "
            "leave model.vocab out."
        )
    return run


def _check_same_tokenizer(folder: Path | None, model: ModelConfig, data: TokenData) -> None:
    if folder is None and data.vocab_size != model.vocab:
        raise LoopformerError(
            f"The starting model has {model.vocab} tokens and no tokenizer beside it, the data's tokenizer has "
            f"{data.vocab_size}; prepare the data with the model's own tokenizer."
        )
    if folder is not None and Tokenizer.load(folder).hash != data.tokenizer.hash:
        raise LoopformerError(
            f"The data in {data.folder} was made with another tokenizer than the model in {folder}; "
            f"prepare it again with --tokenizer {folder / 'tokenizer.json'}."
        )


def check_given(asked: ModelConfig, found: ModelConfig, given: set[str]) -> None:
    for name in sorted(given):
        section, _, key = name.partition(".")
        if section == "model" and getattr(asked, key) != getattr(found, key):
            raise LoopformerError(
                f"{name} is {getattr(asked, key)} but the starting model has {getattr(found, key)}; leave it out."
            )


def make_model(run: RunConfig) -> LoopedLM:
    """The starting weights, on the CPU: the same for any device and number of ranks."""
    if run.init_from is not None:
        return find_model(run.init_from)[0]
    torch.manual_seed(run.training.seed)
    return LoopedLM(run.model)


def fused_precision(run: RunConfig, ranks: Ranks) -> Precision | None:
    """What the products of fused passes are made of; None where passes are not fused."""
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


def autocast(device: torch.device, run: RunConfig) -> Any:
    """bf16 products over fp32 weights, or nothing."""
    if run.training.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def choose_micro_batch(run: RunConfig, objective: Objective, ranks: Ranks, say: Callable[[str], None]) -> int:
    """The largest micro-batch that fits: tried on a GPU, estimated elsewhere."""
    sizes, fused = micro_batches(run, ranks.world), objective.fused is not None
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


@contextmanager
def out_of_memory_advice() -> Iterator[None]:
    """Turn running out of memory, on a GPU or the CPU, into a sentence that says what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise RunFailed(
                "The device ran out of memory; lower training.micro_batch (or set it to auto), set "
                "training.checkpoint_loops=true, or lower objective.chunk, then --resume: checkpoints are safe."
            ) from error
        raise
