"""What Prometheus is told, by the names that people know from vLLM, under `loopformer:`.

    metrics = ServerMetrics("mine"); metrics.first_token(budget=2, seconds=0.1); metrics.text()    # /metrics

Latencies and tokens are by budget, the number of loops that a request was granted.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loopformer.serving.worker import EngineLoad

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


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
        self._waiting = gauge("num_requests_waiting", "Requests that wait for one.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the memory for keys and values in use; 1 is all.")
        self._level = gauge("degradation_level", "0 grants what is asked for; 1, 2 and 3 grant less.")
        self._up = gauge("engine_up", "1 while the engine's process runs.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "budget")
        self._new = counter("generation_tokens", "New tokens.", "budget")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._hits = counter("prefix_cache_hits", "Those of them that another prompt had run.")
        self._success = counter("request_success", "Texts that came to an end.", "budget", "finished_reason")
        self._refused = counter("requests_refused", "Requests that were not run, by status.", "status")
        self._degraded = counter("requests_degraded", "Requests granted less than they asked.", "asked", "budget")
        self._restarts = counter("engine_restarts", "Processes of the engine that died.")
        self._first = histogram("time_to_first_token_seconds", "From request to first token.", _FIRST)
        self._each = histogram("time_per_output_token_seconds", "Between tokens, after the first.", _EACH)
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

    def tokens(self, budget: int, prompt: int, new: int) -> None:
        self._prompt.labels(self._model, budget).inc(prompt)
        self._new.labels(self._model, budget).inc(new)

    def first_token(self, budget: int, seconds: float) -> None:
        self._first.labels(self._model, budget).observe(seconds)

    def finished(self, budget: int, reason: str, new: int, first: float, whole: float) -> None:
        """A text has ended: its tokens, and the seconds from the request to the first and to the last of them."""
        self._success.labels(self._model, budget, reason).inc()
        self._end.labels(self._model, budget).observe(whole)
        if new > 1:
            self._each.labels(self._model, budget).observe((whole - first) / (new - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)
