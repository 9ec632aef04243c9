"""LoopedLM: embed → loop → head. One class for every model of the paper.

    model = LoopedLM(ModelConfig(blocks=2, loops=4, width=128, heads=4, ffn=320, context=128, vocab=1024))
    out = model(ids, Trajectory.parse("2-1-1"))      # ids [B, T]; None means uniform(L)
    out.logits, out.hidden                           # [B, T, V] and [B, T, D] after the final norm

The loop is plain Python; the step inside it (k blocks under one modulation) is what `model.compile()` compiles:
one graph per batch shape, dtype and grad mode, whatever the budget and the schedule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformer.config import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.model.block import EPSILON, RMSNorm, Rotary, Stack, rotary_angles
from loopformer.model.cache import Cache, Passes
from loopformer.model.conditioning import Condition, Conditioner, ZeroLinear
from loopformer.model.cost import Cost
from loopformer.model.noise import GOLDEN, hashed, normal, signed
from loopformer.trajectory import Trajectory, resolve

START_STD = math.sqrt(2 / 5)  # of a random start, as Geiping et al. (2025) have it
TrajectoryLike = Trajectory | str | int | None
Step = Callable[..., Tensor]  # one pass: its number, x, modulation, rotary, mask
F_ = TypeVar("F_", bound=Callable[..., Any])

# Under `torch.compile(model)` the loop would unroll into a graph per budget. It runs as plain Python instead, and
# the modules it calls are compiled: the same one graph of the step that `model.compile()` gives.
_not_compiled_itself: Callable[[F_], F_] = torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
_not_compiled: Callable[[F_], F_] = torch.compiler.disable


@contextmanager
def attention_of_any_length() -> Iterator[None]:
    """Without cuDNN's attention, which is planned anew for every length, at some 60 ms each."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@dataclass(frozen=True)
class Output:
    """What a forward pass gives. `states[i]` is the state after pass i+1, before the final norm."""

    hidden: Tensor  # [B, T, D], after the final norm
    logits: Tensor | None = None  # [B, T, V]; None when not asked for
    states: tuple[Tensor, ...] = ()  # each [B, T, D]; a row that is done keeps its last state


class LoopedLM(nn.Module):
    """A language model k⊗L: one shared stack of k blocks, applied once per step of a trajectory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_rows, config.width)  # tied: also the head
        self.places = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.conditioner = Conditioner(config) if config.conditioning != "none" else None
        self.stack = Stack(config)
        self.adapter = nn.Linear(2 * config.width, config.width, bias=False) if config.inject == "adapter" else None
        self.final_norm = RMSNorm(config.width, learned=True)
        self.initialise()

    def initialise(self) -> None:
        """Draw fresh weights: N(0, 0.02), residual projections smaller, modulators as configured."""
        config = self.config
        depth = config.blocks * (config.loops if config.residual_init == "depth" else 1)
        for name, module in self.named_modules():
            if isinstance(module, ZeroLinear):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attention.out", "ffn.down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
        if self.conditioner is not None:
            self.conditioner.start(config.modulator_start)

    @_not_compiled_itself
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
        """Run ids [B, T] along one trajectory for all rows, or a list of one per row.

        documents  [B, T], the document each token belongs to: no attention across, positions restart
        logits     False leaves the head out, for losses computed in chunks from `hidden`
        states     True keeps the state after each pass
        beyond     True allows more passes than the model was trained for
        check      False trusts the ids' values, so that nothing waits for the GPU
        stack      another way to run a pass than `self.stack`, as training has them
        """
        self.check(ids, documents, check)
        passes = self.passes(self.trajectories(trajectory, len(ids), beyond), len(ids))
        x, rotary, mask = self.embed(ids, documents)
        start = self.random_start(torch.arange(ids.shape[1], device=ids.device)[None], ids)
        run, kept = stack or self.stack, list[Tensor]()

        def step(number: int, *inputs: Any) -> Tensor:
            return run(*inputs)

        x = self.loop(step, x, passes, rotary, mask, kept if states else None, start)
        hidden: Tensor = self.final_norm(x)
        return Output(hidden, self.head(hidden) if logits else None, tuple(kept))

    @torch.no_grad()
    def extend(
        self,
        ids: Tensor,
        cache: Cache,
        counts: Sequence[int] | None = None,
        check: bool = True,
    ) -> Tensor:
        """Run new tokens [B, T] on top of the cache, which keeps them: hidden [B, T, D] after the final norm.

        `counts` says how many tokens of each row count, where rows are padded at the end; what lies beyond is not
        kept and its output means nothing. `check` False trusts the ids' values, as those a model has chosen itself.
        """
        self.check(ids, values=check)
        cache.require_model(self.tokens.weight)
        if len(ids) != len(cache.lengths):
            raise LoopformerError(f"{len(ids)} rows were given to a cache of {len(cache.lengths)}.")
        counts = [ids.shape[1]] * len(ids) if counts is None else counts
        if len(counts) != len(ids) or not all(0 <= count <= ids.shape[1] for count in counts):
            raise LoopformerError(f"counts must be {len(ids)} numbers of tokens in 0…{ids.shape[1]}, got {counts}.")
        positions, mask = cache.place(ids.shape[1])
        x, rotary = self.place(self.tokens(ids), positions)

        def step(number: int, *inputs: Any) -> Tensor:
            out: Tensor = self.stack(*inputs, cache.slots(number))
            return out

        start = self.random_start(positions)
        with attention_of_any_length():
            x = self.loop(step, x, cache.passes, rotary, mask, None, start)
        hidden: Tensor = self.final_norm(x)
        cache.advance(counts)
        return hidden

    def cache(
        self,
        trajectory: TrajectoryLike | Sequence[TrajectoryLike],
        rows: int,
        capacity: int | None = None,
        condition: Callable[[Trajectory], Condition] | None = None,
    ) -> Cache:
        """An empty cache for `rows` sequences along one trajectory, or one each, of at most `capacity` tokens.

        `condition` is a `condition` that keeps what it has computed.
        """
        trajectories = self.trajectories(trajectory, rows)
        each = [trajectories] * rows if isinstance(trajectories, Trajectory) else trajectories
        with torch.no_grad():
            followed = self.passes(trajectories, rows, condition)
        return Cache(self.config, each, followed, capacity or self.config.context, self.tokens.weight)

    @_not_compiled
    def embed(self, ids: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Rotary | None, Tensor | None]:
        """ids [B, T] → their embeddings [B, T, D], rotary angles and attention mask, if any."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]  # [1, T]
        mask = None
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]  # [B, 1, T, T]
            mask = same.tril()
            positions = positions - same.squeeze(1).int().argmax(dim=-1)  # the first token of one's document
        x, rotary = self.place(self.tokens(ids), positions)
        return x, rotary, mask

    def place(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        """Embedded tokens x [B, T, D] at positions [B or 1, T] → states and rotary angles, if any."""
        rotary = None
        if self.places is not None:
            x = x + self.places(positions)
        else:
            rotary = rotary_angles(positions, self.config.head_width, x.dtype)
        if self.config.start == "normed":
            x = F.rms_norm(x, x.shape[-1:], None, EPSILON)
        return x, rotary

    @_not_compiled
    def random_start(self, positions: Tensor, ids: Tensor | None = None) -> Tensor | None:
        """The state before the first pass [B or 1, T, D], at positions [B or 1, T]; None: it is the embedding.

        It follows from the position alone, so that cached equals uncached, and where gradients are wanted from
        all ids [B, T] of the row too: another one for every sample, the same one after a resume.
        """
        if self.config.start != "random":
            return None
        keys = positions.new_zeros(1)
        if ids is not None and self.training and torch.is_grad_enabled():
            keys = hashed(ids + positions * signed(GOLDEN)).sum(1)
        return START_STD * normal(keys, positions, self.config.width)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.tokens.weight.device

    @property
    def dtype_name(self) -> str:
        """The dtype of its weights, in words."""
        return str(self.tokens.weight.dtype).removeprefix("torch.")

    @property
    def cost(self) -> Cost:
        """Parameters, FLOPs and bytes at any budget."""
        return Cost(self.config)

    def head(self, hidden: Tensor) -> Tensor:
        """[…, D] after the final norm → logits […, V]."""
        return F.linear(hidden, self.tokens.weight)

    @_not_compiled
    def condition(self, trajectory: Trajectory) -> Condition:
        """What the passes of a trajectory are told; nothing in an unconditioned model."""
        if self.conditioner is None:
            return Condition()
        condition: Condition = self.conditioner(trajectory)
        return condition

    @_not_compiled
    def passes(
        self,
        trajectories: Trajectory | list[Trajectory],
        rows: int,
        condition: Callable[[Trajectory], Condition] | None = None,
    ) -> Passes:
        """Which rows take part in each pass, and what they are told, by `condition` or the model's own."""
        condition = condition or self.condition
        if isinstance(trajectories, Trajectory):
            table, budget = condition(trajectories), trajectories.budget
            shared = [table.at(slice(step, step + 1)) for step in range(budget)]
            return Passes([rows] * budget, shared, None)
        tables = {trajectory: condition(trajectory) for trajectory in set(trajectories)}
        order = sorted(range(rows), key=lambda row: -trajectories[row].budget)
        counts, conditions = [], []
        for step in range(trajectories[order[0]].budget):
            active = [trajectories[row] for row in order if trajectories[row].budget > step]
            counts.append(len(active))
            conditions.append(Condition.stack([tables[trajectory].at(step) for trajectory in active]))
        return Passes(counts, conditions, order)

    @_not_compiled_itself
    def loop(
        self,
        step: Step,
        x: Tensor,
        passes: Passes,
        rotary: Rotary | None,
        mask: Tensor | None,
        keep: list[Tensor] | None,
        start: Tensor | None = None,
    ) -> Tensor:
        """Every pass of every row. Longest trajectories first, so that a row that is done leaves at the end.

        x [B, T, D] is the embedding; `start` [B or 1, T, D] the state before the first pass, where that is another.
        """
        back = None
        if passes.order is not None:
            back = torch.tensor(passes.order, device=x.device).argsort()
            x, rotary, mask = x[passes.order], _rotary_rows(rotary, passes.order), _rows(mask, passes.order)
            start = _rows(start, passes.order)
        embedded, x = x, x if start is None else start.to(x.dtype).expand_as(x)
        done: list[Tensor] = []  # longest first
        for number, (rows, condition) in enumerate(zip(passes.rows, passes.conditions, strict=True)):
            if rows < len(x):
                done.insert(0, x[rows:])
                x, embedded = x[:rows], embedded[:rows]
                rotary, mask = _rotary_rows(rotary, slice(rows)), _rows(mask, slice(rows))
            x = step(number, self.inject(x, embedded, condition, number), condition.modulation, rotary, mask)
            if keep is not None:
                keep.append(x if back is None else torch.cat([x, *done])[back])
        return x if back is None else torch.cat([x, *done])[back]

    @_not_compiled
    def inject(self, x: Tensor, embedded: Tensor, condition: Condition, number: int) -> Tensor:
        """What a pass starts from: the state x [B, T, D], from the second pass on with some of the embedding.

        An adapter joins the two in every pass, the embedding normalised, so that neither drowns the other.
        """
        if self.adapter is not None:
            both = torch.cat([x, F.rms_norm(embedded, embedded.shape[-1:], None, EPSILON)], dim=-1)
            joined: Tensor = self.adapter(both)
            return joined.to(x.dtype)
        if condition.injection is None or number == 0:
            return x
        return torch.addcmul(x, embedded, condition.injection.to(x.dtype)[:, None])

    @_not_compiled
    def trajectories(
        self, trajectory: TrajectoryLike | Sequence[TrajectoryLike], rows: int, beyond: bool = False
    ) -> Trajectory | list[Trajectory]:
        """Resolve what the caller gave into one trajectory, or one per row, that this model can follow."""
        if isinstance(trajectory, str) or not isinstance(trajectory, Sequence):
            return self.resolve(trajectory, beyond)
        if len(trajectory) != rows:
            raise LoopformerError(f"{len(trajectory)} trajectories were given for {rows} rows; give one per row.")
        each = [self.resolve(given, beyond) for given in trajectory]
        return each[0] if len(set(each)) == 1 else each

    def resolve(self, trajectory: TrajectoryLike, beyond: bool = False) -> Trajectory:
        """Resolve one trajectory and check that this model can follow it."""
        trajectory = resolve(trajectory, self.config.loops, beyond)
        if self.config.conditioning in ("none", "index") and not trajectory.is_uniform:
            raise LoopformerError(
                f"A model with conditioning {self.config.conditioning!r} is not told its steps, so it can only "
                f"follow uniform trajectories; use the budget {trajectory.budget} instead of {trajectory}."
            )
        return trajectory

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step, not the loop: one graph serves every budget and schedule."""
        self.stack.compile(*args, **kwargs)

    @_not_compiled
    def check(self, ids: Tensor, documents: Tensor | None = None, values: bool = True) -> None:
        """Refuse what is no batch of token ids; `values` False trusts their values."""
        if not isinstance(ids, Tensor):
            raise LoopformerError(f"ids must be a [B, T] tensor of integers, got {type(ids).__name__}.")
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise LoopformerError(f"ids must be a [B, T] tensor of integers, got {ids.dtype} {list(ids.shape)}.")
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


def _rows(x: Tensor | None, rows: list[int] | slice) -> Tensor | None:
    """Some rows; what is shared by all rows stays as it is."""
    return x if x is None or len(x) == 1 else x[rows]


def _rotary_rows(rotary: Rotary | None, rows: list[int] | slice) -> Rotary | None:
    if rotary is None or len(rotary[0]) == 1:
        return rotary
    return rotary[0][rows], rotary[1][rows]
