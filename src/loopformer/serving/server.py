"""Start a server, drain it, stop it.

    run_server(ServerSettings(WorkerSettings("runs/mine"), port=8000), print)      # until SIGTERM or Ctrl-C

The socket is bound first, then the model is loaded, then the address is said. SIGTERM drains: what runs is
finished, new requests get 503, and after `drain_seconds` the rest is dropped. A second signal stops at once.

Every request passes a gate before the app. A page from elsewhere that has its name point to 127.0.0.1 (DNS
rebinding) still sends its own name as `Host`, so on loopback only loopback's names are let in. The whole body is
read there, within a size and a time. A client that does not read what it is sent is let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.inference.chat import ChatTemplate
from loopformer.loading import find_config
from loopformer.loading.folder import located, run_of
from loopformer.serving.admission import Admission
from loopformer.serving.answers import error_answer
from loopformer.serving.app import create_app
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.page import PAGE_FILES
from loopformer.serving.protocol import Served
from loopformer.serving.service import Service, ServiceSettings
from loopformer.serving.worker import EngineReady, WorkerSettings, log_as_json

logger = logging.getLogger(__name__)
HEAD_SECONDS = 10  # for a client to say what it wants
IDLE_SECONDS = 15  # between its requests; Python's clients let go after 5 themselves, so that nobody is cut off
LAST_SECONDS = 2  # for connections to close, once nothing runs
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
PATIENCE = 8  # times the largest body that is read of one that is larger
OPEN = frozenset({"/health", "/ready", *PAGE_FILES})  # without a key: for probes, and the page that asks for one


@dataclass(frozen=True)
class ServerSettings:
    """All that `loopformer serve` takes."""

    worker: WorkerSettings
    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 64
    degrade: bool = False
    api_keys: Path | None = None
    cors: tuple[str, ...] = ()  # origins whose pages may ask
    max_prompt: int | None = None  # tokens; the context by default
    max_output: int | None = None
    max_body: int = 1 << 20
    drain_seconds: float = 30.0
    service: ServiceSettings = field(default_factory=ServiceSettings)

    def __post_init__(self) -> None:
        require(self.drain_seconds >= 0, "--drain-seconds is 0 or more.")
        require(self.worker.step_seconds > 0, "--step-seconds is a number of seconds above 0.")
        require(self.service.timeout > 0, "--timeout is a number of seconds above 0.")
        for origin in self.cors:
            require(
                origin in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin) is not None,
                f"--cors takes an origin as browsers send it, such as https://page.example, or *; got {origin!r}.",
            )

    def read_keys(self) -> tuple[bytes, ...]:
        """The hashes of the keys that open the server; none where everybody may come in."""
        return () if self.api_keys is None else read_keys(self.api_keys)


def run_server(settings: ServerSettings, say: Callable[[str], object]) -> None:
    """Serve until told to stop."""
    log_as_json()
    with bound(settings.host, settings.port) as listener:
        asyncio.run(serve(settings, listener, say))


async def serve(
    settings: ServerSettings,
    listener: socket.socket,
    say: Callable[[str], object],
    stop: asyncio.Event | None = None,
) -> None:
    """The same on a socket that is bound, until `stop` is set or a signal comes."""
    keys = settings.read_keys()
    async with started_app(settings, keys) as (app, service, ready):
        server = DrainingServer(app, service, settings.drain_seconds)
        listener.listen()  # who reads the greeting may come at once
        for sentence in greeting(settings, [ready], listener.getsockname(), bool(keys)):
            say(sentence)
        waiting = asyncio.create_task(server.drain_when(stop)) if stop is not None else None
        await server.serve(sockets=[listener])
        if waiting is not None:
            waiting.cancel()


class StartedApp(NamedTuple):
    """The app, its gate included, and what is behind it."""

    app: ASGIApp
    service: Service
    ready: EngineReady


def inspect_model(model: str) -> tuple[ModelConfig, ChatTemplate]:
    """What is known of a model before it is loaded; what is wrong with it is said here."""
    config, folder = find_config(model)
    if folder is None:
        raise LoopformerError("This model came without a tokenizer; put its tokenizer.json beside its weights.")
    chat = ChatTemplate.find(Tokenizer.load(folder), located(model), run_of(model))
    chat.encode([{"role": "user", "content": "?"}])  # a template that fails is said now
    return config, chat


@asynccontextmanager
async def started_app(settings: ServerSettings, keys: tuple[bytes, ...]) -> AsyncIterator[StartedApp]:
    """The app of a model whose engine runs; leaving ends the engine."""
    config, chat = inspect_model(settings.worker.model)
    engine = EngineProcess(settings.worker)
    try:
        ready = await engine.start()
        most = config.context
        served = Served(
            _name(settings.worker.model),
            chat,
            ready.config,
            ready.default,
            ready.value_bytes,
            min(most, settings.max_prompt or most),
            min(most, settings.max_output or most),
        )
        admission = Admission(ready.rows, settings.queue, ready.memory, settings.degrade)
        service = Service(engine, served, admission, settings.service)
        hosts = LOOPBACK | {settings.host} if _is_loopback(settings.host) else None
        gate = GateSettings(keys, hosts, settings.max_body)
        app: ASGIApp = Gate(create_app(service), gate, service.metrics.refused)
        if settings.cors:
            app = CORSMiddleware(
                app,
                settings.cors,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
            )
        yield StartedApp(app, service, ready)
    finally:
        await engine.stop()


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP, but a connection that has not sent a whole head in time is closed."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        """The clock runs from the first byte, or the connection, until a request is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on a signal first finishes what runs."""

    def __init__(self, app: ASGIApp, service: Service, drain_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.force_exit = self.should_exit = True
            return
        logger.info(json.dumps({"event": "drain", "signal": signal.Signals(sig).name}))
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def drain_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._service.draining = True

    async def _drain(self) -> None:
        """Until nothing is in flight, or the time is over."""
        until = asyncio.get_running_loop().time() + self._drain_seconds
        while self._service.admission.in_flight and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        if self._service.admission.in_flight:
            await self._service.engine.stop()  # the rest ends with an error
        self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address; one sentence if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RunFailed(
            f"{host}:{port} cannot be listened on ({error}); choose another --port or --host."
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name(model: str) -> str:
    """What clients call the model: the last part of its path."""
    return Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rpartition("/")[2]


def greeting(
    settings: ServerSettings, engines: Sequence[EngineReady], address: tuple[Any, ...], has_keys: bool
) -> Iterator[str]:
    """The address, for a browser, and a line to try it with; and who may, where that is anybody."""
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = '-H "Authorization: Bearer $API_KEY" ' if has_keys else ""
    first = engines[0]
    most = min(32, settings.max_output or 32)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": most, "budget": first.default.budget})
    processes = f"engine process{'es' * (len(engines) > 1)} {', '.join(str(each.process) for each in engines)}"
    what = f"{_name(settings.worker.model)} (1 to {first.config.loops} loops) on {first.device}, {processes}"
    curl = f"curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    yield f"{what}; open {url} in a browser, or ask it:\n{curl}"
    if not has_keys and not _is_loopback(settings.host):
        yield "Anybody who reaches this address may use it; --api-keys FILE asks for a key."


# What every request passes before the app sees it: host, key, size, patience.


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """The hashes of the keys in a file, one a line; blank lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
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

    def __init__(
        self, app: ASGIApp, settings: GateSettings, refused: Callable[[int], object] = lambda status: None
    ) -> None:
        """`refused` is told the status of each request that is not let in."""
        self._app, self._settings, self._refused = app, settings, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
        except _Refusal as refusal:
            self._refused(refusal.status)
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
