"""What README and the guides show is true: commands and names exist, and every Python block runs.

The blocks of a page run in order, in one namespace, in a folder that has what they name, only small: `runs/mine`, a
text, an export. One that cannot run here has `<!-- not run: REASON -->` before it, which readers do not see.
"""

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from cli.models import save_small
from evaluation.examples import write_local
from serving.servers import running_server
from typer.main import get_command

import loopformer
from loopformer import LoopedLM, ModelConfig
from loopformer.cli import app
from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import save_model
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.server import ServerSettings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
NOT_RUN = {
    "docs/huggingface.md": ["needs Transformers' tests"],
    "docs/inference.md": ["needs a GPU"],
}
ADDRESS = "http://127.0.0.1:8000"  # where a guide's server is


def _blocks(page: str, *languages: str) -> Iterator[tuple[str, str | None, int]]:
    """Code, why it is not run, and the line it begins at."""
    for found in BLOCK.finditer(TEXTS[page]):
        if found["language"] in languages:
            yield found["code"], found["why"], TEXTS[page].count("\n", 0, found.start("code"))


def test_every_block_is_run_or_says_why_not() -> None:
    skipped = {page: [why for _, why, _ in _blocks(page, "python") if why] for page in TEXTS}
    assert {page: reasons for page, reasons in skipped.items() if reasons} == NOT_RUN
    assert sum(text.count("```python\n") for text in TEXTS.values()) == sum(
        len(list(_blocks(page, "python"))) for page in TEXTS
    )
    assert len(WITH_PYTHON) >= 9


WITH_PYTHON = [page for page in TEXTS if any(why is None for _, why, _ in _blocks(page, "python"))]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model is called as that in the box."""
    folder = save_small(tmp_path_factory.mktemp("served") / "box", context=64, loops=8)
    with running_server(ServerSettings(WorkerSettings(folder, device="cpu"))) as server:
        yield server.url


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    _furnish(page)
    names: dict[str, Any] = {}
    for code, why, line in _blocks(page, "python"):
        if why is None:
            if ADDRESS in code:
                code = code.replace(ADDRESS, request.getfixturevalue("address"))
            exec(compile("\n" * line + code, page, "exec"), names)  # so that an error has the page's own line


def _furnish(page: str) -> None:
    """What the page's blocks find in the working directory."""
    text = TEXTS["README.md"]
    tokenizer = Tokenizer.train([text], 320)
    sizes: dict[str, Any] = {"blocks": 1, "width": 16, "heads": 2, "ffn": 32, "modulator_start": "normal"}
    context = 512 if page == "docs/evaluation.md" else 64  # short texts are enough but where windows overlap
    for name, loops in (("mine", 8), ("elastic", 4), ("fixed", 4)):
        torch.manual_seed(0)
        config = ModelConfig(loops=loops, context=context, vocab=tokenizer.vocab_size, positions="rotary", **sizes)
        save_model(LoopedLM(config), Path("runs") / name)
        tokenizer.save(Path("runs") / name)
    if page == "docs/evaluation.md":
        save_model(LoopedLM(ModelConfig(loops=5, context=17, vocab=7, **sizes)), "runs/s3")
    if page == "docs/huggingface.md":
        from loopformer.hf.export import export

        export("runs/mine", "exported")
    if page == "docs/benchmarks.md":
        write_local(Path("data/eval"))
    line = json.dumps({"text": text[:2000]}).encode()
    Path("news.jsonl").write_bytes(line)
    Path("news.jsonl.zst").write_bytes(zstandard.compress(line))
    Path("books").mkdir()
    Path("books/one.txt").write_text(text * 6)


# Links, names and commands.


def test_links_lead_somewhere_and_the_site_has_every_guide() -> None:
    """What `make docs` checks, too, anchors included."""
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "results").rglob("README.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).is_file(), f"{page}: {link}"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in TEXTS if f": {page}\n" not in navigation]


def test_public_names_are_listed_and_there() -> None:
    assert {*loopformer.__all__, "__version__"} <= set(dir(loopformer))
    assert all(getattr(loopformer, name) is not None for name in loopformer.__all__)


def test_names_in_the_guides_exist() -> None:
    """`loopformer.data.supervised.encode_prompt` and such, between backticks."""
    found = {name for text in TEXTS.values() for name in re.findall(r"`(loopformer(?:\.\w+)+)[(`]", text)}
    assert len(found) > 3
    for name in found:
        module, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), last), name


def _commands(page: str) -> list[str]:
    blocks = (code.replace("\\\n", " ") for code, _, _ in _blocks(page, "sh", "bash"))
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_commands_exist() -> None:
    assert {"make demo", "make test"} <= set(_commands("README.md"))
    group = get_command(app)
    verbs = group.commands  # type: ignore[attr-defined]
    general = {name for parameter in group.params for name in parameter.opts}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for command in (command for page in TEXTS for command in _commands(page)):
        if not re.match(r"(OMP_NUM_THREADS=1 )?(make|torchrun|loopformer) ", command):
            continue
        words = shlex.split(command)
        if words[0] == "make":
            assert set(words[1:]) <= targets, command
            continue
        words = words[words.index("loopformer") + 1 :]
        if words[0] in general:
            continue
        assert words[0] in verbs, command
        verb = verbs[words[0]]
        verb = getattr(verb, "commands", {}).get(words[1], verb) if len(words) > 1 else verb  # bench has its own
        options = {name for parameter in verb.params for name in [*parameter.opts, *parameter.secondary_opts]}
        assert {word.split("=")[0] for word in words[1:] if word.startswith("-")} <= options, command
