"""One server for most tests, and the model behind it. What takes seconds to import waits until it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from loopformer import LM

    from .servers import RunningServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from .servers import save_served

    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def lm(folder: str) -> LM:
    from loopformer import load

    return load(folder)


@pytest.fixture(scope="session")
def server(folder: str) -> Iterator[RunningServer]:
    from loopformer.serving.messages import WorkerSettings
    from loopformer.serving.server import ServerSettings

    from .servers import running_server

    with running_server(ServerSettings(WorkerSettings(folder, rows=8, device="cpu"))) as running:
        yield running
