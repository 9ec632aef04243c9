"""The server's end of the pipe to the engine, which has a process of its own (worker.py).

    engine = EngineProcess(WorkerSettings("runs/mine", rows=16))
    ready = await engine.start()                        # what was loaded; what is wrong is one sentence
    call = engine.submit([request, …], 0, stream=True)  # texts of one client, and their priority
    for number, news in await call.take(): ...          # all that has come since: Started, TextPiece, Looked
    call.cancel()                                       # a client that goes away frees its slots

When the process dies, or says nothing for longer than a step may take, whatever it ran fails with `EngineLost` or
`EngineHung`, and another one is started; `engine.state` says where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.request import Request
from loopformer.serving.worker import (
    Cancel,
    EngineLoad,
    EngineReady,
    Look,
    News,
    NewsBatch,
    Started,
    Submit,
    TextPiece,
    WorkerSettings,
    run_worker,
)
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before it is tried again to start a process
SLOWER = 5  # times as long as the last may another process take to load
EngineState = Literal["starting", "ready", "lost", "hung", "stopped"]


class EngineLost(RunFailed):
    """The engine's process died; `retry_after` says in how many seconds there may be another."""

    sentence = "The engine was lost and is started again; try again in a few seconds."

    def __init__(self, retry_after: int) -> None:
        super().__init__(self.sentence)
        self.retry_after = retry_after


class EngineHung(EngineLost):
    """It said nothing for longer than a step may take, and was ended."""

    sentence = "The engine did not go on and is started again; try again in a few seconds."


class ShuttingDown(LoopformerError):
    """The server finishes what it runs and takes nothing new."""

    retry_after = 5

    def __init__(self) -> None:
        super().__init__("The server is shutting down; ask another one.")


class Call:
    """Requests of one client under way, and what has come of them that was not taken yet.

    Nobody waits for whoever takes: what comes is kept, and a slow reader finds more of it at once.
    """

    def __init__(self, numbers: Sequence[int], cancel: Callable[[Call], None]) -> None:
        self._places = {number: place for place, number in enumerate(numbers)}
        self._cancel = cancel
        self._news: list[tuple[int, News]] = []
        self._come = asyncio.Event()
        self._error: Exception | None = None

    @property
    def numbers(self) -> list[int]:
        """Those that still run."""
        return list(self._places)

    def put(self, news: News) -> bool:
        """Keep what has come; whether it was the last of this request."""
        self._news.append((self._places[news.number], news))
        self._come.set()
        ended = not isinstance(news, Started) and not (isinstance(news, TextPiece) and news.reason is None)
        if ended:
            del self._places[news.number]
        return ended

    def fail(self, error: Exception) -> None:
        self._error, self._places = error, {}
        self._come.set()

    async def take(self) -> list[tuple[int, News]]:
        """What has come since, at least one thing, with the place of its request in the call."""
        await self._come.wait()
        self._come.clear()
        news, self._news = self._news, []
        if not news and self._error is not None:
            raise self._error
        if self._error is not None:
            self._come.set()
        return news

    def cancel(self) -> None:
        """Drop what still runs; nothing to do for what is done."""
        if self._places:
            self._cancel(self)
            self._places = {}


@dataclass(eq=False)
class _Link:
    """One process and the pipe to it."""

    process: BaseProcess
    connection: Connection
    outbox: queue.SimpleQueue[Any]
    heard: bool = True  # whether anything came since it was last looked at

    def write(self) -> None:
        """Send what is in the outbox, all of it at once; a thread does this, since a full pipe waits."""
        with contextlib.suppress(OSError):  # the reader hears of it, too
            while (message := self.outbox.get()) is not None:
                messages = [message]
                with contextlib.suppress(queue.Empty):
                    while (message := self.outbox.get_nowait()) is not None:
                        messages.append(message)
                self.connection.send(messages)
                if message is None:
                    return

    def end(self) -> None:
        self.outbox.put(None)
        self.process.kill()
        self.process.join(LONGEST_PAUSE)  # a driver may hold on to it for a while
        self.connection.close()


class EngineProcess:
    """Starts the process, and starts it again when it dies. Used from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.on_load: Callable[[EngineLoad], object] = lambda load: None  # hears how busy the engine is
        self.losses = 0  # processes that died
        self.state: EngineState = "starting"
        self.ready: EngineReady | None = None
        self._link: _Link | None = None
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._load_seconds: float | None = None  # that it took, lately
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> EngineReady:
        """Load the model in a process of its own; what is wrong with it is said here.

        A later process has the model of the first, or none: clients were told what that is. One that takes much
        longer than the last to load it is given up.
        """
        self._loop, began = asyncio.get_running_loop(), time.monotonic()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_worker, args=(self.settings, theirs), daemon=True)
        process.start()
        theirs.close()
        link = _Link(process, ours, queue.SimpleQueue())
        try:
            said = await asyncio.to_thread(_first_word, ours, self._patience)
        except BaseException:
            process.kill()
            raise
        if isinstance(said, EngineReady) and self.ready is not None and said.config != self.ready.config:
            said = f"{said.model} holds another model than when the server started; start the server again."
        if not isinstance(said, EngineReady):
            await asyncio.to_thread(link.end)
            raise RunFailed(said)
        self.settings = replace(self.settings, model=said.model)
        self._link, self.ready, self.state = link, said, "ready"
        self._load_seconds = time.monotonic() - began
        self._watch(link)
        threading.Thread(target=link.write, daemon=True).start()
        threading.Thread(target=self._read, args=(link,), daemon=True).start()
        return said

    @property
    def _patience(self) -> float | None:
        """Seconds that a process may take to load; the first one has no limit, somebody watches it."""
        if self._load_seconds is None:
            return None
        return max(self.settings.step_seconds, SLOWER * self._load_seconds)

    async def stop(self) -> None:
        """End the process; what still runs fails."""
        self.state = "stopped"
        if self._restarting is not None:
            self._restarting.cancel()
        self._fail_all()
        if self._link is not None:
            link, self._link = self._link, None
            await asyncio.to_thread(link.end)

    def submit(self, requests: Sequence[Request], priority: int, stream: bool) -> Call:
        """Run requests of one client, who may read along; what stands in the way is raised."""
        numbers = [next(self._numbers) for _ in requests]
        numbered = zip(numbers, requests, strict=True)
        return self._begin(numbers, [Submit(number, each, priority, stream) for number, each in numbered])

    def look(self, ids: Sequence[int], trajectory: Trajectory, top: int, by_loop: bool) -> Call:
        """Have tokens looked at; one `Looked` comes of it."""
        number = next(self._numbers)
        return self._begin([number], [Look(number, tuple(ids), trajectory, top, by_loop)])

    def _begin(self, numbers: Sequence[int], messages: Sequence[Submit | Look]) -> Call:
        if self._link is None:
            raise self._gone()
        call = Call(numbers, self._cancel)
        self._calls.update(dict.fromkeys(numbers, call))
        for message in messages:
            self._link.outbox.put(message)
        return call

    def _cancel(self, call: Call) -> None:
        for number in call.numbers:
            if self._calls.pop(number, None) is not None and self._link is not None:
                self._link.outbox.put(Cancel(number))

    def _read(self, link: _Link) -> None:
        """Hand over what comes; a thread does this, and its end is the end of the process."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            try:
                while True:
                    batch = link.connection.recv()
                    self._loop.call_soon_threadsafe(self._arrived, link, batch)
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._lost, link, "lost")

    def _arrived(self, link: _Link, batch: NewsBatch) -> None:
        if self._link is not link:
            return  # the last words of one that was given up
        link.heard = True
        for news in batch.news:
            call = self._calls.get(news.number)
            if call is not None and call.put(news):
                del self._calls[news.number]
        self.on_load(batch.load)

    def _watch(self, link: _Link) -> None:
        """Give a process up that has said nothing since this was last called."""
        if self._link is not link:
            return
        if not link.heard:
            self._lost(link, "hung")
            return
        link.heard = False
        self._loop.call_later(self.settings.step_seconds, self._watch, link)

    def _lost(self, link: _Link, state: Literal["lost", "hung"]) -> None:
        if self._link is not link:
            return  # it was stopped, or is known to hang
        self._link, self.state = None, state
        self.losses += 1
        self._fail_all()
        self.on_load(EngineLoad())
        self._restarting = asyncio.create_task(self._restart(link))

    async def _restart(self, link: _Link) -> None:
        await asyncio.to_thread(link.end)
        logger.error("The engine's process is %s (exit code %s).", self.state, link.process.exitcode)
        pause = FIRST_PAUSE
        while True:
            try:
                ready = await self.start()
                logger.info("The engine runs again (engine process %d).", ready.process)
                return
            except Exception as error:
                logger.error("The engine could not be started again: %s", error)
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)

    def _fail_all(self) -> None:
        for call in set(self._calls.values()):
            call.fail(self._gone())
        self._calls = {}

    def _gone(self) -> LoopformerError:
        """What a client is told while there is no engine, and when there may be one again."""
        if self.state == "stopped":
            return ShuttingDown()
        gone = EngineHung if self.state == "hung" else EngineLost
        return gone(math.ceil(min(LONGEST_PAUSE, self._load_seconds or FIRST_PAUSE)))


def _first_word(connection: Connection, seconds: float | None) -> EngineReady | str:
    try:
        if not connection.poll(seconds):
            return f"The engine's process did not load the model within {seconds:.0f} s."
        said: EngineReady | str = connection.recv()
        return said
    except (EOFError, OSError):
        return "The engine's process died while it loaded the model; is there enough memory?"
