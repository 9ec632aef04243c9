"""What README and the guides show is true: links lead somewhere, names exist, commands and Python blocks run.

The Python blocks of a page run in order, in one namespace, in a folder that has what they name, only small:
`runs/mine`, a text, an export. One that cannot run here has `<!-- not run: REASON -->` before it, which readers do
not see.

Every `loopformer …` line of a sh block is parsed: the verb, its options, their values, the settings of `train`.
Then it runs, in a folder that has what it names, unless SKIPPED says why not. SHORTER has options to make it quick.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import zstandard
from cli.models import save_small
from evaluation.examples import write_local
from serving.servers import running_server
from typer.main import get_command
from typer.testing import CliRunner

import loopformer
from loopformer import LoopedLM, LoopformerError, ModelConfig, Trajectory
from loopformer.cli import app
from loopformer.config import DEFAULT_PRESET, load_run
from loopformer.data.stories import World
from loopformer.data.tokenizer import Tokenizer
from loopformer.loading import save_model
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.server import ServerSettings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
        words = World.open("cups").tokenizer
        save_model(LoopedLM(ModelConfig(loops=6, context=160, vocab=words.vocab_size, **sizes)), "runs/cups")
        words.save("runs/cups")
    if page == "docs/huggingface.md":
        from loopformer.hf.export import export

        export("runs/mine", "exported")
    if page == "docs/tasks.md":
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


# Commands.

SHORTER = {  # options that are added to the commands of a verb, so that they take less than a second or two
    "bench": "--tokens 4",
    "chat": "--max-tokens 4",
    "eval": "",
    "eval states": "--sequences 16",
    "eval stories": "--stories 2",
    "eval text": "--max-tokens 300",
    "export": "",
    "generate": "--max-tokens 4",
    "info": "",
    "prepare": "--workers 1",
    "search": "--max-tokens 300",
    "train": "--dry-run",
    "verify": "",
}
SKIPPED = {  # by what a line has: why it is only parsed
    r"^serve": "it does not end; tests/serving starts servers",
    r"^(import|prepare (fineweb-edu|pile))|--text (fineweb-edu|pile)": "needs the Hub",
    r"^(analyze|report)": "figures take seconds; tests/cli/test_analyze.py and test_report.py draw them",
    r"^prepare --out": "the standard library takes seconds; tests/data/test_corpus.py reads it",
    r"^eval tasks": "needs the Hub, or more than a second; the Python block of the page runs the tasks",
    r"--device cuda": "needs a GPU",
    r"^bench .*(paper/|small/)|^bench train": "takes minutes",
    r"^eval text --budgets": "the held-out text of the bundled model takes minutes; tests/test_box.py measures it",
    r"^search --budget": "the same",
}
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer exports only this subclass of it
WRONG = (  # lines that must not pass
    "loopformer generat Once",
    "loopformer generate Once --bugdet 2",
    "loopformer generate Once --budget two",
    "loopformer eval txt runs/mine",
    "loopformer search --model runs/mine",
    "loopformer train training.stesp=3",
    "loopformer train papr/loopformer",
    "loopformer train training.steps=many",
    "torchrun --nproc-per-node 2 -m loopformer train training.stratgy=fsdp",
    "loopformer generate Once --trajectory 1-2-x",
    "time loopformer serve",
)


@dataclass(frozen=True)
class Command:
    """A line of a sh block that calls loopformer."""

    line: str  # as the page has it, without its comment
    words: tuple[str, ...]  # what follows `loopformer`
    standard_input: str | None = None  # the file behind <

    @property
    def rest(self) -> str:
        return shlex.join(self.words)


def _lines(page: str) -> list[str]:
    """The commands of a page's sh blocks, without comments, with continued lines joined."""
    blocks = (code.replace("\\\n", " ") for code, _, _ in _blocks(page, "sh", "bash"))
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def _command(line: str) -> Command | None:
    """The call of loopformer in a line: alone, or with -m behind Python or torchrun. None if there is none."""
    if "loopformer" not in line.split():
        return None
    words = shlex.split(line)
    start = words.index("loopformer")
    assert words[start - 1 : start] == ["-m"] or all("=" in word for word in words[:start]), line
    words = words[start + 1 :]
    end = next((place for place, word in enumerate(words) if word in ("<", ">", "|", "&")), len(words))
    return Command(line, tuple(words[:end]), words[end + 1] if words[end : end + 1] == ["<"] else None)


def _commands(page: str) -> list[Command]:
    return [command for command in map(_command, _lines(page)) if command is not None]


def _verb(command: Command) -> str:
    """The verb of a command, with its subcommand. Raises if the command line cannot be parsed."""
    verb, names, words = get_command(app), [], list(command.words)
    while subcommands := getattr(verb, "commands", None):
        assert words[:1] != [], f"{command.line}: the verb is missing"
        assert words[0] in subcommands, f"{command.line}: there is no verb {words[0]}"
        verb = subcommands[words[0]]
        names.append(words.pop(0))
    context = verb.make_context(" ".join(names), [*words])
    for option in ("trajectory", "compare"):
        values = context.params.get(option) or ()
        for value in (values,) if isinstance(values, str) else values:
            for part in value.split(",") if option == "compare" else (value,):
                Trajectory.parse(part)
    if names == ["train"] and not context.params["resume"]:
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        load_run(next((word for word in words[:1] if "=" not in word), DEFAULT_PRESET), settings)
    return " ".join(names)


def _check(line: str) -> None:
    """Raise if a line calls loopformer in a way that cannot be parsed."""
    command = _command(line)
    if command is not None:
        _verb(command)


@pytest.mark.parametrize("page", TEXTS)
def test_commands_are_right(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in _lines(page):
        if line.startswith("make "):
            assert set(line.split()[1:]) <= targets, line
        try:
            _check(line)
        except (AssertionError, UsageError, LoopformerError) as error:
            pytest.fail(f"{page}: {line}: {error}")


@pytest.mark.parametrize("line", WRONG)
def test_wrong_commands_are_noticed(line: str) -> None:
    with pytest.raises((AssertionError, UsageError, LoopformerError)):
        _check(line)


def test_every_reason_to_skip_is_needed() -> None:
    commands = [command for page in TEXTS for command in _commands(page)]
    assert {pattern for pattern in SKIPPED if any(re.search(pattern, command.rest) for command in commands)} == set(
        SKIPPED
    )
    run = [command for command in commands if not any(re.search(pattern, command.rest) for pattern in SKIPPED)]
    assert len(run) > len(commands) / 2


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: texts, prepared data, and runs of one step."""
    folder = tmp_path_factory.mktemp("commands")
    text = "".join(TEXTS[page] for page in ("README.md", "docs/training.md"))
    line = json.dumps({"text": text}) + "\n"
    chat = {"prompt": "What comes after three?", "response": "four"}
    questions = "".join(json.dumps({**chat, "prompt": f"{number} and one?"}) + "\n" for number in range(300))
    for name, content in {
        "books/one.txt": text,
        "texts/one.txt": text,
        "book.txt": text,
        "news.jsonl": line,
        "chats.jsonl": questions,
        "questions.txt": "Hello\n",
        "mine.yaml": (ROOT / "src/loopformer/data/worlds/cups.yaml").read_text(encoding="utf-8"),
        "prompts.jsonl": json.dumps({"prompt": "Once upon a time"}) + "\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    for name in ("news.jsonl.zst", "texts/one.jsonl.zst"):
        (folder / name).write_bytes(zstandard.compress(line.encode()))
    tiny = "model.width=16 model.heads=2 model.ffn=32 model.context=64 training.batch=16 training.validate_every=1 "
    for words in (
        "prepare books/one.txt --out data/mine --train-tokenizer 320 --workers 1 --val-fraction 0.2",
        "prepare chats.jsonl --out data/chats --supervised --tokenizer data/mine --workers 1 --val-fraction 0.2",
        f"train elastic data.path=data/mine training.steps=1 {tiny} --out runs/mine",
        "train states training.steps=1 training.batch=2 --out runs/s3",
        "train stories training.steps=1 training.batch=2 training.validation_windows=2 --out runs/cups",
    ):
        with chdir(folder):
            result = CliRunner().invoke(app, words.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("page", [page for page in TEXTS if _commands(page)])
def test_commands_run(page: str, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in a folder of the page's own."""
    folder = tmp_path / "work"
    shutil.copytree(small_run, folder)
    monkeypatch.chdir(folder)
    used = " ".join(_lines(page)).replace("train --resume --out", "train --resume")
    for name, kind in set(re.findall(r"(?<!--out )(?<![\w/])((runs|data)/[\w/-]*\w)", used)):
        if not Path(name).exists():
            shutil.copytree(f"{kind}/mine", name)
    for number, command in enumerate(_commands(page)):
        if any(re.search(pattern, command.rest) for pattern in SKIPPED):
            continue
        verb = _verb(command)
        words = [*command.words, *shlex.split(SHORTER[verb if verb in SHORTER else verb.split()[0]])]
        if verb in ("prepare", "train") and "--resume" not in words:
            words += ["--out", f"of-command-{number}"]  # each into a folder of its own
        typed = "" if command.standard_input is None else Path(command.standard_input).read_text()
        result = CliRunner().invoke(app, words, input=typed)
        assert result.exit_code == 0, f"{page}: {command.line}: {result.output} {result.exception!r}"
