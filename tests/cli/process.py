"""The command line, in this process and as one of its own."""

import os
import subprocess
import sys

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


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
