"""Words over a finite group for state tracking: the label at position i is the product of the elements up to it.

    group = Group.named("S3")
    words = group.words(seed=0, stream=TRAIN, numbers=range(64), length=16)     # [64, 16], uniform
    group.products(words)                                                       # their prefix products
    StateLoader(group, context=17, batch=64).batch(step=7)                      # labels align with inputs, no shift

Elements are permutations of 1…m in lexicographic order, the identity first. Their names are cycles, `(12)(345)`.
Products are read from left to right: x·y is first x, then y, so the label at position i is the state after i
moves. The end token precedes every word, as it precedes any text, so a context of n + 1 holds words of n elements.
Without it, a model with rotary positions could not tell g·g from g: attention over identical tokens gives the same
output however many there are.

Each element of a word is a hash of (seed, stream, number of the word, position). The number of a training word is
step · batch + row. So every step has fresh words, resuming is exact, and ranks and micro-batches change nothing.
Training, validation and test draw from different streams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import get_args

import numpy as np
import numpy.typing as npt

from loopformer.config.run import GroupName, RunConfig
from loopformer.data.loader import IGNORE_INDEX, Batch, mix, stream_key
from loopformer.data.tokenizer import END_TOKEN, Tokenizer
from loopformer.errors import LoopformerError, nearest, require

Permutation = tuple[int, ...]  # the image of each of 0…m-1
WordIds = npt.NDArray[np.int64]

TRAIN, VALIDATION, TEST = 0, 1, 2  # streams of words
GROUPS: list[str] = list(get_args(GroupName))


@dataclass(frozen=True)
class Group:
    """A finite group of permutations; the id of an element is its index."""

    name: str
    elements: tuple[Permutation, ...]

    @classmethod
    def named(cls, name: str) -> Group:
        """S3, A5 or S5: the symmetric or the alternating group (even permutations) on three or five points."""
        if name not in GROUPS:
            choices = f"choose {', '.join(GROUPS[:-1])} or {GROUPS[-1]}."
            raise LoopformerError(f"There is no group {name!r}; {nearest(name, GROUPS, choices)}")
        elements = permutations(range(int(name[1:])))
        return cls(name, tuple(element for element in elements if name[0] == "S" or _is_even(element)))

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

    def words(self, seed: int, stream: int, numbers: Iterable[int], length: int) -> WordIds:
        """The words with these numbers, [B, T]; each element is uniform."""
        keys = stream_key(seed, stream, np.fromiter(numbers, np.uint64))  # [B]
        drawn = mix(np.add.outer(keys, np.arange(length, dtype=np.uint64)))  # [B, T]
        return (drawn % np.uint64(len(self))).astype(np.int64)

    def products(self, words: WordIds) -> WordIds:
        """The product of each word [B, T] up to and including every position [B, T]."""
        states = words.copy()
        for position in range(1, words.shape[1]):
            states[:, position] = self.table[states[:, position - 1], words[:, position]]
        return states

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Maps element names, separated by spaces, to ids; the last id is the end token."""
        from tokenizers import AddedToken, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        library = Library(models.WordLevel({name: number for number, name in enumerate((*self.names, END_TOKEN))}))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        library.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
        return Tokenizer(library.to_str(), f"the tokenizer of {self.name}")

    @property
    def setting(self) -> str:
        """The setting that trains on these words."""
        return f"data.states={self.name}"

    @property
    def vocab_size(self) -> int:
        """The elements and the end token."""
        return len(self) + 1

    @property
    def tokens(self) -> int:
        """Tokens on disk, as in `TokenData`. There are none: words are drawn and never stored."""
        return 0

    def loader(self, run: RunConfig) -> StateLoader:
        """The training batches of a run."""
        return StateLoader(self, run.model.context, run.training.batch, run.training.seed)

    def windows(self, run: RunConfig) -> StateWindows:
        """The validation words of a run."""
        return StateWindows(self, run.model.context, run.training.validation_windows)

    def batch(self, words: WordIds) -> Batch:
        """Inputs (the end token, then the word) and the product at each position: both [B, T + 1]."""
        import torch

        end_tokens = np.full((len(words), 1), len(self))  # [B, 1]
        inputs = np.concatenate([end_tokens, words], axis=1)
        targets = np.concatenate([np.full_like(end_tokens, IGNORE_INDEX), self.products(words)], axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), None)

    @cached_property
    def index_hash(self) -> str:
        """Identifies the data in checkpoints. It changes with the order of elements and how words are drawn."""
        batch = self.batch(self.words(seed=0, stream=TRAIN, numbers=range(16), length=16))
        drawn = [self.elements, batch.inputs.tolist(), batch.targets.tolist()]
        return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


class StateWindows:
    """The first `words` words of a stream, for evaluation: `windows.batch(0, 8)`."""

    def __init__(self, group: Group, context: int, words: int, seed: int = 0, stream: int = VALIDATION) -> None:
        require(words >= 1, f"There must be 1 word or more, got {words}.")
        self._group, self._length, self._words = group, word_length(context), words
        self._seed, self._stream = seed, stream

    def __len__(self) -> int:
        return self._words

    def batch(self, start: int, stop: int) -> Batch:
        """Words start:stop and their products."""
        numbers = range(self._words)[start:stop]
        return self._group.batch(self._group.words(self._seed, self._stream, numbers, self._length))


class StateLoader:
    """Training batches of fresh words by step number."""

    def __init__(self, group: Group, context: int, batch: int, seed: int = 0) -> None:
        self.batch_size = batch
        self._group, self._length, self._seed = group, word_length(context), seed

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """The global batch of a step, or some of its rows."""
        numbers = [step * self.batch_size + row for row in (range(self.batch_size) if rows is None else rows)]
        return self._group.batch(self._group.words(self._seed, TRAIN, numbers, self._length))

    def epoch(self, step: int) -> float:
        """Always 0: no word is repeated."""
        return 0.0


def word_length(context: int) -> int:
    """How many elements follow the end token in a full context."""
    require(context >= 2, f"Words need a model.context of 2 or more, got {context}.")
    return context - 1


def cycles(permutation: Permutation) -> str:
    """A permutation in cycle notation, its points counted from 1: (1, 0, 2) is `(12)`, the identity `()`."""
    text, seen = "", set[int]()
    for start, image in enumerate(permutation):
        if start not in seen and image != start:
            point, cycle = start, list[int]()
            while point not in seen:
                seen.add(point)
                cycle.append(point)
                point = permutation[point]
            text += f"({''.join(str(point + 1) for point in cycle)})"
    return text or "()"


def _is_even(permutation: Permutation) -> bool:
    pairs = ((a, b) for index, a in enumerate(permutation) for b in permutation[index + 1 :])
    return sum(a > b for a, b in pairs) % 2 == 0
