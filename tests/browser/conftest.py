"""A real Chromium and real servers. Where playwright or chromium is missing the tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from serving.servers import RunningServer

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """As long as it runs, its module's thread has an event loop: other tests start theirs after it."""
    if CHROMIUM is None:
        pytest.skip("There is no chromium here; `make chromium` installs Debian's.")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install 'loopformer[browser]'")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[RunningServer]:
    """The model in the box, on which more loops show."""
    from serving.servers import running_server

    from loopformer.config.model import BOX
    from loopformer.serving.messages import WorkerSettings
    from loopformer.serving.server import ServerSettings

    with running_server(ServerSettings(WorkerSettings(BOX, rows=8, device="cpu"))) as running:
        yield running


@pytest.fixture(scope="module")
def locked(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for a key, with one slot and one place to wait."""
    from serving.servers import running_server, save_served

    from loopformer.serving.messages import WorkerSettings
    from loopformer.serving.server import ServerSettings

    folder = tmp_path_factory.mktemp("locked")
    keys: Path = folder / "keys"
    keys.write_text("sesame\n")
    worker = WorkerSettings(save_served(folder), rows=1, device="cpu")
    with running_server(ServerSettings(worker, queue=1, api_keys=keys), key="sesame") as running:
        yield running
