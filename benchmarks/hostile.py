"""Malformed and hostile requests: what schemathesis makes of the server's own schema, and hand-made ones.

    report = attack("http://127.0.0.1:8000", seed=0, examples=150)     # statuses by kind, what is `broken`

Every request must be answered, or its connection closed, within `PATIENCE` seconds, and never with 5xx. Hand-made
are: every field of every route with values that do not belong there, bodies that are no JSON, too deep, too large
or cut short, and connections that are slow, half closed, reset, idle, or do not speak HTTP.
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

PATIENCE = 40.0  # seconds, the server's own for a body and a reader included
ROUTES: dict[str, dict[str, Any]] = {  # a request that is right, little work and with all its fields
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
VALUES = [  # as they stand in JSON
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
KINDS = [
    *("", "text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/json; charset=utf-16", "application/jsonx", "image/png", "application/json" * 500),
]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Tally:
    """Statuses by kind of request, and what must not be."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.broken: list[str] = []
        self.slowest = 0.0

    def count(self, kind: str, status: int | str, what: object, seconds: float) -> None:
        self.statuses.setdefault(kind, Counter())[str(status)] += 1
        self.slowest = max(self.slowest, seconds)
        if seconds > PATIENCE or status in ("hangs", "cut off") or (isinstance(status, int) and status >= 500):
            self.broken.append(f"{kind}: {status} after {seconds:.1f} s: {str(what)[:300]}")


def attack(url: str, seed: int, examples: int) -> dict[str, Any]:
    tally = Tally()
    generated(url, examples, tally)
    asyncio.run(hand_made(url, random.Random(seed), tally))
    return {
        "requests": sum(counts.total() for counts in tally.statuses.values()),
        "statuses": tally.statuses,
        "slowest_seconds": tally.slowest,
        "broken": tally.broken,
    }


def generated(url: str, examples: int, tally: Tally) -> None:
    """What fits the schema and what does not, as far as schemathesis knows."""
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
            status = case.call(timeout=PATIENCE).status_code
            tally.count(f"schemathesis, {mode}", status, case.as_curl_command(), time.perf_counter() - began)

        return run

    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            with warnings.catch_warnings(), suppress(Unsatisfiable):
                warnings.simplefilter("ignore")
                check(mode, operation)()  # a route without parameters has no wrong ones, and says so


async def hand_made(url: str, draw: random.Random, tally: Tally) -> None:
    places = asyncio.Semaphore(24)
    address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:

        async def post(kind: str, path: str, body: bytes, headers: dict[str, str]) -> None:
            async with places:
                began = time.perf_counter()
                status: int | str
                try:
                    answer = await client.post(path, content=body, headers=headers)
                    status = answer.status_code
                    if status != 200 and set(answer.json().get("error", ())) != ERROR:
                        tally.broken.append(f"{kind}: {status} without an error of OpenAI's form")
                except httpx.TimeoutException:
                    status = "hangs"
                except httpx.TransportError:  # a body that is far too large is not read to its end
                    status = "closed" if kind == "large" else "cut off"
                tally.count(kind, status, (path, headers, body), time.perf_counter() - began)

        async def talk(talk: "Talk") -> None:
            began = time.perf_counter()
            try:
                status = await asyncio.wait_for(talk.run(address), PATIENCE)
            except TimeoutError:
                status = "hangs"
            tally.count(talk.kind, status, talk, time.perf_counter() - began)

        await asyncio.gather(*(post(*one) for one in bodies(draw)), *map(talk, talks(draw)))


def bodies(draw: random.Random) -> list[tuple[str, str, bytes, dict[str, str]]]:
    plain = {"content-type": "application/json"}
    made = []
    for path, right in ROUTES.items():
        whole = json.dumps(right).encode()
        for name in (*right, "unknown", r"\ud800", "logit_bias", "tools"):
            rest = json.dumps({key: value for key, value in right.items() if key != name})[1:]
            for value in VALUES:
                text = "{" + f'"{name}": {value}' + (", " if rest != "}" else "") + rest
                made.append(("a field", path, text.encode(), plain))
        for _ in range(40):
            changed = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            made.append(("changed bytes", path, bytes(changed), plain))
        made += [("cut short", path, whole[:end], plain) for end in range(0, len(whole), 7)]
        made += [("kind of content", path, whole, {"content-type": kind}) for kind in KINDS]
        coded = {**plain, "content-encoding": "gzip"}
        made += [("coding", path, *one) for one in ((whole.decode().encode("utf-16"), plain), (whole, coded))]
        made += [("coding", path, b"\xef\xbb\xbf" + whole, plain), ("coding", path, b"\xff" * 1000, plain)]
        for depth in (100, 10_000, 400_000):
            made += [
                ("deep", path, start * depth + end * depth, plain)
                for start, end in ((b"[", b"]"), (b'{"a":', b"}"))
            ]
        for size in (1 << 20, (1 << 20) + 1, 1 << 23, 1 << 25):
            made.append(("large", path, b'{"prompt": "' + b"x" * size + b'"}', plain))
    draw.shuffle(made)
    return made


@dataclass(frozen=True)
class Talk:
    """A connection: what is sent, how slowly, and how it ends."""

    kind: str
    pieces: Sequence[bytes]
    pause: float = 0.0
    end: str = "wait"  # for the server to answer or close; "half": our side is closed; "reset": it breaks

    async def run(self, address: tuple[str, int]) -> int | str:
        reader, writer = await asyncio.open_connection(*address)
        said = bytearray()

        async def listen() -> None:
            with suppress(ConnectionError):
                while heard := await reader.read(1 << 16):
                    said.extend(heard)

        listening = asyncio.create_task(listen())
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
            await listening
        except ConnectionError:
            await listening
        finally:
            writer.close()
        return max(map(int, re.findall(rb"HTTP/1.1 (\d{3})", said)), default="closed")


def talks(draw: random.Random) -> list[Talk]:
    right = json.dumps({"prompt": "x", "max_tokens": 16}).encode()
    stream = json.dumps({"prompt": "x", "max_tokens": 16, "stream": True}).encode()
    whole = [f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in (right, stream)]
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
    made = [Talk("no HTTP", [head], end=end) for head in heads for end in ("wait", "half", "reset")]
    made += [Talk("chunks without end", chunks) for _ in range(3)]
    made += [Talk("slow head", [bytes([byte]) for byte in whole[0][:60]], pause=0.5) for _ in range(20)]
    made += [Talk("slow body", [f"{HEAD}Content-Length: 99\r\n\r\n".encode(), *[b" "] * 60], pause=0.6)] * 10
    made += [Talk("half closed", [each], end="half") for each in whole * 20]
    made += [Talk("reset", [each], pause=draw.random() / 5, end="reset") for each in whole * 40]
    made += [
        Talk("half a body", [each[:-5]], end=end) for each in whole for end in ("half", "reset") for _ in range(10)
    ]
    made += [Talk("pipelined", [each * 20]) for each in whole]
    made += [Talk("idle", []) for _ in range(400)]
    return made
