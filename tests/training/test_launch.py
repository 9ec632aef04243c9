"""Starting and continuing a run: its settings, its data and its folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

import loopformer
from loopformer import LoopformerError
from loopformer.training.launch import launch

Small = Callable[..., list[str]]


def test_padded_rows_are_checked_against_the_datas_vocabulary(small: Small, tmp_path: Path) -> None:
    launch("demo", small(model__padded_vocab=320, training__steps=1), tmp_path / "run", quiet=True)
    model = loopformer.load(tmp_path / "run").model
    assert (model.config.vocab, model.config.vocab_rows) == (300, 320)
    with pytest.raises(LoopformerError, match=r"model.padded_vocab 256 is smaller than model.vocab 300"):
        launch("demo", small(model__padded_vocab=256), tmp_path / "other", quiet=True)
