"""`loopformer import` as a user meets it: what it refuses, what it replaces, what it takes along."""

from pathlib import Path

import pytest

from loopformer import load
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
    with pytest.raises(LoopformerError, match=r"out holds files that are not a model; choose another"):
        invoke("import", model, str(out), *force)
    assert contents(out) == before


def test_a_model_that_is_replaced_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    out = Path(save_small(tmp_path / "out", context=32))
    for name in ("chat_template.jinja", "tokenizer_config.json", "schedules.json", "README.md", "notes.txt"):
        (out / name).write_text("{}")
    bare = save_small(tmp_path / "bare", context=16, with_tokenizer=False)
    with pytest.raises(LoopformerError, match="already holds a model"):
        invoke("import", bare, str(out))
    invoke("import", bare, str(out), "--force")
    assert sorted(contents(out)) == ["README.md", "config.json", "model.safetensors", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "m", "out"]


def test_an_export_that_is_replaced_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    invoke("export", model, str(out), "--self-contained")
    (out / "notes.txt").touch()
    invoke("import", model, str(out), "--force")
    assert sorted(contents(out)) == ["config.json", "model.safetensors", "notes.txt", "tokenizer.json"]


@pytest.mark.parametrize("verb", ["import", "export"])
def test_a_folder_that_is_there_stays_the_same_one(model: str, tmp_path: Path, verb: str) -> None:
    """It may be a disk of its own, or the one that a shell is in."""
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    out.mkdir()
    before = out.stat().st_ino
    invoke(verb, model, str(out))
    assert out.stat().st_ino == before
    assert load(out).need_tokenizer().hash == load(model).need_tokenizer().hash
    assert not [path for path in (*tmp_path.iterdir(), *out.iterdir()) if path.suffix == ".part"]


def test_an_import_that_fails_leaves_the_old_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(save_small(tmp_path / "out", context=32))
    before = contents(tmp_path)
    monkeypatch.setattr("loopformer.data.tokenizer.Tokenizer.save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        invoke("import", model, str(out), "--force")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("words", "default"), [(["--trajectory", "2-1-1"], "2-1-1"), (["--budget", "2"], "2-2")])
def test_the_chat_template_and_the_default_of_an_export_come_along(
    model: str, tmp_path: Path, words: list[str], default: str
) -> None:
    pytest.importorskip("transformers")
    (Path(model) / "chat_template.jinja").write_text("{{ messages[0].content }} ☕\n", encoding="utf-8")
    exported, out = tmp_path / "exported", tmp_path / "out"
    invoke("export", model, str(exported), *words)
    assert f"default trajectory {words[1]}" in invoke("import", str(exported), str(out)).stdout
    assert (out / "chat_template.jinja").read_bytes() == (Path(model) / "chat_template.jinja").read_bytes()
    again = load(out)
    assert again.default_trajectory == again.default == again.model.resolve(default)
    assert again.need_tokenizer().hash == load(model).need_tokenizer().hash


def test_the_chat_template_of_a_run_comes_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    seal(Path(save_small(run / "checkpoints" / "step-00000005", context=16)))
    (run / "run.yaml").touch()
    (run / "chat_template.jinja").write_text("{{ messages }}")
    assert "default trajectory" not in invoke("import", str(run), str(tmp_path / "out")).stdout
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
