"""Two replicas behind Ray's proxy, as a user starts them; `make test-ray` asks for these tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from loopformer import LM

from .servers import LONG, MAX_WAIT, RunningServer, wait_until
from .test_server import SHORT, is_alive

pytestmark = [pytest.mark.ray, pytest.mark.slow]
REPLICAS, ROWS, QUEUE = 2, 2, 2
MARK = "LOOPFORMER_TEST_MARK"  # an environment variable, by which all processes of a server are known
MEDIUM: dict[str, Any] = {**LONG, "max_tokens": 1500}


class RayServer(RunningServer):
    """A server of two replicas that asks for a key."""

    def __init__(self, folder: str, log: Path, *options: str) -> None:
        self.mark, self.log = uuid4().hex, log
        command = [sys.executable, "-m", "loopformer", "serve", folder, "--ray", "--port", "0", "--device", "cpu"]
        environment, began = {**os.environ, MARK: self.mark}, time.monotonic()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        first, curl = self.process.stdout.readline(), self.process.stdout.readline()
        assert curl, log.read_text()
        print(f"ready after {time.monotonic() - began:.1f} s")
        url = first.partition("open ")[2].partition(" ")[0]
        super().__init__(url, [first, curl], httpx.Client(base_url=url, timeout=MAX_WAIT, verify=False))
        self.client.headers["authorization"] = "Bearer sesame"

    def engines(self) -> list[int]:
        """The engines' processes, as they are now."""
        return [pid for pid in self.processes() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def processes(self) -> list[int]:
        """All that still runs of it."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except (OSError, ProcessLookupError):
                continue
        return [pid for pid in found if is_alive(pid)]

    def by_replica(self, *names: str) -> dict[str, float]:
        """The sum of these metrics, replica by replica."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if any(line.startswith(f"loopformer:{name}{{") for name in names):
                replica = line.partition('replica="')[2].partition('"')[0]
                sums[replica] = sums.get(replica, 0.0) + float(line.rpartition(" ")[2])
        return sums

    def stream(self, **body: Any) -> str:
        """How a stream ends: its last event, or what became of the connection."""
        last = ""
        try:
            with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    return str(answer.status_code)
                for line in filter(None, answer.iter_lines()):
                    last = line.removeprefix("data: ")
        except httpx.HTTPError as error:
            return type(error).__name__
        return last

    def wait_for_both(self) -> None:
        wait_until(lambda: list(self.by_replica("engine_up").values()) == [1.0] * REPLICAS)


@pytest.fixture(scope="module")
def cluster(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    pytest.importorskip("ray", reason="pip install 'loopformer[ray]'")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sesame\n")
    options = ("--replicas", str(REPLICAS), "--rows", str(ROWS), "--queue", str(QUEUE), "--degrade")
    running = RayServer(folder, keys.with_name("log"), *options, "--api-keys", str(keys))
    yield running
    running.client.close()
    running.process.kill()
    running.process.communicate()


def test_both_replicas_answer_as_one_server_does(cluster: RayServer, server: RunningServer, lm: LM) -> None:
    assert cluster.get("/ready").json() == {"status": "ready"}
    assert cluster.get("/v1/models", authorization="").status_code == 401
    assert cluster.get("/v1/models", host="evil.example").status_code == 403
    with ThreadPoolExecutor(4) as pool:
        answers = [each.json() for each in pool.map(lambda _: cluster.post("/v1/completions", **SHORT), range(16))]
    expected = server.post("/v1/completions", **SHORT).json()
    for answer in answers:
        assert {**answer, "id": None, "created": None} == {**expected, "id": None, "created": None}
    served = cluster.by_replica("request_success_total")
    assert len(served) == REPLICAS
    assert sum(served.values()) == 16
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="sesame")
    chunks = list(client.completions.create(model="tiny", stream=True, **SHORT))
    assert len(chunks) > 2
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == lm.generate(SHORT["prompt"], max_tokens=SHORT["max_tokens"]).text


def test_a_client_that_goes_away_frees_its_slots(cluster: RayServer) -> None:
    with cluster.busy(n=2):
        cluster.wait_for("num_requests_running", 2)
    cluster.wait_for("num_requests_running", 0)
    with pytest.raises(httpx.ReadTimeout):
        cluster.client.post("/v1/completions", json=LONG, timeout=httpx.Timeout(MAX_WAIT, read=0.5))
    cluster.wait_for("num_requests_running", 0)


def test_full_replicas_degrade_and_then_refuse_in_our_words(cluster: RayServer) -> None:
    with ThreadPoolExecutor(24) as pool:
        bodies = [{**MEDIUM, "max_tokens": 400}] * 24
        answers = list(pool.map(lambda body: cluster.post("/v1/completions", **body), bodies))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer.json()["loopformer"] for answer in answers if answer.status_code == 200]
    print(f"{len(served)} served, {len(refused)} refused")
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert all(answer.json()["error"]["code"] == "server_busy" for answer in refused)
    assert any(each["degraded"] and each["asked_budget"] == 4 for each in served)


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_what_is_killed_loses_only_its_own_requests(cluster: RayServer, victim: str) -> None:
    cluster.wait_for_both()
    engines = cluster.engines()
    assert len(engines) == REPLICAS
    pid = engines[0] if victim == "engine" else parent_of(engines[0])
    names = ("num_requests_running", "num_requests_waiting")
    with ThreadPoolExecutor(16) as pool:
        streams: list[Future[str]] = []
        while len(running := cluster.by_replica("num_requests_running")) < 2 or min(running.values()) < 1:
            streams.append(pool.submit(cluster.stream, **LONG))
            assert len(streams) <= REPLICAS * ROWS, running
            wait_until(lambda: sum(cluster.by_replica(*names).values()) == len(streams))
        before = cluster.by_replica(*names)
        os.kill(pid, signal.SIGKILL)
        killed, meanwhile = time.monotonic(), []
        time.sleep(0.2)  # until then it is given requests, which are its own, too
        while time.monotonic() < killed + 5:
            meanwhile.append(cluster.post("/v1/completions", **SHORT).status_code)
        ends = [each.result() for each in streams]
    cluster.wait_for_both()
    seconds = time.monotonic() - killed
    print(f"{victim} killed: {ends}, meanwhile {dict(Counter(meanwhile))}, both up after {seconds:.1f} s")
    lost = [end for end in ends if end != "[DONE]"]
    assert 0 < len(lost) < len(ends)
    assert len(lost) in before.values()
    if victim == "engine":
        assert all(json.loads(end)["error"]["code"] == "engine_lost" for end in lost)
    assert set(meanwhile) == {200}
    assert not is_alive(engines[0])
    assert cluster.post("/v1/completions", **SHORT).status_code == 200


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_sigterm_drains_and_leaves_no_process(cluster: RayServer) -> None:
    cluster.wait_for_both()
    assert len(cluster.processes()) > 8
    with ThreadPoolExecutor() as pool:
        running = pool.submit(cluster.stream, **MEDIUM)
        cluster.wait_for("num_requests_running", 1)
        cluster.process.send_signal(signal.SIGTERM)
        while cluster.get("/ready").status_code != 503:
            pass
        answer = cluster.post("/v1/completions", **SHORT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert int(answer.headers["retry-after"]) > 0
        assert running.result() == "[DONE]"
    told = time.monotonic()
    assert cluster.process.wait(MAX_WAIT) == 0
    print(f"ended {time.monotonic() - told:.1f} s after its last text")
    wait_until(lambda: not cluster.processes())


def test_what_is_wrong_is_one_sentence(folder: str) -> None:
    pytest.importorskip("ray", reason="pip install 'loopformer[ray]'")
    command = [sys.executable, "-m", "loopformer", "serve", folder, "--ray", "--port", "0", "--device", "cpu"]
    for options, sentence in (
        (("--memory", "10"), "10 bytes"),
        (("--replicas", "1000"), "1000 replicas need a CPU"),
    ):
        said = subprocess.run([*command, *options], capture_output=True, text=True, timeout=MAX_WAIT)
        print(said.stderr)
        assert sentence in said.stderr.splitlines()[-1]
        assert said.returncode in (1, 2)
