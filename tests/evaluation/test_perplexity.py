"""Perplexity against a slow direct computation, against training's own validation, and started again."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loopformer import LM, LoopedLM
from loopformer.data.loader import validation_windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.errors import LoopformerError
from loopformer.evaluation.store import Store
from loopformer.evaluation.text import Protocol, Text, perplexity, read_text
from loopformer.inference.score import score
from loopformer.trajectory import Trajectory

from .small import by_rule, make_text


@torch.no_grad()
def directly(lm: LM, text: Text, protocol: Protocol, trajectory: str) -> tuple[float, float]:
    """Perplexity and bits per byte, one forward pass for each token."""
    nats, text_nats, size = [], 0.0, 0
    for given, target in by_rule(text, protocol, lm.model.config.context):
        logits = lm.model(torch.tensor([given]), trajectory).logits
        assert logits is not None
        one = -float(logits[0, -1, : lm.model.config.vocab].log_softmax(0)[target])
        nats.append(one)
        if target != text.tokenizer.eot:
            text_nats += one
            size += text.tokenizer.byte_count([target])
    return math.exp(sum(nats) / len(nats)), text_nats / math.log(2) / size


@pytest.mark.parametrize("trajectory", ["4", "2-1-1"])
@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(),
        Protocol(stride=5),
        Protocol(window=7, stride=1),
        Protocol(join=True),
        Protocol(join=True, stride=8),
        Protocol(max_tokens=30),
    ],
    ids=str,
)
def test_equals_a_direct_computation(lm: LM, text: Text, protocol: Protocol, trajectory: str) -> None:
    (row,) = perplexity(lm.model, text, [trajectory], protocol)
    expected, bits = directly(lm, text, protocol, trajectory)
    assert row["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 16, 40, 100_000])
def test_batches_change_nothing(lm: LM, text: Text, batch_tokens: int) -> None:
    trajectories = ["1", "3-1", "4"]
    once = perplexity(lm.model, text, trajectories, Protocol(stride=3))
    again = perplexity(lm.model, text, trajectories, Protocol(stride=3), batch_tokens=batch_tokens)
    assert [row["nats"] for row in again] == pytest.approx([row["nats"] for row in once], rel=1e-6)


def test_a_document_is_scored_as_score_does_after_an_end_token(lm: LM) -> None:
    assert lm.tokenizer is not None
    text = make_text(["every pass is told"], lm.tokenizer)
    ids = [lm.tokenizer.eot, *text.documents[0].tolist()]
    (row,) = perplexity(lm.model, text, ["2-1-1"], Protocol(window=len(ids) - 1))
    assert row["nats"] == pytest.approx(-score(lm.model, [ids], [Trajectory.parse("2-1-1")])[0].total, rel=1e-6)


@torch.no_grad()
def test_joined_is_what_training_validates_on(lm: LM, tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text("".join(f'{{"text": "its time {i} and its step {i * i}, ☕"}}\n' for i in range(99)))
    assert lm.tokenizer is not None
    lm.tokenizer.save(tmp_path)
    prepare([str(source)], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3)
    batch = validation_windows(TokenData.open(tmp_path / "data", "val"), 16).batch(0, 10_000)
    logits = lm.model(batch.inputs, 2).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(
        logits[..., : lm.model.config.vocab].flatten(0, 1), batch.targets.flatten()
    )
    text = read_text(str(tmp_path / "data"), lm.tokenizer)
    (row,) = perplexity(lm.model, text, [2], Protocol(join=True, max_tokens=batch.targets.numel()))
    assert row["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert row["tokens"] == batch.targets.numel()


def test_cost_and_facts_stand_beside_the_number(lm: LM, text: Text) -> None:
    (row,) = perplexity(lm.model, text, [2], Protocol(stride=8))
    assert row["flops_per_token"] == lm.model.cost.forward_flops(2, 16)
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert row["forward_tokens"] > row["tokens"] == text.tokens
    assert (row["trajectory"], row["budget"], row["sha256"]) == ("2", 2, "0")
    assert row["part"] == "all of it"
    assert (row["dtype"], row["device"], row["window"], row["stride"]) == ("float32", "cpu", 16, 8)


def test_a_limit_is_said(lm: LM, text: Text) -> None:
    (row,) = perplexity(lm.model, text, [1], Protocol(max_tokens=20))
    assert (row["tokens"], row["part"]) == (20, "all of it, up to 20 tokens")


def test_only_what_is_new_is_computed(lm: LM, text: Text, passes: Callable[[], int], tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = perplexity(lm.model, text, [1, 2], store=store, batch_tokens=100_000)
    assert passes() == 1 + 2
    again = perplexity(lm.model, text, [1, 2], store=store)
    assert passes() == 0
    assert [row.pop("reused") for row in again] == [True, True]
    assert [row.pop("reused") for row in first] == [False, False]
    assert again == first
    perplexity(lm.model, text, [1, 2, "3-1", 4], store=store, batch_tokens=100_000)
    assert passes() == 2 + 4
    perplexity(lm.model, text, [1], Protocol(join=True), store=store)
    assert passes() == 1
    perplexity(lm.model, make_text(["its time " * 9], text.tokenizer, "1"), [1], store=store)
    assert passes() == 1
    with torch.no_grad():
        lm.model.tokens.weight += 1
    perplexity(lm.model, text, [1], store=store)
    assert passes() == 1


def test_interrupted_it_keeps_what_is_finished(
    lm: LM, text: Text, passes: Callable[[], int], tmp_path: Path
) -> None:
    def stop(doing: str, done: int, total: int | None) -> None:
        if "M=4" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(lm.model, text, [1, 2, 4], store=Store(tmp_path), report=stop)
    passes()
    rows = perplexity(lm.model, text, [1, 2, 4], store=Store(tmp_path), batch_tokens=100_000)
    assert passes() == 4
    assert [row["reused"] for row in rows] == [True, True, False]


def test_progress_ends_at_the_last_token(lm: LM, text: Text) -> None:
    said: list[tuple[str, int, int | None]] = []
    perplexity(lm.model, text, [1], report=lambda *one: said.append(one), batch_tokens=20)
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    assert said[-1] == ("test.txt M=1", text.tokens, text.tokens)


def test_other_dtypes_are_other_pieces(lm: LM, text: Text, passes: Callable[[], int], tmp_path: Path) -> None:
    (full,) = perplexity(lm.model, text, [2], weights="w", store=Store(tmp_path))
    lm.model.to(torch.bfloat16)
    passes()
    (half,) = perplexity(lm.model, text, [2], weights="w", store=Store(tmp_path))
    assert passes() > 0
    assert half["dtype"] == "bfloat16"
    assert half["nats"] == pytest.approx(full["nats"], rel=0.05)


def test_no_number_is_none(lm: LM, text: Text) -> None:
    with torch.no_grad():
        lm.model.tokens.weight.fill_(math.nan)
    (row,) = perplexity(lm.model, text, [1])
    assert row["perplexity"] is row["bits_per_byte"] is row["nats"] is None


@pytest.mark.parametrize(
    ("trajectory", "sentence"), [(5, "above the model's 4 loops"), (0, "1 or more"), ("a", "Cannot")]
)
def test_impossible_routes(lm: LM, text: Text, trajectory: int | str, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        perplexity(lm.model, text, [trajectory])


def test_a_foreign_tokenizer_is_noticed(lm: LM, text: Text) -> None:
    other = LoopedLM(dataclasses.replace(lm.model.config, vocab=64))
    with pytest.raises(LoopformerError, match="the model knows 64; is this the model's own tokenizer"):
        perplexity(other, text, [1])
    with pytest.raises(LoopformerError, match="--batch-tokens must be 1"):
        perplexity(lm.model, text, [1], batch_tokens=0)
