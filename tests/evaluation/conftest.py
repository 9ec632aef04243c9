"""A small model with its tokenizer, and texts of several lengths; loops through the stack are counted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.evaluation.text import Text

from .small import DOCUMENTS, make_model, make_text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["every pass is told its time and its step, naïve café ☕ 日本語"] * 20, 300)


@pytest.fixture
def lm(tokenizer: Tokenizer) -> LM:
    return LM(make_model(tokenizer), tokenizer)


@pytest.fixture
def text(tokenizer: Tokenizer) -> Text:
    return make_text(DOCUMENTS, tokenizer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("its time and its step, " * 20, encoding="utf-8")
    return path


@pytest.fixture
def loops_run(lm: LM) -> Callable[[], int]:
    """How many loops the model has run since this was last asked."""
    count = 0

    def add(*_: object) -> None:
        nonlocal count
        count += 1

    def since() -> int:
        nonlocal count
        before, count = count, 0
        return before

    lm.model.stack.register_forward_hook(add)
    return since
