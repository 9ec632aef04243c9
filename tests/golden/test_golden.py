"""What users get is what was recorded; see record.py, and its --diff for a list of all differences."""

import json

import pytest
from differences import EXACT, compare
from record import EXPECTED, record


def test_outputs_are_those_recorded() -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    lines = compare(json.loads(EXPECTED.read_text(encoding="utf-8")), record())
    assert not lines, "\n".join(lines)


def test_differences_are_found_with_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXACT, raising=False)

    def recorded(loss: float, nats: float, ids: list[int], sha256: str) -> dict[str, object]:
        runs = {"demo": {"loss": loss, "weights": {"tokens": {"sha256": sha256}}}}
        return {"made_with": {"torch": "2"}, "train": {"runs": runs}, "eval": [{"nats": nats, "ids": ids}]}

    before = recorded(5.0, 100.0, [1, 2], "a")
    assert compare(before, recorded(5.0 * (1 + 5e-5), 100.0 * (1 + 5e-6), [1, 2], "b")) == []
    assert compare(before, recorded(5.1, 100.1, [1, 3], "a")) == [
        "train/runs/demo/loss: 5.0 -> 5.1",
        "eval/0/nats: 100.0 -> 100.1",
        "eval/0/ids: [1, 2] -> [1, 3]",
    ]
    assert compare(before, {**before, "more": 1}) == ["more: nothing -> 1"]
    monkeypatch.setenv(EXACT, "1")
    assert compare(before, recorded(5.0, 100.0, [1, 2], "b")) == [
        "train/runs/demo/weights/tokens/sha256: 'a' -> 'b'"
    ]
