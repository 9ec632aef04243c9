"""Hosts, keys, bodies."""

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

from loopformer import LoopformerError
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.server import (
    LOOPBACK,
    Gate,
    ServerSettings,
    is_host,
    is_key,
    read_keys,
)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000", "[::1]"])
def test_names_of_loopback_are_hosts(host: str) -> None:
    assert is_host(host, LOOPBACK)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.", "localhost:x", "::1"]
)
def test_other_names_are_not(host: str) -> None:
    assert not is_host(host, LOOPBACK)


def test_keys_are_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\n\n first \nsecond\n")
    keys = read_keys(file)
    assert is_key("Bearer first", keys)
    assert is_key("bearer second", keys)
    for wrong in ("", "Bearer", "Bearer ", "Bearer firs", "Basic first", "Bearer # mine", "first", "Bearer \udcff"):
        assert not is_key(wrong, keys)
    file.write_text("first\n", encoding="utf-8-sig")  # as Windows writes it
    assert is_key("Bearer first", read_keys(file))
    file.write_text("# none\n")
    with pytest.raises(LoopformerError, match="no API key"):
        read_keys(file)
    with pytest.raises(LoopformerError, match="cannot be read"):
        read_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "a\tb", "a\x7f"])
def test_a_key_that_clients_send_differently_is_refused_by_its_line(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\nfirst\n{key}\n", encoding="utf-8")
    with pytest.raises(LoopformerError, match=r"Line 3 of .*keys is no API key") as refused:
        read_keys(file)
    assert key not in str(refused.value)


@pytest.mark.parametrize(
    "origin", ["", "page.example", "https://page.example/", "https://", "https://Page.example"]
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    worker = WorkerSettings("tiny")
    ServerSettings(worker, cors=("*", "null", "https://page.example", "http://localhost:3000"))
    with pytest.raises(LoopformerError, match="takes an origin as browsers send it"):
        ServerSettings(worker, cors=(origin,))


Headers = list[tuple[str, str]]


def ask(pieces: list[bytes], headers: Headers | None = None, **options: Any) -> tuple[int, bytes]:
    """The status and body of what a gate answers before an app that gives back what it gets."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def talk() -> list[Message]:
        sent: list[Message] = []
        left = list(pieces)

        async def receive() -> Message:
            if not left:
                await asyncio.sleep(60)
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left) or piece == b"..."}

        async def send(message: Any) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers or []]
        refused: list[int] = []
        refusals: Any = lambda status: SimpleNamespace(inc=lambda: refused.append(status))  # noqa: E731
        gate = Gate(app, refusals, **options)
        await gate({"type": "http", "path": "/", "headers": raw}, receive, send)
        assert refused == [message["status"] for message in sent[:1] if message["status"] != 200]
        return sent

    start, body = asyncio.run(talk())
    return start["status"], body["body"]


def test_a_body_comes_whole() -> None:
    assert ask([b"one ", b"two"]) == (200, b"one two")


@pytest.mark.parametrize("headers", [[], [("content-length", "99")], [("content-length", "9" * 4000)]])
def test_a_large_body_is_refused_with_and_without_a_length(headers: Headers) -> None:
    status, body = ask([b"12345", b"67890"], headers, max_body=8)
    assert status == 413
    assert b"more than 8 bytes" in body


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    assert ask([b"..."], body_seconds=0.05)[0] == 408


def test_a_client_that_does_not_read_is_let_go() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise AssertionError("nobody reads")

    async def talk() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            await asyncio.sleep(60)

        gate = Gate(app, lambda status: Counter("refusals", "None come."), send_seconds=0.05)
        await gate({"type": "http", "path": "/", "headers": []}, receive, send)

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        (
            [("content-length", "3"), ("transfer-encoding", "chunked")],
            "Content-Length or Transfer-Encoding, not both",
        ),
        (
            [("transfer-encoding", "chunked"), ("content-length", "3")],
            "Content-Length or Transfer-Encoding, not both",
        ),
        ([("content-length", "3"), ("content-length", "4")], "one Content-Length header"),
        ([("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")], "one Transfer-Encoding header"),
        ([("authorization", "Bearer a"), ("authorization", "Bearer a")], "one Authorization header"),
        ([("authorization", "Bearer b"), ("authorization", "Bearer a")], "one Authorization header"),
        ([("host", "a"), ("host", "b")], "one Host header"),
    ],
)
def test_what_a_proxy_may_read_differently_is_refused(headers: Headers, sentence: str) -> None:
    status, body = ask([b"one"], headers, keys=(hashlib.sha256(b"a").digest(),))
    assert status == 400
    assert sentence in body.decode()


def test_a_websocket_is_refused() -> None:
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it got past the gate")

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    gate = Gate(app, lambda status: Counter("refusals_of_websockets", "None come."))
    asyncio.run(gate({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
