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


def test_a_refused_start_leaves_no_folder(small: Small, tmp_path: Path) -> None:
    for overrides in (
        small(data__path=tmp_path / "none", data__prepare="null"),
        small(data__path=tmp_path / "none", data__prepare=tmp_path / "nothing.txt"),
        small(model__context=4096),
    ):
        with pytest.raises(LoopformerError):
            launch("demo", overrides, tmp_path / "runs" / "mine", quiet=True, say=lambda _: None)
        assert not list(tmp_path.iterdir())
