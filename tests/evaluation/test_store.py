from pathlib import Path

import pytest
import torch

from loopformer import LoopedLM
from loopformer.config import ModelConfig
from loopformer.evaluation.store import Store, weights_hash


def test_pieces_come_back_and_others_do_not(tmp_path: Path) -> None:
    store = Store.beside(tmp_path)
    key = {"weights": "a", "trajectory": "2-1-2-3"}
    assert store.get(key) is None
    assert store.put(key, {"loss": 1.5}) == {"loss": 1.5}
    assert Store.beside(tmp_path).get(dict(reversed(key.items()))) == {"loss": 1.5}
    assert store.get({**key, "weights": "b"}) is None


def test_half_a_piece_counts_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put({"a": 1}, {"loss": 2.0})
    (file,) = tmp_path.glob("*.json")
    whole = file.read_text()
    for damage in (whole[:20], "{}", "[]", '{"value": 3}', '{"value": ["loss"]}'):
        file.write_text(damage)
        assert store.get({"a": 1}) is None


def test_what_is_no_folder_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Store.beside("someone/on-the-hub").put({"a": 1}, {"b": 2})
    assert len(list((tmp_path / "loopformer" / "evaluation").glob("*.json"))) == 1
    assert Store(None).put({"a": 1}, {"b": 2}) == {"b": 2}
    assert Store(None).get({"a": 1}) is None


def test_where_nothing_can_be_kept_there_are_still_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evaluation").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert Store.beside(tmp_path).folder == tmp_path / "cache" / "loopformer" / "evaluation"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "evaluation"))
    assert Store.beside(tmp_path).folder is None
    assert Store.beside(tmp_path).put({"a": 1}, {"b": 2}) == {"b": 2}


def test_the_hash_follows_weights_settings_and_dtype(tiny: ModelConfig) -> None:
    model = LoopedLM(tiny)
    before = weights_hash(model)
    assert weights_hash(model) == before
    assert weights_hash(model.to(torch.bfloat16)) != before
    model = LoopedLM(tiny)
    with torch.no_grad():
        model.final_norm.weight[0] += 1e-6  # type: ignore[index]
    assert weights_hash(model) != before
