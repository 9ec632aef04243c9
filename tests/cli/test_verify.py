"""`loopformer verify` finds what was changed on disk, and only that."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from loopformer import LoopedLM, ModelConfig
from loopformer.cli import app
from loopformer.data.prepare import prepare
from loopformer.data.shards import STATE_FILE
from loopformer.errors import LoopformerError
from loopformer.files import sha256_of
from loopformer.loading import folder, save_model
from loopformer.loading.folder import FOLDER, SETTINGS

from .models import save_small, seal


def verify(*paths: Path) -> dict[str, str | None]:
    done = CliRunner().invoke(app, ["verify", *map(str, paths), "--json"])
    found = {one["what"]: one["wrong"] for one in json.loads(done.stdout)}
    assert isinstance(done.exception, LoopformerError) == any(found.values()), done.output
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text = tmp_path / "some.jsonl"
    text.write_text("".join(json.dumps({"text": f"every pass {n} is told its time"}) + "\n" for n in range(100)))
    prepare([str(text)], tmp_path / "data", train_tokenizer=280, val_fraction=0.2)
    return tmp_path / "data"


def test_data_that_was_changed(data: Path) -> None:
    assert list(verify(data).values()) == [None, None]
    (shard,) = data.glob("*-train-*.bin")
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    train, val = verify(data).values()
    assert train is not None
    assert "has changed since it was made" in train
    assert val is None


def test_data_with_a_token_that_is_none(data: Path) -> None:
    (shard,) = data.glob("*-val-*.bin")
    before = sha256_of(shard)
    ids = np.fromfile(shard, dtype=np.uint16)
    ids[3] = 9999
    ids.tofile(shard)
    index = data / "index.json"
    index.write_text(index.read_text().replace(before, sha256_of(shard)))
    assert "has token id 9999 in source some" in str(list(verify(data).values())[1])


def test_a_checkpoint_is_read_once_for_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = seal(Path(save_small(tmp_path / FOLDER / "step-00000001", context=32)))
    (tmp_path / SETTINGS).touch()
    hashed: list[str] = []

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(folder, "sha256_of", noted)
    assert verify(tmp_path) == {str(checkpoint): None}
    assert sorted(hashed) == ["config.json", "model.safetensors", "tokenizer.json"]
    (checkpoint / "tokenizer.json").write_text("{}")
    assert verify(checkpoint) == {str(checkpoint): "tokenizer.json does not match its checksum"}


def test_folders_with_nothing_to_look_at(data: Path, tmp_path: Path) -> None:
    (run := tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (run.parent / "run.yaml").touch()
    for empty in (tmp_path, run.parent):
        assert "no prepared data, checkpoint or weights" in str(verify(empty)[str(empty)])
    (data / "index.json").rename(data / STATE_FILE)
    assert "its preparation is unfinished" in str(verify(data)[str(data)])


def test_models(tiny: ModelConfig, tmp_path: Path) -> None:
    model = LoopedLM(replace(tiny, vocab=30, padded_vocab=None))
    save_model(model, tmp_path / "good")
    with torch.no_grad():
        model.final_norm.weight[2] = float("inf")  # type: ignore[index]
    save_model(model, tmp_path / "bad")
    found = verify(tmp_path / "good", tmp_path / "bad", tmp_path / "none")
    good, bad, none = found.values()
    assert good is None
    assert "The tensor final_norm.weight has values that are no finite numbers" in str(bad)
    assert "There is no file or folder" in str(none)
