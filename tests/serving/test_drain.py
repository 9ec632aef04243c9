"""What ends a server while requests run, and what ends a connection that does not say what it wants."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from loopformer.serving import server
from loopformer.serving.server import DrainingServer, bind

from .servers import MAX_WAIT

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def serve(talk: Callable[[DrainingServer, tuple[str, int]], Awaitable[None]], drain_seconds: float = 60.0) -> None:
    """Let something talk to a server of one request that ends when the engine does."""
    stopped = asyncio.Event()

    async def stop() -> None:
        stopped.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await stopped.wait()
        await send({"type": "http.response.body", "body": b"dropped"})

    async def run() -> None:
        service: Any = SimpleNamespace(is_draining=False, admission=SimpleNamespace(in_flight=1))
        service.engine = SimpleNamespace(stop=stop)
        draining = DrainingServer(app, service, drain_seconds)
        with bind("127.0.0.1", 0) as listener:
            async with asyncio.timeout(MAX_WAIT), asyncio.TaskGroup() as tasks:
                tasks.create_task(draining.serve(sockets=[listener]))
                while not draining.started:
                    await asyncio.sleep(0.01)
                await talk(draining, cast(tuple[str, int], listener.getsockname()))

    asyncio.run(run())


async def begin(address: tuple[str, int]) -> Connection:
    """The connection of a request that runs."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(GET + b"\r\n")
    await reader.readuntil(b"begun")
    return reader, writer


def test_after_the_time_to_drain_the_rest_is_dropped() -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        reader, writer = await begin(address)
        draining.handle_exit(signal.SIGTERM, None)
        assert b"dropped" in await reader.read()
        writer.close()

    serve(talk, drain_seconds=0.1)


def test_a_second_signal_stops_at_once() -> None:
    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        _connection = await begin(address)  # which stays open
        draining.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0)
        assert not draining.should_exit
        draining.handle_exit(signal.SIGINT, None)  # nobody waits for what runs

    serve(talk)


@pytest.mark.parametrize("start", [b"", b"G", GET])
def test_a_head_that_does_not_come_is_not_waited_for(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)

    async def talk(draining: DrainingServer, address: tuple[str, int]) -> None:
        with socket.create_connection(address) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, start)
            assert await loop.sock_recv(connection, 1) == b""
        draining.should_exit = True

    serve(talk)
