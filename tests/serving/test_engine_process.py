"""The engine's process when it is lost or hangs, and when another one is started."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from loopformer import LoopformerError, ModelConfig, Trajectory
from loopformer.inference.request import Choice, Event
from loopformer.serving import engine_process
from loopformer.serving.engine_process import Call, EngineProcess
from loopformer.serving.messages import EngineOutput, EngineReady, EngineStats, LensScores, WorkerSettings

READY = EngineReady("mine", ModelConfig(), Trajectory.uniform(2), 1, 1, 4, "cpu", 0)


def loads(settings: WorkerSettings, connection: Connection) -> None:
    connection.send(READY._replace(process=os.getpid()))
    time.sleep(600)


def loads_another(settings: WorkerSettings, connection: Connection) -> None:
    connection.send(READY._replace(config=replace(READY.config, loops=5)))
    time.sleep(600)


def hangs(settings: WorkerSettings, connection: Connection) -> None:
    time.sleep(600)


def test_one_that_hangs_or_has_another_model_is_given_up_and_stopping_ends_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(multiprocessing.active_children())
    targets = [loads, hangs, loads_another, hangs]  # by phase: what a process does that starts in it
    fork = multiprocessing.get_context("fork")  # which imports nothing
    phase, last_phase = fork.Value("i", 0), fork.Value("i", -1)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(engine_process, "run_worker", lambda *given: start_in(phase.value, *given))
    monkeypatch.setattr(engine_process, "FIRST_PAUSE", 0.01)

    def start_in(number: int, *given: Any) -> None:
        last_phase.value = number
        targets[number](*given)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await asyncio.sleep(0.01)

    async def live() -> None:
        engine = EngineProcess(WorkerSettings("mine", step_seconds=240))
        ready = await engine.start()
        phase.value = 1
        engine.settings, engine._load_seconds = replace(engine.settings, step_seconds=0.05), 0.01
        os.kill(ready.process, signal.SIGKILL)
        await until(lambda: "did not load the model within" in caplog.text)
        phase.value = 2
        engine.settings = replace(engine.settings, step_seconds=240)
        await until(lambda: "holds another model" in caplog.text)
        phase.value = 3
        await until(lambda: last_phase.value == 3)
        await engine.stop()
        await until(lambda: set(multiprocessing.active_children()) <= before)

    asyncio.run(live())


def test_a_call_gives_outputs_by_index_and_pieces_that_were_not_read_together() -> None:
    """The tickets of the engine mean nothing here: all of these events have the same one."""

    async def live() -> None:
        call = Call(range(5, 8))
        call.put(EngineOutput(6, Event(0, "a", choices=(Choice(1, -1.0),))))
        call.put(EngineOutput(5, Event(0, "x")))
        call.put(EngineOutput(6, Event(0, "b", choices=(Choice(2, -2.0),))))
        unread = await call.read()
        assert list(unread) == [1, 0]
        assert unread == {0: Event(0, "x"), 1: Event(0, "ab", choices=(Choice(1, -1.0), Choice(2, -2.0)))}
        call.put(EngineOutput(7, LensScores([((1, -0.5),)])))
        assert await call.read() == {2: LensScores([((1, -0.5),)])}

    asyncio.run(live())


def test_an_error_of_a_call_comes_after_what_was_generated_before_it() -> None:
    async def live() -> None:
        call = Call(range(2))
        call.put(EngineOutput(0, Event(0, "a")))
        call.put(EngineOutput(1, LoopformerError("It is too long.")))
        call.put(EngineOutput(0, Event(0, "b")))
        call.put(EngineOutput(0, LoopformerError("It is too short.")))
        assert await call.read() == {0: Event(0, "a")}
        for _ in range(2):
            with pytest.raises(LoopformerError, match="too long"):
                await call.read()

    asyncio.run(live())


def test_a_silence_counts_as_hung_only_if_another_one_follows() -> None:
    """As both processes may have been paused."""
    silent = TimeoutError()
    message: Any = ([], EngineStats())
    items: list[Any] = [silent, message, silent, message, message, silent, silent, message]

    async def get() -> Any:
        item = items.pop(0)
        if item is silent:
            raise silent
        return item

    engine = EngineProcess(WorkerSettings("mine"))
    reports: list[EngineStats] = []
    engine.on_stats = reports.append
    link: Any = SimpleNamespace(inbox=SimpleNamespace(get=get))
    assert asyncio.run(engine._receive(link)) == "hung"
    assert len(reports) == 3
    items[:] = [message, None]
    assert asyncio.run(engine._receive(link)) == "lost"
