"""Starting and continuing a run: its settings, its data and its folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loopformer
from loopformer import LoopformerError
from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch

Small = Callable[..., list[str]]


def weights(run: Path) -> bytes:
    return (checkpoints(run)[-1] / "model.safetensors").read_bytes()


def test_padded_rows_are_checked_against_the_datas_vocabulary(small: Small, tmp_path: Path) -> None:
    launch("demo", small(model__padded_vocab=320, training__steps=1), tmp_path / "run", quiet=True)
    model = loopformer.load(tmp_path / "run").model
    assert (model.config.vocab, model.config.vocab_rows) == (300, 320)
    with pytest.raises(LoopformerError, match=r"model.padded_vocab 256 is smaller than model.vocab 300"):
        launch("demo", small(model__padded_vocab=256), tmp_path / "other", quiet=True)


def test_a_refused_start_leaves_no_folder(small: Small, tmp_path: Path) -> None:
    for overrides in (
        small(data__path=tmp_path / "none", data__prepare="null"),
        small(data__path=tmp_path / "none", data__prepare=tmp_path / "nothing.txt"),
        small(model__context=4096),
    ):
        with pytest.raises(LoopformerError):
            launch("demo", overrides, tmp_path / "runs" / "mine", quiet=True, say=lambda _: None)
        assert not list(tmp_path.iterdir())


def test_damaged_checkpoints_are_set_aside_and_never_deleted(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    launch("demo", small(), run, quiet=True)
    contents = {}
    for name in ("step-00000006.damaged", "step-00000006.damaged-2"):
        newest = checkpoints(run)[-1]
        (newest / "checksums.json").write_text("{}")
        contents[name] = (newest / "optimizer" / "optimizer.safetensors").read_bytes()
        launch(None, [], run, resume=True)
        assert f"It is kept as {newest.with_name(name)}." in capsys.readouterr().err
    for name, content in contents.items():
        assert (run / "checkpoints" / name / "optimizer" / "optimizer.safetensors").read_bytes() == content
    assert checkpoints(run)[-1].name == "step-00000006"


def test_an_unreadable_checkpoint_stops_a_resume(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "run", quiet=True)
    before = checkpoints(tmp_path / "run")
    sums = before[-1] / "checksums.json"
    content = sums.read_bytes()
    sums.unlink()
    sums.mkdir()  # a name that no one can read a file under
    with pytest.raises(LoopformerError, match=r"step-00000006 cannot be read .* make it readable"):
        launch(None, [], tmp_path / "run", resume=True, quiet=True)
    assert checkpoints(tmp_path / "run") == before
    sums.rmdir()
    sums.write_bytes(content)
    assert launch(None, [], tmp_path / "run", resume=True, quiet=True)["step"] == 6


@pytest.mark.parametrize("split", ["train", "val"])
def test_rewritten_shards_are_noticed_before_training(
    split: str, small: Small, corpus: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    launch("demo", small(data__path=data, training__steps=2), tmp_path / "run", quiet=True)
    (shard,) = data.glob(f"*-{split}-*.bin")
    ids = np.fromfile(shard, np.uint16)
    ((ids + 1) % 300).astype(np.uint16).tofile(shard)
    before = weights(tmp_path / "run")
    for resume, out in ((True, tmp_path / "run"), (False, tmp_path / "new")):
        with pytest.raises(LoopformerError, match=f"{shard.name} has changed since it was made"):
            launch("demo", small(data__path=data), out, resume=resume, quiet=True)
    assert weights(tmp_path / "run") == before
    ids.tofile(shard)
    assert launch("demo", small(data__path=data), tmp_path / "run", resume=True, quiet=True)["finished"]
