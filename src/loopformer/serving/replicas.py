"""Several servers behind one address, by Ray Serve: for when one engine or one machine is too small.

    run_replicas(ServerSettings(WorkerSettings("runs/mine")), ReplicaCount(2, 2), print)   # until SIGTERM or Ctrl-C

A replica is the whole server but for its socket: gate, app, admission, an engine in a process of its own. Ray's
proxy has the socket and gives each request to the less busy of two replicas. Whoever must wait waits inside a
replica, and whoever is refused is refused there, since Ray's own back-pressure answers 503 without `Retry-After`.

Ray is started on this machine, for those alone who know a token; with `RAY_ADDRESS` set it is joined where it
runs. It is imported here only, once it has been told not to call home.
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
from loopformer.serving.server import IDLE_SECONDS, ServerSettings, bind, greeting, inspect_model, started_app
from loopformer.serving.worker import EngineReady, log_as_json

logger = logging.getLogger(__name__)
APP = "loopformer"  # what Ray calls the application, and the one deployment in it
SPARE = 1000  # requests that a replica takes beside those it admits: to refuse them, to say how it is
HEALTH_SECONDS = 5.0  # between looks at a replica
ASK_SECONDS = 10.0  # for all replicas to answer what is asked of them
QUIET = {"log_level": "CRITICAL", "enable_access_log": False}  # the replicas' own log says it shorter


@dataclass(frozen=True)
class ReplicaCount:
    """How many replicas there are: always as many, or more the longer the queues."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> ReplicaCount:
        """`2`, or `1-4`."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        count = ReplicaCount(int(match[1]), int(match[2] or match[1])) if match else ReplicaCount(0, 0)
        require(1 <= count.least <= count.most, f"--replicas is a number or a range such as 1-4, not {text!r}.")
        return count

    def options(self, rows: int) -> dict[str, Any]:
        """In Ray's words; beyond so many requests each, some of them wait."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        scaling = {"min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": rows}
        return {"autoscaling_config": scaling}


def is_lost(engine: EngineProcess) -> bool:
    return engine.state in ("lost", "hung")


class PatientApp:
    """The app, but what comes while there is no engine waits for the next one.

    A replica that refused it would be done at once, and so be given all that comes as the least busy.
    """

    def __init__(self, app: ASGIApp, engine: EngineProcess, seconds: float) -> None:
        self._app, self._engine, self._seconds = app, engine, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        until = time.monotonic() + self._seconds
        while scope.get("method") == "POST" and is_lost(self._engine) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self._app(scope, receive, send)


class Replica:
    """What Ray runs: the app, and what is asked of all replicas at once. Its engine ends with its process."""

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
        """Ray gives nothing more to a replica that fails three times in a row, and starts another."""
        if is_lost(self._service.engine):
            raise RunFailed("The engine is started again.")

    def ready(self) -> EngineReady:
        return self._ready

    async def drain(self) -> int:
        """Take nothing new; how many texts are still under way."""
        self._service.is_draining = True
        return self._service.admission.in_flight

    async def drop(self) -> None:
        """End what is under way with an error."""
        await self._service.engine.stop()

    async def metrics(self) -> tuple[str, list[Metric]]:
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._service.metrics.registry.collect())

    async def _all_metrics(self) -> bytes:
        """Those of all replicas, whichever is asked."""
        from ray import serve

        replies = serve.get_deployment_handle(APP, APP).broadcast("metrics")
        answers = await replies.results_async(timeout_s=ASK_SECONDS, return_exceptions=True)
        return generate_latest(ByReplica(each for each in answers if not isinstance(each, BaseException)))


class ByReplica(Collector):
    """What several replicas count, by their names."""

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
    """Serve until told to stop."""
    keys = settings.read_keys()
    model, device = settings.worker.model, settings.worker.device
    inspect_model(model)  # what is wrong with it is said before anything starts
    require(":" not in device, f"With --ray every replica has a GPU of its own; say --device cuda, not {device}.")
    if Path(model).exists():
        settings = replace(settings, worker=replace(settings.worker, model=str(Path(model).resolve())))
    with bind(settings.host, settings.port) as listener:
        address = listener.getsockname()  # Ray binds it anew: whether it is free and which one it is, is known now
    with _StopSignals() as signals, _ray(count):
        signals.listen()  # again: Ray has listened to SIGTERM since, and would abort
        handle = _deploy(settings, keys, count, address)
        while len(engines := _ask_all(handle, "ready")) < count.least:
            time.sleep(0.1)
        signals.armed = True
        for sentence in greeting(settings, engines, address, bool(keys)):
            say(sentence)
        signals.event.wait()
        _drain(handle, settings.drain_seconds)


class _StopSignals:
    """SIGTERM and Ctrl-C: the first one is an event once all runs; any other interrupts, which ends all at once."""

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
        return kind is KeyboardInterrupt and self.event.is_set()  # a second signal is no failure


@contextlib.contextmanager
def _ray(count: ReplicaCount) -> Iterator[None]:
    """Ray, started here or joined; what was started ends."""
    address = os.environ.get("RAY_ADDRESS", "local")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_COLOR_PREFIX="0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # or a thread of it that ends late starts it anew
    options: dict[str, Any] = {}
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # which on Linux, too, keeps it on loopback
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count.most)))
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
    """Start the proxy and the replicas; what reaches them all."""
    import ray
    from ray import serve

    device = settings.worker.device
    has_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    for name in ("CPU", "GPU") if has_gpu else ("CPU",):
        there = ray.cluster_resources().get(name, 0)
        words = f"{count.least} replicas need a {name} each, and Ray has {there:g}; choose fewer --replicas."
        require(count.least <= there, words)
    admitted = settings.worker.rows + settings.queue
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=APP,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(has_gpu)},
        max_ongoing_requests=admitted + SPARE,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=QUIET,
        **count.options(settings.worker.rows),
    )
    http = {"host": address[0], "port": address[1], "keep_alive_timeout_s": IDLE_SECONDS}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
    try:
        return serve.run(deployment.bind(settings, keys), name=APP)
    except RuntimeError as error:
        why = re.findall(r"loopformer\.\S+: (.*)", serve.status().applications[APP].deployments[APP].message)
        raise RunFailed(why[-1] if why else str(error)) from error


def _ask_all(handle: Any, what: str) -> list[Any]:
    """What the replicas answer, those that can."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        answers = handle.broadcast(what).results(timeout_s=ASK_SECONDS, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [each for each in answers if not isinstance(each, BaseException)]


def _drain(handle: Any, seconds: float) -> None:
    """Until nothing is in flight, or the time is over."""
    from ray import serve
    from ray.exceptions import RayActorError

    until = time.monotonic() + seconds
    while sum(_ask_all(handle, "drain")) and time.monotonic() < until:
        time.sleep(0.1)
    _ask_all(handle, "drop")
    with contextlib.suppress(RayActorError):  # Serve itself is gone
        serve.delete(APP)
