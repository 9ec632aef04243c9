"""The engine in a process of its own, and the server's end of the pipe to it.

    engine = EngineProcess(WorkerSettings("runs/mine", rows=16))
    ready = await engine.start()                        # what was loaded; what is wrong is one sentence
    call = engine.submit([request, …], priority=0)      # texts of one client
    for number, news in await call.take(): ...          # all that has come since: Started, TextPiece, Looked
    call.cancel()                                       # a client that goes away frees its slots

The process takes what is in the pipe, gives free slots to whoever waits (lower priority numbers first), steps the
engine, and sends everything that came of the step as one message; with nothing to do it says now and then that it
lives. It ends with its parent. When it dies, or says nothing for longer than a step may take, whatever it ran
fails with `EngineLost`, and another one is started; `engine.state` says where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

from loopformer.config import ModelConfig
from loopformer.device import dtype_of
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.engine import Engine
from loopformer.inference.request import Reason, Request
from loopformer.lm import LM, Fast, load, place
from loopformer.loading.folder import located, run_of
from loopformer.serving.lens import lens, ranked
from loopformer.serving.logs import log_as_json
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
MOST_FAILURES = 5  # of steps in a row, after which the process gives up and another is started
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before it is tried again to start one


EngineState = Literal["starting", "ready", "lost", "hung", "stopped"]


class EngineLost(RunFailed):
    """There is no engine: its process died, or hung and was ended, or the server stops."""

    def __init__(self, state: EngineState, retry_after: int) -> None:
        why = {"hung": "The engine did not go on", "stopped": "The server is shutting down; ask another one."}
        again = " and is started again; try again in a few seconds."
        super().__init__(why[state] if state == "stopped" else why.get(state, "The engine was lost") + again)
        self.state, self.retry_after = state, retry_after


@dataclass(frozen=True)
class WorkerSettings:
    """What the process loads, and how much it runs at once."""

    model: str
    rows: int = 16
    memory: int | None = None  # bytes of keys and values
    device: str = "auto"
    dtype: str | None = None
    fast: Fast = "auto"
    step_seconds: float = 120.0  # without a word of the process, after which it counts as hung

    @property
    def beat_seconds(self) -> float:
        """How often the process says that it lives while it has nothing to do."""
        return self.step_seconds / 4


class EngineReady(NamedTuple):
    """What was loaded."""

    config: ModelConfig
    default: Trajectory
    rows: int
    memory: int  # bytes of keys and values that there is room for
    value_bytes: int
    device: str
    process: int


class EngineLoad(NamedTuple):
    """How busy the engine is, and what it has done so far."""

    running: int = 0
    waiting: int = 0
    used_bytes: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0


# What goes down the pipe.


class Submit(NamedTuple):
    number: int
    request: Request
    priority: int


class Inspect(NamedTuple):
    """Look at tokens (lens.py): after each loop, or else token by token."""

    number: int
    ids: tuple[int, ...]
    trajectory: Trajectory
    top: int
    by_loop: bool


class Cancel(NamedTuple):
    number: int


# What comes up.


class Started(NamedTuple):
    """A request has got its slot, at a time of the clock that all processes share (`time.monotonic`)."""

    number: int
    at: float


class TextPiece(NamedTuple):
    """Text that came of a request, its tokens and their log-probabilities; the last one has a reason."""

    number: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: Reason | None = None
    error: str | None = None


class Looked(NamedTuple):
    """What came of an `Inspect`."""

    number: int
    value: Any


class Refused(NamedTuple):
    """A request that cannot be run, in one sentence."""

    number: int
    sentence: str


News = Started | TextPiece | Looked | Refused


class NewsBatch(NamedTuple):
    """All that came of a step."""

    news: list[News]
    load: EngineLoad


# The process.


def run_worker(settings: WorkerSettings, connection: Connection) -> None:
    """Load the model, say so, and serve what comes down the pipe until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which may go to all processes of a group; the parent drains
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    log_as_json()
    try:
        lm = _load(settings)
        engine = lm.engine(settings.rows, queue=settings.rows, fast=settings.fast, memory=settings.memory)
    except Exception as error:
        if not isinstance(error, LoopformerError):
            logger.exception("The model could not be loaded.")
        connection.send(str(error) or type(error).__name__)
        return
    weight = lm.model.tokens.weight
    (default,) = lm.trajectories(1)
    connection.send(
        EngineReady(
            lm.model.config,
            default,
            engine.rows,
            engine.memory_bytes,
            weight.element_size(),
            str(weight.device),
            os.getpid(),
        )
    )
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _Worker(lm, engine, connection, settings.beat_seconds).run()


def _load(settings: WorkerSettings) -> LM:
    lm, model = load(settings.model), settings.model
    chat = ChatTemplate.find(lm.need_tokenizer(), located(model), run_of(model))
    lm.tokenizer = chat.tokenizer  # whose end token ends an answer
    place(lm, settings.device, None if settings.dtype is None else dtype_of(settings.dtype), settings.fast)
    return lm


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Worker:
    """The loop of the process: take, step, send."""

    def __init__(self, lm: LM, engine: Engine, connection: Connection, beat_seconds: float) -> None:
        self._lm, self._engine, self._pipe, self._beat_seconds = lm, engine, connection, beat_seconds
        self._queue: list[tuple[int, Submit]] = []  # a heap: by priority, then as they came
        self._looks: list[Inspect] = []
        self._numbers: dict[int, int] = {}  # of those that the engine has, by ticket
        self._news: list[News] = []

    def run(self) -> None:
        failures = 0
        while True:
            if not (self._queue or self._looks) and self._engine.idle:
                while not self._pipe.poll(self._beat_seconds):
                    self._send()
            while self._pipe.poll():
                for message in self._pipe.recv():
                    self._take(message)
            self._fill()
            self._look()
            try:
                self._step()
                failures = 0
            except Exception:
                failures += 1
                logger.exception("A step of the engine failed.")
                if failures == MOST_FAILURES:
                    raise
            self._send()

    def _take(self, message: Submit | Inspect | Cancel) -> None:
        if isinstance(message, Submit):
            # Numbers grow, so the heap never compares requests.
            heapq.heappush(self._queue, (message.priority, message))
        elif isinstance(message, Inspect):
            self._looks.append(message)
        else:
            self._cancel(message.number)

    def _cancel(self, number: int) -> None:
        self._looks = [look for look in self._looks if look.number != number]
        self._queue = [entry for entry in self._queue if entry[1].number != number]
        heapq.heapify(self._queue)
        for ticket, other in self._numbers.items():
            if other == number:
                self._engine.cancel(ticket)
                del self._numbers[ticket]
                return

    def _fill(self) -> None:
        """Give the engine as many requests as it has slots for."""
        while self._queue and self._engine.running + self._engine.waiting < self._engine.rows:
            _, (number, request, _) = heapq.heappop(self._queue)
            try:
                ticket = self._engine.submit(request)
            except LoopformerError as error:
                self._news.append(Refused(number, str(error)))
            except Exception:
                logger.exception("A request could not be submitted.")
                self._news.append(Refused(number, "The request cannot be run."))
            else:
                self._numbers[ticket] = number
                self._news.append(Started(number, time.monotonic()))

    def _look(self) -> None:
        """Looked one who looks at tokens; one at a step, to hold nobody up for long."""
        if not self._looks:
            return
        look, model = self._looks.pop(0), self._lm.model
        try:
            see = lens if look.by_loop else ranked
            self._news.append(Looked(look.number, see(model, look.ids, model.resolve(look.trajectory), look.top)))
        except LoopformerError as error:
            self._news.append(Refused(look.number, str(error)))
        except Exception:
            logger.exception("Tokens could not be looked at.")
            self._news.append(Refused(look.number, "The tokens cannot be run."))

    def _step(self) -> None:
        for ticket, text, result, choices in self._engine.step():
            number = self._numbers.get(ticket)
            if number is None:  # cancelled
                continue
            tokens, logprobs = tuple(each.token for each in choices), tuple(each.logprob for each in choices)
            if result is None:
                self._news.append(TextPiece(number, text, tokens, logprobs))
            else:
                self._news.append(TextPiece(number, text, tokens, logprobs, result.reason, result.error))
                del self._numbers[ticket]

    def _send(self) -> None:
        engine, counts = self._engine, self._engine.counts
        load = EngineLoad(
            engine.running,
            len(self._queue) + engine.waiting,
            engine.used_bytes,
            counts.prompt_tokens,
            counts.shared_tokens,
        )
        self._pipe.send(NewsBatch(self._news, load))
        self._news = []


# The server's end.


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
        self._load_seconds = 1.0
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> EngineReady:
        """Load the model in a process of its own; what is wrong with it is said here."""
        self._loop, began = asyncio.get_running_loop(), time.monotonic()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_worker, args=(self.settings, theirs), daemon=True)
        process.start()
        theirs.close()
        link = _Link(process, ours, queue.SimpleQueue())
        try:
            said = await asyncio.to_thread(_first_word, ours)
        except BaseException:
            process.kill()
            raise
        if not isinstance(said, EngineReady):
            link.end()
            raise RunFailed(said)
        self._link, self.ready, self.state = link, said, "ready"
        self._load_seconds = time.monotonic() - began
        self._watch(link)
        threading.Thread(target=link.write, daemon=True).start()
        threading.Thread(target=self._read, args=(link,), daemon=True).start()
        return said

    async def stop(self) -> None:
        """End the process; what still runs fails."""
        self.state = "stopped"
        if self._restarting is not None:
            self._restarting.cancel()
        self._fail_all()
        if self._link is not None:
            link, self._link = self._link, None
            await asyncio.to_thread(link.end)

    def submit(self, requests: Sequence[Request], priority: int = 0) -> Call:
        """Run requests of one client; `EngineLost` where there is no process."""
        numbers = [next(self._numbers) for _ in requests]
        return self._begin(numbers, [Submit(n, r, priority) for n, r in zip(numbers, requests, strict=True)])

    def inspect(self, ids: Sequence[int], trajectory: Trajectory, top: int, by_loop: bool) -> Call:
        """Look at tokens; one `Looked` comes of it."""
        number = next(self._numbers)
        return self._begin([number], [Inspect(number, tuple(ids), trajectory, top, by_loop)])

    def _begin(self, numbers: Sequence[int], messages: Sequence[Submit | Inspect]) -> Call:
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

    def _gone(self) -> EngineLost:
        """What a client is told while there is no engine, and when there may be one again."""
        return EngineLost(self.state, math.ceil(min(LONGEST_PAUSE, self._load_seconds)))


def _first_word(connection: Connection) -> EngineReady | str:
    try:
        said: EngineReady | str = connection.recv()
        return said
    except (EOFError, OSError):
        return "The engine's process died while it loaded the model; is there enough memory?"
