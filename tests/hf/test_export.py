"""An exported folder: Transformers loads it, we load it, a process without loopformer loads it.

Flattened source files import each other, and nothing of the package.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.models import seal
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import loopformer.hf
from loopformer import LM, LoopformerError, load
from loopformer.cli import app
from loopformer.hf.export import CONFIGURATION, MODELING, export, flatten
from loopformer.loading import save_model

REFERENCE = Path(__file__).parent.parent / "reference"
TEXTS = ["every pass", " naïve café ☕ 日本語", "told\n\n its  time"]


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "mine"
    export(folder, out, self_contained=True)
    return out


@pytest.fixture
def run(lm: LM, tmp_path: Path) -> Path:
    """A run with two validated checkpoints."""
    place = tmp_path / "run"
    for step in (5, 10):
        checkpoint = place / "checkpoints" / f"step-{step:08d}"
        save_model(lm.model, checkpoint, source={"run": "runs/mine", "step": step})
        lm.need_tokenizer().save(checkpoint)
        seal(checkpoint)
    (place / "run.yaml").write_text("model: {}\n")
    records = [{"kind": "validation", "step": step, "loss_at_1": 60.0 / step, "loss_at_4": 5.5} for step in (5, 10)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return place


def test_transformers_and_we_load_the_same_folder(exported: Path, lm: LM) -> None:
    assert loopformer.hf  # imported: the model is registered
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    again, ours = load(exported), lm.need_tokenizer()
    assert again.need_tokenizer().hash == ours.hash
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == ours.encode(text)
        assert tokenizer.decode(ours.encode(text)) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == ours.eot
    assert GenerationConfig.from_pretrained(exported).eos_token_id == ours.eot
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert inputs.keys() == {"input_ids", "attention_mask"}
    for budget in (1, 4):
        expected = lm.generate(TEXTS, budget=budget, max_tokens=6)
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False, budget=budget)
        new = [row[len(inputs["input_ids"][0]) :].tolist() for row in found]
        assert [tuple(row[: len(one.ids)]) for row, one in zip(new, expected, strict=True)] == [
            one.ids for one in expected
        ]
        assert [one.ids for one in again.generate(TEXTS, budget=budget, max_tokens=6)] == [
            one.ids for one in expected
        ]


@pytest.mark.slow
def test_it_loads_where_loopformer_is_not(exported: Path, folder: Path, lm: LM, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    export(folder, plain)
    (card,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), flags=re.DOTALL)
    code = f"""
import builtins, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "loopformer":
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
def asked(question=""):
    sys.exit("The tokenizer asks: " + question)
builtins.input = asked
AutoTokenizer.from_pretrained({str(plain)!r})
tokenizer = AutoTokenizer.from_pretrained({str(exported)!r}, trust_remote_code=False)
inputs = tokenizer("every pass", return_tensors="pt")
torch.save({{
    "logits": model(**inputs, trajectory="2-1-1").logits,
    "ids": model.generate(**inputs, max_new_tokens=5, do_sample=False, budget=2),
}}, "got.pt")
try:
    model(**inputs, budget=9)
except ValueError as error:
    print(error)
model.save_pretrained("saved")
AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
import os
os.chdir({str(exported.parent)!r})
{card}
assert not any(name.split(".")[0] == "loopformer" for name in sys.modules)
"""
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **home},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "above the model's 4 loops" in done.stdout
    got = torch.load(tmp_path / "got.pt")
    prompt = lm.need_tokenizer().encode("every pass")
    expected = lm.model(torch.tensor([prompt]), "2-1-1").logits[..., : lm.model.config.vocab]
    torch.testing.assert_close(got["logits"], expected, atol=1e-5, rtol=1e-5)
    result = lm.generate("every pass", budget=2, max_tokens=5)
    assert got["ids"][0].tolist()[: len(prompt) + len(result.ids)] == [*prompt, *result.ids]


def test_the_card_shows_what_the_run_measured_of_these_weights(run: Path, lm: LM, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2⊗4" in card
    assert f"{lm.model.cost.parameters.total:,}" in card
    assert "validation at step 10" in card
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith(("| 1 |", "| 2 |", "| 4 |"))]
    assert [row[-2:] for row in rows] == [["6.0000", "403.4 |"], ["–", "– |"], ["5.5000", "244.7 |"]]
    assert "import loopformer.hf" in card
    assert "lm_eval" not in card  # it would not know the model
    export(run / "checkpoints" / "step-00000005", tmp_path / "earlier")
    assert "| 12.0000 | 1.628e+05 |" in (tmp_path / "earlier" / "README.md").read_text()
    export(tmp_path / "out", tmp_path / "again", self_contained=True)  # an export of an export
    again = (tmp_path / "again" / "README.md").read_text()
    assert "validation at step 10" in again
    assert "import loopformer.hf" not in again
    trained_further = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        trained_further.model.final_norm.weight += 1
    trained_further.save_pretrained(tmp_path / "out")
    export(tmp_path / "out", tmp_path / "again")
    assert "No validation of these weights was recorded" in (tmp_path / "again" / "README.md").read_text()
    (run / "metrics.jsonl").unlink()
    export(run, tmp_path / "out")
    assert "No validation of these weights was recorded" in (tmp_path / "out" / "README.md").read_text()


def test_the_default_and_the_chat_template_travel(run: Path, tmp_path: Path) -> None:
    (run / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}!{% endfor %}")
    export(run, tmp_path / "out", trajectory="2-1-1")
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out").resolve()) == "2-1-1"
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out", budget=3).resolve()) == "3"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "every"}], tokenize=False) == "every!"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["source"]["tuned_to_answer"] is True


def test_published_weights_come_without_a_tokenizer(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(REFERENCE / "loopformer.safetensors")
    file = tmp_path / "published.safetensors"
    save_file({n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}, file)
    _, files = export(file, tmp_path / "out", heads=4, loops=8)
    assert files == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert "no tokenizer came with the weights" in (tmp_path / "out" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.settings.loops == 8


def test_an_earlier_export_is_brought_up_to_date_and_nothing_else_is_touched(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(folder, out, self_contained=True, budget=2)
    (out / ".gitattributes").write_text("kept")
    export(out, out)  # from itself, without the sources
    assert (out / ".gitattributes").read_text() == "kept"
    assert not list(out.glob("*.py"))
    assert not list(tmp_path.glob(".*"))
    config = json.loads((out / "config.json").read_text())
    assert config["budget"] is None
    assert "auto_map" not in config


def test_a_failed_export_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (run / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(LoopformerError, match="is not UTF-8 text"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(folder), str(out), "--budget", "2", "--json"])
    shown = json.loads(done.stdout)
    assert (shown["default"], shown["out"]) == ("2", str(out))
    assert sorted(path.name for path in out.iterdir()) == shown["files"]
    assert "2⊗4" in CliRunner().invoke(app, ["export", str(folder), str(out)]).stdout
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    cases = [
        (folder, tmp_path / "full", [], "holds files that are not an export"),
        (folder, folder, [], "holds files that are not an export"),
        (folder, tmp_path / "full" / "thesis.txt", [], "is a file"),
        (folder, tmp_path / "new", ["--budget", "9"], "Budget 9 is above"),
        (folder, tmp_path / "new", ["--budget", "2", "--trajectory", "2-1"], "not both"),
        (tmp_path / "nowhere", tmp_path / "new", [], "no file or folder"),
    ]
    for source, place, options, said in cases:
        error = CliRunner().invoke(app, ["export", str(source), str(place), *options]).exception
        assert isinstance(error, LoopformerError)
        assert said in str(error)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_we_follow_the_default_of_an_export_too(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "two", budget=2)
    lm = load(tmp_path / "two")
    assert lm.generate("every pass", max_tokens=3).trajectory.budget == 2
    assert lm.generate("every pass", budget=1, max_tokens=3).trajectory.budget == 1
    assert load(folder).generate("every pass", max_tokens=3).trajectory.budget == 4


PACKAGE = {
    "__init__.py": "",
    "words.py": "HELLO, WORLD, UNUSED = 'hello', 'world', 'unused'\n",
    "inner/__init__.py": "raise RuntimeError\n",
    "inner/deep.py": (
        '"""Not an import: from loopformer.words import HELLO."""\n'
        "from __future__ import annotations\n"
        "from loopformer.words import (\n    HELLO,\n    WORLD as PLANET,  # renamed\n)\n"
        "def greet() -> str:\n    from loopformer.inner.big import huge as large\n"
        "    return f'{HELLO} {PLANET} {large}'\n"
    ),
    "inner/big.py": "huge = 3\n",
    "inner/never.py": "raise RuntimeError\n",
    "top.py": "import math\nfrom loopformer.inner.deep import greet\nanswer = greet() + str(math.floor(1.5))\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "loopformer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_small_package_works_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = flatten(["loopformer.top"], write(tmp_path, PACKAGE))
    assert sorted(files) == [f"loopformer_{one}.py" for one in ("inner_big", "inner_deep", "top", "words")]
    flat = tmp_path / "flat_for_test"
    flat.mkdir()
    (flat / "__init__.py").touch()
    for name, text in files.items():
        (flat / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loopformer")  # the one in tmp_path would be found instead, and break
    assert importlib.import_module("flat_for_test.loopformer_top").answer == "hello world 31"
    assert "loopformer" not in sys.modules
    assert "Not an import: from loopformer.words import HELLO" in files["loopformer_inner_deep.py"]


def test_the_model_needs_few_files_and_nothing_of_the_package() -> None:
    files = flatten([CONFIGURATION, MODELING])
    assert {"loopformer_model_looped.py", "loopformer_trajectory.py", "loopformer_hf_modeling.py"} <= set(files)
    assert not any(
        name.startswith(("loopformer_data", "loopformer_loading", "loopformer_training")) for name in files
    )
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 or f"{node.module}.py" in files
                names = [node.module or ""] if node.level == 0 else []
            assert not any(name.split(".")[0] == "loopformer" for name in names)
