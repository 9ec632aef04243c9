"""The ASGI app: OpenAI's routes and a few more, errors in its format, and the page at `/`.

    app = create_app(service)                  # server.py puts it behind a socket

The page consists of the files in page/, served as they are. There is no build step. Nothing is loaded from other
hosts, which the Content-Security-Policy makes browsers enforce. Browsers cache the files and revalidate them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import loopformer
from loopformer.errors import LoopformerError
from loopformer.serving.answers import (
    AnswerWriter,
    ChatWriter,
    CompletionWriter,
    GenerationAnswer,
    LensAnswer,
    lens_answer,
)
from loopformer.serving.protocol import (
    CLIENT_GONE,
    MAX_PROMPTS,
    AnswerBody,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Job,
    LensBody,
    TokenizeBody,
)
from loopformer.serving.service import Service

MIN_THREADED_BODY = 4096  # bytes; larger bodies are tokenized in a thread, so that the event loop is not blocked
MIN_THREADED_LOGPROBS = 1000  # in an answer; that many are written in a thread, for the same reason
FIELD_FORMS = {  # for fields of several types: pydantic's error would mention only one of them
    "prompt": (
        "It is a text, a list of texts, a list of token ids, or a list of such lists; "
        f"ids are 0 or more, and texts or lists at most {MAX_PROMPTS}."
    ),
    "stop": "It is a text, or a list of at most 16, each of 1 to 256 characters.",
    "messages": "Each has a role (system, user or assistant) and a content: a text, or a list of text parts.",
}
PAGE_FOLDER = Path(__file__).with_name("page")
PAGE_FILES = {  # by path: the file and its type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
T = TypeVar("T")


def _invalid_body(error: RequestValidationError) -> ApiError:
    """The first error that pydantic found in a body, with the name of its field."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    names = [str(part) for part in first["loc"] if part != "body"]
    param = str(context.get("field") or (names[0] if names else "")) or None
    if first["type"] in ("unsupported_parameter", "unknown_parameter"):
        return ApiError(first["msg"], code=first["type"], param=param)
    if first["type"] == "json_invalid":
        return ApiError("The body is not JSON.")
    if not names:
        return ApiError("The body is a JSON object, sent with 'Content-Type: application/json'.")
    if len(names) > 1 and names[0] in FIELD_FORMS:
        return ApiError(f"{names[0]}: {FIELD_FORMS[names[0]]}", param=param)
    return ApiError(f"{'.'.join(names)}: {first['msg']}"[:300], param=param)


# Generating.


async def _cancel_on_disconnect(http: Request, work: Awaitable[T]) -> T:
    """The result of `work`. It is cancelled if the client disconnects first."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("The client disconnected.", CLIENT_GONE)
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _generate(
    service: Service, http: Request, body: CompletionBody | ChatBody, writer_type: type[AnswerWriter]
) -> Response:
    if int(http.headers.get("content-length", MIN_THREADED_BODY)) < MIN_THREADED_BODY:
        job = body.job(service.served)
    else:
        job = await asyncio.to_thread(body.job, service.served)
    job = replace(job, client=_client_of(http))
    if not body.stream:
        return await _cancel_on_disconnect(http, _complete(service, http.url.path, job, writer_type))
    events = _events(service, http.url.path, job, writer_type, body.stream_options.include_usage)
    # Wait for the first token before the response starts: an earlier error can still set the HTTP status.
    return EventStream(await _cancel_on_disconnect(http, anext(events)), events)


def _client_of(http: Request) -> str:
    """Who sends a request, as the gate of the server says (server.py)."""
    return str(getattr(http.state, "client", ""))


async def _complete(service: Service, path: str, job: Job, writer_type: type[AnswerWriter]) -> Response:
    async with service.generate(job, path, stream=False) as generation:
        async for _ in generation.events():
            pass
        await generation.finish()
        writer, usage = writer_type(service.served, job, generation.trajectory), generation.usage()
        write = partial(writer.complete, generation.texts, usage, generation.prompt_scores)
        # Many log-probabilities take seconds to write, during which the event loop must not wait.
        logprobs = 0 if job.alternatives is None else usage.total_tokens * (job.alternatives + 1)
        content = write() if logprobs < MIN_THREADED_LOGPROBS else await asyncio.to_thread(write)
        return Response(content, media_type="application/json")


async def _events(
    service: Service, path: str, job: Job, writer_type: type[AnswerWriter], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async with service.generate(job, path, stream=True) as generation:
            writer = writer_type(service.served, job, generation.trajectory)
            async for events in generation.events():
                opening = b"" if has_begun else _event(writer.opening())
                has_begun = True
                # A token that ends within a character has no text yet. Its log-probability is sent at once.
                has_logprobs = job.alternatives is not None
                shown = [(index, event) for index, event in events if has_logprobs or event.piece or event.result]
                yield opening + b"".join(_event(writer.chunk(index, event)) for index, event in shown)
            closing = _event(writer.closing(generation.usage())) if include_usage else b""
            yield closing + b"data: [DONE]\n\n"
    except LoopformerError as error:
        if not has_begun:
            raise
        api_error = ApiError.of(error)
        service.metrics.refused(api_error.status).inc()
        yield _event(api_error.answer())


def _event(answer: AnswerBody) -> bytes:
    return f"data: {answer.to_json()}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream of server-sent events, the first of which is known.

    The generator is closed however the response ends. A client that disconnects would otherwise keep its slots.
    """

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        self._others = others
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._all_events(first), media_type="text/event-stream", headers=headers)

    async def _all_events(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        async for event in self._others:
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._others.aclose()


# The routes.


def create_app(service: Service) -> FastAPI:
    """The ASGI app. The caller starts and stops the engine."""
    served = service.served
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"description": "What is wrong with the request, or 429 with Retry-After while the server is busy."},
        "5XX": {"description": "The engine has failed, or the server shuts down (503)."},
    }
    app = FastAPI(
        title="loopformer", version=loopformer.__version__, docs_url=None, redoc_url=None, responses=errors
    )

    @app.exception_handler(LoopformerError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        api_error = _invalid_body(error) if isinstance(error, RequestValidationError) else ApiError.of(error)
        if api_error.status != CLIENT_GONE:
            service.metrics.refused(api_error.status).inc()
        return api_error.to_response()

    @app.exception_handler(HTTPException)
    async def no_route(http: Request, error: HTTPException) -> Response:
        messages = {404: "There is no such path.", 405: "This path does not allow the method."}
        message = messages.get(error.status_code, "The request cannot be read.")
        return ApiError(message, error.status_code, **error.headers or {}).to_response()

    @app.post("/v1/completions", response_model=GenerationAnswer)
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await _generate(service, http, body, CompletionWriter)

    @app.post("/v1/chat/completions", response_model=GenerationAnswer)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await _generate(service, http, body, ChatWriter)

    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "loopformer",
        "max_model_len": served.config.context,
        "loops": served.config.loops,
        "trajectory": str(served.default),
        "tuned_to_answer": served.tuned_to_answer,
        "flops_per_token": [served.cost.forward_flops(budget) for budget in range(1, served.config.loops + 1)],
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
    async def lens(body: LensBody, http: Request) -> LensAnswer:
        trajectory, ids = body.requested_trajectory(served), tuple(await asyncio.to_thread(body.ids, served))
        rows = await _cancel_on_disconnect(
            http, service.lens(http.url.path, ids, trajectory, body.top, _client_of(http))
        )
        return lens_answer(served, trajectory, rows)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        state = service.engine.state
        return JSONResponse({"status": "ok" if state == "ready" else f"engine {state}"}, _probe_status(state))

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        state = "draining" if service.is_draining else service.engine.state
        return JSONResponse({"status": state}, _probe_status(state))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": loopformer.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, (name, kind) in PAGE_FILES.items():
        route = _page_route(PAGE_FOLDER.joinpath(name).read_bytes(), kind)
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)
    return app


def _probe_status(state: str) -> int:
    return 200 if state == "ready" else 503


def _page_route(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-security-policy": PAGE_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": etag,
    }

    async def send(http: Request) -> Response:
        if etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return send
