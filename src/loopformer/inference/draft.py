"""Self-speculative decoding: the same weights draft along a short trajectory and verify along the full one.

results, report = speculate(model, tokenizer, requests, Draft(Trajectory.uniform(1), length=4))

Several drafted tokens are checked in one pass of the full trajectory. Greedy text is the full model's own; sampled
text follows the full model's distribution, by the usual rule: keep a drafted token with probability
min(1, p_full / p_draft), else draw from what p_full has more of. A short trajectory is not a prefix of the long
one, so the draft has a cache of its own; `Draft(full, length, passes=2)` instead drafts along the first passes of
the full trajectory and stops there, which training does not prepare a model for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import require
from loopformer.inference.decode import padded
from loopformer.inference.request import Event, Request, Result, RowState
from loopformer.inference.sampling import is_whole, probabilities
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache
from loopformer.trajectory import Trajectory

LONGEST = 8  # tokens that an adapted draft has at most


HOPED_RATE = 0.7  # share of the drafted tokens that is kept, before anything is known


WEIGHT_OF_ONE = 0.05  # of each further token in the share: what was kept among about the last 20 counts


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted; `length` None adapts it to what is accepted."""

    trajectory: Trajectory
    length: int | None = 4
    passes: int | None = None  # stop after so many passes of the trajectory

    def __post_init__(self) -> None:
        trajectory = self.trajectory
        require(isinstance(trajectory, Trajectory), f"A draft follows a Trajectory, not {trajectory!r}.")
        whole = self.length is None or (is_whole(self.length) and self.length >= 1)
        require(whole, f"A draft needs 1 token or more, a whole number; got {self.length!r}.")
        require(
            self.passes is None or 1 <= self.passes <= self.trajectory.budget,
            f"A draft stops after 1 to {self.trajectory.budget} passes of its trajectory, not {self.passes}.",
        )

    @property
    def budget(self) -> int:
        return self.passes or self.trajectory.budget


@dataclass(frozen=True)
class Report:
    """What speculation did: tokens drafted and kept, and passes of the full trajectory."""

    drafted: int
    accepted: int
    verifications: int
    tokens: int

    @property
    def acceptance(self) -> float | None:
        """The share that was kept; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@torch.no_grad()
def speculate(
    model: LoopedLM,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    draft: Draft,
    show: Callable[[Event], object] = lambda event: None,
) -> tuple[list[Result], Report]:
    """Run requests to their ends; the texts are those of `generate`, greedily to the letter.

    `show` gets the events as they come.
    """
    model.resolve(draft.trajectory)
    rows = [RowState(number, request, tokenizer, model.config) for number, request in enumerate(requests)]
    results: dict[int, Result] = {}
    drafted = accepted = verifications = 0
    prompts = [row.request.prompt for row in rows]
    full = model.cache([row.request.trajectory for row in rows], len(rows))
    short = model.cache(draft.trajectory, len(rows), passes=draft.passes)
    # The last token of a row is never in a cache: the next pass puts it there.
    _fill(model, full, [prompt[:-1] for prompt in prompts])
    _fill(model, short, [prompt[:-1] for prompt in prompts])
    rate = HOPED_RATE
    while rows:
        room = min(row.places_left for row in rows)
        wanted = max(row.request.max_tokens - len(row.ids) for row in rows) - 1  # one comes from the verification
        budget = round(sum(row.trajectory.budget for row in rows) / len(rows))
        length = min(draft.length or best_length(model, draft, budget, rate), wanted, max(0, room))
        proposals, beliefs = _draft(model, short, rows, length)
        verdict = _verify(model, full, rows, proposals)
        verifications += len(rows)
        kept_rows, going = [], []
        for place, row in enumerate(rows):
            kept, events = _accept(row, proposals[place], beliefs[place], verdict[place])
            for event in events:
                show(event)
            drafted, accepted = drafted + length, accepted + kept
            if (result := events[-1].result) is not None:
                results[row.number] = result
            else:
                rate = updated_rate(rate, length, kept)
                kept_rows.append(row)
                going.append(place)
        rows = kept_rows
        if rows:
            if len(going) < len(full.lengths):
                full, short = full.select(going), short.select(going)
            for cache in (full, short):
                cache.lengths = [min(known, row.length - 1) for known, row in zip(cache.lengths, rows, strict=True)]
    ordered = [results[number] for number in range(len(requests))]
    return ordered, Report(drafted, accepted, verifications, sum(len(result.ids) for result in ordered))


def best_length(model: LoopedLM, draft: Draft, budget: int, rate: float) -> int:
    """The draft length with the most tokens per FLOP, verified at this budget, if each drafted token is kept
    with this probability."""
    price = model.cost.forward_flops(draft.budget) / model.cost.forward_flops(budget)
    rate = min(rate, 0.99)

    def gain(length: int) -> float:
        return (1 - rate ** (length + 1)) / (1 - rate) / (1 + length * price)

    return max(range(1, LONGEST + 1), key=gain)


def updated_rate(rate: float, drafted: int, kept: int) -> float:
    """The probability that a drafted token is kept, after one more draft.

    Each token that was tested counts: those that were kept and the one after them. What follows was never tested.
    """
    for number in range(min(kept + 1, drafted)):
        rate += WEIGHT_OF_ONE * ((number < kept) - rate)
    return rate


def _fill(model: LoopedLM, cache: Cache, prompts: Sequence[Sequence[int]]) -> None:
    """Run all but the last token of each prompt."""
    if any(prompts):
        ids, counts = padded(model, prompts)
        model.extend(ids, cache, counts)


def _draft(
    model: LoopedLM, cache: Cache, rows: list[RowState], length: int
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """`length` tokens for each row, and the distributions they were drawn from."""
    proposals: list[list[int]] = [[] for _ in rows]
    beliefs: list[list[Tensor]] = [[] for _ in rows]
    # The draft's cache may lack the last two tokens of a row: after a draft that was kept whole, its last one too.
    behind = [row.length - known for row, known in zip(rows, cache.lengths, strict=True)]
    for turn in range(length):
        if turn == 0:
            new = [list(row.tail(count)) for row, count in zip(rows, behind, strict=True)]
        else:
            new = [proposal[-1:] for proposal in proposals]
        ids, counts = padded(model, new)
        hidden = model.extend(ids, cache, counts)
        for place, row in enumerate(rows):
            logits = model.head(hidden[place, counts[place] - 1])[: model.config.vocab]
            likely = probabilities(logits, row.request.sampling, (*row.history, *proposals[place]))
            beliefs[place].append(likely)
            proposals[place].append(row.draw(likely))
    return proposals, beliefs


def _verify(model: LoopedLM, cache: Cache, rows: list[RowState], proposals: list[list[int]]) -> Tensor:
    """Logits of the full trajectory after the last token and after each drafted one [rows, length + 1, V]."""
    new = [[row.history[-1], *proposal] for row, proposal in zip(rows, proposals, strict=True)]
    hidden = model.extend(padded(model, new)[0], cache)
    return model.head(hidden)[..., : model.config.vocab]


def _accept(row: RowState, proposal: list[int], beliefs: list[Tensor], logits: Tensor) -> tuple[int, list[Event]]:
    """Keep what the full trajectory agrees with, and one token of its own: how many were kept, and the events."""
    events: list[Event] = []
    for number, (token, belief) in enumerate(zip(proposal, beliefs, strict=True)):
        wanted = probabilities(logits[number], row.request.sampling, row.history)
        if row.random() < float(wanted[token] / belief[token]):
            events.append(row.add(token, logits[number]))
            if events[-1].result is not None:
                return number + 1, events
            continue
        rest = (wanted - belief).clamp(min=0)
        return number, [*events, row.add(row.draw(rest / rest.sum()), logits[number])]
    last = logits[len(proposal)]
    own = row.draw(probabilities(last, row.request.sampling, row.history))
    return len(proposal), [*events, row.add(own, last)]
