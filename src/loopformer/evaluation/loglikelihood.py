"""Log-likelihoods of continuations along a trajectory: what lm-evaluation-harness asks a model, without it.

    spans = encode_pairs(tokenizer, [("The sky is", " blue")]) + encode_texts(tokenizer, ["A whole text."])
    scored = loglikelihoods(model, spans, Trajectory.uniform(4))
    scored.answers[0]          # (log-likelihood, whether greedy decoding would have given it)
    scored.tokens              # tokens run; sharing.py says why they are fewer than asked for
    loglikelihoods_along(model, spans, routes)[route]    # several trajectories, equal first steps computed once

The log-softmax is in fp32 over the tokenizer's ids, and sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import RunFailed, require
from loopformer.evaluation.sharing import Batch, Pack, Span, Window, plan
from loopformer.evaluation.walk import Walker
from loopformer.inference.padding import padded
from loopformer.model import LoopedLM
from loopformer.model.block import Rotary
from loopformer.trajectory import Trajectory

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
    route: Trajectory,
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    count: Count | None = None,
) -> Scored:
    """Score spans along one trajectory; `share` False computes what they have in common again for each."""
    return loglikelihoods_along(model, spans, [route], batch_tokens, share, count)[route]


@torch.no_grad()
def loglikelihoods_along(
    model: LoopedLM,
    spans: Sequence[Span],
    routes: Sequence[Trajectory],
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
    walker = Walker(model, routes)
    totals = {route: [0.0] * len(spans) for route in walker.routes}
    greedy = {route: [True] * len(spans) for route in walker.routes}
    done = 0
    batches = plan(windows, limit, batch_tokens, share)
    for batch in batches:
        with fitting(batch_tokens):
            for route, hidden in walker.walk_from(*_start(model, batch)):
                found = _answers(model, batch, windows, hidden)
                for (*_, number), (total, first) in zip(batch.questions, found, strict=True):
                    totals[route][belong[number]] += total
                    greedy[route][belong[number]] &= first
        done += len(batch.questions)
        if count:
            count(done * len(spans) // len(windows), len(spans))
    for route, sums in totals.items():
        if not all(map(math.isfinite, sums)):
            raise RunFailed(f"The model's output along {route} is not a number; check its weights and dtype.")
    cut = sum(len(span.tokens) > limit + 1 for span in spans)
    tokens = sum(batch.tokens for batch in batches)
    return {route: Scored(list(zip(totals[route], greedy[route], strict=True)), tokens, cut) for route in totals}


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
