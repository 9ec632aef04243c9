"""`loopformer import` as a user meets it: what it refuses, what it replaces, what it takes along."""

from pathlib import Path

import pytest

from loopformer.errors import LoopformerError

from .models import save_small, seal
from .process import invoke


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
@pytest.mark.parametrize("kind", ["prepared", "prepared over a model", "run", "checkpoint", "other"])
def test_a_folder_that_is_no_model_stays_as_it_is(model: str, tmp_path: Path, kind: str, force: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    if kind == "prepared over a model":
        save_small(out, context=16)
    if kind.startswith("prepared"):
        (out / "index.json").write_text("{}")
    elif kind == "run":
        (out / "run.yaml").touch()
        save_small(out / "checkpoints" / "step-00000005", context=16)
    elif kind == "checkpoint":
        save_small(out, context=16)
        seal(out)
    before = contents(out)
    with pytest.raises(LoopformerError, match=r"out holds files that are no model folder of ours; choose another"):
        invoke("import", model, str(out), *force)
    assert contents(out) == before
