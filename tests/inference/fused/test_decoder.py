"""Fused decoding equals the plain path: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os
from typing import Any, Literal

import pytest
import torch
from torch import nn

from loopformer import LM, LoopedLM, LoopformerError, ModelConfig
from loopformer.config import Conditioning

from ..models import spread

pytest.importorskip("triton")
Positions = Literal["learned", "rotary"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU")]
DEVICE = "cpu" if INTERPRETED else "cuda"
CASES: list[tuple[Positions, Conditioning, int, str]] = [
    ("learned", "trajectory", 1, "2-1-1"),
    ("rotary", "trajectory", 2, "4"),
    ("rotary", "none", 2, "2"),
    ("learned", "trajectory", 6, "2-1-1"),
    ("rotary", "none", 5, "4"),
    ("learned", "index", 3, "3"),
]


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def model_of(positions: Positions, conditioning: Conditioning) -> LoopedLM:
    config = ModelConfig(
        blocks=2,
        loops=4,
        width=48,
        heads=3,
        ffn=80,
        context=80,
        vocab=90,
        padded_vocab=96,
        positions=positions,
        conditioning=conditioning,
        inject="gated" if (positions, conditioning) == ("rotary", "trajectory") else "none",  # as `elastic` has it
        start="normed" if (positions, conditioning) == ("rotary", "trajectory") else "embedding",
    )
    return spread(config).to(DEVICE)


def plain_logits(model: LoopedLM, ids: list[int], trajectory: str) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=DEVICE), trajectory).logits
    assert logits is not None
    last: torch.Tensor = logits[0, -1, : model.config.vocab]
    return last


@pytest.mark.parametrize(("positions", "conditioning", "rows", "trajectory"), CASES)
def test_a_token_equals_the_plain_path(
    positions: Positions, conditioning: Conditioning, rows: int, trajectory: str
) -> None:
    from loopformer.inference.fused.decoder import Decoder

    model = model_of(positions, conditioning)
    decoder = Decoder(model, model.resolve(trajectory), rows)
    for length in (3, 40):  # filled anew
        texts = [[(7 * place + row) % 90 for place in range(length + 2 * row)] for row in range(rows)]
        tokens = model.head(decoder.prefill(texts))[:, :90].argmax(-1)
        logits = decoder.step(tokens)
        for row in range(rows):
            texts[row].append(int(tokens[row]))
            torch.testing.assert_close(
                logits[row], plain_logits(model, texts[row], trajectory), atol=1e-4, rtol=1e-4
            )
        decoder.ids.copy_(logits.argmax(-1))
        first, followed = decoder.ids.tolist(), decoder.greedy(6)
        for row in range(rows):
            texts[row].append(first[row])
            for step in range(6):
                expected = plain_logits(model, texts[row], trajectory)
                token = int(followed[step, row])
                assert expected[token] > expected.max() - 1e-3
                texts[row].append(token)


def test_mistakes_are_one_clear_sentence() -> None:
    from loopformer.inference.fused.decoder import Decoder

    model = model_of("learned", "trajectory")
    decoder = Decoder(model, model.resolve(1), 1)
    decoder.prefill([[1] * 78])
    with pytest.raises(LoopformerError, match="78 tokens and 3 more do not fit"):
        decoder.greedy(3)
    with pytest.raises(LoopformerError, match="2 prompts were given to a decoder of 1"):
        decoder.prefill([[1], [2]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_texts_are_the_plain_ones(lm: LM) -> None:
    quick = LM(lm.model, lm.tokenizer).to("cuda")
    try:
        prompts = ["every pass", "its", "time and step and time", "told", "naïve"]
        several: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"max_tokens": 60}]
        for options in several:
            asked: dict[str, Any] = {
                "max_tokens": 20,
                "trajectory": ["2-1-1", "2-1-1", "4", "2-1-1", "4"],
                **options,
            }
            plain = quick.generate(prompts, fast=False, **asked)
            fast = quick.generate(prompts, fast=True, **asked)
            assert [one.text for one in fast] == [one.text for one in plain]
            assert [one.reason for one in fast] == [one.reason for one in plain]
        assert "".join(quick.stream("told", fast=True)) == quick.generate("told", fast=False).text
    finally:
        quick.to("cpu")


def test_weights_may_lie_by_columns() -> None:
    """As `load` lays them out for a CPU, and as they stay when a model is moved by hand."""
    from loopformer.inference.fused.decoder import Decoder

    model, texts = model_of("learned", "trajectory"), [[5, 9, 2], [7, 1, 4]]

    def logits() -> torch.Tensor:
        decoder = Decoder(model, model.resolve("2"), 2)
        return decoder.step(model.head(decoder.prefill(texts))[:, :90].argmax(-1)).clone()

    expected = logits()
    for weight in [model.tokens.weight, *(one.weight for one in model.modules() if isinstance(one, nn.Linear))]:
        weight.data = weight.data.t().contiguous().t()
    torch.testing.assert_close(logits(), expected, atol=1e-4, rtol=1e-4)
