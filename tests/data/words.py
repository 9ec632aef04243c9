"""Small made-up documents, and a stop while they are prepared."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from loopformer.data.prepare import PrepareProgress

WORDS = ["the", "loop", "runs", "again", "and", "time", "moves", "on", "while", "depth", "grows", "step"]


def paragraph(rng: random.Random, words: int = 30) -> str:
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "s", str(rng.randrange(100))]) for _ in range(words))


def document(number: int, paragraphs: int = 4) -> str:
    rng = random.Random(number)
    return "\n\n".join([f"Document {number} — naïve 中文 🙂", *(paragraph(rng) for _ in range(paragraphs))])


def write_jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def stopping_at(batch: int) -> Callable[[PrepareProgress], None]:
    """A `report` that interrupts the work when it is told of a batch of tokens for the so manieth time."""
    left = batch

    def report(progress: PrepareProgress) -> None:
        nonlocal left
        left -= progress.phase == "tokenizing"
        if not left:
            raise KeyboardInterrupt

    return report
