"""Our own folders: a model survives, damage is named, and a run gives its newest whole checkpoint."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.models import seal
from safetensors import safe_open

import loopformer
from loopformer import LoopedLM, LoopformerError
from loopformer.config import ModelConfig
from loopformer.config.model import BOX
from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import load_model, model_folder, save_model
from loopformer.loading.folder import checkpoints, read_config, trained_budgets
from loopformer.training.checkpoint import delete_old_checkpoints

SUMS = "checksums.json"


def test_a_model_survives_its_folder(tiny: ModelConfig, tmp_path: Path) -> None:
    model = LoopedLM(tiny)
    save_model(model, tmp_path / "m")
    again = loopformer.load(tmp_path / "m").model
    assert again.config == tiny
    ids = torch.randint(tiny.vocab, (2, 8))
    assert torch.equal(again(ids, "2-1-1").logits, model(ids, "2-1-1").logits)
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_damage_is_one_clear_sentence(tiny: ModelConfig, tmp_path: Path) -> None:
    folder = save_model(LoopedLM(tiny), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for change, said in [
        ({"version": 99}, "version 99"),
        ({"source": None}, "its source is no mapping"),
        ({"model": {**config["model"], "blokcs": 1}}, "did you mean model.blocks"),
        ({"model": {**config["model"], "blocks": 3}}, r"lack the tensor .*modulators\.2"),
        ({"model": {**config["model"], "ffn": 81}}, r"ffn\.up\.weight has shape"),
        ({"model": {**config["model"], "conditioning": "step"}}, r"conditioner\.time\..* does not belong"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(LoopformerError, match=said):
            load_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(LoopformerError, match=r"model\.safetensors is not a complete safetensors file"):
        loopformer.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoopformerError, match=r"model\.safetensors cannot be read: No such file"):
        loopformer.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(LoopformerError, match="not readable JSON"):
        loopformer.load(folder)


def test_a_failed_save_leaves_the_old_model(tiny: ModelConfig, tmp_path: Path) -> None:
    folder = save_model(LoopedLM(tiny), tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors.part").mkdir()  # nothing can be written there
    with pytest.raises(LoopformerError, match="could not be written"):
        save_model(LoopedLM(tiny), folder)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.fixture
def run(tiny: ModelConfig, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 5 and 10, whose weights say so."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("model: {}\n")
    for step in (5, 10):
        model = LoopedLM(tiny)
        torch.nn.init.constant_(model.tokens.weight, step)
        seal(save_model(model, tmp_path / "run" / "checkpoints" / f"step-{step:08d}"))
    return tmp_path / "run"


def step_loaded(source: Path) -> int:
    return int(loopformer.load(source).model.tokens.weight[0, 0])


def test_a_run_without_its_settings_says_so(run: Path) -> None:
    (run / "run.yaml").unlink()
    newest = checkpoints(run)[-1]
    with pytest.raises(LoopformerError) as caught:
        loopformer.load(run)
    assert str(caught.value) == f"The run {run} has lost its run.yaml; name the checkpoint {newest} itself."
    (newest / "run.yaml").write_text("model: {}\n")
    with pytest.raises(LoopformerError) as caught:
        loopformer.load(run)
    assert f"lost its run.yaml; copy {newest / 'run.yaml'} there, or name the checkpoint" in str(caught.value)
    shutil.copy(newest / "run.yaml", run)
    assert step_loaded(run) == step_loaded(newest) == 10


def test_a_run_is_looked_through_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums of large checkpoints take time, and a damaged one is named once."""
    (checkpoints(run)[-1] / "model.safetensors").write_bytes(b"half")
    loopformer.load(run)
    assert capsys.readouterr().err.count("step-00000010 is damaged") == 1


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"config.json": "0"}', '{"model.safetensors": 3}', None])
def test_checksums_that_say_nothing_make_no_checkpoint_whole(
    run: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoints(run)[-1]
    (newest / SUMS).unlink()
    if content is not None:
        (newest / SUMS).write_text(content)
    assert step_loaded(run) == 5
    assert "step-00000010 is damaged (checksums.json " in capsys.readouterr().err
    with pytest.raises(LoopformerError, match=r"step-00000010 is damaged \(checksums.json .*; use another"):
        loopformer.load(newest)


@pytest.mark.parametrize("name", [SUMS, "model.safetensors"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    run: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == name and "step-00000010" in str(self):
            raise OSError(number, os.strerror(number))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    for source in (run, checkpoints(run)[-1]):
        said = rf"step-00000010 cannot be read \({name}: {os.strerror(number)}\); make it readable"
        with pytest.raises(LoopformerError, match=said):
            loopformer.load(source)


def test_one_checkpoint_is_checked_as_a_run_is(run: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(run)
    assert step_loaded(older) == 5
    copy = shutil.copytree(newest, tmp_path / "copy")
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    for folder in (newest, copy):
        (folder / "model.safetensors").write_bytes(weights)
        with pytest.raises(LoopformerError, match=r"damaged \(model.safetensors does not match its checksum\)"):
            loopformer.load(folder)
    (copy / SUMS).unlink()
    assert step_loaded(copy) == 10, "a model folder without checksums is taken as it is"


def test_a_run_loads_while_its_checkpoints_rotate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer checkpoint comes and the others go at every moment that something is read."""
    for checkpoint in checkpoints(run):
        (checkpoint / SUMS).unlink()
        Tokenizer.train(["text"], 257).save(checkpoint)
        seal(checkpoint)
    calls = 0

    def count(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                older, newest = checkpoints(copy)
                shutil.copytree(older, newest.with_name("step-00000015"))
                delete_old_checkpoints(copy, keep=1, best=None)
            return open_file(*arguments, **options)

        return counted

    loaded = []
    for moment in itertools.count(1):
        copy = Path(shutil.copytree(run, tmp_path / str(moment)))
        calls = 0
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", count(Path.open))
            patched.setattr("loopformer.loading.folder.safe_open", count(safe_open))
            loaded.append(step_loaded(copy))
        if calls < moment:
            break
    assert len(loaded) > 8
    assert loaded[0] == 5, "the next newest, which is a copy of step 5"
    assert loaded[-1] == 10, "nothing rotates any more"


@pytest.mark.parametrize(
    ("objective", "budgets"),
    [
        ("{budget: full}", {4}),
        ("{budget: full}, {budget: short, weight: 0.1}", {1, 2, 3, 4}),
        ("{budget: full}, {budget: [2, 3], weight: 0.1}, {budget: 1, weight: 0, match: 0.5}", {1, 2, 3, 4}),
        ("{budget: full}, {budget: 1, weight: 0}", {4}),
    ],
)
def test_the_budgets_of_a_run_are_those_of_its_objective(
    tiny: ModelConfig, tmp_path: Path, objective: str, budgets: set[int]
) -> None:
    assert tiny.loops == 4
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(f"model: {{loops: 4}}\nobjective: {{trajectories: [{objective}]}}\n")
    assert trained_budgets(tmp_path, tiny) == trained_budgets(checkpoint, tiny) == frozenset(budgets)
    (tmp_path / "run.yaml").write_text("damaged")
    assert trained_budgets(tmp_path, tiny) is None


def test_the_budgets_of_other_models_follow_from_what_their_loops_know(tiny: ModelConfig, tmp_path: Path) -> None:
    assert trained_budgets(BOX, read_config(model_folder(BOX))) == frozenset(range(1, 9))
    assert trained_budgets(tmp_path, tiny) == frozenset({1, 2, 3, 4})
    for conditioning in ("none", "index"):
        assert trained_budgets(tmp_path, dataclasses.replace(tiny, conditioning=conditioning)) is None
