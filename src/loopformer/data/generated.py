"""What a run trains on: prepared tokens, or data that is drawn at least in part.

data = open_data(run.data)                   # TokenData, a Group, a World, or StoriesAmongText
isinstance(data, TokenData)                  # or else it is Generated
data.loader(run).batch(step=7); data.windows(run).batch(0, 8)
"""

from __future__ import annotations

from typing import Protocol

from loopformer.config.model import parse_names
from loopformer.config.run import DataConfig, RunConfig
from loopformer.data.loader import TrainingBatches, ValidationBatches
from loopformer.data.mixture import StoriesAmongText
from loopformer.data.shards import TokenData
from loopformer.data.states import Group
from loopformer.data.stories import World
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import require


class Generated(Protocol):
    """A source that draws training rows: a group's words, a world's stories, or these among text."""

    @property
    def setting(self) -> str:
        """The setting that trains on this data, as in `data.states=S3`."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Tokens on disk, as in `TokenData`."""

    @property
    def index_hash(self) -> str:
        """Identifies the data in checkpoints."""

    def loader(self, run: RunConfig) -> TrainingBatches:
        """The training batches of a run."""

    def windows(self, run: RunConfig) -> ValidationBatches:
        """The validation rows of a run."""


def open_data(config: DataConfig) -> TokenData | Generated:
    """What a run trains on: the training split of a prepared folder, a group's words or a world's stories."""
    if config.states is not None:
        return Group.named(config.states)
    if config.stories is None:
        return TokenData.open(config.path, "train")
    worlds = [World.open(source) for source in parse_names(config.stories)]
    require(len(worlds) > 0, "data.stories names no world; choose cups or village.")
    if not config.is_generated:
        return StoriesAmongText(TokenData.open(config.path, "train"), worlds)
    require(
        len(worlds) == 1, "Several worlds need text beside them; set data.story_rows below 1, or name one world."
    )
    return worlds[0]
