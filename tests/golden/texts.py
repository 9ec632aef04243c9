"""What the golden outputs are made from: texts by a rule, prompts, and two examples of some tasks."""

import json
from pathlib import Path
from typing import Any

_SENTENCE = (
    "every pass is told its time and its step ; a short route costs less than the long one and both share one "
    "stack of blocks , naïve café ☕ 日本語 ."
)

PROMPTS = ("every pass", "a short route costs less", "the long one and both share", "naïve café ☕")

_TASKS: dict[str, list[dict[str, Any]]] = {
    "copa.validation": [
        {"premise": "The tap was turned.", "choice1": "The light came on.", "choice2": "Water came out.",
         "question": "effect", "idx": 0, "label": 1},
        {"premise": "The cup broke.", "choice1": "It fell.", "choice2": "It sang.", "question": "cause", "idx": 1,
         "label": 0},
    ],
    "piqa.validation": [
        {"goal": "How do you boil water?", "sol1": "Heat it.", "sol2": "Paint it.", "label": 0},
        {"goal": "To dry a cup,", "sol1": "fill it.", "sol2": "wipe it with a cloth.", "label": 1},
    ],
    "lambada_openai.test": [
        {"text": "He looked at the stone for a long time.\n\nIt was only a stone"},
        {"text": "“Is it you?” she asked, and he said that it was he"},
    ],
    "arc_easy.test": [
        {"id": "1", "question": "What is water?", "answerKey": "C",
         "choices": {"text": ["a metal", "a gas", "a liquid", "a sound"], "label": ["A", "B", "C", "D"]}},
        {"id": "2", "question": "Which is hot?", "answerKey": "1",
         "choices": {"text": ["fire", "ice", "snow"], "label": ["1", "2", "3"]}},
    ],
}  # fmt: skip
TASKS = ",".join(name.partition(".")[0] for name in _TASKS)


def document(number: int, words: int) -> str:
    """Words in an order of their own for each number."""
    known = _SENTENCE.split()
    return " ".join(
        known[(place * place * (number + 3) + place // 2 + number) % len(known)] for place in range(words)
    )


def write_texts(folder: Path) -> None:
    """One document as book.txt, many as news.jsonl, some unseen ones as new.jsonl."""
    (folder / "book.txt").write_text("\n\n".join(document(n, 90) for n in range(10)), encoding="utf-8")
    _write_lines(folder / "news.jsonl", [{"text": document(n, 40 + n)} for n in range(20, 80)])
    _write_lines(folder / "new.jsonl", [{"text": document(n, n)} for n in range(100, 110)])


def write_tasks(folder: Path) -> None:
    """A folder as `--data` takes it."""
    folder.mkdir()
    for name, examples in _TASKS.items():
        _write_lines(folder / f"{name}.jsonl", examples)


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
