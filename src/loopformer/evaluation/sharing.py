"""What has to be run to score continuations: each distinct row once, and what rows begin with in common once.

    span = Span((*context, *continuation), scored=len(continuation))
    pieces = span.windows(limit=1024)              # one, unless the continuation alone is longer
    for batch in plan(pieces, limit=1024): ...     # rows of about the same length together

The four answers to a question share the question. Rows are put in order of their tokens, so that those that begin
alike are neighbours; neighbours that share half of what comes before their scored tokens or more become a family,
whose common beginning is run once and continued by each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loopformer.inference.prefixes import common

Tokens = tuple[int, ...]
WORTH_SHARING = 8  # tokens; for fewer it is not worth to keep their keys


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
class Batch:
    """Rows to run together; `questions` says which row answers which window."""

    prefixes: tuple[Tokens, ...]  # run once each; none where rows share nothing
    owners: tuple[int, ...]  # the prefix that each row continues, in ascending order
    rows: tuple[Tokens, ...]  # what is run of each row after its prefix
    questions: tuple[tuple[int, int], ...]  # (row, number of the window)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(map(len, self.prefixes)) + sum(map(len, self.rows))


@dataclass(frozen=True)
class _Family:
    """Distinct rows that begin with the same `shared` tokens."""

    rows: tuple[Tokens, ...]
    shared: int

    @property
    def longest(self) -> int:
        """Tokens of the longest row after what is shared."""
        return max(map(len, self.rows)) - self.shared


def plan(windows: Sequence[Window], limit: int, batch_tokens: int = 8192, share: bool = True) -> list[Batch]:
    """Batches of about `batch_tokens` tokens that answer all windows, the longest first.

    `limit` is the model's context; `share` False runs every distinct row whole.
    """
    asked: dict[Tokens, list[int]] = {}
    before: dict[Tokens, int] = {}  # tokens of a row whose outputs nobody asks for
    for number, window in enumerate(windows):
        asked.setdefault(window.inputs, []).append(number)
        free = len(window.inputs) - len(window.targets)
        before[window.inputs] = min(free, before.get(window.inputs, free))
    families = [*_families(sorted(asked), before)] if share else [_Family((row,), 0) for row in asked]
    batches = []
    for together in (False, True):  # rows that share and rows that do not are run in different ways
        kind = [family for family in families if (family.shared > 0) is together]
        batches += [_batch(batch, asked) for batch in _gather(kind, limit, batch_tokens)]
    return batches


def _families(rows: Sequence[Tokens], before: dict[Tokens, int]) -> Iterator[_Family]:
    """Cut rows, which are in order, where neighbours begin differently."""
    run: list[Tokens] = []
    shared = 0
    for row in rows:
        alike = min(common(run[-1], row), before[run[-1]], before[row]) if run else 0
        if run and alike >= max(WORTH_SHARING, min(before[run[-1]], before[row]) / 2):
            shared = alike if len(run) == 1 else min(shared, alike)
        else:
            if run:
                yield _Family(tuple(run), shared)
            run, shared = [], 0
        run.append(row)
    if run:
        yield _Family(tuple(run), shared)


def _gather(families: Sequence[_Family], limit: int, batch_tokens: int) -> Iterator[list[_Family]]:
    """Families of about the same lengths together; a family that is too large for a batch is cut."""
    batch: list[_Family] = []
    rows = shared = longest = 0
    for family in sorted(families, key=lambda one: (-one.shared, -one.longest, one.rows)):
        most = max(1, batch_tokens // (family.shared + family.longest))
        for start in range(0, len(family.rows), most):
            part = _Family(family.rows[start : start + most], family.shared)
            wide = max(shared, part.shared), max(longest, part.longest)
            # A row is given room for the longest beginning and the longest rest, which must fit the context.
            if batch and (sum(wide) > limit or (rows + len(part.rows)) * sum(wide) > batch_tokens):
                yield batch
                batch, rows, wide = [], 0, (part.shared, part.longest)
            batch.append(part)
            rows += len(part.rows)
            shared, longest = wide
    if batch:
        yield batch


def _batch(families: Sequence[_Family], asked: dict[Tokens, list[int]]) -> Batch:
    rows = [(owner, family.shared, row) for owner, family in enumerate(families) for row in family.rows]
    return Batch(
        prefixes=tuple(family.rows[0][: family.shared] for family in families if family.shared),
        owners=tuple(owner for owner, _, _ in rows),
        rows=tuple(row[shared:] for _, shared, row in rows),
        questions=tuple((place, number) for place, (_, _, row) in enumerate(rows) for number in asked[row]),
    )
