"""What has to be run to score continuations: each distinct row once, and what rows begin with in common once.

    span = Span((*context, *continuation), scored=len(continuation))
    pieces = span.windows(limit=1024)              # one, unless the continuation alone is longer
    for batch in plan(pieces, limit=1024): ...     # packs of about the same length together

The four answers to a question share the question. Rows are put in order of their tokens, so that those that begin
alike are neighbours; neighbours that share half of what comes before their scored tokens or more become one pack:
their common beginning, then the rest of each. A rest sees the beginning and itself, at the positions it would have
alone, so the outputs are those of the rows run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loopformer.inference.prefixes import common

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
