"""Validation is what `loopformer eval` measures on the same windows."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from loopformer import load
from loopformer.data.loader import validation_windows
from loopformer.data.shards import TokenData
from loopformer.evaluation.text import Protocol, perplexity, read_text
from loopformer.training.launch import launch
from loopformer.training.reporting import read_metrics

Small = Callable[..., list[str]]


def test_it_is_evals_loss_without_the_rows_that_pad_the_vocabulary(
    small: Small, corpus: Path, tmp_path: Path
) -> None:
    data = TokenData.open(corpus, "val")
    windows, vocab = len(validation_windows(data, 32)), data.tokenizer.vocab_size
    padded = small(model__vocab=vocab, model__padded_vocab=4096, training__validation_windows=windows)
    launch("demo", padded, tmp_path / "run", quiet=True)
    (*_, record) = (record for record in read_metrics(tmp_path / "run") if record["kind"] == "validation")
    lm = load(tmp_path / "run")
    assert lm.model.config.vocab == vocab < lm.model.config.vocab_rows == 4096
    text = read_text(str(corpus), lm.need_tokenizer())
    budgets = [1, 2, 4]
    rows = perplexity(lm.model, text, budgets, Protocol(join=True, max_tokens=32 * windows))
    expected = [math.exp(record[f"loss_at_{budget}"]) for budget in budgets]
    assert [row["perplexity"] for row in rows] == pytest.approx(expected, rel=1e-5)
