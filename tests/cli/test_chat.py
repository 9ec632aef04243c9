"""`loopformer chat`: turns, commands, a full context, Ctrl-C and Ctrl-D, through a pipe and in a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loopformer.cli import app
from loopformer.data.tokenizer import encode_prompt
from loopformer.errors import LoopformerError
from loopformer.inference.request import Request
from loopformer.lm import load

from .models import save_small
from .process import RESTORE_SIGINT, wait_until_asleep

START = RESTORE_SIGINT + "from loopformer.cli import main; main()"
SLOW = """
import time
from loopformer.inference.engine import Engine
step = Engine.step
Engine.step = lambda self: [time.sleep(0.05), step(self)][1]
"""
TOOK = re.compile(
    r"\[(\d+) tokens, [\d.]+ ms each including the prompt; (\d+) loops? each; the limit of new tokens"
)
STOPPED = re.compile(r"\[\d+ tokens, [\d.]+ ms each including the prompt; 4 loops each; stopped\]\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small(tmp_path_factory.mktemp("model") / "m", context=96, std=0.4)


def talk(model: str, said: str | bytes, *words: str, code: int = 0) -> Result:
    """What a chat says: greedy answers, unless `words` say otherwise."""
    options = ["--device", "cpu", "--max-tokens", "6", "--temperature", "0", *words]
    done = CliRunner().invoke(app, ["chat", "--model", model, *options], input=said)
    if isinstance(done.exception, LoopformerError):
        raise done.exception
    assert done.exit_code == code
    return done


def answers(model: str, *questions: str, budget: int = 4) -> str:
    """What a chat answers, turn by turn, without an engine that goes on."""
    lm, messages, texts = load(model), [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tuple(encode_prompt(lm.need_tokenizer(), messages))
        (follows,) = lm.trajectories(1, budget)
        text = "".join(event.piece for event in lm.events([Request(ids, follows, max_tokens=6)]))
        messages.append({"role": "assistant", "content": text.strip()})
        texts.append(text.lstrip() + "\n")
    return "".join(texts)


def test_each_line_is_a_turn_and_what_was_said_is_in_the_prompt(model: str) -> None:
    done = talk(model, "every pass\n\n its time \n")
    assert done.stdout == answers(model, "every pass", "its time")
    assert [found.groups() for found in TOOK.finditer(done.stderr)] == [("6", "4"), ("6", "4")]
    assert done.stdout != answers(model, "every pass") + answers(model, "its time"), "the history counts"


def test_commands_change_the_next_answer(model: str) -> None:
    done = talk(model, "/budget 2\nevery\n/reset\n/trajectory 1\nevery\n/temperature 0.7\n/quit\nnever said\n")
    assert done.stdout == answers(model, "every", budget=2) + answers(model, "every", budget=1)
    assert [found.group(2) for found in TOOK.finditer(done.stderr)] == ["2", "1"]
    assert "[trajectory 2, greedy]" in done.stderr
    assert re.search(r"\[trajectory 1, temperature 0\.7, top-p 0\.95, seed \d+\]", done.stderr)
    assert "/trajectory 2-1-2-3" in talk(model, "/help").stderr
    sampled = [talk(model, said, "--seed", "3").stdout for said in ("/temperature 2\nevery", "every")]
    assert sampled[0] != sampled[1]
    assert sampled[0] == talk(model, "every", "--seed", "3", "--temperature", "2").stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/budgt 2", "There is no /budgt; did you mean /budget? Begin the line with a space to send it."),
        ("/budget", "Write it as /budget 2."),
        ("/budget two", "Cannot read 'two' as a trajectory; write a budget (4)"),
        ("/budget 9", "Budget 9 is above the model's 4 loops; choose 1 to 4."),
        ("/trajectory 4-x", "4-x"),
        ("/temperature warm", "'warm' is not a number; write it as /temperature 0.7."),
        ("/temperature -1", "temperature must be 0 (greedy) or more"),
        ("/reset all", "Write it as /reset."),
        ("a " * 99, "but the context is 96; shorten it."),
    ],
)
def test_a_mistake_is_one_sentence_and_the_chat_goes_on(model: str, line: str, said: str) -> None:
    done = talk(model, f"{line}\nevery\n", code=1)
    first = done.stderr.splitlines()[1]  # after the line about a model that was never tuned
    assert first.startswith("loopformer: ")
    assert said in first
    assert done.stdout == answers(model, "every"), "and what was wrong left no trace"
    talk(model, f"{line}\n/quit\n", code=1)


def test_mistakes_of_the_command_and_the_encoding(model: str) -> None:
    with pytest.raises(LoopformerError, match="Budget 9 is above"):
        talk(model, "", "--budget", "9")
    with pytest.raises(LoopformerError, match="max_tokens must be 1 or more"):
        talk(model, "", "--max-tokens", "0")
    with pytest.raises(LoopformerError, match="Standard input is not UTF-8"):
        talk(model, b"caf\xe9\n")


def test_where_the_context_is_full_the_oldest_turns_go_and_it_is_said_once(model: str) -> None:
    done = talk(model, "every pass is told its time\n" * 6, "--system", "its step")
    assert done.stderr.count("the context is full: the oldest messages are left out from now on") == 1
    assert len(TOOK.findall(done.stderr)) == 6
    again = talk(model, "every pass is told its time\n" * 6 + "/reset\n" + "every pass is told its time\n" * 6)
    assert again.stderr.count("the context is full") == 2, "a new chat has a context of its own"


def test_the_template_of_the_model_is_used(model: str, tmp_path: Path) -> None:
    folder = Path(save_small(tmp_path / "m", context=96, std=0.4))
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with_template = talk(str(folder), "every pass").stdout
    assert with_template == load(model).generate("every pass", max_tokens=6).text.lstrip() + "\n"
    assert with_template != talk(model, "every pass").stdout


def test_answers_are_sampled_and_the_printed_seed_repeats_them(model: str) -> None:
    lines = "every pass\nits time\n"
    runner = CliRunner()
    words = ["chat", "--model", model, "--device", "cpu", "--max-tokens", "6"]
    sampled = runner.invoke(app, words, input=lines)
    seed = re.search(r"^\[temperature 0\.8, top-p 0\.95, seed (\d+)\]$", sampled.stderr, re.MULTILINE)
    assert seed is not None
    assert runner.invoke(app, [*words, "--seed", seed[1]], input=lines).stdout == sampled.stdout
    others = {talk(model, lines, "--temperature", "0.8", "--seed", str(other)).stdout for other in range(4)}
    assert len(others) > 1
    assert "seed" not in talk(model, lines).stderr, "greedy answers have none"


def test_a_model_that_was_never_tuned_to_answer_is_said_to_continue(model: str, tmp_path: Path) -> None:
    line = "[this model was never tuned to answer: it continues your text]\n"
    assert talk(model, "").stderr == line
    tuned = Path(save_small(tmp_path / "m", context=96))
    (tuned / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert talk(str(tuned), "").stderr == ""


def long_answers(folder: Path, stdin: int) -> "subprocess.Popen[bytes]":
    """A chat whose answers take a quarter of an hour, so that none ends before Ctrl-C comes."""
    slow = save_small(folder / "slow", context=1 << 14, std=0.4, positions="rotary")
    words = ["chat", "--model", slow, "--device", "cpu", "--max-tokens", "16000", "--temperature", "0"]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW + START, *words],
        bufsize=0,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_control_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with long_answers(tmp_path, stdin=theirs) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdout.fileno(), False)
        while b"/help lists the commands" not in process.stderr.readline():
            pass
        for _ in range(2):
            while process.stdout.read(1 << 16):
                pass  # what is left of the answer before
            os.write(ours, b"every pass\n")
            while not process.stdout.read(1):  # the answer comes as it is made
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert STOPPED.fullmatch(process.stderr.readline().decode())
        os.write(ours, b"/quit\n")
        assert process.wait() == 0
        assert process.stderr.read() == b""
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("moment", ["answering", "waiting"])
def test_through_a_pipe_control_c_ends_the_chat(tmp_path: Path, moment: str) -> None:
    with long_answers(tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"every pass\nits time\n" if moment == "answering" else b"/reset\n")
        if moment == "answering":
            process.stdout.read(1)
        while b"never tuned" not in process.stderr.readline():
            pass
        if moment == "waiting":
            assert b"the conversation is forgotten" in process.stderr.readline()
            wait_until_asleep(process)  # it waits for the next line
        process.send_signal(signal.SIGINT)
        *before, last = process.communicate()[1].decode().splitlines(keepends=True)
        assert process.returncode == 130
        assert last.startswith("loopformer: stopped; a chat is not saved")
        assert len(before) == (moment == "answering"), "the second answer is not begun"
        assert all(STOPPED.fullmatch(line) for line in before)


def test_in_a_terminal_control_c_drops_the_line_and_control_d_ends(model: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", START, "chat", "-m", model, "--device", "cpu", "--max-tokens", "6"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its controlling terminal, for Ctrl-C
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    shown = ""

    def wait_for(text: str, press: bytes = b"") -> None:
        """Until it is shown. The key is pressed while `input` waits, as one that comes just before is lost."""
        nonlocal shown
        while text not in shown:
            if press:
                wait_until_asleep(process)
                os.write(ours, press)
            while select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 1024).decode(errors="replace")
                if text in shown:
                    break
            assert process.poll() is None, shown
        shown = shown.partition(text)[2]

    wait_for("/help lists the commands")
    wait_for("> ")
    os.write(ours, b"half a line")
    wait_for("half a line")
    wait_for("Ctrl-D or /quit ends the chat", press=b"\x03")
    wait_for("> ")
    os.write(ours, b"every\n")
    wait_for("6 tokens")
    wait_for("> ")
    os.write(ours, b"\x04")
    assert process.wait() == 0
    os.close(ours)
