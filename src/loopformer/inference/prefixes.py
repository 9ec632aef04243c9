"""Prompts that were run lately, so that what a new one shares with them is not run again.

prefixes = Prefixes(most_tokens=4096)
prefixes.keep(prompt, cache.read(0))
kept, shared = prefixes.find(route, other_prompt)    # the longest common beginning

Keys of one trajectory mean nothing under another, so only prompts of the same trajectory share. What was used
longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopformer.model.cache import RowKeys
from loopformer.trajectory import Trajectory

WORTH_SHARING = 8  # tokens; fewer are run again


@dataclass(frozen=True)
class Prefix:
    """A prompt and its keys."""

    tokens: tuple[int, ...]
    keys: RowKeys


class Prefixes:
    """At most `most_tokens` tokens of prompts, the one used last at the end."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._kept: list[Prefix] = []

    @property
    def tokens(self) -> int:
        return sum(len(prefix.tokens) for prefix in self._kept)

    def find(self, route: Trajectory, prompt: Sequence[int]) -> tuple[RowKeys, int]:
        """The keys of the prompt that shares the longest beginning, and its length; all but the last token at most,
        since that one's output is what is wanted."""
        best = max(self._along(route), key=lambda prefix: common(prefix.tokens, prompt), default=None)
        shared = min(common(best.tokens, prompt), len(prompt) - 1) if best is not None else 0
        if best is None or shared == 0:
            return RowKeys(route, []), 0
        self._kept = [prefix for prefix in self._kept if prefix is not best] + [best]
        return best.keys, shared

    def keep(self, prompt: Sequence[int], keys: RowKeys) -> None:
        """Remember a prompt, unless nearly all of it is remembered; one that it begins with is then forgotten."""
        same = self._along(keys.route)
        known = max((common(one.tokens, prompt) for one in same), default=0)
        if len(prompt) > self.most_tokens or len(prompt) - known < WORTH_SHARING:
            return
        beginnings = [one for one in same if common(one.tokens, prompt) == len(one.tokens)]
        self._kept = [one for one in self._kept if not any(one is other for other in beginnings)]
        self._kept.append(Prefix(tuple(prompt), keys.copy()))
        while self.tokens > self.most_tokens:
            del self._kept[0]

    def _along(self, route: Trajectory) -> list[Prefix]:
        return [prefix for prefix in self._kept if prefix.keys.route == route]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
