"""The app: OpenAI's routes, ours, and what lies between a request and the engine.

    service = Service(engine, served, admission, ServiceSettings(timeout=600))
    app = create_app(service)                  # ASGI; server.py puts it behind a socket

A generation goes through `Service.run`: admission, the engine's process, metrics, one line in the log. Whatever
ends it (the last token, a client that goes away, the timeout, an engine that dies) leaves through the same door,
which frees its slots.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import loopformer
from loopformer.errors import LoopformerError, RunFailed
from loopformer.serving.admission import Admission, Admitted, Overloaded
from loopformer.serving.metrics import ServerMetrics
from loopformer.serving.protocol import (
    AnswerForm,
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    DetokenizeBody,
    Job,
    LensBody,
    Served,
    TextSoFar,
    TokenizeBody,
    TooLong,
    UnknownModel,
    error_answer,
    lens_answer,
    usage,
)
from loopformer.serving.worker import (
    Call,
    EngineLoad,
    EngineLost,
    EngineProcess,
    Looked,
    Refused,
    Started,
    TextPiece,
)
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
LONG_TEXT = 4096  # bytes of a body whose tokens are made beside the event loop
CLIENT_GONE = 499  # as nginx logs it; nobody is there to read it
T = TypeVar("T")


class Draining(LoopformerError):
    """The server finishes what it runs and takes nothing new."""


class TimedOut(LoopformerError):
    """A request that took longer than it may."""


class ClientGone(Exception):
    """Nobody is left to answer."""


@dataclass(frozen=True)
class ServiceSettings:
    """How the service treats its clients."""

    timeout: float = 600.0  # seconds that a request may take, waiting included
    log_prompts: bool = False


class Run:
    """A generation under way: its texts as they come, and its times."""

    def __init__(self, service: Service, job: Job, place: Admitted) -> None:
        self._service, self._job, self._place = service, job, place
        self.texts = [TextSoFar(job.prompt_of(number)) for number in range(job.count)]
        self.began = time.monotonic()
        self.first_token = 0.0
        self.queue_seconds = 0.0
        requests = job.requests(place.trajectory) if job.max_tokens else []
        self._call = service.engine.submit(requests, job.priority) if requests else None

    @property
    def done(self) -> bool:
        return self._call is None or all(text.reason is not None for text in self.texts)

    async def parts(self) -> AsyncIterator[list[tuple[int, TextSoFar]]]:
        """What has come of the texts since the last time, those that have come further."""
        while not self.done:
            assert self._call is not None
            parts: dict[int, TextSoFar] = {}
            for number, news in await self._service.within(self._call.take(), self.began):
                if isinstance(news, Started):
                    self.queue_seconds = max(0.0, news.at - self.began)
                    self._service.metrics.queued(self._place.trajectory.budget, self.queue_seconds)
                elif isinstance(news, Refused):
                    raise LoopformerError(news.sentence)
                elif isinstance(news, TextPiece):
                    if news.error is not None:
                        logger.error("A request failed: %s", news.error)
                        raise RunFailed("The text could not be generated.")
                    self._count(number, news)
                    part = parts.setdefault(number, TextSoFar(()))
                    for text in (self.texts[number], part):
                        text.add(news.text, news.tokens, news.logprobs, news.reason)
            if parts:
                yield list(parts.items())

    def _count(self, number: int, news: TextPiece) -> None:
        metrics, budget = self._service.metrics, self._place.trajectory.budget
        seconds = time.monotonic() - self.began
        before = len(self.texts[number].tokens)
        if before == 0:
            metrics.first_token(budget, seconds)
            self.first_token = self.first_token or seconds
        metrics.tokens(budget, 0 if before else len(self.texts[number].prompt), len(news.tokens))
        if news.reason is not None:
            metrics.finished(budget, news.reason, before + len(news.tokens), self.first_token, seconds)

    async def look(self) -> None:
        """Have the finished texts looked at token by token, where more is asked for than the tokens themselves."""
        job = self._job
        if job.alternatives is None or not (job.alternatives or job.echo):
            return
        for text in self.texts:
            ids = (*text.prompt, *text.tokens)
            text.ranked = await self._service.look(ids, self._place.trajectory, job.alternatives, False, self.began)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class Service:
    """What the routes share: the engine, who may come in, what is counted."""

    def __init__(
        self, engine: EngineProcess, served: Served, admission: Admission, settings: ServiceSettings
    ) -> None:
        self.engine, self.served, self.admission, self.settings = engine, served, admission, settings
        self.metrics = ServerMetrics(served.name)
        self.draining = False
        engine.on_load = self._on_load

    def _on_load(self, load: EngineLoad) -> None:
        """The engine says how busy it is."""
        ready = self.engine.ready
        self.metrics.load(load, 1 if ready is None else ready.memory)
        self.metrics.level(self.admission.level)

    @asynccontextmanager
    async def run(self, job: Job, path: str) -> AsyncIterator[tuple[Run, Admitted]]:
        """A generation, from admission to the line in the log; leaving frees what it holds."""
        place = self._enter(job.count, lambda trajectory: job.kv_bytes(self.served, trajectory), job)
        began, status, run = time.monotonic(), 200, None
        try:
            run = Run(self, job, place)
            yield run, place
        except BaseException as error:
            status = status_of(error)
            raise
        finally:
            seconds = time.monotonic() - began
            if run is not None:
                run.cancel()
            self.admission.leave(place, seconds)
            self._log(path, job, place, run, status, seconds)

    def _enter(self, count: int, bytes_of: Callable[[Trajectory], int], job: Job) -> Admitted:
        if self.draining:
            raise Draining("The server is shutting down; ask another one.")
        place = self.admission.enter(count, bytes_of, job.trajectory, job.least)
        if place.degraded:
            self.metrics.degraded(place.asked.budget, place.trajectory.budget)
        return place

    async def look(
        self, ids: tuple[int, ...], trajectory: Trajectory, top: int, by_loop: bool, began: float
    ) -> Any:
        """Have the engine's process look at tokens (lens.py)."""
        call: Call = self.engine.inspect(ids, trajectory, top, by_loop)
        try:
            ((_, news),) = await self.within(call.take(), began)
        finally:
            call.cancel()
        if isinstance(news, Refused):
            raise LoopformerError(news.sentence)
        assert isinstance(news, Looked)
        return news.value

    async def within(self, work: Awaitable[T], began: float) -> T:
        """Await something for as long as a request that began then may still take."""
        try:
            async with asyncio.timeout(max(0.0, began + self.settings.timeout - time.monotonic())):
                return await work
        except TimeoutError:
            raise TimedOut(f"The request took longer than {self.settings.timeout:g} s.") from None

    def _log(self, path: str, job: Job, place: Admitted, run: Run | None, status: int, seconds: float) -> None:
        texts = [] if run is None else run.texts
        line: dict[str, Any] = {
            "event": "request",
            "path": path,
            "status": status,
            "texts": job.count,
            "asked": str(place.asked),
            "trajectory": str(place.trajectory),
            "prompt_tokens": sum(map(len, job.prompts)),
            "new_tokens": sum(len(text.tokens) for text in texts),
            "finish": sorted({text.reason for text in texts if text.reason is not None}),
            "queue_seconds": 0.0 if run is None else round(run.queue_seconds, 4),
            "first_token_seconds": 0.0 if run is None else round(run.first_token, 4),
            "seconds": round(seconds, 4),
        }
        if self.settings.log_prompts:
            line["prompts"] = [self.served.tokenizer.decode(prompt, special=True) for prompt in job.prompts]
        logger.info(json.dumps(line, ensure_ascii=False))


# Errors, in OpenAI's form and without internals.


def status_of(error: BaseException) -> int:
    statuses: list[tuple[type[BaseException], int]] = [
        (Overloaded, 429),
        (Draining, 503),
        (EngineLost, 503),
        (TimedOut, 504),
        (UnknownModel, 404),
        (RunFailed, 500),
        (LoopformerError, 400),
        (ClientGone, CLIENT_GONE),
        (asyncio.CancelledError, CLIENT_GONE),
        (GeneratorExit, CLIENT_GONE),
        (ConnectionError, CLIENT_GONE),
    ]
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


def error_content(error: BaseException) -> dict[str, Any]:
    status = status_of(error)
    message = str(error) if isinstance(error, LoopformerError) else "The server could not do this."
    kinds = {429: "rate_limit_error", 503: "server_error", 504: "timeout_error", 500: "server_error"}
    codes: dict[int, str] = {429: "server_busy", 503: "shutting_down", 504: "timeout", 404: "model_not_found"}
    code = "context_length_exceeded" if isinstance(error, TooLong) else codes.get(status)
    if isinstance(error, EngineLost) and error.state != "stopped":
        code = f"engine_{error.state}"
    return error_answer(message, kinds.get(status, "invalid_request_error"), code=code)


def _error_response(service: Service, error: BaseException) -> Response:
    status = status_of(error)
    headers = {}
    if isinstance(error, Overloaded | EngineLost):
        headers["retry-after"] = str(error.retry_after)
    elif isinstance(error, Draining):
        headers["retry-after"] = "5"
    service.metrics.refused(status)
    return JSONResponse(error_content(error), status, headers)


def _validation_content(error: RequestValidationError) -> dict[str, Any]:
    """What is wrong with a body: the first thing, and the field it is about."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    names = [str(part) for part in first["loc"] if part != "body"]
    param = str(context.get("field") or (names[0] if names else "")) or None
    code = first["type"] if first["type"] in ("unsupported_parameter", "unknown_parameter") else None
    if code is not None:
        return error_answer(first["msg"], param=param, code=code)
    if first["type"] == "json_invalid":
        return error_answer("The body is not JSON.")
    if not names:
        return error_answer("The body is a JSON object, sent with 'Content-Type: application/json'.")
    return error_answer(f"{'.'.join(names)}: {first['msg']}"[:300], param=param)


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await something while the client is there; when it goes away, the work is cancelled."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


# Generating.


async def _generate(
    service: Service, http: Request, body: CompletionBody | ChatBody, form: type[AnswerForm]
) -> Response:
    text_bytes = int(http.headers.get("content-length", LONG_TEXT))
    if text_bytes < LONG_TEXT:
        job = body.job(service.served)
    else:
        job = await asyncio.to_thread(body.job, service.served)
    if body.stream:
        return await _streamed(service, http, job, form, body.stream_options.include_usage)
    return await _unless_gone(http, _whole(service, http.url.path, job, form))


async def _whole(service: Service, path: str, job: Job, form: type[AnswerForm]) -> Response:
    async with service.run(job, path) as (run, place):
        async for _ in run.parts():
            pass
        await run.look()
        used = usage(service.served.cost, run.texts, job.n, place.trajectory.budget)
        return JSONResponse(form(service.served, job, place).whole(run.texts, used))


async def _streamed(
    service: Service, http: Request, job: Job, form: type[AnswerForm], include_usage: bool
) -> Response:
    """Server-sent events. The answer begins with the first token, so that what fails before has its own status."""
    events = _events(service, http.url.path, job, form, include_usage)

    async def begin() -> bytes:
        return await anext(events)

    return EventStream(await _unless_gone(http, begin()), events)


class EventStream(StreamingResponse):
    """Server-sent events, of which the first is there already; whatever ends the response ends what makes them."""

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        self._others = others
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._all(first), media_type="text/event-stream", headers=headers)

    async def _all(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        async for event in self._others:
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._others.aclose()


async def _events(
    service: Service, path: str, job: Job, form: type[AnswerForm], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with service.run(job, path) as (run, place):
            answer = form(service.served, job, place)
            async for parts in run.parts():
                chunks = [] if begun else answer.opening()
                shown = [each for each in parts if each[1].text or each[1].reason or job.alternatives is not None]
                chunks += [answer.chunk(number, part) for number, part in shown]
                begun = True
                yield b"".join(map(_event, chunks))
            used = usage(service.served.cost, run.texts, job.n, place.trajectory.budget)
            yield (_event(answer.closing(used)) if include_usage else b"") + b"data: [DONE]\n\n"
    except LoopformerError as error:
        if not begun:
            raise
        service.metrics.refused(status_of(error))
        yield _event(error_content(error))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


# The routes.


def create_app(service: Service) -> FastAPI:
    """The ASGI app; it starts and stops nothing."""
    served = service.served
    app = FastAPI(title="loopformer", version=loopformer.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(LoopformerError)
    async def wrong(http: Request, error: LoopformerError) -> Response:
        return _error_response(service, error)

    @app.exception_handler(ClientGone)
    async def gone(http: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        service.metrics.refused(400)
        return JSONResponse(_validation_content(error), 400)

    @app.exception_handler(HTTPException)
    async def no_route(http: Request, error: HTTPException) -> Response:
        known = {404: "There is no such address here.", 405: "This address takes another method."}
        message = known.get(error.status_code, "The request cannot be read.")
        return JSONResponse(error_answer(message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        return _error_response(service, error)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await _generate(service, http, body, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await _generate(service, http, body, ChatAnswer)

    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "loopformer",
        "max_model_len": served.config.context,
        "loops": served.config.loops,
        "trajectory": str(served.default),
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return card

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        ids = await asyncio.to_thread(body.ids, served)
        return {"tokens": ids, "count": len(ids), "max_model_len": served.config.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        return {"prompt": await asyncio.to_thread(body.text, served)}

    @app.post("/lens")
    async def lens(body: LensBody, http: Request) -> dict[str, Any]:
        trajectory, ids = body.followed(served), tuple(await asyncio.to_thread(body.ids, served))
        if service.draining:
            raise Draining("The server is shutting down; ask another one.")
        place, began = service.admission.enter(1, lambda _: 0, trajectory, trajectory.budget), time.monotonic()
        try:
            rows = await _unless_gone(http, service.look(ids, trajectory, body.top, True, began))
        finally:
            service.admission.leave(place, time.monotonic() - began)
        return lens_answer(served, trajectory, rows)

    @app.get("/health")
    async def health() -> Response:
        state = service.engine.state
        return JSONResponse({"status": "ok" if state == "ready" else f"engine {state}"}, _up(state == "ready"))

    @app.get("/ready")
    async def ready() -> Response:
        state = "draining" if service.draining else service.engine.state
        return JSONResponse({"status": state}, _up(state == "ready"))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": loopformer.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        service.metrics.engine(service.engine.state == "ready", service.engine.losses)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _up(is_up: bool) -> int:
    return 200 if is_up else 503
