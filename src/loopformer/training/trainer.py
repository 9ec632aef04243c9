"""The training loop. A run that crashed and resumed ends with bitwise the weights of one that did not.

    Trainer(run, Path("runs/mine"), Ranks.start(), resume=False).train()

The samples, trajectories and learning rate of a step depend on (seed, step) only. A checkpoint holds everything
else: the weights, the optimizer's state and the counters.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.config import RunConfig, run_to_yaml
from loopformer.config.model import check_settings, from_mapping, setting
from loopformer.config.run import validation_budgets
from loopformer.data.generated import Generated, open_data
from loopformer.data.loader import (
    IGNORE_INDEX,
    Batch,
    Loader,
    Prefetcher,
    TrainingBatches,
    ValidationBatches,
    Windows,
)
from loopformer.data.shards import TokenData
from loopformer.device import available_bytes, device_name
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.files import read_json, write_atomic
from loopformer.loading import find_model
from loopformer.loading.folder import (
    SETTINGS,
    STATE,
    check_finite,
    latest_good_checkpoint,
    load_model,
    read_config,
    save_model,
    step_of,
)
from loopformer.model import LoopedLM
from loopformer.training.checkpoint import (
    delete_old_checkpoints,
    not_resumable,
    remove_leftovers,
    restore_optimizer,
    set_aside_newer,
    write_checkpoint,
)
from loopformer.training.distributed import Parallel, Ranks, full_tensor
from loopformer.training.fused.ops import Precision
from loopformer.training.fused.passes import unsupported_reason
from loopformer.training.graphs import StepGraphs
from loopformer.training.objective import Objective, autocast
from loopformer.training.optimizer import ModelOptimizer, learning_rate
from loopformer.training.packing import PackedRows, pack_rows
from loopformer.training.plan import (
    MicroBatch,
    costliest_step,
    estimated_micro_batch,
    memory_bytes,
    micro_batch_sizes,
    plan_step,
)
from loopformer.training.reporting import Reporter, SpeedMeter
from loopformer.training.steps import StepCounts, Steps
from loopformer.trajectory import Trajectory

StepBatch = list[tuple[MicroBatch, PackedRows, Batch]]  # the micro-batches of a step on this rank


@dataclass
class TrainingState:
    """What a checkpoint holds besides tensors: counters, the data's hash, and the random generator."""

    step: int = 0
    updates: int = setting(0, "Steps that changed the weights; the others had a non-finite gradient.", minimum=0)
    bad_in_a_row: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    micro_batch: int = setting(0, "Sequences at a time on one device.", minimum=1)
    micro_batch_found: bool = False  # whether `auto` chose it, for the world, device and execution mode below
    device: str = ""
    execution_mode: str = ""
    world: int = 1
    threads: int = setting(0, "CPU threads.", minimum=1, maximum=1 << 16)
    data: str = ""  # hash of the data's index
    rng: tuple[int, ...] = ()

    @classmethod
    def read(cls, checkpoint: Path, run: RunConfig) -> TrainingState:
        """The state in a checkpoint of a run. Raises if it is not one that training wrote."""
        path = checkpoint / STATE
        try:
            state = from_mapping(cls, read_json(path), str(path))
            check_settings(state, str(path))
            require(state.step == step_of(checkpoint), f"{path}: step is {state.step}.")
            fits = state.micro_batch <= run.training.batch
            require(fits, f"{path}: micro_batch is {state.micro_batch}, above training.batch.")
        except LoopformerError as error:
            raise not_resumable(checkpoint, str(error).removesuffix(".")) from error
        return state


class Trainer:
    """Trains a run on this rank."""

    def __init__(self, run: RunConfig, out: Path, ranks: Ranks, resume: bool, quiet: bool = False) -> None:
        self.run, self.out, self.ranks = run, out, ranks
        training = run.training
        self.stop_signal: int | None = None
        notes: list[str] = []
        # Check everything that may be refused before the Reporter writes the first file.
        fused = fused_precision(run, ranks, notes.append)
        uses_graphs = can_use_graphs(run, ranks, notes.append)
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.set_float32_matmul_precision("highest" if training.dtype == "float32" else "high")

        data = open_data(run.data)
        self.tokenizer = data.tokenizer
        self.loader, self.windows = open_loaders(run, data)

        damaged: list[str] = []
        checkpoint = latest_good_checkpoint(out, damaged.append) if resume else None
        if checkpoint is None and damaged:
            raise FileProblem(
                f"{' '.join(damaged)} No checkpoint is intact; restore one, or start a new run with another --out."
            )
        self.state = self._restore_state(checkpoint, data) if checkpoint else TrainingState(data=data.index_hash)
        self.reporter = Reporter(run, out, ranks.is_main, self.state.step, quiet)
        for note in (*notes, *damaged):
            self.reporter.say(note)
        if checkpoint and ranks.is_main:
            for renamed in set_aside_newer(out, self.state.step):
                self.reporter.say(f"A damaged checkpoint is kept as {renamed}.")
            remove_leftovers(out)
        if resume:
            self.reporter.say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint yet; starting anew")
            if (step := self.state.step) >= training.steps:
                self.reporter.say(f"the run is already finished: step {step} of training.steps={training.steps}")

        self.model = load_model(checkpoint) if checkpoint else make_model(run)
        objective = Objective(self.model.to(ranks.device), run.objective, training.checkpoint_loops, fused)
        # Choose the micro-batch before compilation, which would keep a graph for each size that is tried. Choose it
        # before the optimizer exists, whose memory `_fits` reserves itself.
        self._set_micro_batch(objective, uses_graphs)
        on_gpu = ranks.device.type == "cuda"
        # `auto` compiles on a GPU, unless the fused kernels already replace the compiler's.
        if training.compile is True or (training.compile == "auto" and on_gpu and fused is None):
            self.model.compile()
        self.parallel = Parallel(objective, ranks, training.is_sharded)
        # FSDP replaces the parameters, so the optimizer must see them afterwards.
        self.optimizer = ModelOptimizer(self.model, training, fused=on_gpu, capturable=uses_graphs)
        if checkpoint:
            restore_optimizer(self.model, self.optimizer, checkpoint, self.state.updates)
        # A run that ended after too many bad steps gets another one.
        bad = min(self.state.bad_in_a_row, training.bad_steps - 1)
        counts = StepCounts(self.state.step, self.state.updates, bad)
        kind = StepGraphs if uses_graphs else Steps
        self.steps = kind(self._run_pass, self.model, self.optimizer, training, counts)

    def _set_micro_batch(self, objective: Objective, graphs: bool) -> None:
        """Set the micro-batch to the configured size.

        With `auto`, keep the checkpoint's if it was chosen for this world, device and execution mode. Otherwise
        choose again.
        """
        state, ranks, training = self.state, self.ranks, self.run.training
        device = device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
        fused, recompute = objective.fused is not None, training.checkpoint_loops
        mode = f"{training.dtype} fused={fused} checkpoint_loops={recompute}"
        if graphs:  # left out otherwise, so that checkpoints from before graphs keep their micro-batch
            mode += " graphs=True"
        setup = (ranks.world, device, mode)
        if isinstance(training.micro_batch, int):
            state.micro_batch = training.micro_batch
        elif not state.micro_batch_found or (state.world, state.device, state.execution_mode) != setup:
            state.micro_batch = choose_micro_batch(self.run, objective, ranks, graphs, self.reporter.say)
        state.micro_batch_found = not isinstance(training.micro_batch, int)
        state.world, state.device, state.execution_mode = setup

    def _restore_state(self, checkpoint: Path, data: TokenData | Generated) -> TrainingState:
        state = TrainingState.read(checkpoint, self.run)
        if read_config(checkpoint) != self.run.model:
            settings, saved = self.out / SETTINGS, checkpoint / SETTINGS
            raise FileProblem(f"{settings} has other model settings than {saved}; copy that file over it.")
        if state.data != data.index_hash:
            name = self.run.data.path if isinstance(data, TokenData) else data.setting
            raise LoopformerError(
                f"The data in {name} is not what this run was trained on; "
                "restore it, or start a new run with init_from."
            )
        if self.ranks.device.type == "cpu" and self.run.training.threads is None:
            torch.set_num_threads(state.threads)  # with another number of threads, sums differ in their last bits
        try:
            torch.set_rng_state(torch.tensor(state.rng, dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise not_resumable(checkpoint, f"{checkpoint / STATE} has no state of the generator as rng") from error
        return state

    def train(self) -> dict[str, Any]:
        """Train until the last step or a signal; return a summary."""
        stop_signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and so must we
            stop_signals.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._on_signal) for number in stop_signals}
        started = time.perf_counter()
        try:
            with self.reporter, closing(Prefetcher(self._batches(), depth=2)) as batches:
                if self.ranks.is_main:
                    write_atomic(self.out / SETTINGS, run_to_yaml(self.run).encode())
                self._loop(batches)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return {
            "out": str(self.out),
            "step": self.state.step,
            "finished": self.state.step >= self.run.training.steps,
            "signal": self.stop_signal,
            "best_step": self.state.best_step,
            "best_loss": self.state.best_loss,
            "seconds": time.perf_counter() - started,
        }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal == signal.SIGINT == number:  # only for Ctrl-C; a scheduler may send SIGTERM twice
            raise RunFailed("Stopped at once by a second Ctrl-C; --resume continues from the last checkpoint.")
        self.stop_signal = number

    def _batches(self) -> Iterator[StepBatch]:
        """This rank's micro-batches, step by step. Copies from pinned memory overlap with the GPU's computation."""
        run, state, ranks = self.run, self.state, self.ranks
        for step in range(state.step, run.training.steps):
            parts = plan_step(run, step + 1, state.micro_batch, ranks.rank, ranks.world)
            # FSDP gathers weights in every loop, a collective call, so all ranks must run as many.
            packed = [
                pack_rows(run.model, part.trajectories, part.exits, part.loops if self.parallel.is_sharded else 0)
                for part in parts
            ]
            batches = [self.loader.batch(step, part.rows) for part in parts]
            if ranks.device.type == "cuda":
                packed = [rows.map(Tensor.pin_memory) for rows in packed]
                batches = [batch.map(Tensor.pin_memory) for batch in batches]
            yield list(zip(parts, packed, batches, strict=True))

    def _loop(self, batches: Iterator[StepBatch]) -> None:
        training, state = self.run.training, self.state
        meter = SpeedMeter(self.run, self.ranks.device, self.ranks.world)
        first_step = state.step + 1
        for batch in batches:
            step = state.step + 1
            rate = learning_rate(step, training)
            self.optimizer.set_rate(rate)
            divisors = self._count_targets(batch)
            terms, norm, flops = self._step(batch, divisors)
            state.step = step
            state.tokens += training.batch * self.run.model.context
            self.reporter.tick(step)
            # A signal may reach one rank first. All ranks must agree to stop, or the others wait for ever in a
            # collective call.
            is_stopping = self.ranks.any(self.stop_signal is not None)
            is_last = step == training.steps
            is_recorded = is_last or step % training.log_every == 0
            validates = is_last or step % training.validate_every == 0
            saves = is_last or step % training.save_every == 0
            # Reading counts waits for queued steps, so do it only where the host needs them. After a bad step read
            # them at every step, or the next good step would be taken for another bad one.
            needs_counts = is_recorded or validates or saves or is_stopping or step == first_step
            if needs_counts or state.bad_in_a_row > 0 or not self.steps.is_queued:
                state.step, state.updates, state.bad_in_a_row = self.steps.read_counts()
            is_late = state.step < step  # the run had to end before: what was queued after that changed nothing
            step = state.step
            meter.add(flops)  # after the wait for the GPU, which is training
            is_recorded = (is_recorded or state.bad_in_a_row > 0) and not is_late
            # The first step is shown but not recorded: the user sees at once how it goes.
            if is_recorded or step == first_step:
                values = {
                    **self._mean_losses(terms, divisors),
                    "gradient_norm": float(norm),
                    "learning_rate": rate,
                    "skipped": step - state.updates,
                    "epoch": self.loader.epoch(step),
                    **meter.read(),
                }
                if is_recorded:
                    self.reporter.record("train", step, values)
                self.reporter.progress(step, values)
            if state.bad_in_a_row >= training.bad_steps:
                raise RunFailed(
                    f"{state.bad_in_a_row} steps in a row had a gradient that is not finite, at step {step}; "
                    "lower training.learning_rate, lengthen training.warmup, or look at the data, then --resume."
                )
            is_best = False
            if validates:
                is_best = self._validate(step)
                meter.skip()  # speed counts training only
            if saves or is_stopping or is_best:
                self.save()
                meter.skip()
            if is_stopping:
                again = f"loopformer train --resume --out {self.out}"
                self.reporter.say(f"stopped at step {step}; continue with `{again}`")
                return

    def _step(self, batch: StepBatch, divisors: list[float]) -> tuple[Tensor, Tensor, float]:
        """Run a step; return loss terms [3, E] (`Losses`) of the objective's E entries, the norm of the gradients
        before clipping, and all ranks' FLOPs."""
        run, device, cost = self.run, self.ranks.device, self.model.cost
        terms = torch.zeros(3, len(divisors), dtype=torch.float32, device=device)
        flops = 0.0
        for number, (micro_batch, packed, rows) in enumerate(batch):
            with self.parallel.micro_batch(last=number == len(batch) - 1):
                terms += self.steps.backward(rows, packed, divisors)
            flops += run.model.context * micro_batch.training_flops(cost)
        self.parallel.before_update()
        return terms, self.steps.update(), flops * self.ranks.world

    def _run_pass(self, rows: Batch, packed: PackedRows, divisors: list[float]) -> Tensor:
        """Add the gradients of a micro-batch; return its loss terms [3, E]."""
        with autocast(self.ranks.device, self.run):
            losses = self.parallel.module(rows.inputs, rows.targets, rows.documents, packed, divisors)
        # The divisors count the targets of all ranks, so gradients must be summed over ranks. DDP and FSDP average
        # them instead, hence the factor.
        (losses.total * self.ranks.world).backward()
        terms: Tensor = losses.terms
        return terms

    def _count_targets(self, batch: StepBatch) -> list[float]:
        """The number of targets, at least 1, on the rows of each entry of the objective, over all ranks.

        A loss divided by it is a mean per token. So the weight of an entry depends neither on the number of its
        targets nor on the split into micro-batches.
        """
        counts = torch.zeros(len(self.run.objective.trajectories))
        for micro_batch, _, rows in batch:
            counted = (rows.targets != IGNORE_INDEX).sum(1)
            for index, entry in enumerate(micro_batch.trajectories):
                counts[index] += counted[list(entry)].sum()
        if self.ranks.world > 1:  # alone, a copy to the GPU and back would wait for the step before
            counts = self.ranks.sum(counts.to(self.ranks.device))
        return [max(1.0, count) for count in counts.tolist()]

    def _mean_losses(self, terms: Tensor, divisors: list[float]) -> dict[str, float]:
        """The cross-entropy per token of each entry, and the sum of their distances to the full trajectory."""
        cross_entropies, distances, exit_losses = self.ranks.sum(terms).tolist()
        values, consistency = dict[str, float](), 0.0
        for number, entry in enumerate(self.run.objective.trajectories):
            if loss := cross_entropies[number]:  # zero: this step does not use the entry
                name = f"loss_{entry}"
                name = f"{name}_{number + 1}" if name in values else name  # entries may share a budget
                values[name] = loss / divisors[number]
                if exit_loss := exit_losses[number]:
                    values[f"exit_{name}"] = exit_loss / divisors[number]
            consistency += distances[number] / divisors[number]
        return {**values, "consistency": consistency}

    def _validate(self, step: int) -> bool:
        """Validate and record; return whether the loss of the largest trained budget is the lowest so far."""
        loops = self.run.model.loops
        largest = max(entry.budgets(loops)[1] for entry in self.run.objective.trajectories)
        budgets = sorted({*validation_budgets(loops), largest})
        losses = validate(self.parallel, self.windows, budgets, self.state.micro_batch, self.run)
        values = {f"loss_at_{budget}": loss for budget, loss in losses.items()}
        self.reporter.record("validation", step, values)
        # A perplexity of e^99 already means divergence, and exp overflows at 710.
        perplexities = "  ".join(f"M={budget} {math.exp(min(loss, 99)):.2f}" for budget, loss in losses.items())
        self.reporter.say(f"step {step}: validation perplexity  {perplexities}")
        loss, best_loss = losses[largest], self.state.best_loss
        is_best = math.isfinite(loss) and (best_loss is None or loss < best_loss)
        if is_best:
            self.state.best_step, self.state.best_loss = step, loss
        return is_best

    def save(self) -> None:
        """Write a checkpoint. Every rank must call it, because gathering sharded weights is collective."""
        state = self.state
        state.threads = torch.get_num_threads()
        state.rng = tuple(torch.get_rng_state().tolist())
        tensors = {name: full_tensor(tensor).detach() for name, tensor in self.model.state_dict().items()}
        moments = self.optimizer.tensors(self.model)

        def fill(folder: Path) -> None:
            save_model(self.model, folder, {"run": str(self.out), "step": state.step}, state=tensors)
            self.tokenizer.save(folder)
            (folder / SETTINGS).write_text(run_to_yaml(self.run), encoding="utf-8")
            (folder / STATE).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")

        write_checkpoint(self.out, state.step, fill, moments, self.ranks, self.parallel.is_sharded)
        if self.ranks.is_main:
            delete_old_checkpoints(self.out, self.run.training.keep, state.best_step)


@torch.no_grad()
def validate(
    parallel: Parallel, windows: ValidationBatches, budgets: list[int], rows: int, run: RunConfig
) -> dict[int, float]:
    """Mean cross-entropy per token at each budget. The number of ranks does not change the windows.

    The loss is that of `loopformer eval text --join` on the same windows (scoring.py). The training
    loss differs: as in the paper, its softmax includes the rows that pad the vocabulary.
    """
    ranks = parallel.ranks
    # The summed loss of each budget, and last the number of targets.
    sums = torch.zeros(len(budgets) + 1, dtype=torch.float64)
    # Every rank runs the same number of batches, even empty ones: with FSDP, all ranks gather the weights together.
    for index in range(math.ceil(len(windows) / (rows * ranks.world))):
        first = (index * ranks.world + ranks.rank) * rows
        batch = windows.batch(first, first + rows)
        sums[-1] += float((batch.targets != IGNORE_INDEX).sum())
        # Pad the last batches, because torch.compile would compile again for another shape. Padding has no targets.
        if missing := rows - len(batch):
            targets = F.pad(batch.targets, (0, 0, 0, missing), value=IGNORE_INDEX)
            batch = replace(batch.map(partial(F.pad, pad=(0, 0, 0, missing))), targets=targets)
        moved = batch.to(ranks.device)
        tensors = moved.inputs, moved.targets, moved.documents
        for column, budget in enumerate(budgets):
            with autocast(ranks.device, run):
                logprobs = parallel.objective.logprobs(*tensors, Trajectory.uniform(budget))
            sums[column] -= logprobs.cpu().double().sum()
    # MPS has no float64.
    total = ranks.sum(sums.to(torch.float32 if ranks.device.type == "mps" else torch.float64).to(ranks.device))
    return {budget: float(total[index] / total[-1]) for index, budget in enumerate(budgets)}


def open_loaders(run: RunConfig, data: TokenData | Generated) -> tuple[TrainingBatches, ValidationBatches]:
    """The batches of a run for training, and the windows for validation."""
    if not isinstance(data, TokenData):
        return data.loader(run), data.windows(run)
    context, training, documents = run.model.context, run.training, run.data.documents
    held_out = TokenData.open(run.data.path, "val")
    loader = Loader(data, context, training.batch, training.seed, documents)
    return loader, Windows(held_out, context, training.validation_windows, documents)


def make_model(run: RunConfig) -> LoopedLM:
    """The initial model, on the CPU. Random numbers differ between devices, and so would the weights."""
    if run.init_from is not None:
        model = find_model(run.init_from)[0]
        check_finite(model.state_dict())
        return model
    torch.manual_seed(run.training.seed)
    return LoopedLM(run.model)


def fused_precision(run: RunConfig, ranks: Ranks, say: Callable[[str], None] = lambda _: None) -> Precision | None:
    """The precision of the fused kernels, or None if the run does not use them.

    If a GPU run with training.fused=auto cannot use them, `say` gets the reason.
    """
    training, fp8 = run.training, run.training.dtype == "float8"
    reason = unsupported_reason(run.model, ranks.device, fp8)
    if ranks.world > 1 and training.is_sharded:
        reason = "training.strategy=fsdp gathers weights inside the stack; use ddp"
    if training.fused is True or fp8:
        require(training.fused is not False, "training.dtype=float8 needs training.fused; set it to true or auto.")
        require(reason is None, f"{'float8' if fp8 else 'training.fused'} cannot be used: {reason}.")
    elif training.fused is False or ranks.device.type != "cuda" or training.dtype == "float32":
        return None
    elif reason is not None:
        say(f"training without fused kernels: {reason}")
        return None
    return Precision(torch.float32 if training.dtype == "float32" else torch.bfloat16, fp8)


def can_use_graphs(run: RunConfig, ranks: Ranks, say: Callable[[str], None] = lambda _: None) -> bool:
    """Whether steps run as CUDA graphs. If a GPU run with training.graphs=auto cannot, `say` gets the reason."""
    setting, on_gpu, world = run.training.graphs, ranks.device.type == "cuda", ranks.world
    if setting is False or (setting == "auto" and not on_gpu):
        return False
    reason = None
    if not on_gpu:
        reason = f"training.graphs needs a CUDA GPU, not {ranks.device.type}"
    elif world > 1:
        reason = f"training.graphs needs a single GPU, not {world} ranks"
    elif setting == "auto" and (run.data.documents or run.objective.trajectory_groups > 1):
        reason = "with data.documents or several trajectory_groups, passes differ from step to step"
    if reason is not None:
        require(setting == "auto", f"{reason}; set it to auto.")
        say(f"training without CUDA graphs: {reason}")
    return reason is None


def choose_micro_batch(
    run: RunConfig, objective: Objective, ranks: Ranks, graphs: bool, say: Callable[[str], None]
) -> int:
    """The largest micro-batch that fits in memory: measured on a GPU, estimated elsewhere."""
    sizes, fused = micro_batch_sizes(run, ranks.world), objective.fused is not None
    if ranks.device.type != "cuda":
        chosen = estimated_micro_batch(run, ranks.device, ranks.world, fused=fused, graphs=graphs)
    else:
        # The estimate may be too high, so try sizes somewhat beyond it. Far beyond, a trial only costs time.
        limit = 1.5 * available_bytes(ranks.device)
        needed = partial(memory_bytes, run, world=ranks.world, fused=fused, graphs=graphs)
        candidates = (size for size in sizes if needed(size) < limit)
        chosen = next((size for size in candidates if _fits(run, objective, ranks.device, size, graphs)), 1)
    chosen = ranks.smallest(chosen)  # all ranks must split a step alike
    say(f"micro-batch {chosen}: {run.training.batch // (chosen * ranks.world)} per step on each device")
    return chosen


def _fits(run: RunConfig, objective: Objective, device: torch.device, rows: int, graphs: bool) -> bool:
    """Whether a forward and backward of the costliest micro-batch fits in memory."""
    ids = torch.zeros(rows, run.model.context, dtype=torch.long, device=device)
    # At most so many of the rows train on each entry.
    entries = run.objective.trajectories
    trajectories = [
        dict.fromkeys(range(math.ceil(entry.rows * rows - 1e-9)), longest) if longest else {}
        for entry, longest in zip(entries, costliest_step(run), strict=True)
    ]
    exits = [
        dict.fromkeys(each, 1) if entry.exits else {} for entry, each in zip(entries, trajectories, strict=True)
    ]
    documents = torch.zeros_like(ids) if run.data.documents else None
    reserved = None
    try:
        # A real step also holds the gradients of earlier micro-batches and two moments. Reserve their memory.
        reserved = [torch.empty_like(p) for p in objective.parameters() for _ in range(3)]
        with autocast(device, run):
            packed = pack_rows(run.model, trajectories, exits).to(device)
            # Graphs keep their memory, and a pass that is not recorded needs as much again.
            passes = range(2 if graphs else 1)
            losses = [objective(ids, ids, documents, packed, [1.0] * len(trajectories)) for _ in passes]
        losses[-1].total.backward()
        torch.cuda.synchronize(device)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        del reserved
        objective.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
