"""Several servers behind one address, by Ray Serve, for loads beyond one engine or one machine.

    run_replicas(ServerSettings(WorkerSettings("runs/mine")), ReplicaCount(2, 2), print)   # until SIGTERM or Ctrl-C

A replica is a complete server without a socket: the app behind its gate, its queue, and an engine in a separate
process. Ray's proxy has the socket and gives each request to the less busy of two replicas. Each replica queues and
refuses requests itself, because Ray's own back-pressure answers 503 without `Retry-After`.

Ray is started on this machine with a random token. If `RAY_ADDRESS` is set, the Ray that runs there is joined.
Ray is imported inside functions only: it reports usage unless `_ray` has set the environment variables against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from loopformer.errors import LoopformerError, RunFailed, import_optional, require
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.messages import EngineReady, log_as_json
from loopformer.serving.server import IDLE_SECONDS, ServerSettings, bind, greeting, inspect_model, started_app

logger = logging.getLogger(__name__)
APP = "loopformer"  # the name of the application in Ray, and of its only deployment
MAX_UNADMITTED = 1000  # requests that a replica may hold besides admitted ones: health probes and refusals
HEALTH_CHECK_SECONDS = 5.0  # between two health checks of a replica
BROADCAST_TIMEOUT = 10.0  # seconds until all replicas must have answered a broadcast
QUIET_LOGGING = {"log_level": "CRITICAL", "enable_access_log": False}  # replicas log requests themselves


@dataclass(frozen=True)
class ReplicaCount:
    """How many replicas there are: a fixed number, or a range in which Ray scales with the load."""

    minimum: int
    maximum: int

    @staticmethod
    def parse(text: str) -> ReplicaCount:
        """The count of an option such as `2` or `1-4`."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        count = ReplicaCount(int(match[1]), int(match[2] or match[1])) if match else ReplicaCount(0, 0)
        require(
            1 <= count.minimum <= count.maximum, f"--replicas is a number or a range such as 1-4, not {text!r}."
        )
        return count

    def options(self, rows: int) -> dict[str, Any]:
        """The options of a Ray deployment. Ray aims at `rows` ongoing requests per replica."""
        low, high = self.minimum, self.maximum
        if low == high:
            return {"num_replicas": low}
        scaling = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": rows}
        return {"autoscaling_config": scaling}


def is_down(engine: EngineProcess) -> bool:
    return engine.state in ("lost", "hung")


class WaitForEngine:
    """The app, except that a POST waits while the engine is down.

    A replica that refused requests at once would look the least busy, so Ray would send all requests to it.
    """

    def __init__(self, app: ASGIApp, engine: EngineProcess, seconds: float) -> None:
        self._app, self._engine, self._seconds = app, engine, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = time.monotonic() + self._seconds
        while scope.get("method") == "POST" and is_down(self._engine) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._app(scope, receive, send)


class Replica:
    """The actor that Ray runs: the app, and methods for broadcasts."""

    async def __init__(self, settings: ServerSettings, keys: tuple[bytes, ...]) -> None:  # type: ignore[misc]
        log_as_json()
        # A spawned process imports the file of __main__ again. Here that is Ray's worker, which must not run twice.
        vars(sys.modules["__main__"]).pop("__file__", None)
        # The context is entered and never left, because the engine ends with this process. It must be referenced:
        # collecting it as garbage could stop the engine.
        # The proxy picks any replica for /metrics, so each must answer for all of them.
        self._started = started_app(settings, keys, self._all_metrics)
        try:
            app, self._service, self._ready = await self._started.__aenter__()
        except LoopformerError as error:
            logger.error("A replica cannot be started: %s", error)
            raise
        self._app = WaitForEngine(app, self._service.engine, settings.timeout)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    def check_health(self) -> None:
        """Raise while the engine is down. After three failures in a row Ray replaces the replica."""
        if is_down(self._service.engine):
            raise RunFailed("The engine is down; it is being restarted.")

    def ready(self) -> EngineReady:
        return self._ready

    async def drain(self) -> int:
        """Refuse new requests; return how many sequences are still in flight."""
        self._service.is_draining = True
        return self._service.admission.in_flight

    async def stop_engine(self) -> None:
        """Stop the engine. Requests that still run end with an error."""
        await self._service.engine.stop()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The replica's name and its own metrics."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._service.metrics.registry.collect())

    async def _all_metrics(self) -> bytes:
        """The metrics of all replicas, as Prometheus text."""
        from ray import serve

        replies = serve.get_deployment_handle(APP, APP).broadcast("metrics")
        answers = await replies.results_async(timeout_s=BROADCAST_TIMEOUT, return_exceptions=True)
        return generate_latest(MetricsByReplica(each for each in answers if not isinstance(each, BaseException)))


class MetricsByReplica(Collector):
    """The metrics of several replicas, each sample labelled with its replica."""

    def __init__(self, replicas: Iterable[tuple[str, list[Metric]]]) -> None:
        self._families: dict[str, Metric] = {}
        for name, metrics in replicas:
            for metric in metrics:
                new = Metric(metric.name, metric.documentation, metric.type)
                family = self._families.setdefault(metric.name, new)
                family.samples += [s._replace(labels=s.labels | {"replica": name}) for s in metric.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


# Starting, draining, stopping.


def run_replicas(settings: ServerSettings, count: ReplicaCount, say: Callable[[str], object]) -> None:
    """Serve until a signal stops it."""
    keys = settings.read_keys()
    model, device = settings.worker.model, settings.worker.device
    inspect_model(model)  # a wrong model fails here, before Ray starts
    require(":" not in device, f"With --ray each replica gets its own GPU; use --device cuda, not {device}.")
    if Path(model).exists():
        settings = replace(settings, worker=replace(settings.worker, model=str(Path(model).resolve())))
    # Ray binds the address later. Binding it now refuses a port in use before Ray starts, and turns --port 0 into
    # the number of a free port.
    with bind(settings.host, settings.port) as listener:
        address = listener.getsockname()
    with _StopSignals() as signals, _ray(count):
        signals.listen()  # again, because Ray has replaced our SIGTERM handler by one that aborts
        handle = _deploy(settings, keys, count, address)
        while len(engines := _broadcast(handle, "ready")) < count.minimum:
            time.sleep(0.1)
        signals.armed = True
        for sentence in greeting(settings, engines, address, bool(keys)):
            say(sentence)
        signals.event.wait()
        _drain(handle, settings.drain_seconds)


class _StopSignals:
    """Handlers of SIGTERM and Ctrl-C. Once `armed`, the first signal sets the event.

    Any signal before or after that raises KeyboardInterrupt, so that a slow start or drain can be cut short.
    """

    def __init__(self) -> None:
        self.event, self.armed = threading.Event(), False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()

    def __enter__(self) -> _StopSignals:
        self._before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
        self.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        for number, handler in self._before:
            signal.signal(number, handler)
        return kind is KeyboardInterrupt and self.event.is_set()  # a second signal is no error


@contextlib.contextmanager
def _ray(count: ReplicaCount) -> Iterator[None]:
    """Ray, started here or joined. It is stopped only if it was started here."""
    address = os.environ.get("RAY_ADDRESS", "local")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_COLOR_PREFIX="0")
    # Otherwise a Ray thread that outlives the shutdown starts Ray again.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    options: dict[str, Any] = {}
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # despite its name, on Linux it keeps Ray on loopback
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        # All replicas run on this machine, so they share its cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count.maximum)))
        options["include_dashboard"] = False
    ray, serve = (import_optional(module, "serve --ray", "serve,ray") for module in ("ray", "ray.serve"))
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        ray.init(address, namespace=APP, logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError) as error:
        raise RunFailed(f"Ray at {address} cannot be joined or started: {error}") from error
    if address != "local" and serve.status().proxies:
        ray.shutdown()
        raise LoopformerError(f"Ray Serve at {address} already uses its only port; stop what it serves first.")
    try:
        yield
    finally:
        if address != "local":
            serve.shutdown()  # `ray.shutdown` only leaves a joined Ray; the proxy and the replicas would go on
        ray.shutdown()


def _deploy(
    settings: ServerSettings, keys: tuple[bytes, ...], count: ReplicaCount, address: tuple[Any, ...]
) -> Any:
    """Start the proxy and the replicas; return a handle to all replicas."""
    import ray
    from ray import serve

    device = settings.worker.device
    has_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    for name in ("CPU", "GPU") if has_gpu else ("CPU",):
        available, needed = ray.cluster_resources().get(name, 0), count.minimum
        message = f"{needed} replicas need a {name} each, and Ray has {available:g}; choose fewer --replicas."
        require(needed <= available, message)
    admitted = settings.worker.rows + settings.queue
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=APP,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(has_gpu)},
        max_ongoing_requests=admitted + MAX_UNADMITTED,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=QUIET_LOGGING,
        **count.options(settings.worker.rows),
    )
    http = {"host": address[0], "port": address[1], "keep_alive_timeout_s": IDLE_SECONDS}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET_LOGGING)
    try:
        return serve.run(deployment.bind(settings, keys), name=APP)
    except RuntimeError as error:
        # Ray reports the replica's traceback. Its last line with one of our exceptions names the cause.
        causes = re.findall(r"loopformer\.\S+: (.*)", serve.status().applications[APP].deployments[APP].message)
        raise RunFailed(causes[-1] if causes else str(error)) from error


def _broadcast(handle: Any, method: str) -> list[Any]:
    """The answers of all replicas that did not fail. Empty if there is no replica or the broadcast times out."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        answers = handle.broadcast(method).results(timeout_s=BROADCAST_TIMEOUT, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [each for each in answers if not isinstance(each, BaseException)]


def _drain(handle: Any, seconds: float) -> None:
    """Refuse new requests, wait at most `seconds` for those in flight, then remove the app."""
    from ray import serve
    from ray.exceptions import RayActorError

    deadline = time.monotonic() + seconds
    while sum(_broadcast(handle, "drain")) and time.monotonic() < deadline:
        time.sleep(0.1)
    # End the requests that still run. Otherwise `serve.delete` waits for them, up to `drain_seconds` again.
    _broadcast(handle, "stop_engine")
    with contextlib.suppress(RayActorError):  # Serve itself is gone
        serve.delete(APP)
