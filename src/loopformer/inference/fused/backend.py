"""The fused backend: static batches of one trajectory on a GPU, each through a decoder (decoder.py), and greedy
drafts.

decoders = DecoderPool(model)                       # DecoderPool.obstacle(model) says what is in its way here
backend = FusedBackend(decoders)                    # what Engine decodes with
backend = FusedBackend(decoders, Draft(Trajectory.uniform(2), length=4))

Requests of one trajectory run together, one trajectory after another; with int8 weights in groups of as many as a
decoder takes, with a draft one by one (speculate.py). When half of a batch is done, the rest goes on in a smaller
decoder. A decoder is lent to one backend at a time, so several texts may be under way at once; what is free again
serves the next, unless the model's weights have changed meanwhile.

Under faults: what a decoder holds is taken out of the backend while it works and put back when it has. If it is not
there, or is not where the rows say they are, the rows' tokens are run again from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from loopformer.errors import LoopformerError
from loopformer.inference.decode import PIECE
from loopformer.inference.draft import Draft, DraftReport
from loopformer.inference.fused.quantise import Weights, quantised
from loopformer.inference.request import Request, RowState
from loopformer.inference.sampling import Choice, sample
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.fused.decoder import Decoder, Tuning
    from loopformer.inference.fused.speculate import Speculator, Verdict

# Each that is kept holds keys for the whole context; a batch of 128 that thins out goes through 8 decoders.
MOST_KEPT = 8
Lent = TypeVar("Lent")


class LendingPool(Generic[Lent]):
    """What may be used again: lent to one at a time, and of what is free the last few are kept."""

    def __init__(self) -> None:
        self.free: list[tuple[Hashable, Lent]] = []  # the last used at the end

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Lent]) -> Iterator[Lent]:
        """One of this kind, made if none is free."""
        at = next((at for at, (kind, _) in enumerate(self.free) if kind == key), None)
        lent = make() if at is None else self.free.pop(at)[1]
        try:
            yield lent
        finally:
            self.free.append((key, lent))
            del self.free[:-MOST_KEPT]


class DecoderPool:
    """The decoders of a model, made when they are needed."""

    def __init__(self, model: LoopedLM, int8: bool = False, tuning: Tuning | None = None) -> None:
        self.model, self.int8, self._tuning = model, int8, tuning
        self._seen: list[tuple[int, torch.dtype, int]] = []
        self._weights: Weights | None = None
        self._decoders: LendingPool[Decoder] = LendingPool()
        self._speculators: LendingPool[Speculator] = LendingPool()

    @staticmethod
    def obstacle(model: LoopedLM, certainty: bool = False) -> str | None:
        """What the kernels lack to run a model here, and if need be to let its tokens settle, as in "it …"; None if
        nothing."""
        if model.config.plain_only is not None:
            return f"has no kernels for model.{model.config.plain_only}"
        if certainty:
            return "has no kernels for certainty"
        ready = model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None
        return None if ready else "needs a CUDA device and Triton"

    def decoder(self, trajectory: Trajectory, rows: int) -> AbstractContextManager[Decoder]:
        """Lend one for at least so many rows; sizes are powers of two, so that there are few."""
        from loopformer.inference.fused.decoder import Decoder

        self._look_at_weights()
        size = 1 << (rows - 1).bit_length()
        make = partial(Decoder, self.model, trajectory, size, self._weights, self._tuning)
        return self._decoders.lend((trajectory, size), make)

    def speculator(self, trajectory: Trajectory, draft: Draft) -> AbstractContextManager[Speculator]:
        """Lend one for this trajectory and draft."""
        from loopformer.inference.fused.speculate import Speculator

        self._look_at_weights()
        make = partial(Speculator, self.model, trajectory, draft, self._weights, self._tuning)
        return self._speculators.lend((trajectory, draft), make)

    def _look_at_weights(self) -> None:
        """Forget what was made for other weights than those of now: graphs and int8 copies still have them."""
        seen = [
            (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
            for weight in self.model.parameters()
        ]
        if seen != self._seen:
            self._seen, self._decoders, self._speculators = seen, LendingPool(), LendingPool()
            self._weights = quantised(self.model) if self.int8 else None


@dataclass(frozen=True)
class _Batch:
    """Rows in a decoder: the slot of each ticket."""

    decoder: Decoder
    slots: dict[int, int]

    def holds(self, rows: Sequence[RowState]) -> bool:
        """Whether it stands where these rows stand."""
        lengths = self.decoder.cache.lengths
        return all(row.ticket in self.slots and lengths[self.slots[row.ticket]] == row.cached for row in rows)


@dataclass(frozen=True)
class _Rounds:
    """A row that is being drafted for: its rounds to come, and the length its text has before the next."""

    ticket: int
    length: int
    verdicts: Iterator[Verdict]


class FusedBackend:
    """A batch of one trajectory at a time; see the module's docstring."""

    piece = PIECE

    def __init__(self, decoders: DecoderPool, draft: Draft | None = None) -> None:
        self.model, self.draft_report = decoders.model, DraftReport()
        self.prompt_tokens = self.shared_tokens = 0
        self._decoders, self._draft = decoders, draft
        self._lent = ExitStack()
        self._busy = False  # whether rows have slots
        self._batch: _Batch | None = None
        self._rounds: _Rounds | None = None

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        return self._batch.decoder.cache.bytes if self._batch is not None and rows else 0

    def check(self, request: Request) -> None:
        """Refuse what this backend cannot run."""
        if request.certainty is not None:
            raise LoopformerError("fast has no kernels for certainty; leave one of them out.")
        if self._draft is not None and not request.sampling.most_likely:
            raise LoopformerError(
                "fast with a draft is greedy: leave out temperature and repetition penalty, or fast."
            )

    def close(self) -> None:
        """Give the decoders back."""
        self._batch, self._rounds, self._busy = None, None, False
        self._lent.close()

    def plan(self, waiting: Sequence[RowState], tokens: int) -> list[list[RowState]]:
        """Everybody who follows the first one's trajectory, once the batch before is done."""
        from loopformer.inference.fused.decoder import MOST_INT8_ROWS

        if self._busy or not waiting:
            return []
        same = [row for row in waiting if row.trajectory == waiting[0].trajectory]
        if self._draft is not None:
            return [same[:1]]
        return [same[:MOST_INT8_ROWS] if self._decoders.int8 else same]

    @torch.no_grad()
    def prefill(self, rows: Sequence[RowState]) -> list[Choice | None]:
        prompts = [row.request.prompt for row in rows]
        self.prompt_tokens += sum(map(len, prompts))
        self._busy = True
        if self._draft is not None:
            return [self._start_drafting(rows[0])]
        batch, hidden = self._begin(rows, prompts)
        logits = self.model.head(hidden)[: len(rows), : self.model.config.vocab]
        choices = sample(logits, [row.draw() for row in rows])
        self._batch = batch
        return [*choices]

    @torch.no_grad()
    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        if self._draft is not None:
            return [self._next_round(rows[0])]
        batch, self._batch = self._batch, None
        if batch is None or not batch.holds(rows):
            self._lent.close()
            batch, _ = self._begin(rows, [row.history[:-1] for row in rows])
        elif 2 * len(rows) <= batch.decoder.rows:
            smaller = self._lent.enter_context(self._decoders.decoder(rows[0].trajectory, len(rows)))
            smaller.adopt(batch.decoder, [batch.slots[row.ticket] for row in rows])
            batch = _Batch(smaller, {row.ticket: slot for slot, row in enumerate(rows)})
        slots = [batch.slots[row.ticket] for row in rows]
        tokens = torch.zeros(batch.decoder.rows, dtype=torch.long)
        tokens[slots] = torch.tensor([row.ids[-1] for row in rows])
        batch.decoder.rest(slots)
        logits = batch.decoder.step(tokens)
        logits = logits if slots == list(range(len(logits))) else logits[slots]
        choices = sample(logits, [row.draw() for row in rows])
        self._batch = batch
        return [[choice] for choice in choices]

    def keep(self, rows: Sequence[RowState]) -> None:
        if not rows and self._busy:
            self.close()

    def _begin(self, rows: Sequence[RowState], texts: Sequence[Sequence[int]]) -> tuple[_Batch, torch.Tensor]:
        """Run texts in a decoder of their own: hidden [B, D] of each one's last token, idle slots at the end."""
        decoder = self._lent.enter_context(self._decoders.decoder(rows[0].trajectory, len(rows)))
        hidden = decoder.prefill([*texts, *[[0]] * (decoder.rows - len(rows))])
        return _Batch(decoder, {row.ticket: slot for slot, row in enumerate(rows)}), hidden

    def _start_drafting(self, row: RowState) -> Choice:
        """Run a prompt, or a text again that was begun, along both trajectories: its next token."""
        assert self._draft is not None
        self._rounds = None
        speculator = self._lent.enter_context(self._decoders.speculator(row.trajectory, self._draft))
        hidden = speculator.prefill(row.history if not row.ids else row.history[:-1])
        (choice,) = sample(self.model.head(hidden)[None, : self.model.config.vocab], [row.draw()])
        self.draft_report.verifications += 1  # this pass, which gave a token
        last, wanted = (row.ids[-1], len(row.ids)) if row.ids else (choice.token, 1)
        verdicts = speculator.follow(last, row.request.max_tokens - wanted)
        self._rounds = _Rounds(row.ticket, row.length + (not row.ids), verdicts)
        return choice

    def _next_round(self, row: RowState) -> list[Choice]:
        rounds, self._rounds = self._rounds, None
        if rounds is None or (rounds.ticket, rounds.length) != (row.ticket, row.length):
            self._lent.close()
            self._start_drafting(row)
            rounds = self._rounds
            assert rounds is not None
        verdict = next(rounds.verdicts)
        self.draft_report.drafted += verdict.drafted
        self.draft_report.accepted += len(verdict.tokens) - 1
        self.draft_report.verifications += 1
        self._rounds = _Rounds(row.ticket, row.length + len(verdict.tokens), rounds.verdicts)
        return [Choice(token, logprob) for token, logprob in zip(verdict.tokens, verdict.logprobs, strict=True)]
