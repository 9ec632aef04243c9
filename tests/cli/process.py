"""The command line, in this process and as one of its own."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner, Result

from loopformer.cli import app

# A machine that has only what loopformer itself needs.
_BARE = "import sys; [sys.modules.__setitem__(m, None) for m in ('lm_eval', 'datasets', 'transformers')]; "
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(*words: str, code: int = 0, bare: bool = False) -> subprocess.CompletedProcess[str]:
    start = ["-c", f"{_BARE}from loopformer.cli import main; main()"] if bare else ["-m", "loopformer"]
    done = subprocess.run(
        [sys.executable, *start, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **_OFFLINE},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def cpu_seconds(*words: str) -> float:
    """The processor time that Python takes to run with these words, which a busy machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# Tests that run in the background inherit a SIGINT that is ignored; a user at a terminal does not.
RESTORE_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
_PRESS = """
import importlib, itertools, sys
name, number = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
module, _, function = name.rpartition(".")
module = importlib.import_module(module)
original, calls = getattr(module, function), itertools.count(1)
def press(*args, **options):
    if next(calls) == number:
        signal.raise_signal(signal.SIGINT)
    return original(*args, **options)
setattr(module, function, press)
from loopformer.cli import main
main()
"""


def press_control_c(function: str, call: int, *words: str) -> str:
    """The stderr of the command line with these words if Ctrl-C comes at a call, counted from 1, of a function.

    The process sends the signal to itself, so it can be neither too early nor too late.
    """
    command = [sys.executable, "-c", RESTORE_SIGINT + _PRESS, function, str(call), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def wait_until_asleep(process: "subprocess.Popen[bytes]") -> None:
    """Until a process waits for something, such as a line of its input, or has ended."""
    while process.poll() is None:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            return
        time.sleep(0.01)


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
