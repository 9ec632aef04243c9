"""Prompts out of a text, what the states do along a trajectory, and the files it is kept in."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopformer import LM, LoopedLM, LoopformerError
from loopformer.analysis import dynamics
from loopformer.analysis.dynamics import (
    Prompts,
    analyze,
    model_names,
    read_prompts,
    write_results,
)
from loopformer.analysis.metrics import LinearCKA, anisotropy, curvature, lens, movement, prompt_entropy
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.errors import FileProblem, RunFailed
from loopformer.evaluation.store import weights_hash


def _close(found: list[float | None], expected: torch.Tensor) -> None:
    assert [math.nan if value is None else value for value in found] == pytest.approx(
        expected.tolist(), rel=1e-5, abs=1e-6, nan_ok=True
    )


@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("trajectory", [None, 1, "2-1-1"])
def test_every_state_is_measured(lm: LM, prompts: Prompts, trajectory: int | str | None, kind: str) -> None:
    model, ids = lm.model, prompts.ids
    found = analyze(model, prompts, "mine", trajectory, states=kind)
    with torch.no_grad():
        assert model.places is not None
        embedded = model.tokens(ids) + model.places.weight[: ids.shape[1]]
        seen = torch.stack([embedded, *model(ids, trajectory, states=True).states])  # [S, P, T, D]
        shown = model.final_norm(seen) if kind == "after" else seen
    _close(found["metrics"]["curvature"]["mean"], curvature(shown).mean(1))
    _close(found["metrics"]["anisotropy"]["std"], anisotropy(shown).std(1))
    _close(found["metrics"]["prompt_entropy"]["mean"], prompt_entropy(shown).mean(1))
    assert found["metrics"]["movement"]["mean"][0] is None
    _close(found["metrics"]["movement"]["mean"][1:], movement(shown[:-1], shown[1:]).mean(1))
    divergence, agreement = lens(model, seen.flatten(1, 2))  # whatever the states, the lens has the final norm
    _close(found["metrics"]["lens_divergence"]["mean"], divergence.mean(1))
    _close(found["metrics"]["lens_agreement"]["mean"], agreement.mean(1))
    cka = LinearCKA(len(shown), 24)
    cka.add(shown.flatten(1, 2))
    for row, expected in zip(found["cka"], cka.matrix(), strict=True):
        _close(row, expected)
    for row, expected in zip(found["cka_debiased"], cka.matrix(debiased=True), strict=True):
        _close(row, expected)


def test_the_lens_at_the_end_is_the_model(lm: LM, prompts: Prompts) -> None:
    found = analyze(lm.model, prompts, "mine", 3)
    assert found["metrics"]["lens_divergence"]["mean"][-1] == 0
    assert found["metrics"]["lens_agreement"]["mean"][-1] == 1
    assert found["depth"] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_batches_do_not_matter(lm: LM, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = analyze(lm.model, prompts, "mine")
    monkeypatch.setattr(dynamics, "_BATCH_TOKENS", 24)  # two prompts at a time
    told: list[tuple[int, int]] = []
    parts = analyze(lm.model, prompts, "mine", progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 7), (4, 7), (6, 7), (7, 7)]
    for name, series in whole["metrics"].items():
        _close(parts["metrics"][name]["mean"], torch.tensor([math.nan if m is None else m for m in series["mean"]]))
    for row, expected in zip(parts["cka"], whole["cka"], strict=True):
        _close(row, torch.tensor(expected))


def test_results_name_what_they_are_of_and_come_back(lm: LM, prompts: Prompts, tmp_path: Path) -> None:
    found = [analyze(lm.model, prompts, "mine", trajectory) for trajectory in ("2-1-1", 1)]
    assert (found[0]["shape"], found[0]["trajectory"], found[0]["prompts"], found[0]["tokens"]) == (
        "1⊗4",
        "2-1-1",
        7,
        84,
    )
    assert found[0]["weights"] == weights_hash(lm.model)
    assert found[0]["tokens_sha256"] == prompts.hash
    files = write_results(found, tmp_path)
    assert json.loads(files[0].read_text())["results"] == found
    metrics, cka = (file.read_text().splitlines() for file in files[1:])
    assert len(metrics) == 1 + 6 * (4 + 2)
    assert len(cka) == 1 + 16 + 4
    assert "mine,1⊗4,2-1-1,before,0,0.0,movement,," in metrics


def test_results_that_cannot_all_be_written_leave_nothing(
    lm: LM, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [analyze(lm.model, prompts, "mine", 1)]

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        with pytest.raises(FileProblem, match="No space left"):
            write_results(found, tmp_path / "new" / "analysis")
    assert not list(tmp_path.iterdir())
    broken: dict[str, Any] = {"cka": None}
    with pytest.raises(AttributeError):
        write_results(found, tmp_path / "new", broken)
    assert not list(tmp_path.iterdir())


def test_one_prompt_has_no_spread(lm: LM, prompts: Prompts) -> None:
    found = analyze(lm.model, Prompts(prompts.ids[:1], "chance", "all of it", 1), "mine", 2)
    assert found["metrics"]["curvature"]["std"] == [None, None, None]
    assert None not in found["metrics"]["curvature"]["mean"]


def test_wrong_input_is_one_sentence(lm: LM, prompts: Prompts) -> None:
    with pytest.raises(LoopformerError, match=r"before or after the final norm; 'between'"):
        analyze(lm.model, prompts, "mine", states="between")
    with pytest.raises(LoopformerError, match="Budget 5 is above the model's 4 loops"):
        analyze(lm.model, prompts, "mine", 5)
    for name in ("tokens", "final_norm"):
        broken = LoopedLM(lm.model.config)
        nn.init.constant_(broken.get_parameter(f"{name}.weight"), math.nan)
        with pytest.raises(RunFailed, match="no finite numbers"):
            analyze(broken, prompts, "broken")


def _jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_each_document_gives_its_beginning(lm: LM, tmp_path: Path) -> None:
    texts = [f"every pass {i} is told its time and its step" for i in range(5)]
    texts.insert(1, "no")  # too short
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 4, 6)
    expected = [lm.need_tokenizer().encode(texts[i])[:6] for i in (0, 2, 3, 4)]
    assert prompts.ids.tolist() == expected
    assert prompts.documents == 4
    again = read_prompts(str(tmp_path / "a.jsonl"), lm.need_tokenizer(), 4, 6)
    assert again.hash == prompts.hash
    assert read_prompts(str(tmp_path / "a.jsonl"), lm.need_tokenizer(), 3, 6).hash != prompts.hash


def test_few_documents_give_several_windows_each(lm: LM, tmp_path: Path) -> None:
    texts = ["its time and its step " * 3, "every pass is told " * 20]
    one, other = (lm.need_tokenizer().encode(text) for text in texts)
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 5, 8)
    assert prompts.documents == 2
    assert 16 <= len(one) < 24  # two windows, so the other document gives three
    expected = [one[:8], other[:8], one[8:16], other[8:16], other[16:24]]
    assert prompts.ids.tolist() == expected


def test_short_documents_are_read_past(lm: LM, tmp_path: Path) -> None:
    """The first look does not reach the only document that is long enough."""
    texts = ["its step"] * 2000 + ["every pass is told its time and its step"]
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 1, 8)
    assert prompts.ids.tolist() == [lm.need_tokenizer().encode(texts[-1])[:8]]


def test_a_prepared_folder_gives_its_held_out_part(lm: LM, tmp_path: Path) -> None:
    lm.need_tokenizer().save(tmp_path)
    source = _jsonl(tmp_path / "a.jsonl", [f"pass {i} is told its time and step {i * i}" for i in range(400)])
    prepare([source], tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.2, workers=1)
    prompts = read_prompts(str(tmp_path / "data"), lm.need_tokenizer(), 3, 6)
    data = TokenData.open(tmp_path / "data", "val")
    held = data.sources[0].ids.read(0, data.tokens).tolist()
    assert prompts.ids[0].tolist() == held[:6]
    assert data.eot not in prompts.ids
    assert prompts.part == "validation split"


def test_too_little_text_is_one_sentence(lm: LM, tmp_path: Path) -> None:
    text, tokenizer = _jsonl(tmp_path / "a.jsonl", ["every pass is told its time"]), lm.need_tokenizer()
    tokens = len(tokenizer.encode("every pass is told its time"))
    with pytest.raises(LoopformerError, match=f"no document of {tokens + 1} tokens"):
        read_prompts(text, tokenizer, 1, tokens + 1)
    with pytest.raises(LoopformerError, match=r"has 1 windows .* where 2 prompts were asked for"):
        read_prompts(text, tokenizer, 2, tokens)
    with pytest.raises(LoopformerError, match="prompts must be 1 or more"):
        read_prompts(text, tokenizer, 0, 4)
    with pytest.raises(LoopformerError, match="4 tokens or more"):
        read_prompts(text, tokenizer, 1, 3)
    assert read_prompts(text, tokenizer, 1, tokens).ids.dtype == torch.int64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_follows_cpu(lm: LM, prompts: Prompts) -> None:
    expected = analyze(lm.model, prompts, "mine")
    found = analyze(copy.deepcopy(lm.model).cuda(), prompts, "mine")
    assert (found["device"], found["weights"]) == ("cuda", expected["weights"])
    for name, series in expected["metrics"].items():
        assert found["metrics"][name]["mean"] == pytest.approx(series["mean"], abs=1e-3)
    assert torch.tensor(found["cka"]) == pytest.approx(torch.tensor(expected["cka"]), abs=1e-3)


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert model_names(["runs/a/elastic", "runs/b/elastic"]) == ("a/elastic", "b/elastic")
    assert model_names(["runs/a/elastic", "runs/a/fixed"]) == ("elastic", "fixed")
    (tmp_path / "one").mkdir()
    with pytest.raises(LoopformerError, match="given twice"):
        model_names([str(tmp_path / "one"), f"{tmp_path}/one/../one"])
