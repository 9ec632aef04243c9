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

from loopformer import ModelConfig, Trajectory
from loopformer.serving import engine_process
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.messages import EngineLoad, EngineReady, WorkerSettings

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
    monkeypatch.setattr(engine_process, "MAX_LOAD_FACTOR", 20)

    def start_in(number: int, *given: Any) -> None:
        last_phase.value = number
        targets[number](*given)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await asyncio.sleep(0.01)

    async def live() -> None:
        engine = EngineProcess(WorkerSettings("mine", step_seconds=0.5))
        ready = await engine.start()
        phase.value = 1
        os.kill(ready.process, signal.SIGKILL)
        await until(lambda: "did not load the model within" in caplog.text)
        phase.value = 2
        await until(lambda: "holds another model" in caplog.text)
        phase.value = 3
        await until(lambda: last_phase.value == 3)
        await engine.stop()
        await until(lambda: set(multiprocessing.active_children()) <= before)

    asyncio.run(live())


def test_a_silence_counts_as_hung_only_if_another_one_follows() -> None:
    """As both processes may have been paused."""
    silent = TimeoutError()
    message: Any = ([], EngineLoad())
    items: list[Any] = [silent, message, silent, message, message, silent, silent, message]

    async def get() -> Any:
        item = items.pop(0)
        if item is silent:
            raise silent
        return item

    engine = EngineProcess(WorkerSettings("mine"))
    loads: list[EngineLoad] = []
    engine.on_load = loads.append
    link: Any = SimpleNamespace(inbox=SimpleNamespace(get=get))
    assert asyncio.run(engine._receive(link)) == "hung"
    assert len(loads) == 3
    items[:] = [message, None]
    assert asyncio.run(engine._receive(link)) == "lost"
