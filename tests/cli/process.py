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


def wait_for_work(process: "subprocess.Popen[str]", ticks: int = 10) -> None:
    """Wait until a process has computed for so many clock ticks, or has ended."""
    enough: int | None = None
    while process.poll() is None and (enough is None or _cpu_ticks(process) < enough):
        enough = enough or _cpu_ticks(process) + ticks
        time.sleep(0.01)


def _cpu_ticks(process: "subprocess.Popen[str]") -> int:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # in user and in system mode


def is_asleep(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process waits for something, such as a line of its input."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
