"""What every request passes before the app sees it: host, key, size, patience.

    app = Gate(app, GateSettings(keys=read_keys("keys.txt"), hosts=LOOPBACK, max_body=1 << 20))

A page from elsewhere that has its name point to 127.0.0.1 (DNS rebinding) still sends its own name as `Host`, so on
loopback only loopback's names are let in. The whole body is read here, within a size and a time. A client that does
not read what it is sent is let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loopformer.errors import FileProblem, LoopformerError
from loopformer.serving.protocol import error_answer

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
PATIENCE = 8  # times the largest body that is read of one that is larger
OPEN = frozenset({"/health", "/ready"})  # which probes ask without a key


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """The hashes of the keys in a file, one a line; blank lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(
            f"The file of API keys {path} cannot be read; give a text file, one key a line."
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise LoopformerError(f"{path} holds no API key; write one a line.")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def is_key(header: str, keys: tuple[bytes, ...]) -> bool:
    """Whether an Authorization header has one of the keys; it takes as long whichever it is, or none."""
    scheme, _, given = header.partition(" ")
    digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(digest, key) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def is_host(header: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header names one of the hosts, at any port."""
    name, separator, port = header.lower().rpartition(":")
    if not separator or not port.isdigit():
        name = header.lower()
    return name in hosts


@dataclass(frozen=True)
class GateSettings:
    """Whom to let in."""

    keys: tuple[bytes, ...] = ()  # hashes; none: everybody
    hosts: frozenset[str] | None = None  # None: any
    max_body: int = 1 << 20  # bytes
    body_seconds: float = 30.0
    send_seconds: float = 30.0


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str, **headers: str) -> None:
        self.status, self.headers = status, headers
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.body = json.dumps(error_answer(message, kind, code=code)).encode()


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: GateSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
        except _Refusal as refusal:
            await _refuse(refusal, send)
            return
        if body is None:
            return  # the client has gone
        unread = [body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        async def patient_send(message: MutableMapping[str, Any]) -> None:
            try:
                async with asyncio.timeout(self._settings.send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise ConnectionError("The client does not read.") from error

        try:
            await self._app(scope, replay, patient_send)
        except ConnectionError:
            return

    def _check(self, path: str, headers: dict[bytes, str]) -> None:
        settings = self._settings
        if settings.hosts is not None and not is_host(headers.get(b"host", ""), settings.hosts):
            raise _Refusal(403, "This server listens on loopback and takes no other Host.", "host_not_allowed")
        if settings.keys and path not in OPEN and not is_key(headers.get(b"authorization", ""), settings.keys):
            words = "Give a valid API key as 'Authorization: Bearer KEY'."
            raise _Refusal(401, words, "invalid_api_key", **{"www-authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, str], receive: Receive) -> bytes | None:
        """The whole body; None if the client goes away before it has sent it.

        One that is too large is still read for a while: a client whose sending fails may never see the answer.
        """
        most = self._settings.max_body
        too_large = _Refusal(413, f"The body has more than {most} bytes.", "body_too_large", connection="close")
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length[:20]) > PATIENCE * most:
            raise too_large
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= most:
                        body += message.get("body", b"")
                    if size > PATIENCE * most or (size > most and not message.get("more_body", False)):
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self._settings.body_seconds
            words = f"The body did not come within {seconds:g} s."
            raise _Refusal(408, words, "body_timeout", connection="close") from None


async def _refuse(refusal: _Refusal, send: Send) -> None:
    headers = {"content-type": "application/json", "content-length": str(len(refusal.body)), **refusal.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": refusal.body})
