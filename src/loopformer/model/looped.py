"""LoopedLM: embed → loop → head. One class for every model of the paper.

    model = LoopedLM(ModelConfig(blocks=2, loops=4, width=128, heads=4, ffn=320, context=128, vocab=1024))
    out = model(ids, Trajectory.parse("1-1-2"))      # ids [B, T]; None means uniform(L)
    out.logits, out.hidden                           # [B, T, V] and [B, T, D] after the final norm

A model k⊗L is a Transformer of k blocks, the stack, that is applied M times to one state, with the same weights
each time. A trajectory says how far each of the M loops goes: step sizes Δ₁…Δ_M that sum to 1. M is the budget. A
loop knows its time t (the sum of the steps before it) and its step size Δ through a modulation of every block. The
modulation depends on (t, Δ) alone, so it is computed for all loops of a trajectory before the first of them:

    x = embed(ids)                                            # [B, T, D]
    for modulation in conditioner(trajectory): x = stack(x, modulation)
    logits = head(final_norm(x))

The loop is plain Python. What `model.compile()` compiles is the step inside it, the stack under one modulation: one
graph per batch shape, dtype and grad mode, whatever the budget and the schedule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformer.config.model import ModelConfig
from loopformer.device import to_device_async
from loopformer.errors import LoopformerError
from loopformer.model.block import EPSILON, RMSNorm, Rotary, Stack, rotary_angles
from loopformer.model.cache import KVCache, LoopPlan
from loopformer.model.conditioning import Condition, Conditioner, ZeroLinear, loop_scalars
from loopformer.model.cost import Cost
from loopformer.model.noise import GOLDEN, as_int64, hashed, normal_noise
from loopformer.model.packed import Linear, PackedWeight, can_pack_bfloat16, multiply
from loopformer.trajectory import Trajectory, resolve

INITIAL_STATE_STD = math.sqrt(2 / 5)  # of a random initial state, as in Geiping et al. (2025)
TrajectoryLike = Trajectory | str | int | None
Step = Callable[..., Tensor]  # one loop: its number, x, modulation, rotary, mask → x
F_ = TypeVar("F_", bound=Callable[..., Any])

# Under `torch.compile(model)` the loop would unroll into a graph per budget. It runs as plain Python instead, and
# the modules it calls are compiled: the same one graph of the step that `model.compile()` gives.
_compile_only_submodules: Callable[[F_], F_] = torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
_never_compile: Callable[[F_], F_] = torch.compiler.disable


@dataclass(frozen=True)
class Output:
    """The result of a forward pass. `states[i]` is the state after loop i+1, before the final norm."""

    hidden: Tensor  # [B, T, D], after the final norm
    logits: Tensor | None = None  # [B, T, V]; None with `logits=False`
    states: tuple[Tensor, ...] = ()  # each [B, T, D]; a row that has finished keeps its last state


class LoopedLM(nn.Module):
    """A language model k⊗L: one shared stack of k blocks, applied once per step of a trajectory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_rows, config.width)  # tied: also the head
        # Learned position embeddings. The attribute is named as its key in weight files.
        self.places = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.conditioner = Conditioner(config) if config.conditioning != "none" else None
        self.stack = Stack(config)
        self.adapter = Linear(2 * config.width, config.width) if config.inject == "adapter" else None
        self.packed_dtype: torch.dtype | None = None  # of the weights that inference on a CPU uses; see `pack`
        self.packed_head: PackedWeight | None = None
        self.final_norm = RMSNorm(config.width, learned=True)
        self.initialise()

    def initialise(self) -> None:
        """Draw fresh weights: N(0, 0.02), residual projections smaller, modulators as configured."""
        config = self.config
        # Each block adds two residual projections to the stream. 'depth' counts those of all L loops, not of one.
        depth = config.blocks * (config.loops if config.residual_init == "depth" else 1)
        for name, module in self.named_modules():
            if isinstance(module, ZeroLinear):
                module.reset_parameters()  # no random draw: the other weights equal those of a model without it
            elif isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attention.out", "ffn.down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
        if self.conditioner is not None:
            self.conditioner.initialise(config.modulator_start)

    # Whole sequences.

    @_compile_only_submodules
    def forward(
        self,
        ids: Tensor,
        trajectory: TrajectoryLike | Sequence[TrajectoryLike] = None,
        *,
        documents: Tensor | None = None,
        logits: bool = True,
        states: bool = False,
        beyond: bool = False,
        check: bool = True,
        stack: Callable[..., Tensor] | None = None,
    ) -> Output:
        """Run ids [B, T] along one trajectory for all rows, or along a list of one per row.

        documents  [B, T], the document of each token: no attention across documents, and positions restart
        logits     False skips the head, for losses that are computed in chunks from `hidden`
        states     True keeps the state after each loop
        beyond     True allows more loops than the model was trained for
        check      False skips the range check of the ids, which would wait for the GPU
        stack      replaces `self.stack`, for fused or checkpointed loops in training
        """
        self.check(ids, documents, check)
        plan = self.plan_loops(self.trajectories(trajectory, len(ids), beyond), len(ids))
        x, rotary, mask, start = self.embed(ids, documents)
        run_stack, kept = stack or self.stack, list[Tensor]()

        def step(number: int, *inputs: Any) -> Tensor:
            out: Tensor = run_stack(*inputs)
            return out

        x = self.run_loops(step, x, start, plan, rotary, mask, kept if states else None)
        hidden: Tensor = self.final_norm(x)
        return Output(hidden, self.head(hidden) if logits else None, tuple(kept))

    @_never_compile
    def embed(
        self, ids: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Rotary | None, Tensor | None, Tensor]:
        """ids [B, T] → embeddings [B, T, D], rotary angles and mask [B, 1, T, T], if any, and the initial state."""
        columns = positions = torch.arange(ids.shape[1], device=ids.device)[None]  # [1, T]
        mask = None
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]  # [B, 1, T, T]
            mask = same.tril()
            positions = positions - same.squeeze(1).int().argmax(dim=-1)  # minus the first position of the document
        x, rotary = self.add_positions(self.tokens(ids), positions)
        return x, rotary, mask, self.initial_state(x, columns, ids)

    def add_positions(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        """Embedded tokens x [B, T, D] at positions [B or 1, T] → states [B, T, D] and rotary angles, if any."""
        rotary = None
        if self.places is not None:
            x = x + self.places(positions)
        else:
            rotary = rotary_angles(positions, self.config.head_width, x.dtype)
        if self.config.start == "normed":
            x = F.rms_norm(x, x.shape[-1:], None, EPSILON)
        return x, rotary

    @_never_compile
    def initial_state(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        """The state before the first loop [B, T, D]: the embeddings x, or random numbers at positions [B or 1, T].

        In evaluation these depend on the position alone, so a token decoded with a KV cache starts from the same
        state as in a full forward pass. In training they also depend on all ids [B, T] of the row, so they differ
        between samples, and a resumed run draws the same state again.
        """
        if self.config.start != "random":
            return x
        keys = positions.new_zeros(1)
        if ids is not None and self.training and torch.is_grad_enabled():
            keys = hashed(ids + positions * as_int64(GOLDEN)).sum(1)
        return (INITIAL_STATE_STD * normal_noise(keys, positions, self.config.width)).to(x.dtype).expand_as(x)

    @_never_compile
    def plan_loops(
        self,
        trajectories: Trajectory | list[Trajectory],
        rows: int,
        condition: Callable[[Trajectory], Condition] | None = None,
    ) -> LoopPlan:
        """How many rows take part in each loop, and their conditions.

        `condition` gives the condition of one trajectory, so that callers can reuse those they have computed.
        """
        if isinstance(trajectories, Trajectory):
            table, budget = (condition or self.condition)(trajectories), trajectories.budget
            # Slices keep the row dimension at 1, so one modulation is broadcast to all rows.
            return LoopPlan([rows] * budget, [table.at(slice(step, step + 1)) for step in range(budget)], None)
        distinct = list(dict.fromkeys(trajectories))
        table = Condition.cat([*map(condition, distinct)]) if condition else self.condition(*distinct)
        # The loops of all distinct trajectories lie one after another in the table.
        starts = accumulate((trajectory.budget for trajectory in distinct), initial=0)
        first_loops = dict(zip(distinct, starts, strict=False))
        order = sorted(range(rows), key=lambda row: -trajectories[row].budget)
        ordered, counts, index = [trajectories[row] for row in order], [], list[int]()
        for step in range(ordered[0].budget):
            active = [first_loops[trajectory] + step for trajectory in ordered if trajectory.budget > step]
            counts.append(len(active))
            index += active
        expanded = table.select(to_device_async(index, self.device)) if table.tensors else table
        return LoopPlan(counts, expanded.split(counts), order)

    @_never_compile
    def condition(self, *trajectories: Trajectory) -> Condition:
        """The conditions of all loops of the trajectories, in order; empty in an unconditioned model."""
        if self.conditioner is None:
            return Condition()
        scale = self.config.time_scale
        scalars = [loop for trajectory in trajectories for loop in loop_scalars(trajectory, scale)]
        condition: Condition = self.conditioner(to_device_async(scalars, self.device))
        return condition

    @_compile_only_submodules
    def run_loops(
        self,
        step: Step,
        embedded: Tensor,
        x: Tensor,
        plan: LoopPlan,
        rotary: Rotary | None,
        mask: Tensor | None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Run all loops of all rows. Returns the last states [B, T, D], before the final norm.

        `embedded` [B, T, D] are the embeddings, x is the state before the first loop, which may be the same tensor.
        If `states` is a list, the state of all rows is appended after each loop.
        """
        unsort = None  # the indices that restore the caller's order of rows
        if plan.order is not None:
            # Longest trajectories first: active rows are then always a prefix, and finished rows are cut off the
            # end without copying the others.
            order = to_device_async(plan.order, x.device)  # a list as an index would wait for a GPU at each use
            unsort = order.argsort()
            is_embedding, embedded = x is embedded, embedded[order]
            x, mask = embedded if is_embedding else x[order], _select_rows(mask, order)
            rotary = _select_rotary_rows(rotary, order)
        finished: list[Tensor] = []  # inserted at the front, so again longest trajectories first
        for number, (rows, condition) in enumerate(zip(plan.rows, plan.conditions, strict=True)):
            if rows < len(x):
                x, done = x.split_with_sizes([rows, len(x) - rows])  # backward joins them again in one kernel
                finished.insert(0, done)
                embedded = embedded[:rows]
                rotary, mask = _select_rotary_rows(rotary, slice(rows)), _select_rows(mask, slice(rows))
            x = step(number, self.inject(x, embedded, condition, number), condition.modulation, rotary, mask)
            if states is not None:
                states.append(_restore_rows(x, finished, unsort))
        return _restore_rows(x, finished, unsort)

    @_never_compile
    def inject(self, x: Tensor, embedded: Tensor, condition: Condition, number: int) -> Tensor:
        """The input of a loop [B, T, D]: the state x, with the embedding mixed in if the model injects it."""
        if self.adapter is not None:
            # In every loop, including the first. The embedding is normalised to the scale of the state.
            both = torch.cat([x, F.rms_norm(embedded, embedded.shape[-1:], None, EPSILON)], dim=-1)
            joined: Tensor = self.adapter(both)
            return joined.to(x.dtype)
        if condition.injection is None or number == 0:  # before the first loop the state is the embedding
            return x
        return torch.addcmul(x, embedded, condition.injection.to(x.dtype)[:, None])

    def head(self, hidden: Tensor) -> Tensor:
        """[…, D] after the final norm → logits […, V]."""
        return multiply(hidden, self.tokens.weight, self.packed_head)

    # Prefill and decode with a KV cache.

    def cache(
        self,
        trajectory: TrajectoryLike | Sequence[TrajectoryLike],
        rows: int,
        capacity: int | None = None,
        condition: Callable[[Trajectory], Condition] | None = None,
    ) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens, along one trajectory or one per row.

        `condition` replaces `self.condition`, so that callers can reuse conditions they have computed.
        """
        trajectories = self.trajectories(trajectory, rows)
        each = [trajectories] * rows if isinstance(trajectories, Trajectory) else trajectories
        with torch.no_grad():
            plan = self.plan_loops(trajectories, rows, condition or self.condition)
        return KVCache(self.config, each, plan, capacity or self.config.context, self.tokens.weight)

    @torch.no_grad()
    def extend(
        self, ids: Tensor, cache: KVCache, counts: Sequence[int] | None = None, check: bool = True
    ) -> Tensor:
        """Run new tokens [B, T] and append them to the cache. Returns hidden [B, T, D] after the final norm.

        If rows are padded at the end, `counts` is the number of real tokens per row. Outputs at padding are
        meaningless. `check=False` skips the range check of the ids, for tokens that the model has sampled.
        """
        self.check(ids, values=check)
        cache.require_model(self.tokens.weight)
        if len(ids) != len(cache.lengths):
            raise LoopformerError(f"{len(ids)} rows were given to a cache of {len(cache.lengths)}.")
        counts = [ids.shape[1]] * len(ids) if counts is None else counts
        if len(counts) != len(ids) or not all(0 <= count <= ids.shape[1] for count in counts):
            raise LoopformerError(f"counts must be {len(ids)} numbers of tokens in 0…{ids.shape[1]}, got {counts}.")
        positions, mask = cache.positions_and_mask(ids.shape[1])
        x, rotary = self.add_positions(self.tokens(ids), positions)

        def step(number: int, *inputs: Any) -> Tensor:
            out: Tensor = self.stack(*inputs, cache.layers(number))
            return out

        with without_cudnn_attention():
            x = self.run_loops(step, x, self.initial_state(x, positions), cache.plan, rotary, mask)
        hidden: Tensor = self.final_norm(x)
        # Last, so that an error above leaves the lengths unchanged and the next call overwrites what was stored.
        cache.advance(counts)
        return hidden

    # Trajectories, checks and facts.

    @_never_compile
    def trajectories(
        self, trajectory: TrajectoryLike | Sequence[TrajectoryLike], rows: int, beyond: bool = False
    ) -> Trajectory | list[Trajectory]:
        """One trajectory for all rows, or a list of one per row if they differ."""
        if isinstance(trajectory, str) or not isinstance(trajectory, Sequence):
            return self.resolve(trajectory, beyond)
        if len(trajectory) != rows:
            raise LoopformerError(f"{len(trajectory)} trajectories were given for {rows} rows; give one per row.")
        each = [self.resolve(row_trajectory, beyond) for row_trajectory in trajectory]
        return each[0] if len(set(each)) == 1 else each

    def resolve(self, trajectory: TrajectoryLike, beyond: bool = False) -> Trajectory:
        """The trajectory that is meant, where None means the full one. Raises if the model cannot run it."""
        trajectory = resolve(trajectory, self.config.loops, beyond)
        if self.config.conditioning in ("none", "index") and not trajectory.is_uniform:
            raise LoopformerError(
                f"A model with conditioning {self.config.conditioning!r} does not see its step sizes, so it can "
                f"only follow uniform trajectories; use the budget {trajectory.budget} instead of {trajectory}."
            )
        return trajectory

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the stack, not the loops around it, so that one graph serves every budget and schedule."""
        self.stack.compile(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.tokens.weight.device

    @property
    def dtype_name(self) -> str:
        """The dtype of its weights, such as bfloat16, or int8 if they are packed so."""
        dtype = torch.int8 if self.packed_dtype == torch.int8 else self.tokens.weight.dtype
        return str(dtype).removeprefix("torch.")

    def pack(self, dtype: torch.dtype | None) -> None:
        """Let inference on a CPU use weights in torch.int8 or torch.bfloat16 (packed.py); None ends that."""
        self.packed_dtype = dtype
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.packed = None if dtype is None else PackedWeight(dtype)
        # The head is most of the error of int8, and is read once per token. In bf16 it takes no longer.
        head_dtype = torch.bfloat16 if can_pack_bfloat16() else dtype
        self.packed_head = None if dtype is None or head_dtype is None else PackedWeight(head_dtype)

    @property
    def cost(self) -> Cost:
        """Parameters, FLOPs and bytes at any budget."""
        return Cost(self.config)

    @_never_compile
    def check(self, ids: Tensor, documents: Tensor | None = None, values: bool = True) -> None:
        """Raise unless `ids` are token ids [B, T]. `values=False` skips their range, which waits for the GPU."""
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise LoopformerError(f"ids must be a [B, T] tensor of integers, got {got}.")
        if ids.numel() == 0:
            raise LoopformerError(f"ids is empty {list(ids.shape)}; give at least one row of one token.")
        if ids.shape[1] > self.config.context:
            raise LoopformerError(
                f"The sequence has {ids.shape[1]} tokens but the context is {self.config.context}; shorten it."
            )
        if documents is not None and documents.shape != ids.shape:
            raise LoopformerError(
                f"documents has shape {list(documents.shape)}, ids {list(ids.shape)}; make them equal."
            )
        low, high = (int(bound) for bound in ids.aminmax()) if values else (0, 0)
        if low < 0 or high >= self.config.vocab:
            raise LoopformerError(
                f"ids must lie in 0…{self.config.vocab - 1}, got {low}…{high}; is this the model's own tokenizer?"
            )


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Switch off cuDNN's attention, which spends about 60 ms on a plan for every new sequence length."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _restore_rows(x: Tensor, finished: list[Tensor], unsort: Tensor | None) -> Tensor:
    """All rows in the caller's order, from those that still run and those that have finished."""
    every = torch.cat([x, *finished]) if finished else x
    return every if unsort is None else every[unsort]


def _select_rows(x: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """Some rows of x. A tensor with a single row is shared by all rows and returned as it is."""
    return x if x is None or len(x) == 1 else x[rows]


def _select_rotary_rows(rotary: Rotary | None, rows: Tensor | slice) -> Rotary | None:
    if rotary is None or len(rotary[0]) == 1:
        return rotary
    return rotary[0][rows], rotary[1][rows]
