"""Many trajectories over the same tokens: what their first steps have in common is computed once.

    walker = Walker(model, Trajectory.enumerate(8, 4))
    for trajectory, hidden in walker.walk(ids): ...      # hidden [B, T, D] after the final norm
    shared_passes(walker.routes)                         # 90, where each on its own would take 140

A pass is told only its (t, Δ), so trajectories that begin with the same steps share the states after them exactly.
They are walked as a tree, depth first; only the states on the current path are kept, M + 1 of them.

What has to be run to score continuations: each distinct row once, and what rows begin with in common once.

    span = Span((*context, *continuation), scored=len(continuation))
    pieces = span.windows(limit=1024)              # one, unless the continuation alone is longer
    for batch in plan(pieces, limit=1024): ...     # packs of about the same length together

The four answers to a question share the question. Rows are put in order of their tokens, so that those that begin
alike are neighbours; neighbours that share half of what comes before their scored tokens or more become one pack:
their common beginning, then the rest of each. A rest sees the beginning and itself, at the positions it would have
alone, so the outputs are those of the rows run one by one.

Log-likelihoods of continuations along a trajectory: what lm-evaluation-harness asks a model, without it.

    spans = encode_pairs(tokenizer, [("The sky is", " blue")]) + encode_texts(tokenizer, ["A whole text."])
    scored = loglikelihoods(model, spans, Trajectory.uniform(4))
    scored.answers[0]          # (log-likelihood, whether greedy decoding would have given it)
    scored.tokens              # tokens run; sharing.py says why they are fewer than asked for
    loglikelihoods_along(model, spans, routes)[route]    # several trajectories, equal first steps computed once

The log-softmax is in fp32 over the tokenizer's ids, and sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import RunFailed, require
from loopformer.inference.decode import common, padded
from loopformer.model import LoopedLM
from loopformer.model.block import Rotary
from loopformer.trajectory import Trajectory


class Walker:
    """A model and the trajectories to follow, their modulations computed once for any number of batches."""

    @torch.no_grad()
    def __init__(self, model: LoopedLM, trajectories: Iterable[Trajectory]) -> None:
        self.model = model
        self.trajectories = sorted(
            set(trajectories), key=lambda trajectory: trajectory.steps
        )  # equal beginnings side by side
        self._told: dict[tuple[Fraction, Fraction], Tensor | None] = {}  # (t, Δ) → modulation [1, k, 4, D]
        for trajectory in self.trajectories:
            places = list(zip(trajectory.times, trajectory.steps, strict=True))
            if not self._told.keys() >= set(places):
                self._told.update(zip(places, model.passes(trajectory, 1).modulations, strict=True))

    @torch.no_grad()
    def walk(self, ids: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """Each trajectory with the hidden states [B, T, D] of ids [B, T] at its end."""
        yield from self.walk_from(*self.model.embed(ids))

    @torch.no_grad()
    def walk_from(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None
    ) -> Iterator[tuple[Trajectory, Tensor]]:
        """The same from the state before the first pass [B, T, D]."""
        path: list[Tensor] = [x]  # path[i]: the state after i steps of `before`
        before: tuple[Fraction, ...] = ()
        for trajectory in self.trajectories:
            del path[1 + _common(before, trajectory.steps) :]
            for number in range(len(path) - 1, len(trajectory)):
                told = self._told[trajectory.times[number], trajectory.steps[number]]
                path.append(self.model.stack(path[-1], told, rotary, mask))
            before = trajectory.steps
            yield trajectory, self.model.final_norm(path[-1])


def shared_passes(trajectories: Iterable[Trajectory]) -> int:
    """Passes through the stack that these trajectories take together."""
    return len(
        {trajectory.steps[:length] for trajectory in trajectories for length in range(1, len(trajectory) + 1)}
    )


def _common(one: tuple[Fraction, ...], other: tuple[Fraction, ...]) -> int:
    """How many first steps are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


Tokens = tuple[int, ...]


WORTH_SHARING = 8  # tokens


_LONGEST = 2  # contexts in a pack; what attention costs grows with the square of its length


@dataclass(frozen=True)
class Window:
    """Run `inputs`: the last outputs are asked for `targets`, one each."""

    inputs: Tokens
    targets: Tokens


@dataclass(frozen=True)
class Span:
    """Tokens of which the last `scored` are scored, each given those before it."""

    tokens: Tokens
    scored: int

    def windows(self, limit: int) -> list[Window]:
        """Each scored token once, given as many tokens before it as a context of `limit` leaves room for.

        What does not fit is cut off from the left, as lm-evaluation-harness does. More than `limit` scored tokens
        are scored part by part.
        """
        start = len(self.tokens) - self.scored
        ends = [*range(start + limit, len(self.tokens), limit), len(self.tokens)] if self.scored else []
        return [
            Window(self.tokens[max(0, end - limit - 1) : end - 1], self.tokens[first:end])
            for first, end in pairwise([start, *ends])
        ]


@dataclass(frozen=True)
class Pack:
    """Distinct rows as one sequence: the tokens they share, then the rest of each."""

    shared: Tokens
    rests: tuple[Tokens, ...]

    @property
    def rows(self) -> list[Tokens]:
        return [self.shared + rest for rest in self.rests]

    def __len__(self) -> int:
        return len(self.shared) + sum(map(len, self.rests))

    @property
    def ends(self) -> list[int]:
        """Where each rest ends in the sequence."""
        ends = [len(self.shared)]
        for rest in self.rests:
            ends.append(ends[-1] + len(rest))
        return ends[1:]


@dataclass(frozen=True)
class Batch:
    """Packs to run together, and the windows that they answer."""

    packs: tuple[Pack, ...]
    questions: tuple[tuple[int, int, int], ...]  # (pack, where its row ends in the pack, number of the window)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(map(len, self.packs))

    @property
    def plain(self) -> bool:
        """Nothing is shared: every pack is one row."""
        return all(len(pack.rests) == 1 for pack in self.packs)


def plan(windows: Sequence[Window], limit: int, batch_tokens: int = 8192, share: bool = True) -> list[Batch]:
    """Batches of at most `batch_tokens` tokens, or of one pack, that answer all windows; the longest packs first.

    `limit` is the model's context; `share` False runs every distinct row whole.
    """
    asked: dict[Tokens, list[int]] = {}
    before: dict[Tokens, int] = {}  # tokens of a row whose outputs nobody asks for
    for number, window in enumerate(windows):
        asked.setdefault(window.inputs, []).append(number)
        free = len(window.inputs) - len(window.targets)
        before[window.inputs] = min(free, before.get(window.inputs, free))
    families = _families(sorted(asked), before) if share else (([row], 0) for row in asked)
    packs = [pack for rows, shared in families for pack in _packs(rows, shared, _LONGEST * limit)]
    batches = []
    for alone in (True, False):  # rows of their own need no mask
        kind = [pack for pack in packs if (len(pack.rests) == 1) is alone]
        batches += [_batch(batch, asked) for batch in _gather(kind, batch_tokens)]
    return batches


def _families(rows: Sequence[Tokens], before: dict[Tokens, int]) -> Iterator[tuple[list[Tokens], int]]:
    """Rows, which are in order, cut where neighbours begin differently; and how many tokens each part shares."""
    run: list[Tokens] = []
    shared = 0
    for row in rows:
        alike = min(common(run[-1], row), before[run[-1]], before[row]) if run else 0
        if run and alike >= max(WORTH_SHARING, min(before[run[-1]], before[row]) / 2):
            shared = alike if len(run) == 1 else min(shared, alike)
        else:
            if run:
                yield run, shared
            run, shared = [], 0
        run.append(row)
    if run:
        yield run, shared


def _packs(rows: Sequence[Tokens], shared: int, longest: int) -> Iterator[Pack]:
    """A family as packs of at most `longest` tokens, or of one row."""
    rests: list[Tokens] = []
    length = shared
    for row in rows:
        if rests and length + len(row) - shared > longest:
            yield Pack(rows[0][:shared], tuple(rests))
            rests, length = [], shared
        rests.append(row[shared:])
        length += len(row) - shared
    yield Pack(rows[0][:shared], tuple(rests))


def _gather(packs: Sequence[Pack], batch_tokens: int) -> Iterator[list[Pack]]:
    """Packs of about the same length together."""
    batch: list[Pack] = []
    for pack in sorted(packs, key=lambda one: (-len(one), one.shared, one.rests)):
        if batch and (len(batch) + 1) * len(batch[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(pack)
    if batch:
        yield batch


def _batch(packs: Sequence[Pack], asked: dict[Tokens, list[int]]) -> Batch:
    questions = (
        (place, end, number)
        for place, pack in enumerate(packs)
        for row, end in zip(pack.rows, pack.ends, strict=True)
        for number in asked[row]
    )
    return Batch(tuple(packs), tuple(questions))


Answer = tuple[float, bool]  # log-likelihood; whether each token was the most likely one


Count = Callable[[int, int], None]  # how many are done, of how many


BATCH_TOKENS = 8192


_LOGITS = 1 << 24  # numbers in a chunk of logits


@contextmanager
def fitting(batch_tokens: int) -> Iterator[None]:
    """Batches of this size; those that do not fit the device's memory are one sentence."""
    require(batch_tokens >= 1, f"--batch-tokens must be 1 or more, got {batch_tokens}.")
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"Batches of {batch_tokens} tokens do not fit into the device's memory; lower --batch-tokens."
        ) from error


@dataclass(frozen=True)
class Scored:
    """Answers in the order asked; `tokens` were run for them, and `cut` of them did not fit the context."""

    answers: list[Answer]
    tokens: int
    cut: int


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Span]:
    """Contexts and their continuations as tokens, exactly as lm-evaluation-harness splits them.

    Spaces at the end of a context belong to the continuation; both are tokenized together and the context's own
    number of tokens is taken off. An empty context is the end token.
    """
    texts = {text for context, continuation in pairs for text in _texts(context, continuation)}
    ids = dict(zip(texts, tokenizer.encode_batch(list(texts)), strict=True))
    spans = []
    for context, continuation in pairs:
        head, whole = (ids[text] for text in _texts(context, continuation))
        before, scored = head, whole[len(head) :]
        if not before:
            before, scored = (whole[:1], whole[1:]) if whole[:1] == [tokenizer.eot] else ([tokenizer.eot], whole)
        require(
            len(scored) > 0,
            f"The continuation {continuation[:40]!r} adds no token to its context {context[-40:]!r}; "
            "the task cannot be scored with this tokenizer.",
        )
        spans.append(Span((*before, *scored), len(scored)))
    return spans


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Span]:
    """Whole texts, scored from their first token on, which follows the end token."""
    return [Span((tokenizer.eot, *ids), len(ids)) for ids in tokenizer.encode_batch(texts)]


def _texts(context: str, continuation: str) -> tuple[str, str]:
    """The context without its last spaces, and everything."""
    return context.rstrip(), context + continuation


def loglikelihoods(
    model: LoopedLM,
    spans: Sequence[Span],
    trajectory: Trajectory,
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    count: Count | None = None,
) -> Scored:
    """Score spans along one trajectory; `share` False computes what they have in common again for each."""
    return loglikelihoods_along(model, spans, [trajectory], batch_tokens, share, count)[trajectory]


@torch.no_grad()
def loglikelihoods_along(
    model: LoopedLM,
    spans: Sequence[Span],
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    count: Count | None = None,
) -> dict[Trajectory, Scored]:
    """Score spans along several trajectories, batch by batch; what their first steps share is computed once."""
    limit, vocab = model.config.context, model.config.vocab
    largest = max((max(span.tokens) for span in spans), default=0)
    require(
        largest < vocab,
        f"The requests have token ids up to {largest} but the model knows {vocab}; "
        "is this the model's own tokenizer?",
    )
    windows: list[Window] = []
    belong: list[int] = []  # the span of each window
    for number, span in enumerate(spans):
        pieces = span.windows(limit)
        windows += pieces
        belong += [number] * len(pieces)
    walker = Walker(model, trajectories)
    totals = {trajectory: [0.0] * len(spans) for trajectory in walker.trajectories}
    greedy = {trajectory: [True] * len(spans) for trajectory in walker.trajectories}
    done = 0
    batches = plan(windows, limit, batch_tokens, share)
    for batch in batches:
        with fitting(batch_tokens):
            for trajectory, hidden in walker.walk_from(*_start(model, batch)):
                found = _answers(model, batch, windows, hidden)
                for (*_, number), (total, first) in zip(batch.questions, found, strict=True):
                    totals[trajectory][belong[number]] += total
                    greedy[trajectory][belong[number]] &= first
        done += len(batch.questions)
        if count:
            count(done * len(spans) // len(windows), len(spans))
    for trajectory, sums in totals.items():
        if not all(map(math.isfinite, sums)):
            raise RunFailed(f"The model's output along {trajectory} is not a number; check its weights and dtype.")
    cut = sum(len(span.tokens) > limit + 1 for span in spans)
    tokens = sum(batch.tokens for batch in batches)
    return {
        trajectory: Scored(list(zip(totals[trajectory], greedy[trajectory], strict=True)), tokens, cut)
        for trajectory in totals
    }


def _answers(model: LoopedLM, batch: Batch, windows: Sequence[Window], hidden: Tensor) -> list[Answer]:
    """The answers to a batch's questions, from its outputs [B, T, D]."""
    length, device = hidden.shape[1], hidden.device
    wanted = [windows[number].targets for *_, number in batch.questions]
    places = [
        pack * length + place
        for (pack, end, _), targets in zip(batch.questions, wanted, strict=True)
        for place in range(end - len(targets), end)
    ]
    states = hidden.flatten(0, 1)[torch.tensor(places, device=device)]  # [N, D]
    asked = torch.tensor([token for targets in wanted for token in targets], device=device)
    logprobs, likely = _logprobs(model, states, asked)
    sizes = [len(targets) for targets in wanted]
    return [
        (math.fsum(part.tolist()), bool(first.all()))
        for part, first in zip(torch.split(logprobs, sizes), torch.split(likely, sizes), strict=True)
    ]


def _start(model: LoopedLM, batch: Batch) -> tuple[Tensor, Rotary | None, Tensor | None]:
    """The states [B, T, D] of packs before the first pass, angles and mask: each row of a pack as if alone."""
    ids, _ = padded(model, [sum(pack.rests, pack.shared) for pack in batch.packs])  # [B, T]
    positions, mask = torch.arange(ids.shape[1], device=ids.device)[None], None
    if not batch.plain:
        positions, _ = padded(model, [_positions(pack) for pack in batch.packs])
        parts, _ = padded(model, [_parts(pack) for pack in batch.packs])
        same = (parts[:, None, :] == parts[:, :, None]) | (parts[:, None, :] == 0)
        mask = same.tril()[:, None]  # [B, 1, T, T]
    x, rotary = model.place(model.tokens(ids), positions)
    return x, rotary, mask


def _positions(pack: Pack) -> list[int]:
    """Where each token would be if its row were alone."""
    start = len(pack.shared)
    return [*range(start), *(start + place for rest in pack.rests for place in range(len(rest)))]


def _parts(pack: Pack) -> list[int]:
    """0 for what all may see, and a number for each rest, which only itself may see."""
    return [0] * len(pack.shared) + [number for number, rest in enumerate(pack.rests, start=1) for _ in rest]


def _logprobs(model: LoopedLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of targets [N] given hidden [N, D], and whether each is the most likely; the head runs in chunks."""
    chunk = max(1, _LOGITS // model.config.vocab_rows)
    found, likely = [], []
    for states, wanted in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
        logprobs = model.head(states)[:, : model.config.vocab].float().log_softmax(-1)
        found.append(logprobs.gather(1, wanted[:, None])[:, 0])
        likely.append(logprobs.argmax(-1) == wanted)
    return torch.cat(found).cpu(), torch.cat(likely).cpu()
