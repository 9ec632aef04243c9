"""The command: what it prints, its exit codes, and Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loopformer.cli.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.errors import LoopformerError

from .words import document

app = typer.Typer()
app.command()(prepare)


def test_prepare_prints_what_it_made(tmp_path: Path, corpus: Path) -> None:
    arguments = [str(corpus), "--out", str(tmp_path), "--train-tokenizer", "300", "--val-fraction", "0.1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "training and" in result.stdout
    data = TokenData.open(tmp_path)
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert told["tokens"]["train"] == data.tokens
    assert told["tokenizer"]["vocab_size"] == 300
    assert told["sources"][0]["name"] == "news"


def test_a_mistake_is_our_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "nothing.txt"), "--out", str(tmp_path)])
    assert isinstance(result.exception, LoopformerError)


@pytest.mark.parametrize("moment", ["beginning", "tokenizing"])
def test_control_c_then_continue(tmp_path: Path, moment: str) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out"
    corpus.write_text("\n\n".join(document(n, 2) * 10 for n in range(1500)), encoding="utf-8")
    # Tests that run in the background inherit a SIGINT that is ignored; a user at a terminal does not.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import typer; "
    code += "from loopformer.cli.prepare import prepare; typer.run(prepare)"
    command = [sys.executable, "-c", code, str(corpus), "--out", str(out), "--train-tokenizer", "300"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    awaited = out if moment == "beginning" else out / "corpus-train-00000.bin"
    while not awaited.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "training and" in done.stdout
    TokenData.open(out).verify()
