import json
from pathlib import Path

import pytest
import torch

import loopformer
from loopformer import LoopedLM, LoopformerError
from loopformer.config import ModelConfig
from loopformer.files import sha256_of
from loopformer.loading import load_model, save_model


def test_a_model_survives_its_folder(tiny: ModelConfig, tmp_path: Path) -> None:
    model = LoopedLM(tiny)
    save_model(model, tmp_path / "m")
    again = loopformer.load(tmp_path / "m").model
    assert again.config == tiny
    ids = torch.randint(tiny.vocab, (2, 8))
    assert torch.equal(again(ids, "2-1-1").logits, model(ids, "2-1-1").logits)
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_damage_is_one_clear_sentence(tiny: ModelConfig, tmp_path: Path) -> None:
    folder = save_model(LoopedLM(tiny), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for change, said in [
        ({"version": 99}, "version 99"),
        ({"model": {**config["model"], "blokcs": 1}}, "did you mean blocks"),
        ({"model": {**config["model"], "blocks": 3}}, r"lack the tensor .*modulators\.2"),
        ({"model": {**config["model"], "ffn": 81}}, r"ffn\.up\.weight has shape"),
        ({"model": {**config["model"], "conditioning": "step"}}, r"conditioner\.time\..* does not belong"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(LoopformerError, match=said):
            load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(LoopformerError, match="not readable JSON"):
        loopformer.load(folder)


def test_a_failed_save_leaves_the_old_model(tiny: ModelConfig, tmp_path: Path) -> None:
    folder = save_model(LoopedLM(tiny), tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors.part").mkdir()  # nothing can be written there
    with pytest.raises(LoopformerError, match="could not be written"):
        save_model(LoopedLM(tiny), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_run_is_looked_through_once(
    tiny: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checksums of large checkpoints take time, and a damaged one is named once."""
    for step in (5, 10):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:08d}"
        save_model(LoopedLM(tiny), checkpoint)
        sums = {path.name: sha256_of(path) for path in checkpoint.iterdir()}
        (checkpoint / "checksums.json").write_text(json.dumps(sums))
    (tmp_path / "run.yaml").write_text("model: {}\n")
    (checkpoint / "model.safetensors").write_bytes(b"half")
    loopformer.load(tmp_path)
    assert capsys.readouterr().err.count("step-00000010 is damaged") == 1
