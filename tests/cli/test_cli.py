"""The command line as a user meets it; a process of its own takes seconds, so only what needs one has one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopformer import LoopformerError
from loopformer.cli import app, main
from loopformer.config.model import setting_names
from loopformer.config.run import SECTIONS

from .process import cpu_seconds, invoke, run

REFERENCE = Path(__file__).parent.parent / "reference"


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    assert "info" in run("--help").stdout
    assert cpu_seconds("-m", "loopformer", "--help") < cpu_seconds("-c", "import torch") / 2
    code = "import sys, loopformer.cli; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_shows_flags_as_flags_and_arguments_by_name() -> None:
    for words in ([], ["train"], ["eval"], ["eval", "text"], ["bench", "decode"], ["generate"]):
        help_text = invoke(*words, "--help").stdout
        assert "<bool>" not in help_text
        assert "--help" in help_text
    assert "[PRESET] [KEY=VALUE]..." in invoke("train", "--help").stdout
    assert "eval text [OPTIONS] [MODEL]" in invoke("eval", "text", "--help").stdout


def test_a_shell_completes_what_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def asked(typed: str) -> dict[str, str]:
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        return {"_LOOPFORMER_COMPLETE": "complete_bash", **words}

    def complete(typed: str) -> list[str]:
        return CliRunner().invoke(app, [], prog_name="loopformer", env=asked(typed)).stdout.split()

    for name, loops in (("mine", 3), ("other", 5)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.yaml").write_text(f"model: {{loops: {loops}}}\n")
    assert complete("loopformer gen") == ["generate"]
    assert complete("loopformer train small/lo") == ["small/loopformer"]
    assert "paper/tmlt-1x24" not in complete("loopformer train p")
    assert "paper/tmlt-1x24" in complete("loopformer train paper/tmlt-")
    assert complete("loopformer chat --model ") == ["box", "runs/mine", "runs/other"]
    assert complete("loopformer chat --model runs/o") == ["runs/other"]
    assert complete("loopformer chat --model runs/mine --budget ") == ["1", "2", "3"]
    assert complete("loopformer export runs/other out --budget ") == ["1", "2", "3", "4", "5"]
    assert complete("loopformer generate --budget ")[-1] == "8"  # of the model in the box
    assert complete("loopformer search --model nowhere --budget ") == []
    for name, content in (
        ("run.yaml", f"model: {{loops: {10**12}}}\n"),
        ("config.json", '{"model": {"loops": 1e12}}'),
    ):
        (tmp_path / "runs" / name).write_text(content)
        assert complete("loopformer search --model runs --budget ") == []
    code = "import sys; sys.argv = ['loopformer']; from loopformer.cli import main\ntry: main()\n"
    code += "except SystemExit: sys.exit('torch' in sys.modules)"  # a press of TAB must not take seconds
    environment = {**os.environ, **asked("loopformer chat --model runs/mine --budget ")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [b"1", b"2", b"3"])


def test_info_of_a_preset_counts_what_the_paper_has() -> None:
    report = json.loads(invoke("info", "--model", "paper/loopformer", "--json").stdout)
    assert report["shape"] == "3⊗8"
    assert report["parameters"]["total"] == 278_169_600
    assert report["training_gflops_per_token"]["overhead"] == pytest.approx(1.55, abs=0.005)
    assert [row["budget"] for row in report["budgets"]] == list(range(1, 9))
    assert "278,169,600" in invoke("info", "--model", "paper/loopformer").stdout
    assert "small/tmlt" in invoke("info").stdout.split()
    presets = {one["name"]: one for one in json.loads(invoke("info", "--json").stdout)}
    assert presets["paper/loopformer"]["parameters"] == 278_169_600
    assert all(one["about"] for one in presets.values())


def test_info_lists_every_setting_with_its_default() -> None:
    found = {one["name"]: one for one in json.loads(invoke("info", "--settings", "--json").stdout)}
    names = {f"{section}.{name}" for section, cls in SECTIONS.items() for name in setting_names(cls)}
    assert set(found) == names
    assert found["model.inject"]["default"] == "none (none, gated, adapter)"
    assert "training.optimizer" in invoke("info", "--settings").stdout


def _weights(tmp_path: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(REFERENCE / "loopformer.safetensors")
    file = tmp_path / "published.safetensors"
    save_file({n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}, file)
    return file


def test_import_then_info(tmp_path: Path) -> None:
    file, out = _weights(tmp_path), tmp_path / "model"

    def loops_of(model: Path, *given: str) -> int:
        return int(json.loads(invoke("info", "--model", str(model), *given, "--json").stdout)["settings"]["loops"])

    import_it = ("import", str(file), str(out), "--heads", "4", "--loops")
    assert "2⊗8" in invoke(*import_it, "8").stdout
    assert loops_of(out) == 8
    assert loops_of(file, "--heads", "4", "--loops", "6") == 6
    with pytest.raises(LoopformerError, match="already holds a model"):
        invoke(*import_it, "4")
    invoke(*import_it, "4", "--force")
    assert loops_of(out) == 4


def test_a_mistake_ends_the_process_with_one_sentence() -> None:
    error = run("info", "--model", "paper/loopfromer", code=1).stderr
    assert "did you mean paper/loopformer" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("info", "--model", "/no/such/place"), 1, "no file or folder"),
        (("info", "--model", "demo", "--context", "0"), 2, "--context must be 1 or more"),
        (("import", "/no/such/file.pt", "/tmp/out"), 1, "no file or folder"),
        (("inof",), 2, "No such command"),
        (("calibrate", "--model", "box"), 2, "calibrate was removed"),
        (("serve", "--int8"), 2, "--int8 was removed; choose the dtype int8 on a CPU"),
        (("train", "demo", "--steps", "5"), 2, "No such option: --steps; write settings without dashes, as in"),
        (
            ("generate", "a", "runs/mine"),
            2,
            "(runs/mine); give the model with --model, and put quotes around a text.",
        ),
        (("search",), 2, "loopformer: Missing option '--budget'; `loopformer search --help` lists what it takes."),
    ],
)
def test_mistakes_have_exit_codes(
    words: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["loopformer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err
