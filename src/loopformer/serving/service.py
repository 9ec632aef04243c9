"""Admission, generation, request log and metrics.

    service = Service(engine, served, Admission(rows=16, queue=64, memory=2**30), timeout=600)
    async with service.generate(job, "/v1/completions", stream=True) as generation:
        async for events in generation.events(): ...   # what was added to its texts, by index

A text is one generated completion. A request has one or more. At most `rows` texts run and at most `queue` texts
wait. Both are in flight. Their KV cache is limited in proportion: memory * (rows + queue) / rows bytes. One client
may hold at most three quarters of both, and less when others are there: MAX_CLIENT_RATIO times as many texts as it
leaves free. So nobody fills the server alone.

With `degrade` a fuller queue grants smaller budgets. The load is how full the queue is. A level is entered at a
higher load than it is left at (hysteresis), so that budgets do not flicker. A running text keeps its budget, as its
cache is bound to its trajectory.

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
from loopformer.inference.request import Event, Result, TopLogprobs
from loopformer.serving.answers import EMPTY_TEXT, FINISH_REASONS, Usage, count_usage
from loopformer.serving.engine_process import Call, EngineProcess, shutdown_error
from loopformer.serving.messages import Content, EngineStats, LensScores, PromptScores, TokenScore
from loopformer.serving.protocol import CLIENT_GONE, ApiError, Job, Served
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
M = TypeVar("M", CountMetric, Gauge, Histogram)

BUDGET_FRACTIONS = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))  # granted, by level
ENTER_LOADS = (0.25, 0.5, 0.75)  # at this load or more, enter level 1, 2 or 3
LEAVE_LOADS = (0.1, 0.3, 0.55)  # below this load, leave it
MAX_RETRY_AFTER = 60  # seconds
FIRST_REQUEST_SECONDS = 5.0  # assumed until the first request has ended
MAX_CLIENT_RATIO = 3  # texts of one client in flight, for each that could still come in

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

    Its budget is a fraction of the requested budget, rounded up, but at least `min_budget`. A smaller budget than
    the requested one gets equal steps.
    """
    budget = max(math.ceil(requested.budget * BUDGET_FRACTIONS[level]), min(min_budget, requested.budget))
    return requested if budget == requested.budget else Trajectory.uniform(budget)


def seconds_to_wait(waiting: int, rows: int, seconds: float) -> int:
    """Retry-After: the expected time until half the queue, and at least one text, has drained.

    A text is in flight for `seconds` on average. By Little's law `rows + waiting` texts leave in that time.
    """
    return min(MAX_RETRY_AFTER, max(1, math.ceil(seconds * max(1.0, waiting / 2) / (rows + waiting))))


@dataclass(frozen=True)
class Admitted:
    """The texts of a request that was admitted."""

    texts: int
    kv_bytes: int
    trajectory: Trajectory  # granted, not requested
    client: str = ""


class Admission:
    """Counts the texts in flight, and decides which requests come in and at which budget."""

    def __init__(self, rows: int, queue: int, memory: int, degrade: bool = False) -> None:
        """`memory` is the size of the KV cache in bytes."""
        require(queue >= 1, f"The queue must hold 1 text or more, got {queue}.")
        self.rows, self.queue, self.degrade = rows, queue, degrade
        self.in_flight = self.level = 0
        self.by_client: Counter[str] = Counter()  # texts in flight
        self._memory, self._kv_bytes = memory, 0
        self._seconds: float | None = None  # the moving average of a request's duration

    @property
    def load(self) -> float:
        """How full the queue is, by texts or by bytes; 0 while nobody has to wait."""
        by_texts = (self.in_flight - self.rows) / self.queue
        by_bytes = (self._kv_bytes / self._memory - 1) * self.rows / self.queue
        return max(0.0, by_texts, by_bytes)

    def enter(
        self,
        texts: int,
        kv_bytes_of: Callable[[Trajectory], int],
        requested: Trajectory,
        min_budget: int = 1,
        client: str = "",
    ) -> Admitted:
        """Admit all texts of a request, or raise an ApiError.

        `kv_bytes_of` gives the bytes that they need along a trajectory. Texts without a client are limited only by
        the room that is left.
        """
        room = self.rows + self.queue
        max_texts = (MAX_CLIENT_RATIO * room + 1) // (MAX_CLIENT_RATIO + 1) if client else room
        require(
            texts <= max_texts, f"{texts} texts at once are more than the {max_texts} that this server accepts."
        )
        self._update_level()
        trajectory = grant_trajectory(requested, min_budget, self.level)
        kv_bytes = kv_bytes_of(trajectory)
        left = room - self.in_flight - texts
        is_full = left < 0 or self._kv_bytes + kv_bytes > self._memory * room / self.rows
        # The first text of a client always comes in where there is room.
        has_too_many = bool(client) and self.by_client[client] + texts - 1 > MAX_CLIENT_RATIO * left
        # While nothing runs, admit even a request that can never fit: the error of the engine explains why.
        if (is_full or has_too_many) and self.in_flight > 0:
            seconds = FIRST_REQUEST_SECONDS if self._seconds is None else self._seconds
            wait = seconds_to_wait(max(0, self.in_flight - self.rows), self.rows, seconds)
            share = f"You have {self.by_client[client]} texts in flight, which is your share"
            code, reason = ("server_busy", "The server is busy") if is_full else ("client_busy", share)
            raise ApiError(f"{reason}; try again in {wait} s.", 429, code, **{"retry-after": str(wait)})
        self.in_flight += texts
        self.by_client[client] += texts
        self._kv_bytes += kv_bytes
        return Admitted(texts, kv_bytes, trajectory, client)

    def leave(self, admitted: Admitted, seconds: float) -> None:
        """Release texts that were in flight for `seconds`."""
        self.in_flight -= admitted.texts
        self.by_client -= Counter({admitted.client: admitted.texts})  # and without clients that have none
        self._kv_bytes -= admitted.kv_bytes
        self._seconds = seconds if self._seconds is None else self._seconds + (seconds - self._seconds) / 4
        self._update_level()

    def _update_level(self) -> None:
        self.level = next_level(self.level, self.load) if self.degrade else 0


# Generations.


class Generation:
    """The texts of a request while they are generated, and their latencies."""

    def __init__(self, service: Service, job: Job, trajectory: Trajectory) -> None:
        self.job = job
        self.trajectory = trajectory  # granted, not requested
        self.texts = [EMPTY_TEXT] * job.count  # everything so far; the ticket of an event is not used
        self.prompt_scores: dict[int, list[TokenScore]] = {}  # by text, if prompts were scored
        self.began = time.monotonic()
        self.queue_seconds: float | None = None  # until the first text got a slot
        self.call: Call | None = None
        self._service = service
        self._first_tokens: dict[int, float] = {}  # seconds until the first token of each text

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield what was added to the texts since the last iteration, each event with the index of its text."""
        while self.call is not None and any(text.result is None for text in self.texts):
            events: list[tuple[int, Event]] = []
            error: LoopformerError | None = None
            for index, event in (await self._service.read(self.call, self.began)).items():
                assert isinstance(event, Event)
                if event.result is not None and event.result.error is not None:
                    error = RunFailed("The text could not be generated.")
                    event = event._replace(result=None)
                if event.choices or event.result is not None:
                    self._record_metrics(index, event)
                self.texts[index] = self.texts[index].merge(event)
                events.append((index, event))
            yield events
            if error is not None:  # only now, after the tokens before it
                raise error

    def _record_metrics(self, index: int, event: Event) -> None:
        metrics, budget = self._service.metrics, self.trajectory.budget
        seconds = time.monotonic() - self.began
        if index not in self._first_tokens:
            queued = max(0.0, (event.started_at or self.began) - self.began)
            self.queue_seconds = queued if self.queue_seconds is None else self.queue_seconds
            metrics.queue_time(budget).observe(queued)
            self._first_tokens[index] = seconds
            metrics.time_to_first_token(budget).observe(seconds)
            metrics.prompt_tokens(budget).inc(len(self.job.prompt_of(index)))
        metrics.generation_tokens(budget).inc(len(event.choices))
        if event.result is not None:
            metrics.success(budget, FINISH_REASONS[event.result.reason]).inc()
            metrics.latency(budget).observe(seconds)
            later = len(self.texts[index].choices) + len(event.choices) - 1
            if later > 0:
                metrics.time_per_token(budget).observe((seconds - self._first_tokens[index]) / later)

    async def finish(self) -> None:
        """Score the prompts if their log-probabilities are requested, and end the texts without new tokens."""
        for index, text in enumerate(self.texts):
            if self.job.echo and self.job.alternatives is not None:
                self.prompt_scores[index] = await self._score_prompt(index, self.job.alternatives)
            if text.result is None:
                self._finish_empty(index)

    async def _score_prompt(self, index: int, alternatives: int) -> list[TokenScore]:
        job, engine = self.job, self._service.engine
        prompt = job.prompt_of(index)
        call = engine.score(prompt, self.trajectory, alternatives, by_loop=False, client=job.client)
        scores = await self._service.scores(call, self.began)
        assert isinstance(scores, PromptScores)
        return scores.tokens

    def _finish_empty(self, index: int) -> None:
        metrics, budget, prompt = self._service.metrics, self.trajectory.budget, self.job.prompt_of(index)
        result = Result("", (), (), "length", len(prompt), self.trajectory)
        self.texts[index] = self.texts[index]._replace(result=result)
        metrics.prompt_tokens(budget).inc(len(prompt))
        metrics.success(budget, FINISH_REASONS[result.reason]).inc()
        metrics.latency(budget).observe(time.monotonic() - self.began)

    def usage(self) -> Usage:
        new_tokens = [len(text.choices) for text in self.texts]
        cost, budget = self._service.served.cost, self.trajectory.budget
        return count_usage(cost, self.job, new_tokens, bool(self.prompt_scores), budget)

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
        metrics_text: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`timeout` is how many seconds a request may take, waiting included.

        `metrics_text` gives the answer to /metrics, by default the metrics of this server.
        """
        self.engine, self.served, self.admission = engine, served, admission
        self.metrics = ServerMetrics(served.name, engine, admission)
        engine.on_stats, engine.on_loss = self.metrics.record, self.metrics.restarts.inc
        self._metrics_text = metrics_text
        self.is_draining = False
        self.timeout, self._log_prompts = timeout, log_prompts

    async def metrics_text(self) -> bytes:
        """The answer to /metrics, as Prometheus text."""
        return generate_latest(self.metrics.registry) if self._metrics_text is None else await self._metrics_text()

    @asynccontextmanager
    async def generate(self, job: Job, path: str, stream: bool) -> AsyncIterator[Generation]:
        """A running generation. Leaving the context frees its slots."""
        kv_bytes_of = partial(job.kv_bytes, self.served)
        with self._admit(path, job.count, kv_bytes_of, job.trajectory, job.min_budget, job.client) as (
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
                    self.metrics.success(granted.budget, "abort").inc(unfinished)
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
    ) -> list[TopLogprobs]:
        """The most likely next tokens after each loop."""
        with self._admit(path, 1, lambda _: 0, trajectory, trajectory.budget, client) as (_, log_fields):
            log_fields |= {"trajectory": str(trajectory), "prompt_tokens": len(ids)}
            call = self.engine.score(ids, trajectory, top, by_loop=True, client=client)
            scores = await self.scores(call, time.monotonic())
            assert isinstance(scores, LensScores)
            return scores.loops

    @contextmanager
    def _admit(
        self,
        path: str,
        texts: int,
        kv_bytes_of: Callable[[Trajectory], int],
        requested: Trajectory,
        min_budget: int,
        client: str,
    ) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
        """Admit a request, and log it at the end. Yields the granted trajectory and a dict of fields to log."""
        if self.is_draining:
            raise shutdown_error()
        began = time.monotonic()
        admitted = self.admission.enter(texts, kv_bytes_of, requested, min_budget, client)
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

    async def scores(self, call: Call, began: float) -> PromptScores | LensScores:
        """The result of a call that scores tokens."""
        try:
            (scores,) = (await self.read(call, began)).values()
        finally:
            self.engine.cancel(call)
        assert not isinstance(scores, Event)
        return scores

    async def read(self, call: Call, began: float) -> dict[int, Content]:
        """What is new of a call, by index. Raises an error once `timeout` seconds have passed since `began`."""
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

    def record(self, stats: EngineStats) -> None:
        """Record what the engine's process reports."""
        self.prefix_hits.inc(stats.new_prefix_hits)
        self.prefix_queries.inc(stats.new_prefix_hits + stats.new_prompt_tokens)
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.largest_client.set(stats.max_client_running)
        self.memory_usage.set(stats.memory_usage)
