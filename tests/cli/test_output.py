"""Tables, progress, numbers, places to write to and Ctrl-C, as in every verb."""

import builtins
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from loopformer.__main__ import main
from loopformer.cli import app
from loopformer.cli.output import (
    format_duration,
    format_number,
    output_file,
    output_folder,
    print_table,
    progress,
    stoppable,
)
from loopformer.errors import LoopformerError

from .process import invoke

# Every verb, with what it cannot do without.
VERBS = [
    ["prepare"],
    ["train", "demo"],
    ["generate", "Once", "--model", "m"],
    ["chat"],
    ["eval", "text"],
    ["eval", "tasks"],
    ["eval", "states"],
    ["eval", "stories"],
    ["search", "--model", "m", "--budget", "2"],
    ["analyze", "--model", "m"],
    ["report", "m", "--out", "out"],
    ["info"],
    ["import", "m", "out"],
    ["export", "m", "out"],
    ["serve", "m"],
    ["verify", "m"],
    ["bench", "decode"],
    ["bench", "engine"],
    ["bench", "train"],
]


def test_cells_are_plain_text_and_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "loss"], [["[bold]a[/bold]", "3.2"], ["b", "13.21"]], left=1)
    assert capsys.readouterr().out.splitlines() == [
        "name             loss",
        "[bold]a[/bold]    3.2",
        "b               13.21",
    ]


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress("tokens") as report:
        report("news", 1000, 10_000)  # what was there before counts for no speed
        for now in (4.0, 6.0, 8.0):
            report("news", 1000 + int(500 * now), 10_000)
        now = 11.5
        report("news", 10_000, 10_000)  # what is done needs no line
        now = 12.0
        report("books", 5, None)
    assert capsys.readouterr().err.splitlines() == [
        "news: 4,000 of 10,000 tokens, 500 tokens/s, about 12 s left",
        "books: 5 tokens",
    ]


def test_numbers_and_durations() -> None:
    assert (format_number(1.23456, ".3f"), format_number(None, ".3f"), format_number(None, ".3f", missing="-")) == (
        "1.235",
        "not a number",
        "-",
    )
    assert [format_duration(seconds) for seconds in (8, 90, 5400)] == ["8 s", "1.5 minutes", "1.5 hours"]


def test_the_list_of_verbs_is_whole() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    groups = {"bench", "eval"}
    known = {name for name in commands if name not in groups}
    for group in groups:
        known |= {f"{group} {name}" for name, verb in commands[group].commands.items() if not verb.hidden}
    assert {" ".join(words[: 1 + (words[0] in groups)]) for words in VERBS} == known


@pytest.mark.parametrize("words", VERBS, ids=lambda words: "-".join(words[:2]))
def test_control_c_is_one_sentence_in_every_verb(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name.startswith("loopformer.") and not name.startswith("loopformer.cli"):
            raise KeyboardInterrupt  # a verb imports what it needs when it runs, which takes a while
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    done = invoke(*words)
    assert done.exit_code == 130
    assert done.stderr.startswith("loopformer: stopped; ")
    assert "the same command" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_control_c_that_code_of_others_swallows_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    @stoppable("the same command goes on")
    def verb(failure: Exception | None) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if failure is not None:
            raise failure

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for failure in (None, RuntimeError("in words of its own")):
            with pytest.raises(typer.Exit) as ended:
                verb(failure)
            assert ended.value.exit_code == 130
            assert capsys.readouterr().err == "loopformer: stopped; the same command goes on.\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_control_c_while_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "loopformer.cli":
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "loopformer: stopped.\n"


@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "-m", "m", "--text", "none.txt", "--out", "deep/out"],
        ["analyze", "-m", "m", "--text", "a.txt", "--prompts", "500", "--out", "deep/out"],
        ["report", "m", "--text", "none.txt", "--out", "deep/out"],
        ["eval", "text", "m", "--text", "none.txt", "--out", "deep/out.json"],
        ["eval", "tasks", "--data", "none", "--export-requests", "deep/out.jsonl"],
        ["search", "-m", "m", "--budget", "9", "--text", "a.txt", "--out", "deep/out.json"],
        ["search", "-m", "m", "--budget", "2", "--text", "none.txt", "--figure", "deep/out.png"],
        ["export", "m", "deep/out", "--budget", "9"],
        ["import", "none.pt", "deep/out"],
        ["generate", "-m", "m", "--input", "none.jsonl", "--out", "deep/out.jsonl"],
        ["bench", "decode", "-m", "m", "--paths", "none", "--out", "deep/out.json"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_failed_leaves_no_empty_folder(
    words: list[str], model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LoopformerError):
        invoke(*words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("failure", [LoopformerError, KeyboardInterrupt, SystemExit])
def test_what_was_there_or_is_not_empty_stays(tmp_path: Path, failure: type[BaseException]) -> None:
    (tmp_path / "mine").mkdir()

    def fail(out: Path, begun: bool) -> None:
        with output_folder(out):
            if begun:
                (out.parent / "half").touch()
            raise failure("it failed")

    for out, begun in ((tmp_path / "mine", False), (tmp_path / "mine" / "deep" / "er", True)):
        with pytest.raises(failure):
            fail(out, begun)
    assert [path.name for path in sorted((tmp_path / "mine").rglob("*"))] == ["deep", "half"]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LoopformerError, match="is a file; give a folder with --out"),
        output_folder(tmp_path / "file"),
    ):
        pytest.fail("the work began")
    with (
        pytest.raises(LoopformerError, match=r"--figure names a file to write, but .* is a folder"),
        output_file(tmp_path, "--figure"),
    ):
        pytest.fail("the work began")
