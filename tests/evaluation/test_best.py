"""The best schedules are saved with the model, and belong to its weights."""

import json
from pathlib import Path

import pytest
import torch

from loopformer import LM
from loopformer.errors import LoopformerError
from loopformer.evaluation.schedules import FILE, can_save, save_best, scheduled, search
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.text import Text
from loopformer.trajectory import Trajectory


def test_saved_schedules_are_used_and_merged(lm: LM, text: Text, tmp_path: Path) -> None:
    two, three = (search(lm.model, budget, text=text) for budget in (2, 3))
    save_best(tmp_path, three)
    save_best(tmp_path, two)
    saved = json.loads((tmp_path / FILE).read_text())
    assert list(saved) == ["2", "3"]
    assert saved["2"]["perplexity"] == two["best"]["perplexity"]
    assert saved["2"]["text"] == {"text": "test.txt", "sha256": "0", "tokens": text.tokens}
    assert saved["2"]["weights"] == weights_hash(lm.model)
    for found in (two, three):
        best = Trajectory.parse(found["best"]["trajectory"])
        assert scheduled(tmp_path, lm.model, found["budget"], "best") == best
    assert scheduled(tmp_path, lm.model, 3, "uniform") == Trajectory.uniform(3)
    assert not list(tmp_path.glob("*.tmp"))


def test_the_only_schedule_needs_no_search(lm: LM, tmp_path: Path) -> None:
    assert scheduled(tmp_path, lm.model, 1, "best") == Trajectory.uniform(1)
    assert scheduled(tmp_path, lm.model, 4, "best") == Trajectory.uniform(4)


def test_what_is_refused(lm: LM, text: Text, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match=r"No best schedule of budget 2 .* loopformer search --model"):
        scheduled(tmp_path, lm.model, 2, "best")
    with pytest.raises(LoopformerError, match="above the model's 4 loops"):
        scheduled(tmp_path, lm.model, 5, "best")
    with pytest.raises(LoopformerError, match="did you mean best"):
        scheduled(tmp_path, lm.model, 2, "bets")
    save_best(tmp_path, search(lm.model, 2, text=text))
    with torch.no_grad():
        lm.model.tokens.weight += 1
    with pytest.raises(LoopformerError, match="was found for other weights"):
        scheduled(tmp_path, lm.model, 2, "best")
    (tmp_path / FILE).write_text('{"2": 3}')
    with pytest.raises(LoopformerError, match="is damaged; delete it"):
        scheduled(tmp_path, lm.model, 2, "best")


def test_what_is_no_folder_holds_none(tmp_path: Path) -> None:
    assert can_save(tmp_path)
    assert not can_save(tmp_path / "none")
