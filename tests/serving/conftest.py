"""One server for most tests, and the model behind it."""

from collections.abc import Iterator

import pytest

import loopformer
from loopformer import LM
from loopformer.serving.server import ServerSettings
from loopformer.serving.worker import WorkerSettings

from .servers import RunningServer, running_server, save_served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def lm(folder: str) -> LM:
    return loopformer.load(folder)


@pytest.fixture(scope="session")
def server(folder: str) -> Iterator[RunningServer]:
    with running_server(ServerSettings(WorkerSettings(folder, rows=8, device="cpu"))) as running:
        yield running
