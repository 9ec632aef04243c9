"""The server's end of the pipe to the engine, which runs in a process of its own (worker.py).

    engine = EngineProcess(WorkerSettings("runs/mine", rows=16))
    ready = await engine.start()                        # raises one sentence if the model cannot be loaded
    call = engine.submit([request, …], 0, stream=True)  # the texts of one client, and their priority
    for index, output in await call.read(): ...         # everything since the last read
    engine.cancel(call)                                 # frees the slots of a client that has left

When the process dies ("lost"), or is silent for longer than a step may take ("hung"), the requests that it ran end
with an error, and another process is started. `engine.state` says which of these is the case.
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

from loopformer.errors import RunFailed
from loopformer.inference.request import Request
from loopformer.serving.messages import (
    Cancel,
    EngineLoad,
    EngineOutput,
    EngineReady,
    ScoreRequest,
    Submit,
    WorkerSettings,
    run_worker,
)
from loopformer.serving.protocol import ApiError
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between attempts to start another process; they double
MAX_LOAD_FACTOR = 5  # another process may take this many times as long to load as the last
EngineState = Literal["starting", "ready", "lost", "hung", "stopped"]


def shutting_down() -> ApiError:
    return ApiError("The server is shutting down; ask another one.", 503, "shutting_down", **{"retry-after": "5"})


class Call:
    """The requests of one client, and their outputs that were not read yet.

    The engine never waits for a reader: outputs are stored, and a slow reader finds more of them at once.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self._outputs: list[tuple[int, EngineOutput]] = []
        self._has_outputs = asyncio.Event()

    def put(self, output: EngineOutput) -> None:
        self._outputs.append((output.number - self.numbers.start, output))
        self._has_outputs.set()

    async def read(self) -> list[tuple[int, EngineOutput]]:
        """All outputs since the last read, at least one, each with the index of its request in the call."""
        await self._has_outputs.wait()
        self._has_outputs.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


class _Link:
    """One process and the pipe to it. Threads read and write, since a pipe blocks."""

    def __init__(self, settings: WorkerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=run_worker, args=(settings, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else the end of the process would not close the pipe
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # ends with None, when the process has ended
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
        with contextlib.suppress(OSError):  # the reader notices, too
            while (messages := self.outbox.get()) is not None:
                self._connection.send(messages)

    def kill(self) -> None:
        self.outbox.put(None)
        self.process.kill()

    def end(self) -> None:
        self.kill()
        self.process.join(MAX_PAUSE)  # a driver may hold on to it for a while
        self._connection.close()


class EngineProcess:
    """Starts the process, and starts another when it dies. Used from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.on_load: Callable[[EngineLoad], object] = lambda load: None
        self.on_loss: Callable[[], object] = lambda: None
        self.state: EngineState = "starting"
        self.ready: EngineReady | None = None
        self._link: _Link | None = None
        self._calls: dict[int, Call] = {}  # by the number of a request that has not ended
        self._next_number = 0
        self._load_seconds: float | None = None  # of the last process
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> EngineReady:
        """Load the model in another process. From then on a process that is lost is replaced."""
        link, ready = await self._start_process()
        self._supervisor = asyncio.create_task(self._supervise(link))
        return ready

    async def stop(self) -> None:
        """End the process. Requests that still run fail."""
        self.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._fail_all()
        if self._link is not None:
            link, self._link = self._link, None
            await asyncio.to_thread(link.end)

    async def _start_process(self) -> tuple[_Link, EngineReady]:
        """A process that has loaded the model. Raises one sentence if it cannot be loaded.

        Clients were told what the first process loaded, so a later one must load the very same model. It has a time
        limit; the first has none, as somebody is waiting for it.
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
            self.on_load(EngineLoad())
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
                # Once is no proof: where both processes were paused, the time is over before the other one speaks.
                silences += 1
                continue
            if message is None:
                return "lost"
            silences = 0
            outputs, load = message
            for output in outputs:
                # A request that was cancelled meanwhile has no call any more.
                call = self._calls.pop(output.number, None) if output.is_last else self._calls.get(output.number)
                if call is not None:
                    call.put(output)
            self.on_load(load)
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

    def submit(self, requests: Sequence[Request], priority: int, stream: bool) -> Call:
        """Generate texts for one client. With `stream` their tokens come more often."""
        call = self._begin_call(len(requests))
        numbered = zip(call.numbers, requests, strict=True)
        self._post([Submit(priority, number, request, stream) for number, request in numbered])
        return call

    def score(self, ids: Sequence[int], trajectory: Trajectory, top: int, by_loop: bool) -> Call:
        """Score tokens, in a single output."""
        call = self._begin_call(1)
        self._post([ScoreRequest(call.numbers.start, tuple(ids), trajectory, top, by_loop)])
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
            call.put(EngineOutput(number, error=self._unavailable()))
        self._calls = {}

    def _unavailable(self) -> ApiError:
        """Why there is no engine, and when there may be one again."""
        if self.state == "stopped":
            return shutting_down()
        code, event = ("engine_hung", "did not go on") if self.state == "hung" else ("engine_lost", "was lost")
        sentence = f"The engine {event} and is started again; try again in a few seconds."
        seconds = math.ceil(min(MAX_PAUSE, self._load_seconds or FIRST_PAUSE))
        return ApiError(sentence, 503, code, **{"retry-after": str(seconds)})
