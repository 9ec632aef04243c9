"""A queue of runs on one machine, some at a time, each in a process of its own; what is done already is left out.

work_through({"a": ["python", "train.py", "a"], …}, Path("runs"), workers=4)     # logs in runs/a.log, …
"""

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

RAW = "raw.json"  # what a run that is done leaves in its folder


def work_through(commands: Mapping[str, Sequence[str]], runs: Path, workers: int) -> None:
    """Run each command that has not left its `raw.json` yet; SIGTERM stops all of them in order."""
    runs.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for process in running.values():
            process.terminate()

    def work(name: str) -> None:
        if stopped or (runs / name / RAW).exists():
            return
        with (runs / f"{name}.log").open("ab") as log:
            running[name] = subprocess.Popen(commands[name], stdout=log, stderr=subprocess.STDOUT)
            code = running[name].wait()
        print(f"{name}: {'done' if code == 0 else f'ended with {code}'}", flush=True)

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, commands))


def rounded(value: Any) -> str:
    """JSON with six digits of each number, which is more than any of them is worth."""
    return json.dumps(
        json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}")), ensure_ascii=False
    )
