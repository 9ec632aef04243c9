"""Attacks beside an ordinary client: is it still served in time, and are probes of /health?

    report = withstand("priority", seconds=30)      # outcomes and seconds by who sent a request, what is `broken`

The attack runs in a process of its own, so that it does not delay the client and the probes.
"""

import asyncio
import json
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from typing import Any

import httpx
import numpy as np
from hostile import Connection
from serve_process import ServeProcess

MAX_FILES = 256  # descriptors of the server, half of which are for connections
CONNECTIONS_PER_KIND = 200
MAX_HEALTH_P99, MAX_WAIT = 0.25, 15.0  # seconds
PROBE_SECONDS, RETRY_SECONDS = 0.05, 1.0
KEYS = [f"key-{number}" for number in range(9)]  # the last one is the ordinary client's
Body = tuple[str, bytes]  # the path and the content of a request


def text(**fields: Any) -> Body:
    body = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, **fields}
    return "/v1/completions", json.dumps(body).encode()


def wrong_bodies() -> list[Body]:
    """Lists of wrong values: as many as 1 MiB holds, and as many as the server parses."""
    forms = {
        "/v1/completions": '{"prompt": [%s]}',
        "/v1/chat/completions": '{"messages": [{"role": "user", "content": [%s]}]}',
        "/detokenize": '{"tokens": [%s]}',
    }
    weights = {"-1": 1, "1.5": 1, '""': 2, "{}": 9, "[]": 9, '{"a":1}': 14}  # what an item counts for as values
    sizes = [(item, 2**20 // (len(item) + 1) - 64) for item in weights]
    sizes += [(item, min(count, 2**20 // 6 // weights[item] - 64)) for item, count in sizes]
    return [(path, (form % ",".join([item] * n)).encode()) for path, form in forms.items() for item, n in sizes]


def long_names() -> list[Body]:
    """A megabyte of a name or of a value."""
    long = "max_tokens" * 100_000
    bodies = [text(**{field: long}) for field in ("model", "trajectory", "stop", "budget", "max_tokens")]
    bodies += [text(**{name: 1}) for name in (long, "\ud800" * 150_000)]
    numbers = [text(**{field: 10**4000}) for field in ("budget", "min_budget", "max_tokens", "n", "seed")]
    return [*bodies, *numbers, ("/tokenize", bodies[0][1]), ("/lens", bodies[1][1])]


STORY = "Once upon a time there was a little girl. " * 45  # nearly as many tokens as the context has
SCORED = text(prompt=STORY, max_tokens=0, echo=True, logprobs=20)
STOP = ("the " * 64)[:255]  # nearly occurs in the text all the time
STOPS = [[STOP + end for end in "abcdefghijklmnop"], [STOP] * 17, ["x" * 60_000] * 16, ["ab"] * 170_000]
# By attack: the requests that are sent in turn, the number of clients, and the requests of each in flight.
REQUESTS: dict[str, tuple[Sequence[Body], int, int]] = {
    "errors": (wrong_bodies(), 1, 4),
    "priority": ([text(priority=-10)], 8, 8),
    "copies": ([text(n=27)], 1, 4),  # more are not accepted from one client
    "stops": ([text(prompt="the " * 40, max_tokens=200, n=4, stop=stop) for stop in STOPS], 1, 6),
    "forged": ([text()], 8, 8),
    "names": (long_names(), 1, 8),
    "lengths": ([text(prompt="a " * 520_000), text(prompt=["b " * 4_000] * 120)], 1, 8),
    "scores": ([SCORED, ("/lens", json.dumps({"prompt": STORY}).encode())], 1, 27),
}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-0\r\n"
CONNECTIONS = [
    Connection("idle", []),
    Connection("half a head", [POST]),
    Connection("half a body", [POST + b'Content-Length: 99\r\n\r\n{"prompt"']),
]
CHUNKED = POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = [
    Connection("chunks of a byte", [CHUNKED + b"1\r\nx\r\n" * 100_000]),
    Connection("chunks of 20 bytes", [CHUNKED + b"14\r\n%s\r\n" % (b"x" * 20) * 50_000 + b"0\r\n\r\n"]),
    Connection("segments of a byte", [CHUNKED, *([b"1", b"\r", b"\n", b"x", b"\r", b"\n"] * 1000)], pause=0.0005),
]
CONNECTIONS_OF = {"connections": CONNECTIONS * CONNECTIONS_PER_KIND, "chunks": CHUNKS * 4}
ATTACKS = (*REQUESTS, *CONNECTIONS_OF)


async def send(client: httpx.AsyncClient, key: str, path: str, content: bytes | None = None) -> tuple[str, Any]:
    """The status of a request with the code of its error, or how its connection failed; and the answer."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    headers["x-forwarded-for"] = ".".join(str(random.randrange(256)) for _ in range(4))  # which nobody believes
    method = "GET" if content is None else "POST"
    try:
        response = await client.request(method, path, content=content, headers=headers)
    except httpx.TransportError as error:
        return type(error).__name__, None
    answer = response.json()
    return f"{response.status_code} {answer.get('error', {}).get('code') or ''}".strip(), answer


async def wait_if_refused(outcome: str) -> None:
    await asyncio.sleep(RETRY_SECONDS * (not outcome.startswith(("200", "400"))))


def attack(url: str, name: str, seconds: float) -> Counter[str]:
    """Attack for so many seconds, and count the outcomes."""
    outcomes = Counter[str]()

    async def repeat(act: Callable[[], Awaitable[object]]) -> None:
        while True:
            outcome = str(await act())
            outcomes[outcome] += 1
            await wait_if_refused(outcome)

    async def run() -> None:
        bodies, clients, at_once = REQUESTS.get(name, ((), 0, 0))
        turn, address = cycle(bodies), (httpx.URL(url).host, httpx.URL(url).port or 80)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits()) as client:

            async def send_next(key: str) -> str:
                return (await send(client, key, *next(turn)))[0]

            acts: list[Callable[[], Awaitable[object]]]
            acts = [partial(send_next, key) for key in KEYS[:clients] * at_once]
            acts += [partial(each.run, address) for each in CONNECTIONS_OF.get(name, ())]
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*map(repeat, acts))

    asyncio.run(run())
    return outcomes


async def watch(url: str, is_over: Callable[[], bool]) -> tuple[dict[str, Counter[str]], dict[str, Any], set[str]]:
    """Outcomes and seconds of an ordinary client and of probes of /health, and the texts of the client."""
    outcomes = {who: Counter[str]() for who in ("ordinary", "health")}
    seconds: dict[str, list[float]] = {who: [] for who in outcomes}
    texts = set()

    async def probe(client: httpx.AsyncClient) -> None:
        began = time.perf_counter()
        outcomes["health"][(await send(client, KEYS[-1], "/health"))[0]] += 1
        seconds["health"].append(time.perf_counter() - began)

    async def ask(client: httpx.AsyncClient) -> None:
        while not is_over():
            began, outcome = time.perf_counter(), ""
            while outcome != "200":  # it tries again until it is served
                assert time.perf_counter() < began + 10 * MAX_WAIT, f"The ordinary client gets {outcome}."
                outcome, answer = await send(client, KEYS[-1], *text(max_tokens=8, echo=True, logprobs=0))
                outcomes["ordinary"][outcome] += 1
                await wait_if_refused(outcome)
            seconds["ordinary"].append(time.perf_counter() - began)
            texts.add(answer["choices"][0]["text"])
            await asyncio.sleep(0.5)

    # Another address than the attacker's. A probe opens a new connection each time.
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    no_reuse = httpx.AsyncHTTPTransport(local_address="127.0.0.2", limits=httpx.Limits(max_keepalive_connections=0))
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, transport=transport) as client,
        httpx.AsyncClient(base_url=url, timeout=60, transport=no_reuse) as newcomer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(ask(client))
        while not is_over():  # at a fixed rate, so that a slow answer does not delay the next probe
            tasks.create_task(probe(newcomer))
            await asyncio.sleep(PROBE_SECONDS)
    points = {"p50": 50, "p99": 99, "max": 100}
    times = {who: {p: float(np.percentile(seconds[who], q)) for p, q in points.items()} for who in seconds}
    return outcomes, times, texts


def withstand(name: str, seconds: float) -> dict[str, Any]:
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.NamedTemporaryFile("w") as keys_file, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        print(*KEYS, sep="\n", file=keys_file, flush=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, most_files))
        options = ["--device", "cpu", "--rows", "4", "--queue", "32"]
        if name != "forged":  # without keys addresses count
            options += ["--api-keys", keys_file.name]
        server = ServeProcess(*options)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))
        with server:
            pool.submit(int).result()  # once it has started
            until = time.perf_counter() + 5
            _, quiet_times, quiet_texts = asyncio.run(watch(server.url, lambda: time.perf_counter() > until))
            attacking = pool.submit(attack, server.url, name, seconds)
            outcomes, times, texts = asyncio.run(watch(server.url, attacking.done))
            server.log.seek(0)
            errors = [line for line in server.log if '"level": "error"' in line][:20]
    outcomes["attacker"] = attacking.result()
    failures = [
        f"{who}: {outcome}"
        for who in outcomes
        for outcome in outcomes[who]
        if outcome.startswith("5") or (who != "attacker" and not outcome[0].isdigit())
    ]
    return {
        "options": [option for option in options if option != keys_file.name],
        "seconds": seconds,
        "load_average": os.getloadavg(),
        "outcomes": outcomes,
        "seconds_before_attack": quiet_times,
        "seconds_during_attack": times,
        "errors_in_the_log": errors,
        "broken": [
            *failures,
            *(["/health is late"] if times["health"]["p99"] > MAX_HEALTH_P99 else []),
            *(["the ordinary client waits too long"] if times["ordinary"]["max"] > MAX_WAIT else []),
            *(["other texts than before"] if texts != quiet_texts else []),
            *([f"{len(errors)} errors in the log"] if errors else []),
        ],
    }
