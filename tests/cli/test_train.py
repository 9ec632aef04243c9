"""`loopformer train` as a user meets it."""

import json
from pathlib import Path

import pytest

from .process import invoke


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("\n\n".join(f"Every pass {number} is told its time." for number in range(2000)))
    invoke("prepare", str(folder / "a.txt"), "--out", str(folder / "data"), "--train-tokenizer", "300")
    return folder / "data"


def test_a_dry_run_warns_of_text_that_is_repeated_too_often(data: Path, tmp_path: Path) -> None:
    words = ["train", "demo", f"data.path={data}", "model.context=16", "--dry-run", "--out", str(tmp_path / "run")]
    tokens = json.loads((data / "index.json").read_text())["tokens"]["train"]
    for epochs, warns in ((3.9, False), (4.1, True)):
        shown = invoke(*words, f"training.steps={round(epochs * tokens / 256)}").stdout
        assert f"{epochs:.2f} epochs" in shown
        assert ("more than 4 epochs" in shown) is warns
    assert not (tmp_path / "run").exists()
