"""A small corpus and a prepared folder that several tests share."""

from pathlib import Path

import pytest

from loopformer.data.prepare import prepare
from loopformer.data.tokenizer import Tokenizer

from .words import document, write_jsonl


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return [document(number) for number in range(60)]


@pytest.fixture(scope="session")
def tokenizer(documents: list[str]) -> Tokenizer:
    return Tokenizer.train(documents, 500)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    return write_jsonl(folder / "news.jsonl", [{"text": text, "id": i} for i, text in enumerate(documents)])


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """One source, small shards so that windows cross their borders."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare([str(corpus)], out, train_tokenizer=500, val_fraction=0.1, shard_tokens=1000)
    return out
