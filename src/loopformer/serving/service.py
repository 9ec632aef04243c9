"""What lies between a route and the engine: admission, the process, metrics, one line in the log.

    service = Service(engine, served, admission, ServiceSettings(timeout=600))
    async with service.run(job, "/v1/completions", stream=True) as run:
        async for parts in run.parts(): ...     # what has come of its texts since the last time

Whatever ends a generation (the last token, a client that goes away, the timeout, an engine that dies) leaves
through the same door, which frees its slots. Prometheus is told by the names that people know from vLLM, under
`loopformer:`; latencies and tokens are by budget, the number of loops that a request was granted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.request import Reason
from loopformer.serving.admission import Admission, Admitted, Overloaded
from loopformer.serving.answers import FINISH, TextSoFar
from loopformer.serving.engine_process import Call, EngineHung, EngineLost, EngineProcess, ShuttingDown
from loopformer.serving.protocol import Job, Served, TooLong, UnknownModel
from loopformer.serving.worker import Alternatives, EngineLoad, Looked, Refused, Started, TextPiece
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class TimedOut(LoopformerError):
    """A request that took longer than it may."""


class ClientGone(Exception):
    """Nobody is left to answer."""


class ErrorForm(NamedTuple):
    """What an error is answered with, in OpenAI's words."""

    status: int
    type: str = "server_error"
    code: str | None = None


CLIENT_GONE = ErrorForm(499)  # as nginx logs it; nobody is there to read it
FORMS: tuple[tuple[type[BaseException], ErrorForm], ...] = (  # the first that fits counts
    (Overloaded, ErrorForm(429, "rate_limit_error", "server_busy")),
    (ShuttingDown, ErrorForm(503, code="shutting_down")),
    (EngineHung, ErrorForm(503, code="engine_hung")),
    (EngineLost, ErrorForm(503, code="engine_lost")),
    (TimedOut, ErrorForm(504, "timeout_error", "timeout")),
    (UnknownModel, ErrorForm(404, "invalid_request_error", "model_not_found")),
    (TooLong, ErrorForm(400, "invalid_request_error", "context_length_exceeded")),
    (RunFailed, ErrorForm(500)),
    (LoopformerError, ErrorForm(400, "invalid_request_error")),
    (ClientGone, CLIENT_GONE),
    (asyncio.CancelledError, CLIENT_GONE),
    (GeneratorExit, CLIENT_GONE),
    (ConnectionError, CLIENT_GONE),
    (BaseException, ErrorForm(500)),
)


def form_of(error: BaseException) -> ErrorForm:
    return next(form for kind, form in FORMS if isinstance(error, kind))


def error_of(refused: Refused) -> LoopformerError:
    """What a client is told: that the request is wrong, or that we failed."""
    return (RunFailed if refused.ours else LoopformerError)(refused.sentence)


@dataclass(frozen=True)
class ServiceSettings:
    """How the service treats its clients."""

    timeout: float = 600.0  # seconds that a request may take, waiting included
    log_prompts: bool = False


class Run:
    """A generation under way: its texts as they come, and its times."""

    def __init__(self, service: Service, job: Job, place: Admitted) -> None:
        self.job, self.place, self._service = job, place, service
        self.texts = [TextSoFar(job.prompt_of(number)) for number in range(job.count)]
        self.began = time.monotonic()
        self.queue_seconds: float | None = None  # until the first of its texts got a slot
        self._first_tokens: dict[int, float] = {}  # seconds until each text began
        self._call: Call | None = None

    def start(self, stream: bool) -> None:
        if self.job.max_tokens:  # else there is only a prompt to look at
            requests = self.job.requests(self.place.trajectory)
            self._call = self._service.engine.submit(requests, self.job.priority, stream)

    @property
    def first_token_seconds(self) -> float:
        """Until the first of its texts began."""
        return min(self._first_tokens.values(), default=0.0)

    async def parts(self) -> AsyncIterator[list[tuple[int, TextSoFar]]]:
        """What has come of the texts since the last time, those that have come further."""
        while self._call is not None and any(text.reason is None for text in self.texts):
            parts: dict[int, TextSoFar] = {}
            for number, news in await self._service.within(self._call.take(), self.began):
                if isinstance(news, Started):
                    queued = max(0.0, news.at - self.began)
                    self.queue_seconds = queued if self.queue_seconds is None else self.queue_seconds
                    self._service.metrics.queued(self.place.trajectory.budget, queued)
                elif isinstance(news, Refused):
                    raise error_of(news)
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
        metrics, budget = self._service.metrics, self.place.trajectory.budget
        seconds = time.monotonic() - self.began
        text = self.texts[number]
        if number not in self._first_tokens:
            self._first_tokens[number] = seconds
            metrics.first_token(budget, seconds)
            metrics.prompt_tokens(budget, len(text.prompt))
        metrics.new_tokens(budget, len(news.tokens))
        if news.reason is not None:
            new = len(text.tokens) + len(news.tokens)
            metrics.finished(budget, news.reason, new, self._first_tokens[number], seconds)

    async def look(self) -> None:
        """Have the finished texts looked at token by token, where more is asked for than the tokens themselves."""
        job, along, metrics = self.job, self.place.trajectory, self._service.metrics
        for text in self.texts:
            if job.alternatives is not None and (job.alternatives or job.echo):
                ids = (*text.prompt, *text.tokens)
                text.ranked = await self._service.look(ids, along, job.alternatives, False, self.began)
            if text.reason is None:  # a prompt and nothing more
                text.reason = "length"
                metrics.prompt_tokens(along.budget, len(text.prompt))
                metrics.finished(along.budget, "length", 0, 0.0, time.monotonic() - self.began)

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
        self.metrics_text: Callable[[], Awaitable[bytes]] = self._own_metrics  # replicas give those of all
        engine.on_load = self._on_load

    def _on_load(self, load: EngineLoad) -> None:
        """The engine says how busy it is."""
        ready = self.engine.ready
        self.metrics.load(load, 1 if ready is None else ready.memory)
        self.metrics.level(self.admission.level)

    def counted(self) -> CollectorRegistry:
        """All that is counted, as it stands now."""
        self.metrics.engine(self.engine.state == "ready", self.engine.losses)
        return self.metrics.registry

    async def _own_metrics(self) -> bytes:
        return generate_latest(self.counted())

    @contextmanager
    def _admitted(
        self, count: int, bytes_of: Callable[[Trajectory], int], asked: Trajectory, least: int
    ) -> Iterator[Admitted]:
        """A place for requests of one client, which leaving frees."""
        if self.draining:
            raise ShuttingDown
        place, began = self.admission.enter(count, bytes_of, asked, least), time.monotonic()
        try:
            yield place
        finally:
            self.admission.leave(place, time.monotonic() - began)

    @asynccontextmanager
    async def run(self, job: Job, path: str, stream: bool) -> AsyncIterator[Run]:
        """A generation, from admission to the line in the log; leaving frees what it holds."""
        bytes_of = partial(job.kv_bytes, self.served)
        with self._admitted(job.count, bytes_of, job.trajectory, job.least) as place:
            if place.degraded:
                self.metrics.degraded(place.asked.budget, place.trajectory.budget)
            run, status = Run(self, job, place), 200
            try:
                run.start(stream)
                yield run
            except BaseException as error:
                status = form_of(error).status
                raise
            finally:
                run.cancel()
                if status == CLIENT_GONE.status:
                    self.metrics.aborted(place.trajectory.budget, sum(text.reason is None for text in run.texts))
                self._log(path, run, status)

    async def lens(self, path: str, ids: tuple[int, ...], trajectory: Trajectory, top: int) -> list[Alternatives]:
        """The most likely next tokens after each loop."""
        with self._admitted(1, lambda _: 0, trajectory, trajectory.budget):
            began, status = time.monotonic(), 200
            try:
                rows: list[Alternatives] = await self.look(ids, trajectory, top, True, began)
            except BaseException as error:
                status = form_of(error).status
                raise
            finally:
                seconds = round(time.monotonic() - began, 4)
                line = {"trajectory": str(trajectory), "prompt_tokens": len(ids), "seconds": seconds}
                logger.info(json.dumps({"event": "request", "path": path, "status": status, **line}))
            return rows

    async def look(
        self, ids: tuple[int, ...], trajectory: Trajectory, top: int, by_loop: bool, began: float
    ) -> Any:
        """Have the engine's process look at tokens, for a request that began then."""
        call = self.engine.look(ids, trajectory, top, by_loop)
        try:
            ((_, news),) = await self.within(call.take(), began)
        finally:
            call.cancel()
        if isinstance(news, Refused):
            raise error_of(news)
        assert isinstance(news, Looked)
        return news.value

    async def within(self, work: Awaitable[T], began: float) -> T:
        """Await something for as long as a request that began then may still take."""
        try:
            async with asyncio.timeout(max(0.0, began + self.settings.timeout - time.monotonic())):
                return await work
        except TimeoutError:
            raise TimedOut(f"The request took longer than {self.settings.timeout:g} s.") from None

    def _log(self, path: str, run: Run, status: int) -> None:
        job, place = run.job, run.place
        line: dict[str, Any] = {
            "event": "request",
            "path": path,
            "status": status,
            "texts": job.count,
            "asked": str(place.asked),
            "trajectory": str(place.trajectory),
            "prompt_tokens": sum(map(len, job.prompts)),
            "new_tokens": sum(len(text.tokens) for text in run.texts),
            "finish": sorted({text.reason for text in run.texts if text.reason is not None}),
            "queue_seconds": round(run.queue_seconds or 0.0, 4),
            "first_token_seconds": round(run.first_token_seconds, 4),
            "seconds": round(time.monotonic() - run.began, 4),
        }
        if self.settings.log_prompts:
            line["prompts"] = [self.served.tokenizer.decode(prompt, special=True) for prompt in job.prompts]
        logger.info(json.dumps(line, ensure_ascii=False))


class ServerMetrics:
    """All that is counted, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._before, self._losses = EngineLoad(), 0

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"loopformer:{name}", what, ["model_name"], registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"loopformer:{name}", what, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            names = ["model_name", "budget"]
            return Histogram(f"loopformer:{name}", what, names, registry=self.registry, buckets=buckets)

        self._running = gauge("num_requests_running", "Requests that have a slot.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for one, or to be looked at.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the memory for keys and values in use; 1 is all.")
        self._level = gauge("degradation_level", "0 grants what is asked for; 1, 2 and 3 grant less.")
        self._up = gauge("engine_up", "1 while the engine's process runs.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "budget")
        self._new = counter("generation_tokens", "New tokens.", "budget")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._hits = counter("prefix_cache_hits", "Those of them that another prompt had run.")
        self._success = counter(
            "request_success", "Texts by how they ended: stop, length or abort.", "budget", "finished_reason"
        )
        self._refused = counter("requests_refused", "Requests that were not run, by status.", "status")
        self._degraded = counter("requests_degraded", "Requests granted less than they asked.", "asked", "budget")
        self._restarts = counter("engine_restarts", "Processes of the engine that died.")
        self._first = histogram("time_to_first_token_seconds", "From request to first token.", _FIRST)
        self._each = histogram(
            "request_time_per_output_token_seconds", "Between tokens after the first, the mean of a text.", _EACH
        )
        self._end = histogram("e2e_request_latency_seconds", "From request to last token.", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "From request to slot.", _WHOLE)
        for counted in (self._queries, self._hits, self._restarts):
            counted.labels(model)

    def load(self, load: EngineLoad, memory: int) -> None:
        """How busy the engine says it is; its counts begin again with a new process."""
        before = self._before if load.prompt_tokens >= self._before.prompt_tokens else EngineLoad()
        shared = max(0, load.shared_tokens - before.shared_tokens)
        self._hits.labels(self._model).inc(shared)
        self._queries.labels(self._model).inc(shared + load.prompt_tokens - before.prompt_tokens)
        self._before = load
        self._running.labels(self._model).set(load.running)
        self._waiting.labels(self._model).set(load.waiting)
        self._usage.labels(self._model).set(load.used_bytes / memory)

    def engine(self, up: bool, losses: int) -> None:
        """Whether the engine's process runs, and how many have died."""
        self._up.labels(self._model).set(up)
        self._restarts.labels(self._model).inc(losses - self._losses)
        self._losses = losses

    def level(self, level: int) -> None:
        self._level.labels(self._model).set(level)

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, status).inc()

    def degraded(self, asked: int, budget: int) -> None:
        self._degraded.labels(self._model, asked, budget).inc()

    def queued(self, budget: int, seconds: float) -> None:
        self._queue.labels(self._model, budget).observe(seconds)

    def prompt_tokens(self, budget: int, count: int) -> None:
        self._prompt.labels(self._model, budget).inc(count)

    def new_tokens(self, budget: int, count: int) -> None:
        self._new.labels(self._model, budget).inc(count)

    def first_token(self, budget: int, seconds: float) -> None:
        self._first.labels(self._model, budget).observe(seconds)

    def aborted(self, budget: int, count: int) -> None:
        """Texts whose client has gone away."""
        self._success.labels(self._model, budget, "abort").inc(count)

    def finished(self, budget: int, reason: Reason, new: int, first: float, whole: float) -> None:
        """A text has ended: its tokens, and the seconds from the request to the first and to the last of them."""
        self._success.labels(self._model, budget, FINISH[reason]).inc()
        self._end.labels(self._model, budget).observe(whole)
        if new > 1:
            self._each.labels(self._model, budget).observe((whole - first) / (new - 1))
