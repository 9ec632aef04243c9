"""What replicas are, without Ray: how many, how they wait for an engine, what they count together."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from loopformer import LoopformerError
from loopformer.cli import app
from loopformer.serving.replicas import MetricsByReplica, ReplicaCount, WaitForEngine


def test_a_number_is_fixed_and_a_range_follows_the_queues() -> None:
    assert ReplicaCount.parse("2").options(rows=16) == {"num_replicas": 2}
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16}
    assert ReplicaCount.parse("1-4").options(rows=16) == {"autoscaling_config": scaling}


@pytest.mark.parametrize("text", ["", "0", "0-2", "4-1", "two", "1-", "-1", "1-2-3"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(LoopformerError, match="a number or a range such as 1-4"):
        ReplicaCount.parse(text)


def test_metrics_of_all_replicas_are_one_text() -> None:
    counted = {}
    for name, requests in (("a", 2), ("b", 3)):
        registry = CollectorRegistry()
        Counter("loopformer:requests", "Requests.", ["budget"], registry=registry).labels("4").inc(requests)
        Histogram("loopformer:seconds", "Seconds.", registry=registry, buckets=(1.0,)).observe(0.5)
        counted[name] = list(registry.collect())
    text = generate_latest(MetricsByReplica(counted.items())).decode()
    assert text.count("# TYPE loopformer:requests_total counter") == 1
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {each.labels["replica"]: each.value for each in samples if each.name == "loopformer:requests_total"}
    assert found == {"a": 2, "b": 3}
    assert {each.labels["replica"] for each in samples if each.name == "loopformer:seconds_bucket"} == {"a", "b"}


def test_what_comes_while_there_is_no_engine_waits_for_one() -> None:
    reached: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["method"])

    async def run(seconds: float) -> None:
        engine: Any = SimpleNamespace(state="lost")
        patient, none = WaitForEngine(answer, engine, seconds), (None, None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(patient({"type": "http", "method": "POST"}, *none))  # type: ignore[arg-type]
            tasks.create_task(patient({"type": "http", "method": "GET"}, *none))  # type: ignore[arg-type]
            while "GET" not in reached:
                await asyncio.sleep(0.01)
            assert "POST" not in reached or seconds == 0
            engine.state = "ready"

    asyncio.run(run(10))
    assert reached == ["GET", "POST"]
    asyncio.run(run(0))
    assert reached[2:] == ["POST", "GET"]  # it has waited long enough, and is told


def test_what_cannot_be_is_one_sentence(folder: str) -> None:
    def said(*options: str) -> str:
        result = CliRunner().invoke(app, ["serve", folder, *options])
        assert result.exit_code == 1
        assert isinstance(result.exception, LoopformerError)
        return str(result.exception)

    assert "add --ray" in said("--replicas", "2")
    assert "a number or a range" in said("--ray", "--replicas", "some")
    assert "use --device cuda, not cuda:1" in said("--ray", "--device", "cuda:1")


def test_without_ray_its_extra_is_named(folder: str) -> None:
    code = "import sys; sys.modules['ray'] = None; from loopformer.cli import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", code, "serve", folder, "--ray", "--port", "0"], capture_output=True, text=True
    )
    assert said.stderr.strip().endswith("serve --ray needs ray; pip install 'loopformer[serve,ray]'.")
    assert said.returncode == 2
    assert len(said.stderr.splitlines()) == 1
