"""Generation through decoders (decoder.py): for few trajectories and many tokens on a GPU.

fast = Fast(model)                                       # keeps its decoders; fast.ready says whether it can serve
for event in fast.generate(tokenizer, requests): ...     # the events of generate.py
results, report = fast.speculate(tokenizer, requests, Draft(Trajectory.uniform(2), length=4))

Requests of one trajectory run together, one trajectory after another. When half of a batch is done, the rest goes
on in a smaller decoder. With a draft they run one by one (fast_speculation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.generate import Event, Request, Result, RowState, take_all
from loopformer.inference.quantise import quantised
from loopformer.inference.speculative import Draft, Report
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.inference.decoder import Decoder
    from loopformer.inference.fast_speculation import Speculator


class Fast:
    """The decoders of a model, made when they are first needed."""

    def __init__(self, model: LoopedLM, int8: bool = False) -> None:
        self.model = model
        self._int8 = quantised(model) if int8 else None
        self._decoders: dict[tuple[Trajectory, int], Decoder] = {}
        self._speculators: dict[tuple[Trajectory, Draft], Speculator] = {}

    @staticmethod
    def ready(model: LoopedLM) -> bool:
        """Whether the kernels can run: on a CUDA device, with Triton installed."""
        return model.tokens.weight.device.type == "cuda" and find_spec("triton") is not None

    def decoder(self, route: Trajectory, rows: int) -> Decoder:
        """One for at least so many rows; sizes are powers of two, so that there are few."""
        from loopformer.inference.decoder import Decoder

        size = 1 << (rows - 1).bit_length()
        if (route, size) not in self._decoders:
            self._decoders[route, size] = Decoder(self.model, route, size, self._int8)
        return self._decoders[route, size]

    def speculator(self, route: Trajectory, draft: Draft) -> Speculator:
        """One for this trajectory and draft."""
        from loopformer.inference.fast_speculation import Speculator

        if (route, draft) not in self._speculators:
            self._speculators[route, draft] = Speculator(self.model, route, draft, self._int8)
        return self._speculators[route, draft]

    def speculate(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        draft: Draft,
        show: Callable[[Event], object] = lambda event: None,
    ) -> tuple[list[Result], Report]:
        """As `speculate` of speculative.py, for greedy requests."""
        from loopformer.inference.fast_speculation import speculate_one_by_one

        return speculate_one_by_one(
            self.model, lambda route: self.speculator(route, draft), tokenizer, requests, show
        )

    @torch.no_grad()
    def generate(self, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Event]:
        """Run requests; events come as tokens do."""
        rows = [RowState(number, request, tokenizer, self.model.config) for number, request in enumerate(requests)]
        for route in dict.fromkeys(row.route for row in rows):
            yield from self._run(route, [row for row in rows if row.route == route])

    def _run(self, route: Trajectory, rows: list[RowState]) -> Iterator[Event]:
        decoder = self.decoder(route, len(rows))
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
                smaller = self.decoder(route, len(rows))
                smaller.adopt(decoder, seats)
                decoder, seats = smaller, list(range(len(rows)))
            tokens = torch.zeros(decoder.rows, dtype=torch.long)
            tokens[seats] = torch.tensor([row.ids[-1] for row in rows])
            decoder.rest(seats)
            logits = decoder.step(tokens)
