"""Several servers behind one address, by Ray Serve: for when one engine or one machine is too small.

    run_replicas(ServerSettings(WorkerSettings("runs/mine")), ReplicaCount(2, 2), print)   # until SIGTERM or Ctrl-C

A replica is a complete server without a socket: gate, app, admission, an engine in a process of its own. Ray's
proxy has the socket and gives each request to the less busy of two replicas. Requests wait and are refused inside a
replica, since Ray's own back-pressure answers 503 without `Retry-After`.

Ray is started on this machine with a random token, or joined where it runs if `RAY_ADDRESS` is set. It is imported
in functions only, after the environment variables that keep it from reporting usage are set.
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

from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.messages import EngineReady, log_as_json
from loopformer.serving.server import IDLE_SECONDS, ServerSettings, bind, greeting, inspect_model, started_app

logger = logging.getLogger(__name__)
APP = "loopformer"  # the name of the application in Ray, and of its only deployment
MAX_UNADMITTED = 1000  # requests that a replica may hold besides the admitted ones: probes, and those it refuses
HEALTH_SECONDS = 5.0  # between health checks of a replica
BROADCAST_SECONDS = 10.0  # for all replicas to answer a broadcast
QUIET_LOGGING = {"log_level": "CRITICAL", "enable_access_log": False}  # as replicas log requests themselves


@dataclass(frozen=True)
class ReplicaCount:
    """How many replicas there are: a fixed number, or a range in which the queues decide."""

    minimum: int
    maximum: int

    @staticmethod
    def parse(text: str) -> ReplicaCount:
        """`2`, or `1-4`."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        count = ReplicaCount(int(match[1]), int(match[2] or match[1])) if match else ReplicaCount(0, 0)
        require(
            1 <= count.minimum <= count.maximum, f"--replicas is a number or a range such as 1-4, not {text!r}."
        )
        return count

    def options(self, rows: int) -> dict[str, Any]:
        """The options of a Ray deployment. Replicas with more than `rows` requests each get another one."""
        low, high = self.minimum, self.maximum
        if low == high:
            return {"num_replicas": low}
        scaling = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": rows}
        return {"autoscaling_config": scaling}


def is_lost(engine: EngineProcess) -> bool:
    return engine.state in ("lost", "hung")


class PatientApp:
    """The app, but a POST that comes while there is no engine waits for the next engine.

    A replica that refused it at once would count as the least busy one, and so get all of the requests.
    """

    def __init__(self, app: ASGIApp, engine: EngineProcess, seconds: float) -> None:
        self._app, self._engine, self._seconds = app, engine, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        until = time.monotonic() + self._seconds
        while scope.get("method") == "POST" and is_lost(self._engine) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self._app(scope, receive, send)


class Replica:
    """The actor that Ray runs: the app, and methods for broadcasts. Its engine ends with its process."""

    async def __init__(self, settings: ServerSettings, keys: tuple[bytes, ...]) -> None:  # type: ignore[misc]
        log_as_json()
        vars(sys.modules["__main__"]).pop("__file__", None)  # else the engine's process imports Ray's worker, too
        self._started = started_app(settings, keys)
        try:
            app, self._service, self._ready = await self._started.__aenter__()
        except LoopformerError as error:
            logger.error("A replica cannot be started: %s", error)
            raise
        self._app = PatientApp(app, self._service.engine, settings.timeout)
        self._service.metrics_text = self._all_metrics

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    def check_health(self) -> None:
        """Raises while there is no engine. After three times in a row Ray replaces the replica."""
        if is_lost(self._service.engine):
            raise RunFailed("The engine is started again.")

    def ready(self) -> EngineReady:
        return self._ready

    async def drain(self) -> int:
        """Accept nothing new. Returns the number of texts still in flight."""
        self._service.is_draining = True
        return self._service.admission.in_flight

    async def drop(self) -> None:
        """End the requests that still run with an error."""
        await self._service.engine.stop()

    async def metrics(self) -> tuple[str, list[Metric]]:
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._service.metrics.registry.collect())

    async def _all_metrics(self) -> bytes:
        """The metrics of all replicas, which is what any of them serves."""
        from ray import serve

        replies = serve.get_deployment_handle(APP, APP).broadcast("metrics")
        answers = await replies.results_async(timeout_s=BROADCAST_SECONDS, return_exceptions=True)
        return generate_latest(ByReplica(each for each in answers if not isinstance(each, BaseException)))


class ByReplica(Collector):
    """The metrics of several replicas, with their names as labels."""

    def __init__(self, replicas: Iterable[tuple[str, list[Metric]]]) -> None:
        self._families: dict[str, Metric] = {}
        for name, metrics in replicas:
            for metric in metrics:
                new = Metric(metric.name, metric.documentation, metric.type)
                family = self._families.setdefault(metric.name, new)
                family.samples += [each._replace(labels=each.labels | {"replica": name}) for each in metric.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


# Starting, draining, stopping.


def run_replicas(settings: ServerSettings, count: ReplicaCount, say: Callable[[str], object]) -> None:
    """Serve until a signal stops it."""
    keys = settings.read_keys()
    model, device = settings.worker.model, settings.worker.device
    inspect_model(model)  # a wrong model fails here, before Ray starts
    require(":" not in device, f"With --ray every replica has a GPU of its own; say --device cuda, not {device}.")
    if Path(model).exists():
        settings = replace(settings, worker=replace(settings.worker, model=str(Path(model).resolve())))
    with bind(settings.host, settings.port) as listener:
        address = listener.getsockname()  # Ray binds it anew; now it is known to be free, and --port 0 is chosen
    with _StopSignals() as signals, _ray(count):
        signals.listen()  # again: Ray has replaced the handler of SIGTERM by one that aborts
        handle = _deploy(settings, keys, count, address)
        while len(engines := _broadcast(handle, "ready")) < count.minimum:
            time.sleep(0.1)
        signals.armed = True
        for sentence in greeting(settings, engines, address, bool(keys)):
            say(sentence)
        signals.event.wait()
        _drain(handle, settings.drain_seconds)


class _StopSignals:
    """SIGTERM and Ctrl-C. Once armed, the first one sets the event. Any other one ends everything at once."""

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
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else one of its threads that ends late starts it again
    options: dict[str, Any] = {}
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux, too, this keeps it on loopback
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count.maximum)))
        options["include_dashboard"] = False
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise LoopformerError(
            f"Several replicas need {error.name}, which is not installed; pip install 'loopformer[serve,ray]'"
        ) from error

    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        ray.init(address, namespace=APP, logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError) as error:
        raise RunFailed(f"Ray at {address} cannot be joined or started: {error}") from error
    if address != "local" and serve.status().proxies:
        ray.shutdown()
        raise LoopformerError(f"Ray Serve is in use at {address}, and has one port; stop what it serves first.")
    try:
        yield
    finally:
        if address != "local":
            serve.shutdown()
        ray.shutdown()


def _deploy(
    settings: ServerSettings, keys: tuple[bytes, ...], count: ReplicaCount, address: tuple[Any, ...]
) -> Any:
    """Start the proxy and the replicas. Returns the handle that reaches all of them."""
    import ray
    from ray import serve

    device = settings.worker.device
    has_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    for name in ("CPU", "GPU") if has_gpu else ("CPU",):
        available, needed = ray.cluster_resources().get(name, 0), count.minimum
        sentence = f"{needed} replicas need a {name} each, and Ray has {available:g}; choose fewer --replicas."
        require(needed <= available, sentence)
    admitted = settings.worker.rows + settings.queue
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=APP,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(has_gpu)},
        max_ongoing_requests=admitted + MAX_UNADMITTED,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_SECONDS,
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
        why = re.findall(r"loopformer\.\S+: (.*)", serve.status().applications[APP].deployments[APP].message)
        raise RunFailed(why[-1] if why else str(error)) from error


def _broadcast(handle: Any, method: str) -> list[Any]:
    """The answers of those replicas that can answer."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        answers = handle.broadcast(method).results(timeout_s=BROADCAST_SECONDS, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [each for each in answers if not isinstance(each, BaseException)]


def _drain(handle: Any, seconds: float) -> None:
    """Wait until nothing is in flight or the time is over, then remove the app."""
    from ray import serve
    from ray.exceptions import RayActorError

    until = time.monotonic() + seconds
    while sum(_broadcast(handle, "drain")) and time.monotonic() < until:
        time.sleep(0.1)
    _broadcast(handle, "drop")
    with contextlib.suppress(RayActorError):  # Serve itself is gone
        serve.delete(APP)
