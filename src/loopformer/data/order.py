"""Which sample comes at which position: arithmetic, not arrays.

    order = Order(seed=0, sizes=(1000, 50), weights=(3, 1))
    order.locate(np.arange(480))      # source, sample and epoch of each position

Within a source each epoch is its own random permutation of all samples: a Feistel network on the next power of
four, repeated until it lands inside. A mixture repeats a block of positions in which each source has its share,
every block shuffled in its own way. So any position costs the same, nothing is stored, and resuming or cutting
a batch among ranks cannot change the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loopformer.errors import LoopformerError

UInt64s = npt.NDArray[np.uint64]

BLOCK = 4096  # positions in which a mixture's shares are exact, rounded to whole samples
_ROUNDS = 6
_BLOCKS_KEY = 2**32  # keys the shuffling of blocks; below it are sources


class Located(NamedTuple):
    """For each position: the source, the sample in it, and how often that source was gone through before."""

    source: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """A seeded order over sources of `sizes` samples, drawn in proportion to `weights`."""

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights) or min(self.sizes, default=0) < 1:
            raise LoopformerError("An order needs at least one sample and a weight for every source.")
        if self.seed < 0:
            raise LoopformerError(f"A seed must be 0 or more, got {self.seed}.")
        if min(self.shares) == 0:
            raise LoopformerError(
                f"The smallest weight {min(self.weights):g} is under 1/{BLOCK} of the mixture; raise it or drop it."
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """How many positions of a block belong to each source."""
        return shares(self.weights, BLOCK) if len(self.sizes) > 1 else (BLOCK,)

    def locate(self, positions: npt.ArrayLike) -> Located:
        where = np.asarray(positions, dtype=np.uint64)
        block, place = np.divmod(where, np.uint64(BLOCK))
        slot = permute(place, BLOCK, stream_key(self.seed, _BLOCKS_KEY, block)) if len(self.sizes) > 1 else place
        ends = np.cumsum(self.shares)
        source = np.searchsorted(ends, slot, side="right")
        sample, epoch = np.empty_like(where), np.empty_like(where)
        for number, (size, share, end) in enumerate(zip(self.sizes, self.shares, ends, strict=True)):
            own = source == number
            # Positions of this source before this one: its share of every earlier block, then its slots.
            running = block[own] * np.uint64(share) + slot[own] - np.uint64(end - share)
            epoch[own], inside = np.divmod(running, np.uint64(size))
            sample[own] = permute(inside, size, stream_key(self.seed, number, epoch[own]))
        return Located(source.astype(np.int64), sample.astype(np.int64), epoch.astype(np.int64))

    def drawn(self, position: int) -> list[int]:
        """How many samples of each source come before a position."""
        block, place = divmod(position, BLOCK)
        rest = self.locate(np.arange(block * BLOCK, block * BLOCK + place)).source
        counts = np.bincount(rest, minlength=len(self.sizes))
        return [block * share + int(count) for share, count in zip(self.shares, counts, strict=True)]


def permute(index: UInt64s, size: int, key: UInt64s) -> UInt64s:
    """A bijection of 0 … size-1 for each key."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [mix(key + np.uint64(number)) for number in range(_ROUNDS)]
    result = index.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], half, [key[outside] for key in keys])
        outside = outside[result[outside] >= size]
    return result


def shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole parts of `total` in proportion to the weights, by largest remainder."""
    exact = [Fraction(weight) for weight in weights]
    wanted = [weight * total / sum(exact) for weight in exact]
    parts = [int(part) for part in wanted]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - wanted[i], i))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return tuple(parts)


def _feistel(value: UInt64s, half: int, keys: Sequence[UInt64s]) -> UInt64s:
    """A bijection of 0 … 4^half-1: each round mixes one half with a hash of the other."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def stream_key(seed: int, stream: int, number: UInt64s) -> UInt64s:
    start = mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(stream)
    return mix(mix(start) + number)


def mix(value: UInt64s) -> UInt64s:
    """SplitMix64's step: 64 bits in, 64 well mixed bits out, wrapping on purpose."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
