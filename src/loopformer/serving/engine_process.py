"""The server's end of the pipe to the engine, which runs in a process of its own (worker.py).

    engine = EngineProcess(WorkerSettings("runs/mine", rows=16))
    ready = await engine.start()                        # raises one sentence if the model cannot be loaded
    call = engine.submit([request, …], stream=True)     # the texts of an HTTP request
    contents = await call.read()                        # everything since the last read, by index
    engine.cancel(call)                                 # frees the slots of a client that has left

The process is "lost" when it dies, and "hung" when it is silent for longer than a step may take. In both cases its
requests end with an error and a new process is started. `engine.state` is the current state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.request import Event, Request
from loopformer.serving.messages import (
    Cancel,
    Content,
    EngineOutput,
    EngineReady,
    EngineStats,
    ScoreRequest,
    Submit,
    WorkerSettings,
    run_worker,
)
from loopformer.serving.protocol import ApiError
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between restarts; doubled after each failure
MAX_LOAD_FACTOR = 5  # a restart may take this many times as long as the previous load
EngineState = Literal["starting", "ready", "lost", "hung", "stopped"]


def shutdown_error() -> ApiError:
    return ApiError("The server is shutting down; try another one.", 503, "shutting_down", **{"retry-after": "5"})


class Call:
    """The engine's requests for one HTTP request, and their unread outputs.

    The engine never waits for a reader. Outputs are stored until the next read.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self._unread: dict[int, Content] = {}  # by the index of the request in the call
        self._error: LoopformerError | None = None
        self._has_outputs = asyncio.Event()

    def put(self, output: EngineOutput) -> None:
        """Store an output for the next read. The first error ends the call, so what follows it is dropped."""
        if self._error is not None:
            return
        index, content = output.number - self.numbers.start, output.content
        unread = self._unread.get(index)
        if isinstance(content, LoopformerError):
            self._error = content
        elif isinstance(content, Event) and isinstance(unread, Event):
            self._unread[index] = unread.merge(content)  # a slow reader gets fewer, longer pieces
        else:
            self._unread[index] = content
        self._has_outputs.set()

    async def read(self) -> dict[int, Content]:
        """What is new since the last read, by the index of the request in the call.

        An error of any request is raised once everything before it was read.
        """
        await self._has_outputs.wait()
        unread, self._unread = self._unread, {}
        if self._error is None:
            self._has_outputs.clear()
        elif not unread:
            raise self._error
        return unread


class _Link:
    """A worker process and the pipe to it. Threads read and write, because a pipe blocks the event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, worker_end = context.Pipe()
        self.process = context.Process(target=run_worker, args=(settings, worker_end), daemon=True)
        self.process.start()
        # Close our copy, otherwise `_read` would not see the end of the pipe when the process dies.
        worker_end.close()
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # None comes last, when the process has died
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            try:
                while True:
                    loop.call_soon_threadsafe(self.inbox.put_nowait, self._connection.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(self.inbox.put_nowait, None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the process has died, which `_read` reports
            while (messages := self.outbox.get()) is not None:
                self._connection.send(messages)

    def kill(self) -> None:
        self.outbox.put(None)
        self.process.kill()

    def end(self) -> None:
        self.kill()
        self.process.join(MAX_PAUSE)  # a GPU driver may delay the exit
        self._connection.close()


class EngineProcess:
    """Starts the engine's process, and restarts it when it dies or hangs. Use it from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        # Set by the metrics, which need what the loaded model reports (EngineReady).
        self.on_stats: Callable[[EngineStats], object] = lambda stats: None
        self.on_loss: Callable[[], object] = lambda: None
        self.state: EngineState = "starting"
        self.ready: EngineReady | None = None
        self._link: _Link | None = None
        self._calls: dict[int, Call] = {}  # by request number, until the request ends
        self._next_number = 0
        self._load_seconds: float | None = None  # of the last process
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> EngineReady:
        """Load the model in a new process. From then on the process is restarted when it dies or hangs."""
        link, ready = await self._start_process()
        self._supervisor = asyncio.create_task(self._supervise(link))
        return ready

    async def stop(self) -> None:
        """End the process. Requests that still run fail."""
        self.state = "stopped"  # first: `_fail_all` takes its error from the state
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._fail_all()
        if self._link is not None:
            link, self._link = self._link, None
            await asyncio.to_thread(link.end)

    async def _start_process(self) -> tuple[_Link, EngineReady]:
        """A process that has loaded the model. Raises RunFailed if it cannot be loaded.

        Clients rely on the settings of the first model, so a restart must load a model with the same settings. Only
        a restart has a time limit: at the first start the user is watching.
        """
        began, seconds = time.monotonic(), None
        if self._load_seconds is not None:
            seconds = max(self.settings.step_seconds, MAX_LOAD_FACTOR * self._load_seconds)
        link = _Link(self.settings)
        try:
            async with asyncio.timeout(seconds):
                answer: EngineReady | str | None = await link.inbox.get()
        except TimeoutError:
            answer = f"The engine's process did not load the model within {seconds:.0f} s."
        except BaseException:
            link.kill()
            raise
        if answer is None:
            answer = "The engine's process died while it loaded the model; is there enough memory?"
        if isinstance(answer, EngineReady) and self.ready is not None and answer.config != self.ready.config:
            answer = f"{answer.model} holds another model than when the server started; start the server again."
        if not isinstance(answer, EngineReady):
            await asyncio.to_thread(link.end)
            raise RunFailed(answer)
        self.settings = replace(self.settings, model=answer.model)
        self._link, self.ready, self.state = link, answer, "ready"
        self._load_seconds = time.monotonic() - began
        return link, answer

    async def _supervise(self, link: _Link) -> None:
        """Hand out the outputs of a process until it is lost, then start another one."""
        while True:
            self.state = await self._receive(link)
            self._link = None
            self._fail_all()
            self.on_loss()
            self.on_stats(EngineStats())
            await asyncio.to_thread(link.end)
            logger.error("The engine's process is %s (exit code %s).", self.state, link.process.exitcode)
            link = await self._restart()

    async def _receive(self, link: _Link) -> Literal["lost", "hung"]:
        """Hand out the outputs of a process until it dies or was silent for `step_seconds`."""
        silences = 0
        while silences < 2:
            try:
                async with asyncio.timeout(self.settings.step_seconds / 2):
                    message = await link.inbox.get()
            except TimeoutError:
                # One timeout proves nothing: after the machine was suspended, it ends before the worker can send.
                silences += 1
                continue
            if message is None:
                return "lost"
            silences = 0
            outputs, stats = message
            for output in outputs:
                # A request that was cancelled in the meantime no longer has a call.
                number = output.number
                call = self._calls.pop(number, None) if output.is_last else self._calls.get(number)
                if call is not None:
                    call.put(output)
            self.on_stats(stats)
        return "hung"

    async def _restart(self) -> _Link:
        pause = FIRST_PAUSE
        while True:
            try:
                link, ready = await self._start_process()
                logger.info("The engine runs again (engine process %d).", ready.process)
                return link
            except Exception as error:
                logger.error("The engine could not be started again: %s", error)
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE, 2 * pause)

    def submit(self, requests: Sequence[Request], stream: bool) -> Call:
        """Generate a text for each request. With `stream` events are sent more often."""
        call = self._begin_call(len(requests))
        numbered = zip(call.numbers, requests, strict=True)
        self._post([Submit(number, request, stream) for number, request in numbered])
        return call

    def score(self, ids: Sequence[int], trajectory: Trajectory, top: int, by_loop: bool, client: str) -> Call:
        """Score tokens, in a single output."""
        call = self._begin_call(1)
        self._post([ScoreRequest(call.numbers.start, tuple(ids), trajectory, top, by_loop, client)])
        return call

    def cancel(self, call: Call) -> None:
        """Drop those requests of a call that have not ended."""
        running = [number for number in call.numbers if self._calls.pop(number, None) is not None]
        if running:
            self._post([Cancel(number) for number in running])

    def _begin_call(self, size: int) -> Call:
        if self._link is None:
            raise self._unavailable()
        call = Call(range(self._next_number, self._next_number + size))
        self._next_number += size
        self._calls.update(dict.fromkeys(call.numbers, call))
        return call

    def _post(self, messages: Sequence[Submit | ScoreRequest | Cancel]) -> None:
        if self._link is not None:
            self._link.outbox.put(messages)

    def _fail_all(self) -> None:
        for number, call in self._calls.items():
            call.put(EngineOutput(number, self._unavailable()))
        self._calls = {}

    def _unavailable(self) -> ApiError:
        """The error for requests without an engine, with the time to retry after."""
        if self.state == "stopped":
            return shutdown_error()
        code, event = ("engine_hung", "does not respond") if self.state == "hung" else ("engine_lost", "was lost")
        sentence = f"The engine {event} and is being restarted; try again in a few seconds."
        seconds = math.ceil(min(MAX_PAUSE, self._load_seconds or FIRST_PAUSE))
        return ApiError(sentence, 503, code, **{"retry-after": str(seconds)})
