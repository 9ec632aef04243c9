"""`loopformer serve` as a user starts it, on a free port of loopback: what soak.py and serving_throughput.py ask.

with ServeProcess("runs/mine", "--rows", "8") as server:
    server.url, server.engine, server.metric("generation_tokens_total")
"""

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from types import TracebackType
from typing import Self


class ServeProcess:
    """The server's process, its log in a file, and the process of its engine."""

    def __init__(self, *options: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until it ends)
        command = [sys.executable, "-m", "loopformer", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        if not greeting:
            self.log.seek(0)
            raise SystemExit(f"The server did not start: {self.log.read()[-2000:]}")
        self.url = re.findall(r"http://[\d.:]+", greeting)[0]
        self.engine = int(re.findall(r"engine process (\d+)", greeting)[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.log.close()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"loopformer:{name}{{"))

    def settle(self) -> None:
        """Wait until nothing runs."""
        wait_until(lambda: not self.metric("num_requests_running") + self.metric("num_requests_waiting"))


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "The condition did not become true in time."
        time.sleep(0.05)
