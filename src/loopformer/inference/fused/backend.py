"""Generation through decoders (decoder.py): for few trajectories and many tokens on a GPU.

fast = Fast(model)                                       # Fast.ready(model) says whether it can serve here
for event in fast.generate(tokenizer, requests): ...     # the events of generate.py
results, report = fast.speculate(tokenizer, requests, Draft(Trajectory.uniform(2), length=4))
fast = Fast(model, int8=True)                            # the same with int8 weights

Requests of one trajectory run together, one trajectory after another; with int8 weights in groups of as many as a
decoder takes. When half of a batch is done, the rest goes on in a smaller decoder. With a draft they run one by one
(fast_speculation.py). Nobody shares a decoder, so several texts may be under way at once; what is free again serves
the next, unless the model's weights have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.decode import take_all
from loopformer.inference.draft import Draft, Report
from loopformer.inference.fused.quantise import Weights, quantised
from loopformer.inference.request import Event, Request, Result, RowState
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.fused.decoder import Decoder, Tuning
    from loopformer.inference.fused.speculate import Speculator


# Each that is kept holds keys for the whole context; a batch of 128 that thins out goes through 8 decoders.
MOST_KEPT = 8


Kept = TypeVar("Kept")


class Shelf(Generic[Kept]):
    """What may be used again: lent to one at a time, and of what is free the last few are kept."""

    def __init__(self) -> None:
        self.free: list[tuple[Hashable, Kept]] = []  # the last used at the end

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], Kept]) -> Iterator[Kept]:
        """One of this kind, made if none is free."""
        at = next((at for at, (kind, _) in enumerate(self.free) if kind == key), None)
        one = make() if at is None else self.free.pop(at)[1]
        try:
            yield one
        finally:
            self.free.append((key, one))
            del self.free[:-MOST_KEPT]


class Fast:
    """The decoders of a model, made when they are needed."""

    def __init__(self, model: LoopedLM, int8: bool = False, tuning: Tuning | None = None) -> None:
        self.model, self._int8, self._tuning = model, int8, tuning
        self._seen: list[tuple[int, torch.dtype, int]] = []
        self._weights: Weights | None = None
        self._decoders: Shelf[Decoder] = Shelf()
        self._speculators: Shelf[Speculator] = Shelf()

    @staticmethod
    def ready(model: LoopedLM) -> bool:
        """Whether the kernels can run: on a CUDA device, with Triton installed."""
        return model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None

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

    def speculate(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        draft: Draft,
        show: Callable[[Event], object] = lambda event: None,
    ) -> tuple[list[Result], Report]:
        """As `speculate` of speculative.py, for greedy requests."""
        from loopformer.inference.fused.speculate import speculate_one_by_one

        return speculate_one_by_one(
            self.model, lambda trajectory: self.speculator(trajectory, draft), tokenizer, requests, show
        )

    @torch.no_grad()
    def generate(self, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Event]:
        """Run requests; events come as tokens do."""
        from loopformer.inference.fused.decoder import MOST_INT8_ROWS

        rows = [RowState(number, request, tokenizer, self.model.config) for number, request in enumerate(requests)]
        for trajectory in dict.fromkeys(row.trajectory for row in rows):
            alike = [row for row in rows if row.trajectory == trajectory]
            most = MOST_INT8_ROWS if self._int8 else len(alike)
            for start in range(0, len(alike), most):
                yield from self._run(trajectory, alike[start : start + most])

    def _run(self, trajectory: Trajectory, rows: list[RowState]) -> Iterator[Event]:
        with ExitStack() as lent:
            decoder = lent.enter_context(self.decoder(trajectory, len(rows)))
            idle = [[0]] * (decoder.rows - len(rows))
            hidden = decoder.prefill([*(row.request.prompt for row in rows), *idle])
            logits = self.model.head(hidden)[:, : self.model.config.vocab]
            seats = list(range(len(rows)))  # the decoder's row of each that goes on
            while True:
                events = take_all(rows, logits[seats])
                yield from events
                going = [place for place, event in enumerate(events) if event.result is None]
                rows, seats = [rows[place] for place in going], [seats[place] for place in going]
                if not rows:
                    return
                if 2 * len(rows) <= decoder.rows:
                    smaller = lent.enter_context(self.decoder(trajectory, len(rows)))
                    smaller.adopt(decoder, seats)
                    decoder, seats = smaller, list(range(len(rows)))
                tokens = torch.zeros(decoder.rows, dtype=torch.long)
                tokens[seats] = torch.tensor([row.ids[-1] for row in rows])
                decoder.rest(seats)
                logits = decoder.step(tokens)

    def _look_at_weights(self) -> None:
        """Forget what was made for other weights than those of now: graphs and int8 copies still have them."""
        seen = [
            (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
            for weight in self.model.parameters()
        ]
        if seen != self._seen:
            self._seen, self._decoders, self._speculators = seen, Shelf(), Shelf()
            self._weights = quantised(self.model) if self._int8 else None
