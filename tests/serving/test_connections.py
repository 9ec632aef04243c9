"""More connections than a server has room for."""

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from loopformer.serving import server
from loopformer.serving.server import RESERVED_FILES, DrainingServer, max_connections

from .servers import MAX_WAIT, UserServer
from .test_drain import GET, Connection, begin, serve

ROOM = 32  # connections
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(server, "RESERVED_FILES", files - 2)
    assert max_connections() == 2


async def leave(*connections: Connection) -> None:
    for _, writer in connections:
        writer.close()


@pytest.mark.usefixtures("room_for_two")
def test_a_new_connection_replaces_the_one_that_is_idle_longest() -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        running = await begin(address)
        first = await asyncio.open_connection(*address)
        first[1].write(GET[:9])
        while len(draining.server_state.connections) < 2:
            await asyncio.sleep(0.01)
        second = await asyncio.open_connection(*address)
        assert await first[0].read() == b""  # closed
        second[1].write(GET + b"\r\n")
        await second[0].readuntil(b"begun")
        await leave(running, first, second)
        draining.should_exit = draining.force_exit = True

    serve(talk)


@pytest.mark.usefixtures("room_for_two")
@pytest.mark.parametrize("start", [UNFINISHED, UNFINISHED + b"{"])
def test_a_new_connection_replaces_one_with_half_a_body(start: bytes) -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        running = await begin(address)
        half = await asyncio.open_connection(*address)
        half[1].write(start)
        while len(draining.server_state.tasks) < 2:
            await asyncio.sleep(0.01)
        second = await begin(address)
        await half[0].read()  # returns because the connection is closed
        await leave(running, half, second)
        draining.should_exit = draining.force_exit = True

    serve(talk)


@pytest.mark.usefixtures("room_for_two")
def test_a_connection_too_many_gets_an_answer_while_all_are_busy() -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        running = [await begin(address) for _ in range(2)]
        refused = await asyncio.open_connection(*address)
        head, _, body = (await refused[0].read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["code"] == "server_full"
        await leave(running[0], refused)
        while len(draining.server_state.connections) > 1:
            await asyncio.sleep(0.01)
        again = await begin(address)
        await leave(running[1], again)
        draining.should_exit = draining.force_exit = True

    serve(talk)


@pytest.fixture(scope="module")
def limited(folder: str) -> Iterator[UserServer]:
    started = UserServer(folder, files=RESERVED_FILES + ROOM)
    yield started
    started.end()


def test_connections_never_take_all_file_descriptors(limited: UserServer) -> None:
    """Three times as many connections as there is room for, whatever part of a request they have sent."""
    url, _, _ = limited.greeting()
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as open_connections:

        def connect(content: bytes) -> None:
            connection = open_connections.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(content)

        def health() -> int:
            return httpx.get(f"{url}/health", timeout=MAX_WAIT, verify=False).status_code

        for start in (b"", GET, UNFINISHED, HEALTH + UNFINISHED):
            for _ in range(3 * ROOM):
                connect(start)
            assert [health() for _ in range(5)] == [200] * 5
    limited.process.terminate()
    _, log = limited.process.communicate(timeout=MAX_WAIT)
    assert limited.process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["message"] for line in lines if "connections" in line.get("message", "")] == [
        f"All {ROOM} connections are in use. New ones replace idle ones; a higher `ulimit -n` allows more."
    ]
    assert "traceback" not in log.lower()


def test_websockets_are_off_whatever_is_installed() -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        assert draining.config.ws_protocol_class is None
        assert draining.config.ws == "none"  # "auto" gives None as well where no library is installed
        draining.should_exit = True

    serve(talk)
