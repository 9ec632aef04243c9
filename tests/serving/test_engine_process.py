"""The engine's process when it is started again: it hangs, finds another model, or is not wanted any more."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from loopformer import ModelConfig, Trajectory
from loopformer.serving import engine_process
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.worker import EngineReady, WorkerSettings

READY = EngineReady("mine", ModelConfig(), Trajectory.uniform(2), 1, 1, 4, "cpu", 0)


def loads(settings: WorkerSettings, connection: Connection) -> None:
    connection.send(READY._replace(process=os.getpid()))
    time.sleep(60)


def loads_another(settings: WorkerSettings, connection: Connection) -> None:
    connection.send(READY._replace(config=replace(READY.config, loops=5)))
    time.sleep(60)


def hangs(settings: WorkerSettings, connection: Connection) -> None:
    time.sleep(60)


def test_one_that_hangs_or_has_another_model_is_given_up_and_stopping_ends_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    targets = [loads, hangs, loads_another, hangs]
    fork = multiprocessing.get_context("fork")  # which imports nothing
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(engine_process, "run_worker", lambda *given: targets[started() - 1](*given))
    monkeypatch.setattr(engine_process, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(engine_process, "MAX_LOAD_FACTOR", 20)
    before, begun = set(multiprocessing.active_children()), fork.Value("i", 0)

    def started() -> int:
        with begun:
            begun.value += 1
            return int(begun.value)

    async def until(so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not so():
                await asyncio.sleep(0.01)

    async def live() -> None:
        engine = EngineProcess(WorkerSettings("mine", step_seconds=0.5))
        ready = await engine.start()
        os.kill(ready.process, signal.SIGKILL)
        await until(lambda: "did not load the model within" in caplog.text)
        await until(lambda: "holds another model" in caplog.text)
        await until(lambda: begun.value == len(targets))
        await engine.stop()
        await until(lambda: set(multiprocessing.active_children()) <= before)

    asyncio.run(live())
