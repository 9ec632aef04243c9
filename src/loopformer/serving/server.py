"""Start a server, drain it, stop it.

    run_server(ServerSettings(WorkerSettings("runs/mine"), port=8000), print)      # until SIGTERM or Ctrl-C

The socket is bound first, then the model is loaded, then the address is printed. SIGTERM drains: running requests
finish, new ones get 503, and what is left after `drain_seconds` is dropped. A second signal stops at once.

Every request passes a gate before the app. The gate checks the host and the key. It limits how large a body is, how
long it takes to arrive, and how many values it has. A web page can have its own name resolve to 127.0.0.1 (DNS
rebinding), but a browser still sends that name as `Host`. So a server on loopback accepts only loopback's names. A
client that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from prometheus_client import Counter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import NO_TOKENIZER, FileProblem, LoopformerError, RunFailed, require
from loopformer.inference.chat import ChatTemplate, was_tuned_to_answer
from loopformer.loading import find_config
from loopformer.loading.folder import resolve_model_path, run_folder_of, trained_budgets
from loopformer.serving.app import PAGE_FILES, create_app
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.messages import EngineReady, WorkerSettings, log_as_json
from loopformer.serving.protocol import ApiError, Served
from loopformer.serving.service import Admission, Service

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)
HEAD_SECONDS = 10  # for a client to send the head of a request
MAX_TINY_PIECES = 1024  # of a body, and one more for each PIECE_BYTES: a piece takes 4 us of the event loop
PIECE_BYTES = 64
IDLE_SECONDS = 15  # keep-alive; Python's clients close idle connections after 5 s, so they never reuse a closed one
MAX_ACCEPTS = 16  # connections that asyncio accepts at once; it cannot close any of them in between
BACKLOG = 2048  # connections that wait in the kernel to be accepted
RESERVED_FILES = 128  # descriptors that are left for the engine, the model's files and connections that just came
CLOSE_SECONDS = 2  # for connections to close after the last request
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_DRAIN_FACTOR = 8  # drain at most this many times `max_body` of an oversized upload
SMALL_BODY = 1 << 16  # bytes; up to this size a body is parsed whatever it contains
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[{:,'))  # bytes that say nothing about the number of values
NESTED_WEIGHT = 4  # of a list, an object or a key: their Python objects are that many times as large as a number
BYTES_PER_WEIGHT = 6  # a body may weigh `max_body` divided by this; 128 prompts of 1,024 ids fit into 1 MiB
# Paths without a key: health probes have none, and the page itself asks the user for it.
OPEN_PATHS = frozenset({"/health", "/ready", *PAGE_FILES})


@dataclass(frozen=True)
class ServerSettings:
    """The options of `loopformer serve`."""

    worker: WorkerSettings
    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 64
    degrade: bool = False
    api_keys: Path | None = None
    cors: tuple[str, ...] = ()  # origins of web pages that may use the server
    max_prompt: int | None = None  # tokens; the context by default
    max_output: int | None = None
    max_body: int = 1 << 20
    drain_seconds: float = 30.0
    timeout: float = 600.0  # seconds that a request may take, waiting included
    log_prompts: bool = False

    def __post_init__(self) -> None:
        require(self.drain_seconds >= 0, "--drain-seconds is 0 or more.")
        require(self.worker.step_seconds > 0, "--step-seconds is a number of seconds above 0.")
        require(self.timeout > 0, "--timeout is a number of seconds above 0.")
        for origin in self.cors:
            require(
                origin in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin) is not None,
                f"--cors takes an origin as browsers send it, such as https://page.example, or *; got {origin!r}.",
            )

    def read_keys(self) -> tuple[bytes, ...]:
        """The hashes of the keys that the server accepts; none if it needs no key."""
        return () if self.api_keys is None else read_keys(self.api_keys)


def run_server(settings: ServerSettings, say: Callable[[str], object]) -> None:
    """Serve until a signal stops it."""
    log_as_json()
    gc.freeze()  # otherwise a full collection visits every module, which holds the event loop for half a second
    with bind(settings.host, settings.port) as listener:
        asyncio.run(serve(settings, listener, say))


async def serve(
    settings: ServerSettings,
    listener: socket.socket,
    say: Callable[[str], object],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve on a bound socket until `stop` is set or a signal comes."""
    keys = settings.read_keys()
    async with started_app(settings, keys) as (app, service, ready):
        server = DrainingServer(app, service, settings.drain_seconds, stop)
        listener.listen()  # before the greeting, whose reader may connect at once
        for line in greeting(settings, [ready], listener.getsockname(), bool(keys)):
            say(line)
        await server.serve(sockets=[listener])


def inspect_model(model: str) -> tuple[ModelConfig, ChatTemplate]:
    """A model's settings and chat template, without loading the weights. Raises if either is unusable."""
    config, folder = find_config(model)
    if folder is None:
        raise LoopformerError(NO_TOKENIZER)
    chat = ChatTemplate.find(Tokenizer.load(folder), resolve_model_path(model), run_folder_of(model))
    chat.encode([{"role": "user", "content": "?"}])  # a broken template fails here, not at the first chat
    chat.tokenizer.fewest_tokens("")  # computes what later calls need
    return config, chat


@asynccontextmanager
async def started_app(
    settings: ServerSettings,
    keys: tuple[bytes, ...],
    metrics_text: Callable[[], Awaitable[bytes]] | None = None,
) -> AsyncIterator[tuple[ASGIApp, Service, EngineReady]]:
    """The app behind its gate, with a running engine. Leaving the context stops the engine."""
    config, chat = inspect_model(settings.worker.model)
    max_prompt = min(config.context, settings.max_prompt or config.context)
    max_output = min(config.context, settings.max_output or config.context)
    engine = EngineProcess(settings.worker)
    try:
        ready = await engine.start()
        model = settings.worker.model
        served = Served(
            _served_name(model),
            chat,
            ready.config,
            ready.default,
            ready.value_bytes,
            max_prompt,
            max_output,
            trained_budgets(model, ready.config),
            was_tuned_to_answer(model),
        )
        admission = Admission(ready.rows, settings.queue, ready.memory, settings.degrade)
        service = Service(engine, served, admission, settings.timeout, settings.log_prompts, metrics_text)
        hosts = LOOPBACK | {settings.host} if _is_loopback(settings.host) else None
        app: ASGIApp = Gate(create_app(service), service.metrics.refused, keys, hosts, settings.max_body)
        if settings.cors:
            methods = ["GET", "POST"]
            app = CORSMiddleware(app, settings.cors, methods, allow_headers=["*"], expose_headers=["Retry-After"])
        yield app, service, ready
    finally:
        await engine.stop()


def max_connections() -> int:
    """How many connections leave enough file descriptors for everything else."""
    if sys.platform == "win32":
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit - RESERVED_FILES)


class IdleConnections(dict["LimitedProtocol", None]):
    """The connections of a server without a complete request, the longest idle first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.was_full = limit, False


class LimitedConnection(h11.Connection):
    """h11's state of a connection, which refuses a body in tiny pieces: each takes time, however small it is."""

    _pieces = _size = 0  # of the current body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._size = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._size = self._pieces + 1, self._size + len(event.data)
            if self._pieces > MAX_TINY_PIECES + self._size // PIECE_BYTES:
                raise h11.RemoteProtocolError("The body comes in too many pieces.")
        return event


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with three limits.

    A connection that does not send the head of a request in time is closed. A body in thousands of tiny pieces is
    refused. At the maximum number of connections a new one replaces the one that has been idle longest, or gets a
    503 if none is idle. A connection counts as idle until its request is complete. Otherwise half-sent bodies would
    keep everybody else out.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, idle: IdleConnections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = LimitedConnection(h11.SERVER)
        self._idle = idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timer()
        if len(self.connections) > self._idle.limit:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, unless the answer came before the end of the body, and close the connection."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            self.transport.write(_raw_answer(ApiError("The request is not HTTP, or its body is in tiny pieces.")))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Otherwise a complete pipelined request runs, or the connection closes once its answer is sent.
        if (self.cycle.response_complete or self.cycle.more_body) and not self.transport.is_closing():
            self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        """Start the timer at connection and after each answer. Stop it when the head of a request is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._head_timer is not None or not self.cycle.more_body:
                self._forget()
            if self.cycle.more_body:
                self._idle[self] = None  # Idle since its head came: more of the body does not reset that.
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            self._idle[self] = None

    def _forget(self) -> None:
        """Stop the timer. The connection is no longer idle."""
        self._idle.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, or this one, with an answer, if no other is idle."""
        if not self._idle.was_full:
            self._idle.was_full = True
            sentence = (
                "All %d connections are in use. New ones replace idle ones; a higher `ulimit -n` allows more."
            )
            logger.warning(sentence, self._idle.limit)
        oldest = next(iter(self._idle))
        if oldest is self:
            sentence = "All connections are in use; try again in a second."
            self.transport.write(_raw_answer(ApiError(sentence, 503, "server_full", **{"retry-after": "1"})))
            self.transport.close()
        else:
            oldest.transport.abort()
        # Not in `connection_lost`, which comes later: the next newcomer would choose the same connection.
        del self._idle[oldest]
        self.connections.discard(oldest)


def _raw_answer(error: ApiError) -> bytes:
    """The answer to what did not become a request."""
    response = error.to_response()
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"Connection: close"]
    head += [name.title() + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on the first signal finishes what runs and answers 503 to new requests."""

    def __init__(
        self, app: ASGIApp, service: Service, drain_seconds: float, stop: asyncio.Event | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, IdleConnections(max_connections())),  # type: ignore[arg-type]
            ws="none",
            backlog=MAX_ACCEPTS,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # uvicorn would believe the address that any client on loopback sends
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        super().__init__(config)
        self._service, self._drain_seconds, self._stop = service, drain_seconds, stop or asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to MAX_ACCEPTS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining:
            self.force_exit = self.should_exit = True
            return
        logger.info(json.dumps({"event": "drain", "signal": signal.Signals(sig).name}))
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        self._service.is_draining |= self._stop.is_set()
        if self._service.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        """Stop once nothing is in flight, or after `drain_seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while self._service.admission.in_flight:
                    await asyncio.sleep(0.05)
        if self._service.admission.in_flight:
            await self._service.engine.stop()  # the requests that are left end with an error
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RunFailed(f"Cannot listen on {host}:{port} ({error}); choose another --port or --host.") from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _served_name(model: str) -> str:
    """What clients call the model: the last part of its path."""
    return Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rpartition("/")[2]


def greeting(
    settings: ServerSettings, engines: Sequence[EngineReady], address: tuple[Any, ...], has_keys: bool
) -> Iterator[str]:
    """The address for a browser, a command to try, and a warning if anybody may use the server."""
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = '-H "Authorization: Bearer $API_KEY" ' if has_keys else ""
    first = engines[0]
    max_tokens = min(32, settings.max_output or 32)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": max_tokens, "budget": first.default.budget})
    processes = f"engine process{'es' * (len(engines) > 1)} {', '.join(str(each.process) for each in engines)}"
    name, loops = _served_name(settings.worker.model), first.config.loops
    model = f"{name} (1 to {loops} loops) on {first.device}, {processes}"
    curl = f"curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    yield f"{model}; open {url} in a browser, or ask it:\n{curl}"
    if not has_keys and not _is_loopback(settings.host):
        yield "Anybody who reaches this address may use it; --api-keys FILE asks for a key."


# The gate.


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The hashes of the keys in a file, one per line. Blank lines and comments (#) do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(
            f"The file of API keys {path} cannot be read; give a text file with one key per line."
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    for key in keys:
        number = lines.index(key) + 1  # the key itself must not be shown
        sentence = (
            f"Line {number} of {path} is no API key; use printable ASCII, as clients encode the rest differently."
        )
        require(key.isascii() and key.isprintable(), sentence)
    if not keys:
        raise LoopformerError(f"{path} holds no API key; write one per line.")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def is_key(header: str, keys: tuple[bytes, ...]) -> bool:
    """Whether an Authorization header has one of the keys. It compares in constant time, to reveal none."""
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


def is_too_complex(body: bytes | bytearray, max_weight: int) -> bool:
    """Whether a JSON body has so many values that parsing it would take much time and memory.

    A comma weighs 1, and so does a string, whatever it contains. A bracket, brace or colon weighs NESTED_WEIGHT.
    """
    # Escapes first: without them, quotes only begin and end strings.
    skeleton = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    weight = quotes = 0
    for start in range(0, len(skeleton), SMALL_BODY):  # in pieces, because a list of all strings takes much memory
        parts = skeleton[start : start + SMALL_BODY].split(b'"')
        structure = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        commas = structure.count(b",")
        weight += commas + NESTED_WEIGHT * (len(structure) - commas)
    return weight + quotes // 2 > max_weight


class Gate:
    """ASGI middleware that checks host and key, and passes on requests with their complete bodies."""

    def __init__(
        self,
        app: ASGIApp,
        refusals: Callable[[int], Counter],
        keys: tuple[bytes, ...] = (),
        hosts: frozenset[str] | None = None,
        max_body: int = 1 << 20,  # bytes
        body_seconds: float = 30.0,
        send_seconds: float = 30.0,
    ) -> None:
        """`keys` are hashes; no key is needed if there are none. Without `hosts` any host is accepted."""
        self._app, self._keys, self._hosts, self._max_body = app, keys, hosts, max_body
        self._body_seconds, self._send_seconds, self._refusals = body_seconds, send_seconds, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check_framing([name for name, _ in scope["headers"]])
            self._check_access(scope["path"], headers)
            # Clients share rows and queue, and their keys tell them apart. On a server without keys, a client could
            # make up many, so its address counts.
            address = (scope.get("client") or ("",))[0]
            key = hashlib.sha256(headers.get(b"authorization", "").encode()).hexdigest()[:16]
            scope["state"] = {**scope.get("state", {}), "client": key if self._keys else address}
            body = await self._read_body(headers, receive)
        except ApiError as error:
            self._refusals(error.status).inc()
            await error.to_response()(scope, receive, send)
            return
        if body is None:
            return  # the client disconnected
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise ConnectionError("The client does not read.") from error

        with contextlib.suppress(ConnectionError):
            await self._app(scope, replay, send_in_time)

    @staticmethod
    def _check_framing(names: Sequence[bytes]) -> None:
        """Refuse what a proxy in front may read differently, so that nobody gets past the proxy's checks."""
        for name in (b"authorization", b"content-length", b"host", b"transfer-encoding"):
            if names.count(name) > 1:
                raise ApiError(f"Send one {name.decode().title()} header, not several.", connection="close")
        if b"content-length" in names and b"transfer-encoding" in names:
            raise ApiError("Send Content-Length or Transfer-Encoding, not both.", connection="close")

    def _check_access(self, path: str, headers: dict[bytes, str]) -> None:
        if self._hosts is not None and not is_host(headers.get(b"host", ""), self._hosts):
            raise ApiError("This server listens on loopback and accepts no other Host.", 403, "host_not_allowed")
        if self._keys and path not in OPEN_PATHS and not is_key(headers.get(b"authorization", ""), self._keys):
            sentence = "Give a valid API key as 'Authorization: Bearer KEY'."
            raise ApiError(sentence, 401, "invalid_api_key", **{"www-authenticate": "Bearer"})

    async def _read_body(self, headers: dict[bytes, str], receive: Receive) -> bytes | None:
        """The complete body, or None if the client disconnects first.

        An oversized body is drained up to a limit: a client that cannot finish sending may never see the answer.
        """
        max_body, seconds = self._max_body, self._body_seconds
        too_large = ApiError(f"The body has more than {max_body} bytes.", 413, "body_too_large", connection="close")
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length[:20]) > MAX_DRAIN_FACTOR * max_body:
            raise too_large
        body, size, has_more = bytearray(), 0, True
        try:
            async with asyncio.timeout(seconds):
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    has_more = message.get("more_body", False)
                    if size <= max_body:
                        body += message.get("body", b"")
                    elif size > MAX_DRAIN_FACTOR * max_body or not has_more:
                        raise too_large
        except TimeoutError:
            sentence = f"The body did not arrive within {seconds:g} s."
            raise ApiError(sentence, 408, "body_timeout", connection="close") from None
        if size > SMALL_BODY:
            if b"\0" in body:  # as in UTF-16, whose bytes `is_too_complex` would misread
                raise ApiError("The body is not JSON in UTF-8.")
            if is_too_complex(body, max_body // BYTES_PER_WEIGHT):
                sentence = "The body has too many values; send shorter lists, or raise the server's --max-body."
                raise ApiError(sentence, code="body_too_complex")
        return bytes(body)
