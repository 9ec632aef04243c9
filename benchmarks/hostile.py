"""Malformed and hostile requests: those that schemathesis derives from the server's schema, and hand-made ones.

    report = attack("http://127.0.0.1:8000", seed=0, examples=150)     # statuses by kind, what is `broken`

Every request must be answered within `TIMEOUT` seconds, and never with 5xx, or its connection closed. The hand-made
requests put wrong values into every field of every route. Their bodies are not JSON, too deep, too large or cut
short, and their connections are slow, half closed, reset, idle, or do not speak HTTP.
"""

import asyncio
import json
import random
import re
import socket
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT = 40.0  # seconds, longer than the server's own timeouts
ROUTES: dict[str, dict[str, Any]] = {  # a valid cheap request with all fields of the route
    "/v1/completions": {
        "prompt": "x",
        "max_tokens": 2,
        "budget": 1,
        "min_budget": 1,
        "priority": 0,
        "n": 1,
        "stop": ["q"],
        "seed": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "top_p": 1,
        "top_k": 5,
        "min_p": 0,
        "repetition_penalty": 1,
        "echo": False,
        "logprobs": 1,
        "model": "box",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 2,
        "budget": 1,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 1,
        "stop": "q",
        "n": 1,
    },
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/lens": {"prompt": "x", "trajectory": "2-1-1", "top": 2},
}
VALUES = [  # JSON text
    *("-1", "0", "1", "1.5", "-0.0", "1e308", "1e999", "NaN", "Infinity", "-Infinity", "true", "false"),
    *("2147483648", "9223372036854775808", "-9223372036854775809", "9" * 400, "9" * 5000, "-" + "9" * 400),
    *('""', '"x"', r'"\u0000"', r'"\ud800"', '"\U0001f600"', '"../../etc/passwd"', '"1-1-1-1-1-1-1-1-1-1-1-1"'),
    *('"uniform:99999999999"', '"1/0"', '"1e9-1"', '"0-0"', '"' + "9-" * 120 + '9"', '"' + "x" * 100_000 + '"'),
    *("[]", "[[]]", "[null]", "[-1]", "[99999999999999999999]", '["", ""]', "[1, \"x\"]", "[[1], [2, -3]]"),
    *("{}", '{"role": "user"}', '{"a": {"b": []}}', "[{}]", '[{"role": "tool", "content": "x"}]'),
    *("[" + "1," * 50_000 + "1]", "[" * 500 + "]" * 500, "[" * 50_000 + "]" * 50_000),
    '{"a":' * 900 + "1" + "}" * 900,
]  # fmt: skip
ERROR = {"message", "type", "param", "code"}
CONTENT_TYPES = [
    *("", "text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/json; charset=utf-16", "application/jsonx", "image/png", "application/json" * 500),
]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Tally:
    """Counts statuses by kind of request, and collects broken promises."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.broken: list[str] = []
        self.slowest = 0.0

    def count(self, kind: str, status: int | str, what: object, seconds: float) -> None:
        self.statuses.setdefault(kind, Counter())[str(status)] += 1
        self.slowest = max(self.slowest, seconds)
        if seconds > TIMEOUT or status in ("hangs", "cut off") or (isinstance(status, int) and status >= 500):
            self.broken.append(f"{kind}: {status} after {seconds:.1f} s: {str(what)[:300]}")


def attack(url: str, seed: int, examples: int) -> dict[str, Any]:
    tally = Tally()
    send_generated(url, examples, tally)
    asyncio.run(send_hand_made(url, random.Random(seed), tally))
    return {
        "requests": sum(counts.total() for counts in tally.statuses.values()),
        "statuses": tally.statuses,
        "slowest_seconds": tally.slowest,
        "broken": tally.broken,
    }


def send_generated(url: str, examples: int, tally: Tally) -> None:
    """Send requests that schemathesis derives from the schema, valid and invalid."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable

    def check(mode: Any, operation: Any) -> Callable[[], None]:
        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(mode))
        def run(case: Any) -> None:
            began = time.perf_counter()
            status = case.call(timeout=TIMEOUT).status_code
            tally.count(f"schemathesis, {mode}", status, case.as_curl_command(), time.perf_counter() - began)

        return run

    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            with warnings.catch_warnings(), suppress(Unsatisfiable):
                warnings.simplefilter("ignore")
                check(mode, operation)()  # raised where a route has no parameters


async def send_hand_made(url: str, rng: random.Random, tally: Tally) -> None:
    slots = asyncio.Semaphore(24)
    address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, verify=False) as client:

        async def post(kind: str, path: str, body: bytes, headers: dict[str, str]) -> None:
            async with slots:
                began = time.perf_counter()
                status: int | str
                try:
                    answer = await client.post(path, content=body, headers=headers)
                    status = answer.status_code
                    if status != 200 and set(answer.json().get("error", ())) != ERROR:
                        tally.broken.append(f"{kind}: {status} without an error of OpenAI's form")
                except httpx.TimeoutException:
                    status = "hangs"
                except httpx.TransportError:  # the server does not read an oversized body to its end
                    status = "closed" if kind == "large" else "cut off"
                tally.count(kind, status, (path, headers, body), time.perf_counter() - began)

        async def run_connection(connection: "Connection") -> None:
            began = time.perf_counter()
            try:
                status = await asyncio.wait_for(connection.run(address), TIMEOUT)
            except TimeoutError:
                status = "hangs"
            tally.count(connection.kind, status, connection, time.perf_counter() - began)

        await asyncio.gather(
            *(post(*request) for request in hand_made_bodies(rng)), *map(run_connection, hand_made_connections(rng))
        )


def hand_made_bodies(rng: random.Random) -> list[tuple[str, str, bytes, dict[str, str]]]:
    plain = {"content-type": "application/json"}
    requests = []
    for path, valid in ROUTES.items():
        complete = json.dumps(valid).encode()
        for name in (*valid, "unknown", r"\ud800", "logit_bias", "tools"):
            rest = json.dumps({key: value for key, value in valid.items() if key != name})[1:]
            for value in VALUES:
                text = "{" + f'"{name}": {value}' + (", " if rest != "}" else "") + rest
                requests.append(("a field", path, text.encode(), plain))
        for _ in range(40):
            changed = bytearray(complete)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            requests.append(("changed bytes", path, bytes(changed), plain))
        requests += [("cut short", path, complete[:end], plain) for end in range(0, len(complete), 7)]
        requests += [("kind of content", path, complete, {"content-type": kind}) for kind in CONTENT_TYPES]
        coded = {**plain, "content-encoding": "gzip"}
        requests += [
            ("coding", path, *request)
            for request in ((complete.decode().encode("utf-16"), plain), (complete, coded))
        ]
        requests += [("coding", path, b"\xef\xbb\xbf" + complete, plain), ("coding", path, b"\xff" * 1000, plain)]
        for depth in (100, 10_000, 400_000):
            requests += [
                ("deep", path, start * depth + end * depth, plain)
                for start, end in ((b"[", b"]"), (b'{"a":', b"}"))
            ]
        for size in (1 << 20, (1 << 20) + 1, 1 << 23, 1 << 25):
            requests.append(("large", path, b'{"prompt": "' + b"x" * size + b'"}', plain))
    rng.shuffle(requests)
    return requests


@dataclass(frozen=True)
class Connection:
    """A connection: the bytes it sends, how slowly, and how it ends."""

    kind: str
    pieces: Sequence[bytes]
    pause: float = 0.0
    end: str = "wait"  # wait: for the server; half: close our side; reset: break it

    async def run(self, address: tuple[str, int]) -> int | str:
        reader, writer = await asyncio.open_connection(*address)
        received = bytearray()

        async def read_answer() -> None:
            with suppress(ConnectionError):
                while chunk := await reader.read(1 << 16):
                    received.extend(chunk)

        reading = asyncio.create_task(read_answer())
        try:
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self.pause)
            if self.end == "half":
                writer.write_eof()
            if self.end == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return "reset"
            await reading
        except ConnectionError:
            await reading
        finally:
            writer.close()
        return max(map(int, re.findall(rb"HTTP/1.1 (\d{3})", received)), default="closed")


def hand_made_connections(rng: random.Random) -> list[Connection]:
    valid = json.dumps({"prompt": "x", "max_tokens": 16}).encode()
    stream = json.dumps({"prompt": "x", "max_tokens": 16, "stream": True}).encode()
    complete = [f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in (valid, stream)]
    heads = [
        *(b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\r\n"),
        b"\r\n" * 99,
        *(b"GET / HTTP/9.9\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
        *(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\nHost: lo\x00cal\r\n\r\n"),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        *(f"{HEAD}Content-Length: {n}\r\n\r\n{{}}".encode() for n in ("-1", "x", "1e3", "9" * 30, "+2", "0x2")),
        HEAD.encode() + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD.encode() + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        *(
            HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
            for chunk in (b"-1\r\n", b"f" * 40 + b"\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n")
        ),
        HEAD.encode() + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        HEAD.encode() + b"Transfer-Encoding: gzip\r\n\r\n{}",
    ]  # fmt: skip
    chunks = [f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), *[b"10000\r\n" + b"[" * 65536 + b"\r\n"] * 200]
    connections = [Connection("no HTTP", [head], end=end) for head in heads for end in ("wait", "half", "reset")]
    connections += [Connection("chunks without end", chunks) for _ in range(3)]
    connections += [
        Connection("slow head", [bytes([byte]) for byte in complete[0][:60]], pause=0.5) for _ in range(20)
    ]
    connections += [
        Connection("slow body", [f"{HEAD}Content-Length: 99\r\n\r\n".encode(), *[b" "] * 60], pause=0.6)
    ] * 10
    connections += [Connection("half closed", [request], end="half") for request in complete * 20]
    connections += [
        Connection("reset", [request], pause=rng.random() / 5, end="reset") for request in complete * 40
    ]
    connections += [
        Connection("half a body", [request[:-5]], end=end)
        for request in complete
        for end in ("half", "reset")
        for _ in range(10)
    ]
    connections += [Connection("pipelined", [request * 20]) for request in complete]
    connections += [Connection("idle", []) for _ in range(400)]
    return connections
