"""A server under load and misfortune: full, timed out, its engine killed, drained."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from typer.testing import CliRunner

from loopformer import LM, LoopformerError
from loopformer.cli import app
from loopformer.serving.app import PAGE_FILES
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.server import ServerSettings, bind, serve

from .servers import LONG, MAX_WAIT, RunningServer, UserServer, add_checkpoint, running_server, stopped, wait_until

PAGE = "http://page.example"
SHORT: dict[str, Any] = {"prompt": "its time", "max_tokens": 4, "temperature": 0}


class Launched(NamedTuple):
    """What starts while the other tests run."""

    to_stop: UserServer
    to_kill: UserServer
    refused: Future[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose one checkpoint is the model of the other tests."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    add_checkpoint(run, 1, std=0.3)
    return run


@pytest.fixture(scope="module")
def small(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One slot, a queue of four, two keys, engines that count as hung after half a minute, and budgets that give
    way."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sesame\nsimsalabim\n")
    worker = WorkerSettings(str(run), rows=1, device="cpu", step_seconds=30)
    settings = ServerSettings(worker, queue=4, api_keys=keys, degrade=True)
    with running_server(settings, key="sesame") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def launched(folder: str, small: RunningServer) -> Iterator[Launched]:
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(start, WorkerSettings(folder, memory=10, device="cpu"))
        open_server = UserServer(folder, "--cors", PAGE, "--log-prompts")
        servers = Launched(UserServer(folder, "--drain-seconds", str(MAX_WAIT)), open_server, refused)
        yield servers
        servers.to_stop.end()
        servers.to_kill.end()


def test_only_keys_open_it(small: RunningServer) -> None:
    for key in ("", "Bearer simsim", "sesame"):
        answer = small.client.post("/v1/completions", json=SHORT, headers={"authorization": key})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert small.get("/metrics", authorization=key).status_code == 401
        for path in ("/health", *PAGE_FILES):
            assert small.get(path, authorization=key).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="simsim", max_retries=0).models.list()
    assert openai.OpenAI(base_url=f"{small.url}/v1", api_key="sesame").models.list().data
    assert "Bearer $API_KEY" in small.said[0]


def test_a_full_queue_refuses_degrades_and_recovers(small: RunningServer, lm: LM) -> None:
    refused, degraded = (small.metric(f"requests_{name}_total") for name in ("refused", "degraded"))
    with ThreadPoolExecutor(8) as pool:
        with small.busy():
            least = {"budget": 4, "min_budget": 2}
            share = [pool.submit(small.post, "/v1/completions", **SHORT, **least) for _ in range(3)]
            small.wait_for("num_requests_waiting", 3)
            assert small.post("/v1/completions", **SHORT).json()["error"]["code"] == "client_busy"
            other = pool.submit(small.post, "/v1/completions", key="simsalabim", **SHORT, **least)
            small.wait_for("num_requests_waiting", 4)
            answer = small.post("/v1/completions", key="simsalabim", **SHORT)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "server_busy"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "rate_limit_error"
        answers = [each.result().json() for each in (*share, other)]
    budgets = [answer["loopformer"]["budget"] for answer in answers]
    assert min(budgets) == 2
    assert max(budgets) == 4
    for answer in answers:
        followed = answer["loopformer"]
        assert followed["degraded"] == (followed["budget"] < 4)
        expected = lm.generate("its time", budget=followed["budget"], max_tokens=4)
        assert answer["choices"][0]["text"] == expected.text
    assert small.metric("requests_refused_total", status="429") >= 1
    assert small.metric("requests_refused_total") > refused
    assert small.metric("requests_degraded_total") > degraded
    assert small.post("/v1/completions", **SHORT).json()["loopformer"] == {
        "budget": 4,
        "trajectory": "4",
        "degraded": False,
    }


def started_prompts(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The lengths of the prompts that were answered, in the order in which they got the slot."""
    starts: list[tuple[float, int]] = []
    for record in caplog.records:
        line = json.loads(record.getMessage())
        if line.get("status") == 200:
            starts.append((record.created - line["seconds"] + line["queue_seconds"], line["prompt_tokens"]))
    return [tokens for _, tokens in sorted(starts)]


def test_lower_priorities_come_first(small: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """The log says when each text got the slot. The order of its lines depends on how messages meet."""
    caplog.set_level("INFO", "loopformer")

    def ask(priority: int) -> None:
        small.post("/v1/completions", **{**SHORT, "prompt": [1] * (10 + priority)}, priority=priority)

    with ThreadPoolExecutor(8) as pool, small.busy():
        for number, priority in enumerate((5, 0, -5), 1):
            pool.submit(ask, priority)
            small.wait_for("num_requests_waiting", number)
    assert started_prompts(caplog) == [5, 10, 15]


def test_clients_take_turns(small: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Three texts of a client wait, with the highest priority, and then one of another client comes in."""
    caplog.set_level("INFO", "loopformer")

    def ask(tokens: int, **more: Any) -> None:
        small.post("/v1/completions", **{**SHORT, "prompt": [1] * tokens, **more})

    with ThreadPoolExecutor(8) as pool, small.busy():
        for number in range(1, 4):
            pool.submit(ask, number, priority=-10)
            small.wait_for("num_requests_waiting", number)
        pool.submit(ask, 9, key="simsalabim", priority=10)
        small.wait_for("num_requests_waiting", 4)
        assert small.metric("num_clients") == 2
        assert small.metric("max_client_requests_in_flight") == 4
        assert small.metric("max_client_requests_running") == 1
    assert started_prompts(caplog) == [9, 1, 2, 3]


def test_a_request_may_not_take_forever(small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor() as pool, small.busy(n=4) as lines:
        waiting = pool.submit(small.post, "/v1/completions", key="simsalabim", **LONG)
        small.wait_for("num_requests_waiting", 4)
        monkeypatch.setattr(small.service, "timeout", 0.01)
        *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert waiting.result().status_code == 504
        assert waiting.result().json()["error"]["code"] == "timeout"
    small.wait_for("num_requests_running", 0)


def test_an_engine_that_dies_or_hangs_is_started_again(
    small: RunningServer, run: Path, lm: LM, caplog: pytest.LogCaptureFixture
) -> None:
    """What it ran ends, what comes meanwhile is sent away, then all is as before, whatever was trained since."""
    add_checkpoint(run, 2, std=0.2)
    caplog.set_level("INFO", "loopformer")
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="sesame", max_retries=0)
    said, expected = small.said[0], lm.generate("its time", max_tokens=4).text
    assert small.service is not None
    engine = small.service.engine
    for number, state, sentence in (
        (signal.SIGKILL, "lost", "engine was lost"),
        (signal.SIGSTOP, "hung", "engine does not respond"),
    ):
        stream = client.completions.create(model="tiny", stream=True, **LONG)
        next(iter(stream))
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(small.post, "/v1/completions", **SHORT)
            small.wait_for("num_requests_waiting", 1)
            os.kill(int(re.findall(r"engine process (\d+)", said)[0]), number)
            settings = engine.settings
            engine.settings = replace(settings, step_seconds=1)  # from the next silence on
            with pytest.raises(openai.APIError, match=sentence):
                list(stream)
            engine.settings = settings
        for answer in (waiting.result(), small.post("/v1/completions", **SHORT)):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == f"engine_{state}"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        for path in ("/health", "/ready"):
            answer = small.get(path)
            assert answer.status_code == 503
            assert state in answer.json()["status"]
        small.wait_for("engine_up", 1)
        assert small.get("/ready").status_code == 200
        assert small.post("/v1/completions", **SHORT).json()["choices"][0]["text"] == expected
        said = next(message for message in caplog.messages if "runs again" in message)
    assert small.metric("engine_restarts_total") == 2


def test_sigterm_finishes_what_runs_and_refuses_the_rest(launched: Launched, lm: LM) -> None:
    """As a user starts it; the line it prints works."""
    started = launched.to_stop.process
    url, engine, curl = launched.to_stop.greeting()
    said = subprocess.run(
        curl.replace("curl", "curl -s", 1), shell=True, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout)["choices"][0]["text"]
    client = httpx.Client(base_url=url, timeout=MAX_WAIT, verify=False)
    body = {**LONG, "max_tokens": 2000}  # so many that none ends before both run
    with (
        ThreadPoolExecutor() as pool,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as one,
    ):
        lines = one.iter_lines()
        next(lines)
        other = pool.submit(client.post, "/v1/completions", json=body)
        wait_until(lambda: 'num_requests_running{model_name="tiny"} 2.0' in client.get("/metrics").text)
        with stopped(engine):  # so that both still run when the others are refused
            started.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.post("/v1/completions", json=SHORT).status_code == 503
        assert "data: [DONE]" in list(lines)
        assert other.result().json()["choices"][0]["text"] == lm.generate(LONG["prompt"], max_tokens=2000).text
    assert started.wait(MAX_WAIT) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert started.stderr is not None
    logged = [json.loads(line) for line in started.stderr.read().splitlines()]
    assert [line["status"] for line in logged if line["event"] == "request"] == [200, 200, 200]
    assert LONG["prompt"] not in json.dumps(logged)


def test_the_engine_ends_with_a_server_that_is_killed(launched: Launched) -> None:
    """Before, pages that it knows may ask it. It writes down what it is asked, but no odd requests, which could
    fill the log."""
    url, engine, _ = launched.to_kill.greeting()
    server = launched.to_kill.process
    with httpx.Client(base_url=url, timeout=MAX_WAIT, verify=False) as client:
        for origin, allowed in ((PAGE, PAGE), ("http://evil.example", None)):
            answer = client.post("/v1/completions", json=SHORT, headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed
            asked = {"origin": origin, "access-control-request-method": "POST"}
            answer = client.options("/v1/completions", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed
        assert client.get("/health", headers={"connection": "upgrade", "upgrade": "websocket"}).status_code == 200
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as odd:
            odd.sendall(b"what is this?\r\n\r\n")
            assert odd.recv(100).startswith(b"HTTP/1.1 400 ")
        assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert server.stderr is not None
    for _ in range(3):
        assert json.loads(server.stderr.readline())["prompts"] == [SHORT["prompt"]]
    server.kill()
    wait_until(lambda: not is_alive(engine))


def is_alive(process: int) -> bool:
    """Whether it runs; one that nobody has asked about since it ended has no command any more."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(settings: WorkerSettings) -> str:
    """Why a server does not start, in one sentence."""
    with bind("127.0.0.1", 0) as listener, pytest.raises(LoopformerError) as refused:
        asyncio.run(serve(ServerSettings(settings), listener, print))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_wrong_at_the_start_is_one_sentence(launched: Launched, tmp_path: Path) -> None:
    assert "nowhere" in start(WorkerSettings(str(tmp_path / "nowhere"), device="cpu"))
    assert "bytes of one row's keys" in launched.refused.result()
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(LoopformerError, match="choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_without_the_extra_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("loopformer.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(LoopformerError, match=re.escape("pip install 'loopformer[serve]'")):
        CliRunner().invoke(app, ["serve"], catch_exceptions=False)
