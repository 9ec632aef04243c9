"""The model in the box: small, elastic, as good as its card says, and what every verb takes where none is named."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loopformer
from loopformer import LM
from loopformer.cli import app
from loopformer.config.model import BOX
from loopformer.evaluation.text import perplexity, read_text
from loopformer.loading.folder import HELD_OUT, resolve_model_path

FOLDER = resolve_model_path(BOX)


@pytest.fixture(scope="module")
def lm() -> LM:
    return loopformer.load(BOX)


def test_it_is_small(lm: LM) -> None:
    assert lm.model.cost.parameters.total <= 8e6
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16e6


def test_its_card_is_true_and_depth_pays(lm: LM) -> None:
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| [\d.]+ \|$", (FOLDER / "README.md").read_text("utf-8"), re.M)
    said = {int(budget): float(found) for budget, found in rows}
    assert list(said) == list(range(1, 9))
    assert all(more <= 1.002 * less for less, more in pairwise(said.values()))  # six and seven are almost equal
    assert said[8] <= 0.85 * said[1]
    text = read_text(str(FOLDER / HELD_OUT), lm.need_tokenizer())
    (found,) = perplexity(lm.model, text, [1])
    assert found["perplexity"] == pytest.approx(said[1], rel=0.01)  # which was measured in bf16


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "The city", "--max-tokens", "4", "--json"],
        ["eval", "text", "--budgets", "1,2", "--max-tokens", "600", "--json"],
        ["search", "--budget", "7", "--max-tokens", "600", "--json"],
        ["analyze", "--prompts", "2", "--length", "16", "--budgets", "2", "--out", "found", "--json"],
        ["bench", "decode", "--budgets", "2", "--tokens", "2", "--contexts", "8", "--paths", "plain", "--json"],
    ],
    ids=lambda words: str(words[0]),
)
def test_every_verb_takes_it(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)
