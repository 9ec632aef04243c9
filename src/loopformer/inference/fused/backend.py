"""What `lm` decodes with on a GPU: memory and graphs that are lent and used again, and the backend of drafts.

pool = FusedPool(model)                             # obstacle(model) says what is in its way here
with pool.batch(slots=4) as batch:                  # for SharedBackend (shared.py): any budgets, any number of rows
    backend = SharedBackend(batch)
backend = DraftBackend(pool, Draft(Trajectory.uniform(2), length=4))

A batch or a speculator is lent to one at a time, so several texts may be under way at once; what is free again
serves the next, unless the model's weights have changed meanwhile.

Under faults: what a draft's rounds have come to is taken out of the backend while they run and put back when they
have. If it is not there, or is not where the row says it is, the row's tokens are run again from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from loopformer.device import available_bytes
from loopformer.errors import LoopformerError
from loopformer.inference.decode import PIECE, slot_bytes
from loopformer.inference.draft import Draft, DraftReport
from loopformer.inference.fused.quantise import MOST_INT8_ROWS, Fingerprint, Weights, fingerprint, quantised
from loopformer.inference.request import Request, RowState
from loopformer.inference.sampling import Choice, Draw, sample
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.fused.batch import SharedBatch
    from loopformer.inference.fused.decoder import Tuning
    from loopformer.inference.fused.speculate import Speculator, Verdict

MOST_KEPT = 4  # each holds keys for the whole context of its rows
MOST_SLOTS = 256  # of one batch; more requests wait for each other
MOST_TOGETHER = 16  # tokens that are verified at once
Lent = TypeVar("Lent")


def obstacle(model: LoopedLM) -> str | None:
    """What the kernels lack to run a model here, as in "it …"; None if nothing."""
    if model.config.plain_only is not None:
        return f"has no kernels for model.{model.config.plain_only}"
    ready = model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None
    return None if ready else "needs a CUDA device and Triton"


def longest_draft(int8: bool) -> int:
    """The most tokens of a draft that are verified together, with one before them."""
    return (MOST_INT8_ROWS if int8 else MOST_TOGETHER) - 1


def draft_obstacle(draft: Draft, requests: Sequence[Request], int8: bool) -> str | None:
    """What the kernels lack to draft so for these requests, as in "it …"."""
    if any(request.sampling.repetition_penalty != 1 for request in requests):
        return "drafts without a repetition penalty"
    if (draft.length or 1) > longest_draft(int8):
        return f"drafts at most {longest_draft(int8)} tokens"
    return None


class LendingPool(Generic[Lent]):
    """What may be used again: lent to one at a time; of what is free the last few are kept, if there is room."""

    def __init__(self, has_room: Callable[[Sequence[Lent]], bool] = lambda kept: True) -> None:
        self.free: list[tuple[Hashable, Lent]] = []  # the last used at the end
        self._has_room = has_room
        self._door = Lock()

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Lent]) -> Iterator[Lent]:
        """One of this kind, made if none is free."""
        with self._door:
            at = next((at for at, (kind, _) in enumerate(self.free) if kind == key), None)
            found = None if at is None else self.free.pop(at)[1]
        lent = make() if found is None else found
        try:
            yield lent
        finally:
            with self._door:
                self.free.append((key, lent))
                del self.free[:-MOST_KEPT]
                while self.free and not self._has_room([kept for _, kept in self.free]):
                    del self.free[0]


class FusedPool:
    """The batches and speculators of a model, made when they are needed."""

    def __init__(self, model: LoopedLM, int8: bool = False, tuning: Tuning | None = None) -> None:
        self.model, self.int8, self._tuning = model, int8, tuning
        self._seen: Fingerprint = []
        self._weights: Weights | None = None
        self._batches: LendingPool[SharedBatch] = LendingPool(self._has_room)
        self._speculators: LendingPool[Speculator] = LendingPool()

    @contextmanager
    def batch(self, slots: int) -> Iterator[SharedBatch]:
        """Lend one of so many slots or more, a power of two and MOST_SLOTS at most; int8 weights serve one."""
        from loopformer.inference.fused.batch import SharedBatch

        self._look_at_weights()
        slots = 1 if self.int8 else min(MOST_SLOTS, 1 << (slots - 1).bit_length())
        make = partial(SharedBatch, self.model, slots, None, self._weights, self._tuning)
        with self._batches.lend(slots, make) as batch:
            try:
                yield batch
            finally:
                batch.leave()

    def speculator(self, trajectory: Trajectory, draft: Draft) -> AbstractContextManager[Speculator]:
        """Lend one for this trajectory and draft."""
        from loopformer.inference.fused.speculate import Speculator

        self._look_at_weights()
        make = partial(Speculator, self.model, trajectory, draft, self._weights, self._tuning)
        return self._speculators.lend((trajectory, draft), make)

    def _look_at_weights(self) -> None:
        """Forget what was made for other weights than those of now: graphs and int8 copies still have them."""
        seen = fingerprint(self.model)
        if seen != self._seen:
            self._seen, self._batches, self._speculators = seen, LendingPool(self._has_room), LendingPool()
            self._weights = quantised(self.model) if self.int8 else None

    def _has_room(self, kept: Sequence[SharedBatch]) -> bool:
        """Whether as much memory is free as batches keep that nobody uses."""
        nbytes = sum(batch.nbytes for batch in kept)
        return nbytes <= available_bytes(self.model.tokens.weight.device)


@dataclass(frozen=True)
class _Rounds:
    """A row that is being drafted for: its rounds to come, and the length its text has before the next."""

    ticket: int
    length: int
    verdicts: Iterator[Verdict]


class DraftBackend:
    """Drafts, one row at a time (speculate.py); see the module's docstring."""

    piece = PIECE

    def __init__(self, pool: FusedPool, draft: Draft) -> None:
        self.model, self.draft_report = pool.model, DraftReport()
        self.prompt_tokens = self.shared_tokens = 0
        self._pool, self._draft = pool, draft
        self._lent = ExitStack()
        self._rounds: _Rounds | None = None
        self._busy = False  # whether a row has the slot

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        size = self.model.tokens.weight.element_size()
        return sum(row.length * self.model.cost.kv_bytes(row.trajectory.budget, size) for row in rows)

    @property
    def memory_bytes(self) -> int:
        return slot_bytes(self.model)

    def check(self, request: Request) -> None:
        """Refuse what this backend cannot run."""
        if (why := draft_obstacle(self._draft, [request], self._pool.int8)) is not None:
            raise LoopformerError(f"fast {why}; leave it out.")

    def close(self) -> None:
        """Give the speculator back."""
        self._rounds, self._busy = None, False
        self._lent.close()

    def plan(self, waiting: Sequence[RowState], tokens: int) -> list[list[RowState]]:
        """The first one, once the one before is done."""
        return [] if self._busy or not waiting else [[waiting[0]]]

    @torch.no_grad()
    def prefill(self, rows: Sequence[RowState]) -> list[Choice | int]:
        (row,) = rows
        self.prompt_tokens += len(row.request.prompt)
        self._busy = True
        return [self._start(row)]

    @torch.no_grad()
    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        (row,) = rows
        rounds, self._rounds = self._rounds, None
        if rounds is None or (rounds.ticket, rounds.length) != (row.ticket, row.length):
            self._lent.close()
            self._start(row)
            rounds, self._rounds = self._rounds, None  # whose verdicts end if one of them fails
            assert rounds is not None
        verdict = next(rounds.verdicts)
        self.draft_report.drafted += verdict.drafted
        self.draft_report.accepted += len(verdict.tokens) - 1
        self.draft_report.verifications += 1
        self._rounds = _Rounds(row.ticket, row.length + len(verdict.tokens), rounds.verdicts)
        return [[Choice(*pair) for pair in zip(verdict.tokens, verdict.logprobs, strict=True)]]

    def keep(self, rows: Sequence[RowState]) -> None:
        if not rows and self._busy:
            self.close()

    def _start(self, row: RowState) -> Choice:
        """Run a prompt, or a text again that was begun, along both trajectories: its next token."""
        self._rounds = None
        speculator = self._lent.enter_context(self._pool.speculator(row.trajectory, self._draft))
        hidden = speculator.prefill(row.history if not row.ids else row.history[:-1])
        (choice,) = sample(self.model.head(hidden)[None, : self.model.config.vocab], [row.draw()])
        self.draft_report.verifications += 1  # this pass, which gave a token
        last, wanted = (row.ids[-1], len(row.ids)) if row.ids else (choice.token, 1)
        sampling = row.request.sampling
        draw = None if sampling.most_likely else partial(Draw, sampling, row.seed)
        verdicts = speculator.follow(last, row.request.max_tokens - wanted, draw)
        self._rounds = _Rounds(row.ticket, row.length + (not row.ids), verdicts)
        return choice
