"""benchmarks/speculation.py says in one sentence what it cannot measure, and measures the rest."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.data.prepare import prepare
from loopformer.loading import save_model

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "speculation.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "some.jsonl"
    text.write_text("".join(json.dumps({"text": f"every pass {n} is told its time"}) + "\n" for n in range(200)))
    prepare([str(text)], folder / "out", train_tokenizer=280, val_fraction=0.2)
    return folder / "out"


def run(monkeypatch: pytest.MonkeyPatch, data: Path, config: ModelConfig, folder: Path, *words: str) -> None:
    save_model(LoopedLM(config), folder / "m")
    (folder / "m" / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", str(folder / "m"), "--text", str(data), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_report_is_json_of_every_draft(
    tiny: ModelConfig,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(tiny, loops=2, vocab=280, padded_vocab=280)
    run(monkeypatch, data, config, tmp_path, "--prompts", "2", "--prompt-tokens", "8", "--new-tokens", "6")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["seed"], report["prompts"], report["new_tokens"]) == (None, 2, 6)
    assert {row["draft"] for row in report["rows"]} == {"M = 1"}
    assert all(row["same_texts"] == 1 for row in report["rows"])


@pytest.mark.parametrize(
    ("loops", "words", "said"),
    [
        (4, ["--prompts", "0"], "--prompts and --prompt-tokens must be 1 or more"),
        (4, ["--new-tokens", "1"], "--new-tokens must be 2 or more"),
        (1, [], "A model of 1 loop has no shorter trajectory"),
    ],
)
def test_mistakes_are_one_clear_sentence(
    tiny: ModelConfig,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loops: int,
    words: list[str],
    said: str,
) -> None:
    with pytest.raises(LoopformerError, match=said):
        run(monkeypatch, data, replace(tiny, loops=loops, vocab=280, padded_vocab=280), tmp_path, *words)


def test_an_unknown_dtype_is_refused(
    tiny: ModelConfig,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, data, tiny, tmp_path, "--dtype", "float33")
    assert "invalid choice: 'float33'" in capsys.readouterr().err
