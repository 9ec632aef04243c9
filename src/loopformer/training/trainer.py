"""The training loop: from settings to checkpoints, exact to the bit across crashes.

    Trainer(run, Path("runs/mine"), Ranks.start(), resume=False).train()

Everything a step does follows from (seed, step): its samples, its short routes, its learning rate. A checkpoint
holds the weights, the moments and the counters; continuing from one is the same as never having stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from loopformer.config import RunConfig, run_to_yaml
from loopformer.config.run import validation_budgets
from loopformer.data.loader import NO_LOSS, Batch, Loader, Prefetcher, validation_windows
from loopformer.data.shards import TokenData
from loopformer.device import device_name, peak_flops
from loopformer.errors import FileProblem, LoopformerError, RunFailed
from loopformer.files import read_json
from loopformer.loading.folder import SETTINGS, STATE, latest_good, load_model, save_tensors
from loopformer.training.batches import Piece, pieces, short_trajectory
from loopformer.training.checkpoint import (
    optimizer_tensors,
    restore_optimizer,
    rotate,
    set_aside_newer,
    write_checkpoint,
)
from loopformer.training.distributed import Parallel, Ranks, whole
from loopformer.training.objective import Divisors, Objective
from loopformer.training.plan import training_flops_per_token
from loopformer.training.reporting import Reporter
from loopformer.training.setup import (
    autocast,
    choose_micro_batch,
    compile_step,
    fused_numbers,
    learning_rate,
    make_model,
    make_optimizer,
)
from loopformer.training.validation import validate


@dataclass
class Progress:
    """Counters that travel with a checkpoint."""

    step: int = 0
    updates: int = 0  # steps that changed the weights; the others were not finite
    bad_in_a_row: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    micro_batch: int = 0
    micro_batch_found: bool = False  # by looking for what fits, on `device`, run in that `way`
    device: str = ""
    way: str = ""
    world: int = 1
    threads: int = 0
    data: str = ""  # hash of the data's index
    rng: list[int] = field(default_factory=list)


class Trainer:
    """One run on one rank."""

    def __init__(self, run: RunConfig, out: Path, ranks: Ranks, resume: bool, quiet: bool = False) -> None:
        self.run, self.out, self.ranks = run, out, ranks
        training = run.training
        self.stop_signal: int | None = None
        fused = fused_numbers(run, ranks)  # refused before anything is written
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.set_float32_matmul_precision("highest" if training.dtype == "float32" else "high")

        data = TokenData.open(run.data.path, "train")
        self.tokenizer = data.tokenizer
        self.loader = Loader(data, run.model.context, training.batch, training.seed, run.data.documents)
        self.windows = validation_windows(
            TokenData.open(run.data.path, "val"), run.model.context, training.validation_windows, run.data.documents
        )

        notes: list[str] = []
        checkpoint = latest_good(out, notes.append) if resume else None
        if checkpoint is None and notes:
            raise FileProblem(
                f"{' '.join(notes)} None is left; restore one, or start a new run with another --out."
            )
        self.progress = self._restore_progress(checkpoint, data) if checkpoint else Progress(data=data.index_hash)
        self.reporter = Reporter(run, out, ranks.main, self.progress.step, quiet)
        for note in notes:
            self.reporter.say(note)
        if checkpoint and ranks.main:
            for aside in set_aside_newer(out, self.progress.step):
                self.reporter.say(f"It is kept as {aside}.")
        if resume:
            self.reporter.say(f"going on from {checkpoint}" if checkpoint else "no checkpoint yet; starting anew")

        model = load_model(checkpoint) if checkpoint else make_model(run)
        objective = Objective(model.to(ranks.device), run.objective, training.checkpoint_loops, fused)
        self._settle_micro_batch(objective)
        self.pieces = pieces(
            training.batch,
            self.progress.micro_batch,
            run.objective,
            ranks.rank,
            ranks.world,
            in_step=training.sharded,
        )
        compile_step(run, model, ranks.device, fused is not None)
        self.parallel = Parallel(objective, ranks, training.sharded)
        self.model = model
        on_gpu = ranks.device.type == "cuda"
        self.optimizer = make_optimizer(model, training, fused=on_gpu)
        if checkpoint:
            restore_optimizer(model, self.optimizer, checkpoint, self.progress.updates, on_gpu)

    def _settle_micro_batch(self, objective: Objective) -> None:
        """The configured micro-batch; with `auto` the one found before, unless it was found for other devices."""
        progress, ranks, asked = self.progress, self.ranks, self.run.training.micro_batch
        place = device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
        training = self.run.training
        way = f"{training.dtype} fused={objective.fused is not None} checkpoint_loops={training.checkpoint_loops}"
        now = (ranks.world, place, way)
        if isinstance(asked, int):
            progress.micro_batch = asked
        elif not progress.micro_batch_found or (progress.world, progress.device, progress.way) != now:
            progress.micro_batch = choose_micro_batch(self.run, objective, ranks, self.reporter.say)
        progress.micro_batch_found = not isinstance(asked, int)
        progress.world, progress.device, progress.way = now

    def _restore_progress(self, checkpoint: Path, data: TokenData) -> Progress:
        progress = Progress(**read_json(checkpoint / STATE))
        if progress.data != data.index_hash:
            raise LoopformerError(
                f"The data in {data.folder} is not what this run was trained on; restore it, or start a new run "
                "with init_from."
            )
        if self.ranks.device.type == "cpu" and self.run.training.threads is None:
            torch.set_num_threads(progress.threads)  # sums split over other threads differ in their last bits
        torch.set_rng_state(torch.tensor(progress.rng, dtype=torch.uint8))
        return progress

    def train(self) -> dict[str, Any]:
        """Train to the last step, or to a signal; return what happened."""
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        started = time.perf_counter()
        try:
            with self.reporter, closing(Prefetcher(self._batches(), depth=2)) as batches:
                self._loop(batches)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return {
            "out": str(self.out),
            "step": self.progress.step,
            "finished": self.progress.step >= self.run.training.steps,
            "signal": self.stop_signal,
            "best_step": self.progress.best_step,
            "best_loss": self.progress.best_loss,
            "seconds": time.perf_counter() - started,
        }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal == signal.SIGINT == number:  # a scheduler may well send SIGTERM twice
            raise RunFailed("Stopped at once, as asked twice; --resume goes on from the last checkpoint.")
        self.stop_signal = number

    def _batches(self) -> Iterator[list[tuple[Piece, Batch]]]:
        for step in range(self.progress.step, self.run.training.steps):
            yield [(piece, self._pinned(self.loader.batch(step, piece.start, piece.stop))) for piece in self.pieces]

    def _pinned(self, batch: Batch) -> Batch:
        if self.ranks.device.type != "cuda":
            return batch
        documents = None if batch.documents is None else batch.documents.pin_memory()
        return Batch(batch.inputs.pin_memory(), batch.targets.pin_memory(), documents)

    def _loop(self, batches: Iterator[list[tuple[Piece, Batch]]]) -> None:
        training, progress = self.run.training, self.progress
        meter = _Meter(self.run, self.ranks)
        for batch in batches:
            step = progress.step + 1
            terms, norm, rate, flops = self._step(step, batch)
            finite = self._update(norm)
            progress.step = step
            progress.tokens += training.batch * self.run.model.context
            progress.bad_in_a_row = 0 if finite else progress.bad_in_a_row + 1
            meter.add(flops)
            self.reporter.tick(step)
            if step % training.log_every == 0 or step == training.steps or not finite:
                loss, short, consistency = self.ranks.sum(terms).tolist()
                values = {
                    "loss_full": loss,
                    "loss_short": short,
                    "consistency": consistency,
                    "gradient_norm": float(norm),
                    "learning_rate": rate,
                    "skipped": step - progress.updates,
                    "epoch": self.loader.epoch(step),
                    **meter.read(),
                }
                self.reporter.record("train", step, values)
                self.reporter.progress(step, values)
            if progress.bad_in_a_row >= training.bad_steps:
                raise RunFailed(
                    f"{progress.bad_in_a_row} steps in a row had a gradient that is not finite, at step {step}; "
                    "lower training.learning_rate, lengthen training.warmup, or look at the data, then --resume."
                )
            stopping = self.ranks.any(self.stop_signal is not None)
            best = False
            if step % training.validate_every == 0 or step == training.steps:
                best = self._validate(step)
                meter.skip()
            if step % training.save_every == 0 or step == training.steps or stopping or best:
                self.save()
                meter.skip()
            if stopping:
                self.reporter.say(f"stopped at step {step}; go on with --resume")
                return

    def _step(self, step: int, batch: list[tuple[Piece, Batch]]) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """Gradients of one step: the loss terms, the gradient's norm before clipping, the rate, the FLOPs."""
        run, device = self.run, self.ranks.device
        rate = learning_rate(step, run.training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        divisors = self._divisors(batch)
        terms = torch.zeros(3, dtype=torch.float32, device=device)
        flops = 0.0
        for number, (piece, rows) in enumerate(batch):
            short = short_trajectory(run.model.loops, run.objective, run.training.seed, step, piece.part)
            with self.parallel.micro_batch(last=number == len(batch) - 1):
                with autocast(device, run):
                    losses = self.parallel.module(
                        rows.inputs.to(device, non_blocking=True),
                        rows.targets.to(device, non_blocking=True),
                        None if rows.documents is None else rows.documents.to(device, non_blocking=True),
                        divisors,
                        None,
                        short,
                        piece.short_rows,
                    )
                (losses.total * self.ranks.world).backward()  # the wrappers average over ranks, we sum
            terms += losses.terms
            del losses  # its graph holds the cast weights
            flops += len(rows) * run.model.context * training_flops_per_token(run, short.budget if short else None)
        self.parallel.before_update()
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), run.training.clip))
        return terms, norm, rate, flops * self.ranks.world

    def _divisors(self, batch: list[tuple[Piece, Batch]]) -> Divisors:
        counts = torch.zeros(2)
        for piece, rows in batch:
            counted = (rows.targets != NO_LOSS).sum(1)
            counts[0] += counted.sum()
            counts[1] += counted[list(piece.short_rows)].sum()
        full, short = self.ranks.sum(counts.to(self.ranks.device)).tolist()
        return Divisors(max(1.0, full), max(1.0, short))

    def _update(self, norm: torch.Tensor) -> bool:
        """Take the step unless its gradient is not finite; every rank sees the same norm."""
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
            self.progress.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _validate(self, step: int) -> bool:
        """Validate, and say whether the full budget is the best so far."""
        budgets = validation_budgets(self.run.model.loops)
        losses = validate(self.parallel, self.windows, budgets, self.progress.micro_batch, self.run)
        values = {f"loss_at_{budget}": loss for budget, loss in losses.items()}
        self.reporter.record("validation", step, values)
        shown = "  ".join(f"M={budget} {math.exp(min(loss, 99)):.2f}" for budget, loss in losses.items())
        self.reporter.say(f"step {step}: validation perplexity  {shown}")
        now, before = losses[budgets[-1]], self.progress.best_loss
        best = math.isfinite(now) and (before is None or now < before)
        if best:
            self.progress.best_step, self.progress.best_loss = step, now
        return best

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        progress = self.progress
        progress.threads = torch.get_num_threads()
        progress.rng = torch.get_rng_state().tolist()
        tensors = {name: whole(tensor).detach() for name, tensor in self.model.state_dict().items()}
        moments = optimizer_tensors(self.model, self.optimizer)

        def fill(folder: Path) -> None:
            save_tensors(tensors, self.run.model, folder, {"run": str(self.out), "step": progress.step})
            self.tokenizer.save(folder)
            (folder / SETTINGS).write_text(run_to_yaml(self.run), encoding="utf-8")
            (folder / STATE).write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")

        write_checkpoint(self.out, progress.step, fill, moments, self.ranks, self.parallel.sharded)
        if self.ranks.main:
            rotate(self.out, self.run.training.keep, progress.best_step)


class _Meter:
    """Speed since the last reading, without the time that validation and saving take."""

    def __init__(self, run: RunConfig, ranks: Ranks) -> None:
        self._tokens_per_step = run.training.batch * run.model.context
        self._ranks, self._peak = ranks, peak_flops(ranks.device)
        self._reset()

    def _reset(self) -> None:
        self._steps, self._flops, self._since = 0, 0.0, time.perf_counter()
        self._away = 0.0
        self._last = self._since

    def add(self, flops: float) -> None:
        self._steps += 1
        self._flops += flops
        self._last = time.perf_counter()

    def skip(self) -> None:
        """What happened since the last step was not training."""
        now = time.perf_counter()
        self._away += now - self._last
        self._last = now

    def read(self) -> dict[str, float | None]:
        seconds = max(1e-9, time.perf_counter() - self._since - self._away)
        flops = self._flops / seconds / self._ranks.world
        memory = torch.cuda.max_memory_allocated() / 2**30 if self._ranks.device.type == "cuda" else _peak_rss()
        values = {
            "tokens_per_second": self._steps * self._tokens_per_step / seconds,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self._peak if self._peak else None,
            "peak_memory_gib": memory,
        }
        self._reset()
        return values


def _peak_rss() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
