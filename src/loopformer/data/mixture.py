"""Stories among text: a share of the rows of every batch are stories, in the tokens of a prepared folder.

    data = StoriesAmongText(TokenData.open("data/box", "train"), [World.open("cups"), World.open("village")])
    data.loader(run).batch(step=7)

A story row holds as many whole stories as fit, each with its answer and an end token. Worlds take turns. Which rows
of a batch are stories follows from (seed, step), so resuming is exact, and ranks and micro-batches change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from loopformer.config.run import RunConfig
from loopformer.data.loader import (
    Batch,
    Loader,
    TrainingBatches,
    ValidationBatches,
    Windows,
    permute,
    stream_key,
)
from loopformer.data.shards import TokenData
from loopformer.data.stories import Curriculum, EncodedStory, StoryDrawer, World, story_row
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import require

ROW_STREAM = 4  # the random stream that chooses the rows, beside those of states.py and stories.py
TOKENS_PER_STORY = 48  # of a short story: so many are drawn for a row, and those that fit are used


class StoriesAmongText:
    """The data of a run with `data.path` and `data.stories`."""

    def __init__(self, text: TokenData, worlds: Sequence[World]) -> None:
        self.text, self.worlds = text, worlds

    @property
    def setting(self) -> str:
        """The settings that train on this data."""
        return f"data.stories={','.join(world.source for world in self.worlds)} and the same data.path"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def tokens(self) -> int:
        """Tokens of the text on disk."""
        return self.text.tokens

    @property
    def index_hash(self) -> str:
        """Identifies the data in checkpoints."""
        hashes = [self.text.index_hash, *(world.index_hash for world in self.worlds)]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def loader(self, run: RunConfig) -> TrainingBatches:
        """The training batches of a run."""
        return MixedLoader(self, run)

    def windows(self, run: RunConfig) -> ValidationBatches:
        """Windows of held-out text; `loopformer eval stories` measures the stories."""
        return Windows(TokenData.open(run.data.path, "val"), run.model.context, run.training.validation_windows)


class MixedLoader:
    """Training batches of which some rows are stories and the others windows of text."""

    def __init__(self, data: StoriesAmongText, run: RunConfig) -> None:
        training, self._context = run.training, run.model.context
        self._tokenizer, self._learns_text = data.tokenizer, run.data.loss == "text"
        self._batch, self._seed = training.batch, training.seed
        self._text = Loader(data.text, self._context, training.batch, training.seed)
        workers = -(-run.data.workers // len(data.worlds))
        self._worlds = [
            (
                world,
                StoryDrawer(world, training.seed, None, workers),
                Curriculum(world.hops, run.data.curriculum * training.steps),
            )
            for world in data.worlds
        ]
        for world in data.worlds:
            needed = world.long_length(data.tokenizer) + 1  # and the end token
            reason = f"too short for the stories of {world.source}; set it to {needed} or more"
            require(self._context >= needed, f"model.context is {self._context}, {reason}.")
        self._story_rows = int(run.data.story_rows * training.batch + 0.5)
        some = 0 < self._story_rows < training.batch
        reason = "change data.story_rows or raise training.batch"
        require(some, f"{self._story_rows} of {training.batch} rows would be stories; {reason}.")

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """The global batch of a step, or some of its rows."""
        import torch

        numbers = np.arange(self._batch) if rows is None else np.array(rows, np.int64)
        keys = stream_key(self._seed, ROW_STREAM, np.full(len(numbers), step, np.uint64))
        is_story = permute(numbers.astype(np.uint64), self._batch, keys) < self._story_rows
        ids = np.empty((2, len(numbers), self._context), np.int64)  # inputs and targets
        if not is_story.all():
            windows = self._text.batch(step, numbers[~is_story].tolist())
            ids[:, ~is_story] = windows.inputs.numpy(), windows.targets.numpy()
        for row, stories in zip(np.flatnonzero(is_story), self._draw_rows(step, numbers[is_story]), strict=True):
            ids[:, row] = story_row(stories, self._tokenizer.eot, self._context, self._learns_text)
        inputs, targets = torch.from_numpy(ids)
        return Batch(inputs, targets, None)

    def _draw_rows(self, step: int, rows: npt.NDArray[np.int64]) -> list[list[EncodedStory]]:
        """The stories of each row: as many of those that are drawn for it as fit."""
        per_row = max(1, self._context // TOKENS_PER_STORY)
        numbers = ((step * self._batch + rows)[:, None] * per_row + np.arange(per_row)).ravel().tolist()
        encoded = dict[int, EncodedStory]()
        for index, (world, draw, curriculum) in enumerate(self._worlds):
            # Shifted from row to row, so that no world is always the one that is cut off.
            turns = (sum(divmod(number, per_row)) % len(self._worlds) for number in numbers)
            of_world = [number for number, turn in zip(numbers, turns, strict=True) if turn == index]
            stories = draw(of_world, curriculum.most_hops(step))
            encoded |= zip(of_world, world.encode(stories, self._tokenizer), strict=True)
        in_order = [encoded[number] for number in numbers]
        return [self._fitting(in_order[start : start + per_row]) for start in range(0, len(in_order), per_row)]

    def _fitting(self, stories: Sequence[EncodedStory]) -> list[EncodedStory]:
        """The first stories that fit into a row, up to one that does not: a shorter one would have fewer hops."""
        ends = accumulate(len(story.ids) + len(story.answer) + 1 for story in stories)
        return [story for story, end in zip(stories, ends, strict=True) if end <= self._context]

    def epoch(self, step: int) -> float:
        """How often the text has been seen before a step."""
        return self._text.epoch(step) * (1 - self._story_rows / self._batch)
