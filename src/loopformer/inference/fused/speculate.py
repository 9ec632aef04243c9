"""Self-speculation on the GPU: a whole round, greedily drafted and verified, is one replayed CUDA graph.

speculator = Speculator(model, Trajectory.uniform(8), Draft(Trajectory.uniform(2), length=4))
first = int(model.head(speculator.prefill(prompt)).argmax())
for verdict in speculator.follow(first, count=64): ...       # verdict.tokens: what was kept, and one more

One sequence at a time. A round drafts `length` tokens with decoders along the short trajectory and verifies them as
that many more rows of a decoder along the full one (decoder.py); the device itself finds out what is kept and where
the next round begins, and the host reads that once a round. Sampled rounds draw their tokens between the graphs of
their decoders, draft and verification with the same noise (sampling.py). Tokens are those of `Decoder.greedy` along
the full trajectory, or drawn like them, up to rounding: matmuls of several rows round otherwise than those of one,
so where the two most likely tokens are equal but for that, either may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loopformer.errors import require
from loopformer.inference.draft import HOPED_RATE, LONGEST, Draft, best_length, updated_rate
from loopformer.inference.fused import kernels
from loopformer.inference.fused.backend import MOST_TOGETHER, longest_draft
from loopformer.inference.fused.decoder import Decoder, Tuning, record
from loopformer.inference.fused.quantise import Weights, plain
from loopformer.inference.sampling import Draw, choose
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

DrawAt = Callable[[int], Draw]


@dataclass(frozen=True)
class Verdict:
    """What a round gave: the drafted tokens that were kept and one more, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    drafted: int


class Speculator:
    """One sequence along a trajectory, drafted along another; the graph of a round for each length of a draft."""

    def __init__(
        self,
        model: LoopedLM,
        trajectory: Trajectory,
        draft: Draft,
        weights: Weights | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self._weights = weights or plain(model)
        most = longest_draft(self._weights.int8)
        require((draft.length or 1) <= most, f"fast drafts at most {most} tokens, got {draft.length}; draft fewer.")
        self.model, self.trajectory, self.draft, self._tuning = model, model.resolve(trajectory), draft, tuning
        self._full, self._short = model.cache(self.trajectory, 1), model.cache(model.resolve(draft.trajectory), 1)
        # Before a draft the context holds a token of the prompt and the one after it.
        self.longest = min(draft.length or LONGEST, most, max(0, self._full.capacity - 2))
        # A draft that was kept whole leaves its last token unrun, so the first pass of the next runs two tokens.
        self._pair, self._next = self._drafter(2), self._drafter(1)
        like = self._pair.ids
        self._ids, self._lengths = like.new_zeros(MOST_TOGETHER), like.new_zeros(MOST_TOGETHER)
        self._verdict = like.new_zeros(MOST_TOGETHER + 1)
        self._tops, self._logprobs = (torch.zeros(MOST_TOGETHER, device=like.device) for _ in range(2))
        self._verifiers: dict[int, Decoder] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._prompt: tuple[int, ...] = ()

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Run a new prompt along both trajectories: hidden [D] of its last token along the full one."""
        require(len(prompt) > 0, "The prompt is empty; give at least one token.")
        self._prompt = tuple(prompt)
        ids = torch.tensor([self._prompt], device=self._ids.device)
        for cache in (self._short, self._full):
            cache.lengths = [0]
            hidden = self.model.extend(ids, cache)
        return hidden[0, -1]

    @torch.no_grad()
    def follow(self, token: int, count: int, draw: DrawAt | None = None) -> Iterator[Verdict]:
        """Tokens after the prompt and `token`, `count` of them or a few more, or fewer where the context ends: the
        most likely ones, or what `draw` says for the number of tokens before each."""
        require(len(self._prompt) > 0, "There is no prompt to follow yet; give one to prefill first.")
        length, said = len(self._prompt), 0  # tokens in the cache: all but the last
        self._pair.ids.copy_(torch.tensor([self._prompt[-1], token]))
        self._pair.lengths.copy_(torch.tensor([length - 1, length]))
        self._ids[0] = token
        self._lengths.copy_(length + torch.arange(MOST_TOGETHER))
        rate = HOPED_RATE
        going = said < count and length < self._full.capacity
        if going:
            drafted = self._start(length, rate, draw)
        while going:
            kept, *tokens = self._verdict.tolist()
            verdict = Verdict(tokens[: kept + 1], self._logprobs[: kept + 1].tolist(), drafted)
            rate = updated_rate(rate, drafted, kept)
            length, said = length + kept + 1, said + kept + 1
            going = said < count and length < self._full.capacity
            if going:  # the device goes on while the text of this round is made
                drafted = self._start(length, rate, draw)
            yield verdict

    def _start(self, length: int, rate: float, draw: DrawAt | None) -> int:
        """Begin a round after so many tokens; how many it drafts."""
        drafted = self.draft.length or best_length(self.model.cost, self.draft, self.trajectory.budget, rate)
        drafted = min(drafted, self.longest)
        room = self._full.capacity - 1 - length
        if drafted > room:  # the last few tokens of a context are not worth compiling for
            drafted = max((rows - 1 for rows in self._verifiers if rows - 1 <= room), default=0)
        if draw is not None:
            self._round(drafted, [draw(length + 1 + number) for number in range(drafted + 1)])
            return drafted
        if self._ids.device.type != "cuda":  # Triton's interpreter
            self._round(drafted)
            return drafted
        if drafted not in self._graphs:
            self._verifier(drafted + 1)
            state = [self._ids, self._lengths, self._pair.ids, self._pair.lengths]
            self._graphs[drafted] = record(self._ids.device, lambda: self._round(drafted), state)
        self._graphs[drafted].replay()
        return drafted

    def _round(self, drafted: int, draws: Sequence[Draw] = ()) -> None:
        """Launch every kernel of a round; `draws` are of the drafted tokens and the one after them."""
        for number in range(drafted):
            self._draft_one(self._next if number else self._pair, draws[number : number + 1])
        verifier = self._verifier(drafted + 1)
        self._run(verifier, draws)
        programs = verifier.best.shape[1]
        kernels.accept_kernel[(1,)](
            verifier.best,
            verifier.where,
            self._ids,
            self._lengths,
            self._pair.ids,
            self._pair.lengths,
            self._verdict,
            self._tops,
            programs,
            T=drafted + 1,
            BLOCK_N=triton.next_power_of_2(programs),
            BLOCK_T=MOST_TOGETHER,
            **verifier.launch,
        )
        total = verifier.logits[:, : self.model.config.vocab].logsumexp(-1)
        torch.sub(self._tops[: drafted + 1], total, out=self._logprobs[: drafted + 1])

    def _run(self, decoder: Decoder, draws: Sequence[Draw]) -> None:
        """Run a decoder; then, of its last rows, drawn tokens take the place of the most likely ones."""
        if not draws:
            decoder.run()
            return
        decoder.replay("stay")
        logits, last = decoder.logits[:, : self.model.config.vocab], slice(-len(draws), None)
        tokens, _ = choose(logits[last], draws)
        decoder.best[last] = -torch.inf
        decoder.best[last, 0] = logits[last].gather(1, tokens[:, None])[:, 0]
        decoder.where[last, 0] = tokens

    def _draft_one(self, decoder: Decoder, draws: Sequence[Draw]) -> None:
        """Run a decoder and draft what its last row says."""
        self._run(decoder, draws)
        programs = decoder.best.shape[1]
        kernels.draft_kernel[(1,)](
            decoder.best,
            decoder.where,
            decoder.lengths,
            self._next.ids,
            self._next.lengths,
            self._ids,
            self._lengths,
            programs,
            ROW=decoder.rows - 1,
            BLOCK_N=triton.next_power_of_2(programs),
            **decoder.launch,
        )

    def _drafter(self, rows: int) -> Decoder:
        trajectory = self.model.resolve(self.draft.trajectory)
        return Decoder(self.model, trajectory, rows, self._weights, self._tuning, together=self._short)

    def _verifier(self, rows: int) -> Decoder:
        """One for each number of rows; they share the tokens, their places and the cache."""
        if rows not in self._verifiers:
            made = Decoder(self.model, self.trajectory, rows, self._weights, self._tuning, together=self._full)
            made.ids, made.lengths = self._ids[:rows], self._lengths[:rows]
            self._verifiers[rows] = made
        return self._verifiers[rows]
