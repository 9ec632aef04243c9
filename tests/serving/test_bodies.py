"""Large bodies: the server answers each at once, with little memory, whatever it contains."""

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message

from loopformer import LM, Trajectory
from loopformer.inference.chat import ChatTemplate
from loopformer.serving.app import create_app
from loopformer.serving.engine_process import EngineProcess
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.protocol import Served
from loopformer.serving.server import NESTED_WEIGHT, Gate, is_too_complex
from loopformer.serving.service import Admission, Service

MIB = 1 << 20
MAX_HOLD = 0.1  # seconds of the event loop
CHAT = b'{"messages": [{"role": "user", "content": [%s]}]}'
MESSAGE = b'{"role": "user", "content": "x"}'


def repeat(item: bytes, most: int = MIB) -> bytes:
    """As many items of a list as a body of 1 MiB has room for."""
    return b",".join([item] * min(most, (MIB - 256) // (len(item) + 1)))


def keys(value: bytes, most: int = MIB) -> bytes:
    """As many different keys as a body has room for."""
    return b",".join(b'"k%d":%s' % (number, value) for number in range(min(most, (MIB - 256) // 16)))


BODIES = [  # a path, and a body that the server refuses; spaces make it 1 MiB
    *(("/v1/completions", b'{"prompt": [%s]}' % repeat(item)) for item in (b"-1", b"1.5", b"{}", b"[]", b"[-1]")),
    *(("/v1/completions", b'{"prompt": [%s]}' % repeat(item, 120_000)) for item in (b"-1", b"1.5", b"31234")),
    ("/v1/completions", b'{"prompt": [%s, -1]}' % repeat(b"31234", 120_000)),
    ("/v1/completions", b'{"prompt": [%s]}' % repeat(b"[-1]", 30_000)),
    ("/v1/completions", b'{"prompt": [%s]}' % repeat(b"[1]", 30_000)),
    ("/v1/completions", b'{"prompt": [%s]}' % repeat(b'"aa"', 80_000)),
    ("/v1/completions", b'{"prompt": ["%s"]}' % (b"\\\\" * (MIB // 2 - 64))),
    ("/v1/completions", b'{"prompt": "x", "stop": [%s]}' % repeat(b'"\\u0000"')),
    ("/v1/completions", b'{"prompt": "x", %s}' % keys(b"1")),
    ("/v1/completions", b'{"prompt": "", %s}' % keys(b"null", 20_000)),
    ("/v1/completions", b'{"prompt": "x", "logit_bias": {%s}}' % keys(b"1", 20_000)),
    ("/v1/chat/completions", b'{"messages": [%s]}' % repeat(b"{}")),
    ("/v1/chat/completions", b'{"messages": [%s]}' % repeat(b"{}", 30_000)),
    ("/v1/chat/completions", b'{"messages": [%s]}' % repeat(MESSAGE, 5000)),
    ("/v1/chat/completions", b'{"messages": [%s, 1]}' % repeat(MESSAGE, 4000)),
    ("/v1/chat/completions", CHAT % repeat(b"1", 120_000)),
    ("/v1/chat/completions", CHAT % repeat(b"{}", 30_000)),
    ("/v1/chat/completions", CHAT % repeat(b'{"type":"text","text":""}', 9000).replace(b'""', b"1", 1)),
    ("/tokenize", b'{"messages": [%s]}' % repeat(b'{"content":[1,2,3]}', 4000)),
    ("/detokenize", b'{"tokens": [%s]}' % repeat(b"-1", 120_000)),
    ("/detokenize", b'{"tokens": [%s]}' % repeat(b"{}", 30_000)),
    ("/lens", b'{"prompt": [%s]}' % repeat(b"-1", 120_000)),
]


@pytest.fixture(scope="module")
def gated_app(lm: LM, folder: str) -> Iterator[ASGIApp]:
    """The app behind its gate. Its engine is not started: no body here gets that far."""
    chat, config = ChatTemplate(lm.need_tokenizer()), lm.model.config
    served = Served("tiny", chat, config, Trajectory.uniform(4), 4, config.context, config.context)
    service = Service(EngineProcess(WorkerSettings(folder)), served, Admission(1, 1, 100))
    gc.freeze()  # as the server does when it starts
    yield Gate(create_app(service), service.metrics.refused)
    gc.unfreeze()


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    sent: list[Any] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


async def longest_hold(work: Callable[[], Any]) -> tuple[float, Any]:
    """The most processor time between two turns of another task, and the result of the work."""
    longest, last = 0.0, time.process_time()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            now = time.process_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        result = await work()
        await asyncio.sleep(0)
    finally:
        ticking.cancel()
    return longest, result


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: repr(value)[:40])
def test_a_large_body_takes_little_time_and_memory(gated_app: ASGIApp, path: str, body: bytes) -> None:
    body = body.ljust(MIB - 64)
    asyncio.run(post(gated_app, path, b"{}"))  # the first request builds the routes
    began = time.process_time()
    with suppress(ValueError):
        json.loads(body)
    parsed_in = time.process_time() - began
    held, (status, answer) = asyncio.run(longest_hold(lambda: post(gated_app, path, body)))
    assert status == 400, answer
    assert len(answer) < 600
    assert held < MAX_HOLD + 5 * parsed_in
    tracemalloc.start()
    try:
        asyncio.run(post(gated_app, path, body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [%s]}' % b",".join([b"[%s]" % b",".join([b"31234"] * 1024)] * 128),
        b'{"messages": [%s]}' % repeat(MESSAGE, 4096),
        b'{"prompt": "%s"}' % (b'[{\\"a\\": [1, 2]}, \\\\' * 40_000),
    ],
    ids=["prompts", "messages", "code"],
)
def test_what_a_client_may_need_is_not_too_complex(gated_app: ASGIApp, body: bytes) -> None:
    status, answer = asyncio.run(post(gated_app, "/v1/completions", body))
    assert status == 400
    assert b"too many values" not in answer


def weigh(value: Any) -> int:
    """The weight of a value, by its definition."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return NESTED_WEIGHT + sum(map(weigh, value)) + max(0, len(value) - 1)
    if isinstance(value, dict):
        items = sum(weigh(key) + NESTED_WEIGHT + weigh(item) for key, item in value.items())
        return NESTED_WEIGHT + items + max(0, len(value) - 1)
    return 0


texts = st.text() | st.text('\\"[{,:')
json_values = st.recursive(
    st.none() | st.integers() | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=40
)


@given(json_values, st.booleans())
def test_the_weight_counts_values_and_not_what_strings_contain(value: Any, escapes: bool) -> None:
    body, weight = json.dumps(value, ensure_ascii=escapes).encode("utf-8", "replace"), weigh(value)
    assert is_too_complex(body, weight - 1)
    assert not is_too_complex(body, weight)


def test_the_weight_of_a_long_body_is_that_of_its_pieces() -> None:
    value = ["," * 3, {"[": '"', '"': [0, 1]}] * 30_000
    body, weight = json.dumps(value).encode(), weigh(value)
    assert is_too_complex(body, weight - 1)
    assert not is_too_complex(body, weight)


def test_a_large_body_is_utf_8(gated_app: ASGIApp) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode("utf-16")
    status, answer = asyncio.run(post(gated_app, "/v1/completions", body))
    assert status == 400
    assert b"UTF-8" in answer
