"""Admission, generation, request log and metrics.

    service = Service(engine, served, Admission(rows=16, queue=64, memory=2**30), timeout=600)
    async with service.generate(job, "/v1/completions", stream=True) as generation:
        async for events in generation.events(): ...   # what was added to its texts

At most `rows` requests run and at most `queue` requests wait. Both are in flight. Their keys and values are limited
in proportion: memory * (rows + queue) / rows bytes. One client may hold at most three quarters of both, and less
when others are there: MAX_SHARE times as many texts as it leaves free. So nobody fills the server alone.

With `degrade` a fuller queue grants smaller budgets. The load is how full the queue is. A level is entered at a
higher load than it is left at (hysteresis), so that budgets do not flicker. A running request keeps its budget, as
its cache is bound to its trajectory.

However a generation ends (last token, client gone, timeout, engine lost), leaving its context frees its slots.
Metrics have vLLM's names with the prefix `loopformer:`. Latencies and tokens are labelled by the granted budget.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as CountMetric

from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.inference.request import Event, Result
from loopformer.scoring import Alternatives
from loopformer.serving.answers import FINISH_REASONS, Usage, count_usage
from loopformer.serving.engine_process import Call, EngineProcess, shutdown_error
from loopformer.serving.messages import EngineLoad, Failure, Output, Scores, TokenScore
from loopformer.serving.protocol import CLIENT_GONE, ApiError, Job, Served
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
M = TypeVar("M", CountMetric, Gauge, Histogram)

SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))  # of the requested budget, by level
ENTER_LOADS = (0.25, 0.5, 0.75)  # at this load or more, enter level 1, 2 or 3
LEAVE_LOADS = (0.1, 0.3, 0.55)  # below this load, leave it
MAX_RETRY_AFTER = 60  # seconds
FIRST_REQUEST_SECONDS = 5.0  # assumed until the first request has ended
MAX_SHARE = 3  # texts of one client in flight, for each that could still come in

# Histogram buckets in seconds: time to first token, time per output token, end to end.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


# Admission.


def next_level(level: int, load: float) -> int:
    """The level of degradation at a new load."""
    while level < len(ENTER_LOADS) and load >= ENTER_LOADS[level]:
        level += 1
    while level > 0 and load < LEAVE_LOADS[level - 1]:
        level -= 1
    return level


def grant_trajectory(requested: Trajectory, min_budget: int, level: int) -> Trajectory:
    """The trajectory that is granted at a level.

    Its budget is a share of the requested budget, rounded up, but at least `min_budget`. A smaller budget than the
    requested one gets equal steps.
    """
    budget = max(math.ceil(requested.budget * SHARES[level]), min(min_budget, requested.budget))
    return requested if budget == requested.budget else Trajectory.uniform(budget)


def seconds_to_wait(waiting: int, rows: int, seconds: float) -> int:
    """The expected time until half the queue has left, but at least one request.

    A request is in flight for `seconds` on average. By Little's law `rows + waiting` requests leave in that time.
    """
    return min(MAX_RETRY_AFTER, max(1, math.ceil(seconds * max(1.0, waiting / 2) / (rows + waiting))))


@dataclass(frozen=True)
class Admitted:
    """Texts of one client that were admitted together."""

    count: int
    bytes: int
    trajectory: Trajectory  # granted, not requested
    client: str = ""


class Admission:
    """Counts the texts in flight, and decides which requests come in and at which budget."""

    def __init__(self, rows: int, queue: int, memory: int, degrade: bool = False) -> None:
        require(queue >= 1, f"The queue must hold 1 request or more, got {queue}.")
        self.rows, self.queue, self.degrade = rows, queue, degrade
        self.in_flight = self.level = 0
        self.by_client: Counter[str] = Counter()  # texts in flight
        self._memory, self._bytes = memory, 0
        self._seconds: float | None = None  # the moving average of a request's duration

    @property
    def load(self) -> float:
        """How full the queue is, by requests or by bytes; 0 while nobody has to wait."""
        by_count = (self.in_flight - self.rows) / self.queue
        by_bytes = (self._bytes / self._memory - 1) * self.rows / self.queue
        return max(0.0, by_count, by_bytes)

    def enter(
        self,
        count: int,
        bytes_of: Callable[[Trajectory], int],
        requested: Trajectory,
        min_budget: int = 1,
        client: str = "",
    ) -> Admitted:
        """Admit all texts or none. `bytes_of` gives the bytes of their keys and values along a trajectory. A client
        without a name gets no share, only what is free."""
        room = self.rows + self.queue
        most = (MAX_SHARE * room + 1) // (MAX_SHARE + 1) if client else room
        require(count <= most, f"{count} texts at once are more than the {most} that this server accepts.")
        self._update_level()
        trajectory = grant_trajectory(requested, min_budget, self.level)
        size = bytes_of(trajectory)
        left = room - self.in_flight - count
        is_full = left < 0 or self._bytes + size > self._memory * room / self.rows
        # The first text of a client always comes in where there is room.
        has_too_many = bool(client) and self.by_client[client] + count - 1 > MAX_SHARE * left
        # While nothing runs, admit even a request that can never fit: the error of the engine explains why.
        if (is_full or has_too_many) and self.in_flight > 0:
            seconds = FIRST_REQUEST_SECONDS if self._seconds is None else self._seconds
            wait = seconds_to_wait(max(0, self.in_flight - self.rows), self.rows, seconds)
            code, reason = "server_busy", "The server is busy"
            if not is_full:
                code, reason = (
                    "client_busy",
                    f"You have {self.by_client[client]} texts in flight, which is your share",
                )
            raise ApiError(f"{reason}; try again in {wait} s.", 429, code, **{"retry-after": str(wait)})
        self.in_flight += count
        self.by_client[client] += count
        self._bytes += size
        return Admitted(count, size, trajectory, client)

    def leave(self, admitted: Admitted, seconds: float) -> None:
        """Release texts that were in flight for `seconds`."""
        self.in_flight -= admitted.count
        self.by_client -= Counter({admitted.client: admitted.count})  # and without clients that have none
        self._bytes -= admitted.bytes
        self._seconds = seconds if self._seconds is None else self._seconds + (seconds - self._seconds) / 4
        self._update_level()

    def _update_level(self) -> None:
        self.level = next_level(self.level, self.load) if self.degrade else 0


# Generations.


class Generation:
    """The texts of a request while they are generated, and their latencies."""

    def __init__(self, service: Service, job: Job, trajectory: Trajectory) -> None:
        self.job, self.trajectory, self.budget, self._service = job, trajectory, trajectory.budget, service
        self.texts = [Event(index, "") for index in range(job.count)]  # everything so far
        self.prompt_scores: dict[int, list[TokenScore]] = {}  # by text, if prompts were scored
        self.began = time.monotonic()
        self.queue_seconds: float | None = None  # until the first text got a slot
        self._first_tokens: dict[int, float] = {}  # seconds until the first token of each text
        self.call: Call | None = None

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield what was added to the texts since the last iteration. Tickets are the indices of the texts."""
        while self.call is not None and any(text.result is None for text in self.texts):
            events: list[Event] = []
            error: LoopformerError | None = None
            for output in await self._service.read(self.call, self.began):
                if isinstance(output, Failure):
                    error = output.error
                elif isinstance(output, Event):
                    if output.result is not None and output.result.error is not None:
                        error = RunFailed("The text could not be generated.")
                        output = output._replace(result=None)
                    if output.choices or output.result is not None:
                        self._record_metrics(output)
                    self.texts[output.ticket] = self.texts[output.ticket].merge(output)
                    events.append(output)
            if events:
                yield events
            if error is not None:  # only now, after the tokens before it
                raise error

    def _record_metrics(self, event: Event) -> None:
        metrics, seconds, index = self._service.metrics, time.monotonic() - self.began, event.ticket
        if index not in self._first_tokens:
            queued = max(0.0, (event.started_at or self.began) - self.began)
            self.queue_seconds = queued if self.queue_seconds is None else self.queue_seconds
            metrics.queue_time(self.budget).observe(queued)
            self._first_tokens[index] = seconds
            metrics.time_to_first_token(self.budget).observe(seconds)
            metrics.prompt_tokens(self.budget).inc(len(self.job.prompt_of(index)))
        metrics.generation_tokens(self.budget).inc(len(event.choices))
        if event.result is not None:
            metrics.success(self.budget, FINISH_REASONS[event.result.reason]).inc()
            metrics.latency(self.budget).observe(seconds)
            later = len(self.texts[index].choices) + len(event.choices) - 1
            if later > 0:
                metrics.time_per_token(self.budget).observe((seconds - self._first_tokens[index]) / later)

    async def score_prompts(self) -> None:
        """Score the prompts if their log-probabilities are requested. Texts without new tokens end here."""
        job, metrics = self.job, self._service.metrics
        for index, text in enumerate(self.texts):
            prompt = job.prompt_of(index)
            if job.echo and job.alternatives is not None:
                call = self._service.engine.score(prompt, self.trajectory, job.alternatives, by_loop=False)
                self.prompt_scores[index] = await self._service.scores(call, self.began)
            if text.result is None:
                result = Result("", (), (), "length", len(prompt), self.trajectory)
                self.texts[index] = text._replace(result=result)
                metrics.prompt_tokens(self.budget).inc(len(prompt))
                metrics.success(self.budget, FINISH_REASONS[result.reason]).inc()
                metrics.latency(self.budget).observe(time.monotonic() - self.began)

    def usage(self) -> Usage:
        new_tokens = [len(text.choices) for text in self.texts]
        return count_usage(self._service.served.cost, self.job, new_tokens, bool(self.prompt_scores), self.budget)

    def log_fields(self) -> dict[str, Any]:
        return {
            "texts": self.job.count,
            "asked": str(self.job.trajectory),
            "trajectory": str(self.trajectory),
            "prompt_tokens": sum(map(len, self.job.prompts)),
            "new_tokens": sum(len(text.choices) for text in self.texts),
            "finish": sorted({text.result.reason for text in self.texts if text.result is not None}),
            "queue_seconds": round(self.queue_seconds or 0.0, 4),
            "first_token_seconds": round(min(self._first_tokens.values(), default=0.0), 4),
        }


class Service:
    """What the routes share: the engine, the admission, the metrics."""

    def __init__(
        self,
        engine: EngineProcess,
        served: Served,
        admission: Admission,
        timeout: float = 600.0,
        log_prompts: bool = False,
    ) -> None:
        """`timeout` is how many seconds a request may take, waiting included."""
        self.engine, self.served, self.admission = engine, served, admission
        self.metrics = ServerMetrics(served.name, engine, admission)
        engine.on_load, engine.on_loss = self.metrics.set_load, self.metrics.restarts.inc
        self.is_draining = False
        # A replica replaces this by a function that gives the metrics of all replicas.
        self.metrics_text: Callable[[], Awaitable[bytes]] = self._metrics_text
        self.timeout, self._log_prompts = timeout, log_prompts

    async def _metrics_text(self) -> bytes:
        return generate_latest(self.metrics.registry)

    @asynccontextmanager
    async def generate(self, job: Job, path: str, stream: bool) -> AsyncIterator[Generation]:
        """A running generation. Leaving the context frees its slots."""
        bytes_of = partial(job.kv_bytes, self.served)
        with self._admit(path, job.count, bytes_of, job.trajectory, job.min_budget, job.client) as (
            granted,
            log_fields,
        ):
            if granted != job.trajectory:
                self.metrics.degraded(job.trajectory.budget, granted.budget).inc()
            generation = Generation(self, job, granted)
            try:
                if job.max_tokens:  # otherwise there is only a prompt to score
                    requests = job.requests(granted)
                    generation.call = self.engine.submit(requests, stream)
                yield generation
            except BaseException as error:
                if ApiError.of(error).status == CLIENT_GONE:
                    unfinished = sum(text.result is None for text in generation.texts)
                    self.metrics.success(generation.budget, "abort").inc(unfinished)
                raise
            finally:
                if generation.call is not None:
                    self.engine.cancel(generation.call)
                log_fields |= generation.log_fields()
                if self._log_prompts:
                    decode = self.served.tokenizer.decode
                    log_fields["prompts"] = [decode(prompt, special=True) for prompt in job.prompts]

    async def lens(
        self, path: str, ids: tuple[int, ...], trajectory: Trajectory, top: int, client: str
    ) -> list[Alternatives]:
        """The most likely next tokens after each loop."""
        with self._admit(path, 1, lambda _: 0, trajectory, trajectory.budget, client) as (_, log_fields):
            log_fields |= {"trajectory": str(trajectory), "prompt_tokens": len(ids)}
            call = self.engine.score(ids, trajectory, top, by_loop=True)
            rows: list[Alternatives] = await self.scores(call, time.monotonic())
            return rows

    @contextmanager
    def _admit(
        self,
        path: str,
        count: int,
        bytes_of: Callable[[Trajectory], int],
        requested: Trajectory,
        min_budget: int,
        client: str,
    ) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
        """Admit a request, and log it at the end. Yields the granted trajectory and a dict of fields to log."""
        if self.is_draining:
            raise shutdown_error()
        began = time.monotonic()
        admitted = self.admission.enter(count, bytes_of, requested, min_budget, client)
        status = 200
        fields: dict[str, Any] = {}
        try:
            yield admitted.trajectory, fields
        except BaseException as error:
            status = ApiError.of(error).status
            raise
        finally:
            seconds = time.monotonic() - began
            self.admission.leave(admitted, seconds)
            line = {"event": "request", "path": path, "status": status, **fields, "seconds": round(seconds, 4)}
            logger.info(json.dumps(line, ensure_ascii=False))

    async def scores(self, call: Call, began: float) -> Any:
        """The result of a call that scores tokens."""
        try:
            (output,) = await self.read(call, began)
        finally:
            self.engine.cancel(call)
        if isinstance(output, Failure):
            raise output.error
        assert isinstance(output, Scores)
        return output.scores

    async def read(self, call: Call, began: float) -> list[Output]:
        """The next outputs of a request. Raises an error once `timeout` seconds have passed since `began`."""
        try:
            async with asyncio.timeout(max(0.0, began + self.timeout - time.monotonic())):
                return await call.read()
        except TimeoutError:
            raise ApiError(f"The request took longer than {self.timeout:g} s.", 504, "timeout") from None


class ServerMetrics:
    """All metrics, in a registry of their own. A metric with labels is a function of their values."""

    def __init__(self, model: str, engine: EngineProcess, admission: Admission) -> None:
        self.registry = CollectorRegistry()

        def new(kind: Callable[..., M], name: str, help: str, *labels: str, **options: Any) -> Callable[..., M]:
            metric: Any = kind(
                f"loopformer:{name}", help, ["model_name", *labels], registry=self.registry, **options
            )
            return partial(metric.labels, model)

        self.running = new(Gauge, "num_requests_running", "Texts that have a slot.")()
        self.waiting = new(Gauge, "num_requests_waiting", "Texts that wait for a slot, or requests to be scored.")()
        self.memory_usage = new(
            Gauge, "kv_cache_usage_perc", "Share of the memory for keys and values; 1 is all."
        )()
        level = new(Gauge, "degradation_level", "0 grants the requested budget; 1, 2 and 3 grant less.")()
        level.set_function(lambda: admission.level)
        clients = new(Gauge, "num_clients", "Clients with texts in flight: API keys, or addresses.")()
        clients.set_function(lambda: len(admission.by_client))
        largest = new(Gauge, "max_client_requests_in_flight", "Texts in flight of the client that has most.")()
        largest.set_function(lambda: max(admission.by_client.values(), default=0))
        self.largest_client = new(Gauge, "max_client_requests_running", "Slots of the client that has most.")()
        up = new(Gauge, "engine_up", "1 while the engine's process runs.")()
        up.set_function(lambda: engine.state == "ready")
        self.prompt_tokens = new(CountMetric, "prompt_tokens", "Tokens of prompts.", "budget")
        self.generation_tokens = new(CountMetric, "generation_tokens", "New tokens.", "budget")
        self.prefix_queries = new(CountMetric, "prefix_cache_queries", "Tokens of prompts that were looked up.")()
        self.prefix_hits = new(
            CountMetric, "prefix_cache_hits", "Tokens of prompts that were found in the cache."
        )()
        ended = "Texts by how they ended: stop, length or abort."
        self.success = new(CountMetric, "request_success", ended, "budget", "finished_reason")
        self.refused = new(CountMetric, "requests_refused", "Requests that were refused, by status.", "status")
        less = "Requests that were granted less than requested."
        self.degraded = new(CountMetric, "requests_degraded", less, "asked", "budget")
        self.restarts = new(CountMetric, "engine_restarts", "Engine processes that died or hung.")()

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Callable[..., Histogram]:
            return new(Histogram, name, help, "budget", buckets=buckets)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From request to first token.", _TTFT)
        mean = "Between tokens after the first, the mean of a text."
        self.time_per_token = histogram("request_time_per_output_token_seconds", mean, _TPOT)
        self.latency = histogram("e2e_request_latency_seconds", "From request to last token.", _E2E)
        self.queue_time = histogram("request_queue_time_seconds", "From request to slot.", _E2E)

    def set_load(self, load: EngineLoad) -> None:
        """Add what the engine's process reports."""
        self.prefix_hits.inc(load.shared_tokens)
        self.prefix_queries.inc(load.shared_tokens + load.prompt_tokens)
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.largest_client.set(load.max_client_running)
        self.memory_usage.set(load.memory_usage)
