"""The app: OpenAI's routes and ours, answers whole or as server-sent events, errors in OpenAI's form.

app = create_app(service)                  # ASGI; server.py puts it behind a socket
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import loopformer
from loopformer.errors import LoopformerError
from loopformer.serving.answers import (
    AnswerForm,
    ChatAnswer,
    CompletionAnswer,
    error_answer,
    lens_answer,
    usage,
)
from loopformer.serving.page import page_router
from loopformer.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Job,
    LensBody,
    TokenizeBody,
    WrongField,
)
from loopformer.serving.service import CLIENT_GONE, ClientGone, Service, form_of

LONG_TEXT = 4096  # bytes of a body whose tokens are made beside the event loop
FORMS = {  # fields that take several, of which a sentence about one would mislead
    "prompt": "It is a text, a list of texts, a list of token ids, or a list of such lists; ids are 0 or more.",
    "stop": "It is a text, or a list of at most 16, each of 1 to 256 characters.",
    "messages": "Each has a role (system, user or assistant) and a content: a text, or a list of text parts.",
}
T = TypeVar("T")


# Errors, without internals.


def _error_content(error: BaseException) -> dict[str, Any]:
    message = str(error) if isinstance(error, LoopformerError) else "The server could not do this."
    form, param = form_of(error), error.field if isinstance(error, WrongField) else None
    return error_answer(message, form.type, param, form.code)


def _error_response(service: Service, error: BaseException) -> Response:
    status, seconds = form_of(error).status, getattr(error, "retry_after", None)
    service.metrics.refused(status)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return JSONResponse(_error_content(error), status, headers)


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
    if len(names) > 1 and names[0] in FORMS:
        return error_answer(f"{names[0]}: {FORMS[names[0]]}", param=param)
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
    async with service.run(job, path, stream=False) as run:
        async for _ in run.parts():
            pass
        await run.look()
        used = usage(service.served.cost, run.texts, job.n, run.place.trajectory.budget)
        return JSONResponse(form(service.served, job, run.place).whole(run.texts, used))


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
        async with service.run(job, path, stream=True) as run:
            answer = form(service.served, job, run.place)
            async for parts in run.parts():
                chunks = [] if begun else [answer.opening()]
                shown = [each for each in parts if each[1].text or each[1].reason or job.alternatives is not None]
                chunks += [answer.chunk(number, part) for number, part in shown]
                begun = True
                yield b"".join(map(_event, chunks))
            used = usage(service.served.cost, run.texts, job.n, run.place.trajectory.budget)
            yield (_event(answer.closing(used)) if include_usage else b"") + b"data: [DONE]\n\n"
    except LoopformerError as error:
        if not begun:
            raise
        service.metrics.refused(form_of(error).status)
        yield _event(_error_content(error))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


# The routes.


def create_app(service: Service) -> FastAPI:
    """The ASGI app; it starts and stops nothing."""
    served = service.served
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"description": "What is wrong with the request, or 429 with Retry-After while the server is busy."},
        "5XX": {"description": "The engine has failed, or the server shuts down (503)."},
    }
    app = FastAPI(
        title="loopformer", version=loopformer.__version__, docs_url=None, redoc_url=None, responses=errors
    )

    @app.exception_handler(LoopformerError)
    async def wrong(http: Request, error: LoopformerError) -> Response:
        return _error_response(service, error)

    @app.exception_handler(ClientGone)
    async def gone(http: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE.status)

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
    async def lens(body: LensBody, http: Request) -> dict[str, Any]:
        trajectory, ids = body.followed(served), tuple(await asyncio.to_thread(body.ids, served))
        rows = await _unless_gone(http, service.lens(http.url.path, ids, trajectory, body.top))
        return lens_answer(served, trajectory, rows)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        state = service.engine.state
        return JSONResponse({"status": "ok" if state == "ready" else f"engine {state}"}, _up(state == "ready"))

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        state = "draining" if service.draining else service.engine.state
        return JSONResponse({"status": state}, _up(state == "ready"))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": loopformer.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(page_router())
    return app


def _up(is_up: bool) -> int:
    return 200 if is_up else 503
