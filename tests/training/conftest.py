"""A prepared folder and a run small enough for tests."""

import random
from pathlib import Path

import pytest

from loopformer.data.prepare import prepare

from .runs import Small, overriding

SENTENCE = "one shared stack of blocks is applied many times and every pass is told its time and its step"


def write_text(path: Path, lines: int = 400, seed: int = 0) -> Path:
    rng = random.Random(seed)
    text = "\n\n".join(" ".join(rng.choices(SENTENCE.split(), k=30)) + "." for _ in range(lines))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shards: about 15,000 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_text(folder / "text.txt")
    prepare([str(text)], folder / "data", train_tokenizer=300, val_fraction=0.1)
    return folder / "data"


@pytest.fixture
def small(corpus: Path) -> Small:
    """Overrides that scale any preset down to a run of a second; more of them as section__key=value."""
    base: dict[str, object] = {
        "model.width": 32,
        "model.heads": 2,
        "model.ffn": 64,
        "model.context": 32,
        "data.path": corpus,
        "objective.trajectory_groups": 1,
        "training.steps": 6,
        "training.batch": 4,
        "training.micro_batch": 2,
        "training.warmup": 2,
        "training.dtype": "float32",
        "training.device": "cpu",
        "training.threads": 1,
        "training.save_every": 2,
        "training.validate_every": 3,
        "training.validation_windows": 4,
        "training.log_every": 1,
    }
    return overriding(base)
