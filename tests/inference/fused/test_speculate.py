"""Fused speculation gives the full model's tokens: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os
from functools import partial
from typing import Any, Literal

import pytest
import torch

from loopformer import LM, LoopedLM, LoopformerError, ModelConfig, Trajectory
from loopformer.config import Conditioning
from loopformer.inference.draft import Draft
from loopformer.inference.sampling import Draw, Sampling, sample

from ..models import spread

pytest.importorskip("triton")
Positions = Literal["learned", "rotary"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU")]
DEVICE = "cpu" if INTERPRETED else "cuda"
PROMPT = [3, 10, 17, 24, 1]
CONTEXT = 22


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def model_of(positions: Positions, conditioning: Conditioning, context: int = CONTEXT) -> LoopedLM:
    config = ModelConfig(
        blocks=1,
        loops=2,
        width=24,
        heads=2,
        ffn=40,
        context=context,
        vocab=30,
        padded_vocab=32,
        positions=positions,
        conditioning=conditioning,
        inject="gated" if (positions, conditioning) == ("rotary", "trajectory") else "none",  # as `elastic` has it
        start="normed" if (positions, conditioning) == ("rotary", "trajectory") else "embedding",
    )
    return spread(config, std=0.25).to(DEVICE)


def small() -> Any:
    """Small pieces, so that keys are split although there are few; few programs, for the interpreter."""
    from loopformer.inference.fused.decoder import Tuning

    each = dict.fromkeys(("qkv", "out", "up", "down", "head"), 16)
    return Tuning(rows=each, splits=2, block_n=4)


def followed(model: LoopedLM, draft: Draft, int8: bool = False) -> tuple[list[int], list[Any]]:
    """Tokens after the prompt until the context is full, the prefill's first, and the verdicts."""
    from loopformer.inference.fused.quantise import quantised
    from loopformer.inference.fused.speculate import Speculator

    weights = quantised(model) if int8 else None
    speculator = Speculator(model, model.resolve(2), draft, weights, small())
    first = int(model.head(speculator.prefill(PROMPT[:1]))[:30].argmax())  # what was there before is not seen
    assert len([token for verdict in speculator.follow(first, 2) for token in verdict.tokens]) >= 2
    first = int(model.head(speculator.prefill(PROMPT))[:30].argmax())
    verdicts = list(speculator.follow(first, 1000))
    return [first, *(token for verdict in verdicts for token in verdict.tokens)], verdicts


@pytest.mark.parametrize(
    ("positions", "conditioning", "length"),
    [("rotary", "trajectory", 4), ("learned", "trajectory", 1), ("rotary", "none", None), ("learned", "none", 2)],
)
@pytest.mark.parametrize("budget", [1, 2])
def test_tokens_are_the_full_models(
    positions: Positions, conditioning: Conditioning, length: int | None, budget: int
) -> None:
    model = model_of(positions, conditioning)
    tokens, verdicts = followed(model, Draft(Trajectory.uniform(budget), length))
    assert len(tokens) == CONTEXT - len(PROMPT) + 1
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens[:-1]]], device=DEVICE), 2).logits
    assert logits is not None
    expected = logits[0, len(PROMPT) - 1 :, :30]
    chosen = expected.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
    assert bool((chosen > expected.max(-1).values - 1e-3).all())
    logprobs = torch.tensor([one for verdict in verdicts for one in verdict.logprobs], device=DEVICE)
    torch.testing.assert_close(logprobs, (chosen - expected.logsumexp(-1))[1:], atol=1e-4, rtol=1e-4)
    if budget == 2:  # a draft along the full trajectory is always right
        assert all(len(verdict.tokens) == verdict.drafted + 1 for verdict in verdicts)
    elif conditioning == "trajectory":
        assert any(len(verdict.tokens) <= verdict.drafted for verdict in verdicts)


@pytest.mark.parametrize("length", [3, None])
def test_sampled_tokens_are_those_that_the_full_model_draws(length: int | None) -> None:
    from loopformer.inference.fused.speculate import Speculator

    model = model_of("rotary", "trajectory")
    sampling = Sampling(temperature=0.9, top_p=0.9)
    speculator = Speculator(model, model.resolve(2), Draft(Trajectory.uniform(1), length), None, small())
    with torch.no_grad():
        speculator.prefill(PROMPT)
        verdicts = list(speculator.follow(7, 1000, partial(Draw, sampling, 11)))
        tokens = [token for verdict in verdicts for token in verdict.tokens]
        logits = model(torch.tensor([[*PROMPT, 7, *tokens[:-1]]], device=DEVICE), 2).logits
    assert len(tokens) == CONTEXT - len(PROMPT)
    assert logits is not None
    after = logits[0, len(PROMPT) :, :30]
    draws = [Draw(sampling, 11, len(PROMPT) + 1 + number) for number in range(len(tokens))]
    expected = sample(after, draws)
    assert tokens == [one.token for one in expected]
    logprobs = [one for verdict in verdicts for one in verdict.logprobs]
    assert logprobs == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert any(len(verdict.tokens) > 1 for verdict in verdicts)


def test_int8_tokens_are_those_of_the_int8_decoder() -> None:
    from loopformer.inference.fused.decoder import Decoder
    from loopformer.inference.fused.quantise import quantised

    model = model_of("rotary", "trajectory")
    decoder = Decoder(model, model.resolve(2), 1, quantised(model), small())
    decoder.ids.copy_(model.head(decoder.prefill([PROMPT]))[:, :30].argmax(-1))
    expected = [*decoder.ids.tolist(), *decoder.greedy(CONTEXT - len(PROMPT))[:, 0].tolist()]
    assert followed(model, Draft(Trajectory.uniform(1), 3), int8=True)[0] == expected


def test_mistakes_are_one_clear_sentence(lm: LM) -> None:
    from loopformer.inference.fused.backend import draft_obstacle
    from loopformer.inference.fused.speculate import Speculator

    model = model_of("learned", "none")
    with pytest.raises(LoopformerError, match="at most 15 tokens, got 16"):
        followed(model, Draft(Trajectory.uniform(1), 16))
    with pytest.raises(LoopformerError, match="at most 3 tokens, got 4"):
        followed(model, Draft(Trajectory.uniform(1), 4), int8=True)
    short, penalised = Trajectory.uniform(1), lm.requests(["told"], repetition_penalty=1.5)
    assert draft_obstacle(Draft(short), penalised, int8=False) == "drafts without a repetition penalty"
    assert draft_obstacle(Draft(short, 4), [], int8=True) == "drafts at most 3 tokens"
    assert draft_obstacle(Draft(short, 15), lm.requests(["told"], temperature=1.0), int8=False) is None
    speculator = Speculator(model, model.resolve(2), Draft(Trajectory.uniform(1)))
    with pytest.raises(LoopformerError, match="no prompt to follow yet"):
        next(speculator.follow(3, 4))
    with pytest.raises(LoopformerError, match="The prompt is empty"):
        speculator.prefill([])


def test_drafts_go_on_to_the_end_of_the_context() -> None:
    from loopformer.inference.fused.speculate import Speculator

    model, full = model_of("rotary", "trajectory", context=8), Trajectory.uniform(2)

    def drafted(length: int | None, prompt: int) -> list[int]:
        speculator = Speculator(model, full, Draft(full, length), None, small())
        first = int(model.head(speculator.prefill(PROMPT[:prompt]))[:30].argmax())
        return [verdict.drafted for verdict in speculator.follow(first, 1000)]

    assert drafted(None, 2) == [1, 1, 1]  # what pays fits, though the longest draft would not
    assert drafted(15, 1) == [6]  # never more than the context holds
    assert drafted(3, 3) == [3, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_texts_with_a_draft_are_the_plain_ones(lm: LM) -> None:
    quick = LM(lm.model, lm.tokenizer).to("cuda")
    try:
        prompts = ["every pass", "its", "time and step and time"]
        several: list[dict[str, Any]] = [{}, {"max_tokens": 1}, {"max_tokens": 90}, {"stops": "e"}]
        several += [{"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "top_p": 0.8, "seed": 6}]
        for options in several:
            asked: dict[str, Any] = {"max_tokens": 20, "trajectory": ["2-1-1", "4", "4"], **options}
            plain = quick.generate(prompts, fast=False, **asked)
            for length in (3, None):
                fast = quick.generate(prompts, fast=True, draft=Draft(Trajectory.uniform(1), length), **asked)
                assert [(one.text, one.reason) for one in fast] == [(one.text, one.reason) for one in plain]
    finally:
        quick.to("cpu")
