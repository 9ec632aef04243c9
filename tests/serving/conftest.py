"""One server for most tests, and the model behind it."""

from collections.abc import Iterator

import pytest

import loopformer
from loopformer import LM

from .servers import RunningServer, running_server, save_served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def lm(folder: str) -> LM:
    return loopformer.load(folder)


@pytest.fixture(scope="session")
def server(folder: str) -> Iterator[RunningServer]:
    with running_server(folder, rows=8, queue=64) as running:
        yield running
