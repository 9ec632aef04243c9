from pathlib import Path

import torch

import loopformer
from loopformer import LoopedLM
from loopformer.config import ModelConfig
from loopformer.lm import optimize_weight_layout
from loopformer.loading import save_model


def test_order_in_memory_changes_nothing_else(tiny: ModelConfig, tmp_path: Path) -> None:
    model = LoopedLM(tiny)
    ids = torch.randint(tiny.vocab, (2, 9))
    expected = model(ids, "2-1-1").logits
    first = save_model(model, tmp_path / "first")
    optimize_weight_layout(model)
    assert model.tokens.weight.stride() == (1, tiny.vocab_rows)
    torch.testing.assert_close(model(ids, "2-1-1").logits, expected)
    second = save_model(model, tmp_path / "second")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert loopformer.load(second).model.tokens.weight.stride() == (1, tiny.vocab_rows)
