"""The weights that kernels read: on the CPU, too."""

from dataclasses import replace

import pytest
import torch

from loopformer.config import ModelConfig
from loopformer.inference.fused.quantise import fingerprint, weights_by_rows

from ..models import spread


@pytest.mark.parametrize("start", ["embedding", "normed"])
def test_passes_start_from_what_the_model_starts_from(tiny: ModelConfig, start: str) -> None:
    model = spread(replace(tiny, positions="rotary", inject="gated", start=start))  # type: ignore[arg-type]
    assert model.config.plain_only is None
    ids = torch.arange(tiny.vocab)
    weights = weights_by_rows(model)
    expected, _ = model.place(model.tokens(ids)[None], ids[None])
    torch.testing.assert_close(weights.embedding, expected[0].detach())
    torch.testing.assert_close(weights.head, model.tokens.weight.detach())


def test_where_positions_are_learned_no_table_has_the_start(tiny: ModelConfig) -> None:
    assert replace(tiny, positions="learned", start="normed").plain_only == "start"


def test_other_weights_have_another_fingerprint(tiny: ModelConfig) -> None:
    model = spread(replace(tiny, positions="rotary", start="normed"))
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.tokens.weight.mul_(2)
    assert fingerprint(model) != before
