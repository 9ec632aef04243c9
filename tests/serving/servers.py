"""A server on a free port of loopback, in a thread, with its engine in a process of its own."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from cli.models import save_small, seal

from loopformer.loading.folder import FOLDER, SETTINGS
from loopformer.serving import server
from loopformer.serving.server import ServerSettings, bind, serve
from loopformer.serving.service import Service

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the engine's process, beside other tests
MAX_WAIT = 240.0  # seconds for anything that happens sooner or later; a busy machine is many times as slow
LONG: dict[str, Any] = {"prompt": "every pass is told", "max_tokens": 4000, "temperature": 0}  # some seconds


def save_served(folder: Path, std: float = 0.3) -> str:
    """A small model with room for long texts, whose weights are spread so that every choice shows."""
    return save_small(folder / "tiny", context=4096, std=std)


def add_checkpoint(run: Path, step: int, std: float) -> Path:
    """A run of such models; the newest checkpoint is what one that loads it now gets."""
    checkpoint = run / FOLDER / f"step-{step:08d}"
    shutil.copytree(save_served(run / f"model-{step}", std), checkpoint)
    (run / SETTINGS).touch()
    return seal(checkpoint)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + MAX_WAIT
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)


class UserServer:
    """`loopformer serve` as a user starts it."""

    def __init__(self, folder: str, *options: str, files: int | None = None) -> None:
        """`files` is the most file descriptors that it may have."""
        command = [sys.executable, "-m", "loopformer", "serve", folder, "--port", "0", "--device", "cpu", *options]
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def greeting(self) -> tuple[str, int, str]:
        """Its address, its engine's process, and the line to try it with."""
        assert self.process.stdout is not None
        first, curl = self.process.stdout.readline(), self.process.stdout.readline()
        return re.findall(r"http://[\d.:]+", first)[0], int(re.findall(r"engine process (\d+)", first)[0]), curl

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """A process does nothing meanwhile."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@dataclass
class RunningServer:
    url: str
    said: list[str]
    client: httpx.Client
    service: Service | None = None  # where it runs in this process

    def post(self, path: str, **body: Any) -> httpx.Response:
        """`key` is the API key of another client."""
        headers = {"authorization": f"Bearer {body.pop('key')}"} if "key" in body else {}
        return self.client.post(path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    @contextmanager
    def busy(self, n: int = 1) -> Iterator[Iterator[str]]:
        """Long texts run, of which one line was read."""
        with self.client.stream("POST", "/v1/completions", json={**LONG, "n": n, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels but these."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            known, _, value = line.rpartition(" ")
            if known.startswith(f"loopformer:{name}{{") and all(f'{k}="{v}"' in known for k, v in labels.items()):
                total += float(value)
        return total

    @contextmanager
    def stopped_engine(self) -> Iterator[None]:
        """The engine's process does nothing meanwhile."""
        assert self.service is not None
        assert self.service.engine.ready is not None
        with stopped(self.service.engine.ready.process):
            yield

    def wait_for(self, name: str, value: float) -> None:
        until = time.monotonic() + MAX_WAIT
        while self.metric(name) != value:
            assert time.monotonic() < until, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.03)


@contextmanager
def running_server(settings: ServerSettings, key: str | None = None) -> Iterator[RunningServer]:
    listener = bind("127.0.0.1", 0)
    said: list[str] = []
    failures: list[BaseException] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    services: list[Service] = []

    def record(*given: Any) -> Service:
        services.append(Service(*given))
        return services[-1]

    async def main() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await serve(settings, listener, said.append, stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    patch = mock.patch.object(server, "Service", record)
    patch.start()
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # Reading certificates is slow.
    client = httpx.Client(base_url=url, headers=headers, timeout=MAX_WAIT, verify=False)
    try:
        try:
            wait_until(lambda: bool(said or failures))
        finally:
            patch.stop()
        assert not failures, failures
        yield RunningServer(url, said, client, services[-1])
    finally:
        client.close()
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join(MAX_WAIT)
        listener.close()
        assert not thread.is_alive()
        assert not failures, failures
