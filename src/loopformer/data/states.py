"""Words over a finite group, to be tracked: the label at place i is the product of the elements up to it.

    group = Group.named("S3")
    words = group.words(seed=0, stream=TRAIN, numbers=range(64), places=16)     # [64, 16], uniform
    group.products(words)                                                       # their prefix products
    StateLoader(group, context=17, batch=64).batch(step=7)                      # inputs and labels, not shifted

Elements are permutations of 1…m in lexicographic order, the identity first; their names are cycles, `(12)(345)`.
Products are read from left to right: x·y is first x, then y, so the label at place i is the state after i moves.
A word is read after the end token, as any text, so a context of n + 1 holds words of n. Without it a model with
rotary positions could not tell g·g from g: attention gives equal tokens equal outputs, however many they are.

Each element of a word is a hash of (seed, stream, number of the word, place); a training word's number is
step · batch + row. So every step has fresh words, resuming is exact, and ranks and micro-batches change nothing.
Training, validation and test draw from streams of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import get_args

import numpy as np
import numpy.typing as npt

from loopformer.config.run import DataConfig, GroupName
from loopformer.data.loader import NO_LOSS, Batch, mix, stream_key
from loopformer.data.shards import TokenData
from loopformer.data.tokenizer import END, Tokenizer
from loopformer.errors import LoopformerError, nearest, require

Permutation = tuple[int, ...]  # what each of 0…m-1 goes to
WordIds = npt.NDArray[np.int64]

TRAIN, VALIDATION, TEST = 0, 1, 2  # streams of words
GROUPS: list[str] = list(get_args(GroupName))


@dataclass(frozen=True)
class Group:
    """A finite group of permutations; an element's id is its place among them."""

    name: str
    elements: tuple[Permutation, ...]

    @classmethod
    def named(cls, name: str) -> Group:
        """S3, A5 or S5: the symmetric or the alternating (even permutations) group on so many points."""
        if name not in GROUPS:
            raise LoopformerError(f"There is no group {name!r}; {nearest(name, GROUPS, f'choose {_listed()}.')}")
        every = permutations(range(int(name[1:])))
        return cls(name, tuple(one for one in every if name[0] == "S" or _is_even(one)))

    def __len__(self) -> int:
        return len(self.elements)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The elements in cycle notation."""
        return tuple(map(cycles, self.elements))

    @cached_property
    def table(self) -> WordIds:
        """The id of x·y at [x, y]."""
        ids = {element: number for number, element in enumerate(self.elements)}
        return np.array([[ids[tuple(y[point] for point in x)] for y in self.elements] for x in self.elements])

    def words(self, seed: int, stream: int, numbers: Iterable[int], places: int) -> WordIds:
        """Words [B, T] by their numbers, each element uniform."""
        keys = stream_key(seed, stream, np.fromiter(numbers, np.uint64))  # [B]
        drawn = mix(np.add.outer(keys, np.arange(places, dtype=np.uint64)))  # [B, T]
        return (drawn % np.uint64(len(self))).astype(np.int64)

    def products(self, words: WordIds) -> WordIds:
        """The product of each word [B, T] up to and with every place [B, T]."""
        states = words.copy()
        for place in range(1, words.shape[1]):
            states[:, place] = self.table[states[:, place - 1], words[:, place]]
        return states

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Names of elements, apart by spaces ↔ ids; after them the end token, which stands before a word."""
        vocabulary = {name: number for number, name in enumerate((*self.names, END))}
        return Tokenizer(_word_level(vocabulary), f"the tokenizer of {self.name}")

    @property
    def vocab_size(self) -> int:
        """The elements and the end token, which every tokenizer has."""
        return len(self) + 1

    @property
    def tokens(self) -> int:
        """As of a prepared folder; words are drawn, none are stored."""
        return 0

    def batch(self, words: WordIds) -> Batch:
        """Words [B, T] after the end token, and the product at each of their places: both [B, T + 1]."""
        import torch

        before = np.full((len(words), 1), len(self))
        inputs = np.concatenate([before, words], axis=1)
        targets = np.concatenate([np.full_like(before, NO_LOSS), self.products(words)], axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), None)

    @cached_property
    def index_hash(self) -> str:
        """What a run's checkpoints keep of its data: the elements in their order, and how words are drawn."""
        batch = self.batch(self.words(seed=0, stream=TRAIN, numbers=range(16), places=16))
        drawn = [self.elements, batch.inputs.tolist(), batch.targets.tolist()]
        return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


class StateWindows:
    """A fixed number of words from a stream: `windows.batch(0, 8)`."""

    def __init__(self, group: Group, context: int, words: int, seed: int = 0, stream: int = VALIDATION) -> None:
        if words < 1:
            raise LoopformerError(f"There must be 1 word or more, got {words}.")
        self._group, self._places, self._words = group, word_length(context), words
        self._seed, self._stream = seed, stream

    def __len__(self) -> int:
        return self._words

    def batch(self, start: int, stop: int) -> Batch:
        """Words start:stop and their products."""
        numbers = range(self._words)[start:stop]
        return self._group.batch(self._group.words(self._seed, self._stream, numbers, self._places))


class StateLoader:
    """Training batches of fresh words by step number."""

    def __init__(self, group: Group, context: int, batch: int, seed: int = 0) -> None:
        self.batch_size = batch
        self._group, self._places, self._seed = group, word_length(context), seed

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows start:stop of the global batch of a step."""
        first, rows = step * self.batch_size, range(self.batch_size)[start:stop]
        numbers = range(first + rows.start, first + rows.stop)
        return self._group.batch(self._group.words(self._seed, TRAIN, numbers, self._places))

    def epoch(self, step: int) -> float:
        """No word comes again."""
        return 0.0


def open_data(config: DataConfig) -> TokenData | Group:
    """What a run trains on: the training split of a prepared folder, or a group's words."""
    return TokenData.open(config.path, "train") if config.states is None else Group.named(config.states)


def word_length(context: int) -> int:
    """The elements of a word that fills a context, after the end token."""
    require(context >= 2, f"Words need a model.context of 2 or more, got {context}.")
    return context - 1


def cycles(permutation: Permutation) -> str:
    """A permutation in cycle notation, its points counted from 1: (1, 0, 2) is `(12)`, the identity `()`."""
    text, seen = "", set[int]()
    for start, after in enumerate(permutation):
        if start not in seen and after != start:
            point, cycle = start, list[int]()
            while point not in seen:
                seen.add(point)
                cycle.append(point)
                point = permutation[point]
            text += f"({''.join(str(point + 1) for point in cycle)})"
    return text or "()"


def _is_even(permutation: Permutation) -> bool:
    pairs = ((a, b) for place, a in enumerate(permutation) for b in permutation[place + 1 :])
    return sum(a > b for a, b in pairs) % 2 == 0


def _listed() -> str:
    return f"{', '.join(GROUPS[:-1])} or {GROUPS[-1]}"


def _word_level(vocabulary: dict[str, int]) -> str:
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    library = Library(models.WordLevel(vocabulary))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return library.to_str()
