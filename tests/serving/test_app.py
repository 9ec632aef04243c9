"""The routes, as clients meet them: OpenAI's own, plain HTTP, and hostile ones."""

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from loopformer import LM
from loopformer.serving.answers import CompletionWriter

from .servers import LONG, MAX_WAIT, RunningServer, wait_until

PROMPTS = ["every pass is told", "its", "time and its step", "told its time", "naïve café"]
DEPTHS: list[dict[str, Any]] = [{"budget": 1}, {"budget": 2}, {"budget": 4}, {"trajectory": "2-1-1"}, {}]
CHAT: list[Any] = [{"role": "user", "content": "its time"}]
LISTS = ("tokens", "text_offset")  # of log-probabilities


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_works_unchanged(client: openai.OpenAI, lm: LM) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "loopformer"
    expected = lm.generate(PROMPTS[0], budget=2, max_tokens=12)
    done = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=12, temperature=0, extra_body={"budget": 2}
    )
    assert done.choices[0].text == expected.text
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (expected.prompt_tokens, 12)
    assert done.usage.model_extra is not None
    assert done.usage.model_extra["loops"] == 2 * (expected.prompt_tokens + 11)
    assert done.usage.model_extra["flops"] > 0
    assert done.model_extra is not None
    assert done.model_extra["loopformer"] == {"budget": 2, "trajectory": "2", "degraded": False}


def test_the_openai_client_streams(client: openai.OpenAI, lm: LM) -> None:
    length = 600  # a busy server sends what has come together, so a short text may come in two parts
    expected = lm.generate(PROMPTS[2], max_tokens=length)
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPTS[2],
            max_tokens=length,
            temperature=0,
            stream=True,
            logprobs=0,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["loopformer"]["degraded"] is False
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])  # clients take the first
    assert all(choice.logprobs is not None for chunk in chunks for choice in chunk.choices)  # as they asked
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == expected.text
    assert len(choices) > 3
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    check_offsets(expected.text, *([x for part in parts for x in getattr(part, name)] for name in LISTS))
    assert [choice.finish_reason for choice in choices][-1] == "length"
    logprobs = [value for c in choices if c.logprobs for value in c.logprobs.token_logprobs or []]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == length


def test_chats_stream_and_do_not(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**options, stream=True, logprobs=True, top_logprobs=2))
    text = whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == text
    assert whole.choices[0].logprobs is not None
    tokens = whole.choices[0].logprobs.content or []
    assert len(tokens) == 20
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4)  # greedy
    streamed = [c.logprobs.content or [] for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    together = [token for part in streamed for token in part]
    assert [token.token for token in together] == [token.token for token in tokens]
    for token, expected in zip(together, tokens, strict=True):  # another batch rounds differently
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(
            [top.logprob for top in expected.top_logprobs], abs=1e-4
        )


def test_a_text_in_company_is_the_text_alone(server: RunningServer, lm: LM) -> None:
    """Streams and not, every depth, more of them than there are slots."""
    cases = [(prompt, depth, 5 + 7 * number) for number, prompt in enumerate(PROMPTS) for depth in DEPTHS]

    def ask(case: tuple[str, dict[str, Any], int]) -> str:
        prompt, depth, most = case
        stream = most % 2 == 0
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": stream, **depth}
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 200
        if not stream:
            return str(answer.json()["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, cases))
    for (prompt, depth, most), text in zip(cases, texts, strict=True):
        assert text == lm.generate(prompt, max_tokens=most, **depth).text


def check_offsets(text: str, tokens: list[str], offsets: list[int]) -> None:
    """A token is found where it is said to begin, unless it is half a character."""
    assert offsets == sorted(offsets)
    whole = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if "\ufffd" not in token]
    assert whole
    assert all(text[offset:].startswith(token) for token, offset in whole)


def test_echo_and_logprobs_are_what_the_scorer_says(server: RunningServer, lm: LM) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 1, "budget": 2}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == PROMPTS[0]
    assert choice["finish_reason"] == "length"
    first, *values = choice["logprobs"]["token_logprobs"]
    assert first is None
    (score,) = lm.score([PROMPTS[0]], budget=2)
    assert len(values) == len(score.logprobs) - 1
    assert all(math.isfinite(value) for value in values)
    body = {**body, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == PROMPTS[0] + lm.generate(PROMPTS[0], budget=2, max_tokens=4).text
    lists = choice["logprobs"]
    lengths = {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(score.ids) + 4}
    assert len(lists["top_logprobs"][-1]) <= 3
    check_offsets(choice["text"], *(lists[name] for name in LISTS))


def test_offsets_count_characters_and_not_their_halves(server: RunningServer) -> None:
    body = {"prompt": "héllo 日本 😀!", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == body["prompt"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(choice["text"]) - 1


def test_probes_may_ask_for_the_head_alone(server: RunningServer) -> None:
    assert [server.client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": [-1]}, "prompt: It is a text, a list of texts"),
        ({"stop": ["x"] * 17}, "stop: It is a text, or a list of at most 16"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "replace").decode(),
)
def test_a_field_of_several_forms_is_explained(server: RunningServer, fields: dict[str, Any], said: str) -> None:
    content = json.dumps({"prompt": "its", "max_tokens": 1, **fields})  # with escapes
    answer = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_seeds_stops_and_many_texts(server: RunningServer) -> None:
    body = {"prompt": PROMPTS[:2], "n": 3, "max_tokens": 8, "temperature": 1.5, "seed": 3}
    first, second = (server.post("/v1/completions", **body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 3
    greedy = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
    text = server.post("/v1/completions", **greedy).json()["choices"][0]["text"]
    stop = next(char for char in text[3:] if char.isascii())
    (stopped,) = server.post("/v1/completions", **greedy, stop=[stop]).json()["choices"]
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_tokens_and_back(server: RunningServer, lm: LM) -> None:
    tokens = server.post("/tokenize", prompt=PROMPTS[4]).json()
    assert tokens["tokens"] == lm.need_tokenizer().encode(PROMPTS[4])
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": PROMPTS[4]}
    assert server.post("/tokenize", messages=CHAT).json()["count"] > 4
    assert server.post("/detokenize", tokens=[10**9]).status_code == 400


def test_the_lens_shows_every_loop(server: RunningServer, lm: LM) -> None:
    seen = server.post("/lens", prompt=PROMPTS[0], trajectory="2-1-1", top=3).json()
    assert [loop["time"] for loop in seen["loops"]] == [0.5, 0.75, 1.0]
    assert all(len(loop["top"]) == 3 for loop in seen["loops"])
    first = lm.generate(PROMPTS[0], trajectory="2-1-1", max_tokens=1)
    assert seen["loops"][-1]["top"][0]["id"] == first.ids[0]
    assert seen["loops"][-1]["top"][0]["logprob"] == pytest.approx(first.logprobs[0], abs=1e-4)
    assert [loop["trained"] for loop in seen["loops"]] == [False, False, True]


def test_a_lens_waits_in_the_queue_as_one_text(server: RunningServer) -> None:
    assert server.service is not None
    admission = server.service.admission
    wait_until(lambda: admission.in_flight == 0)
    with ThreadPoolExecutor() as pool:
        with server.stopped_engine():
            waiting = pool.submit(server.post, "/lens", prompt=PROMPTS[0])
            wait_until(lambda: admission.in_flight > 0)
            assert admission.in_flight == 1
        assert waiting.result().status_code == 200


def test_what_is_counted_is_told(server: RunningServer) -> None:
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
    before = {name: server.metric(name, budget="3") for name in names}
    hits = server.metric("prefix_cache_hits_total")
    for _ in range(2):
        server.post(
            "/v1/completions", prompt="every pass is told its time and its step. " * 2, max_tokens=4, budget=3
        )
    grown = {name: server.metric(name, budget="3") - before[name] for name in names}
    assert 2 <= grown["generation_tokens_total"] <= 8
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 2
    assert server.metric("prefix_cache_hits_total") > hits
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert server.get(path).status_code == 200


def test_a_request_is_logged_and_counted_once(
    server: RunningServer, lm: LM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "loopformer")
    kinds = ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds")
    names = ["prompt_tokens_total", "generation_tokens_total", "request_success_total"]
    names += [f"{kind}_{part}" for kind in kinds for part in ("count", "sum")]
    before = {name: server.metric(name, budget="2") for name in names}
    body: dict[str, Any] = {"prompt": [1] * 10, "budget": 2, "temperature": 0}
    started = time.monotonic()
    with ThreadPoolExecutor() as pool, server.busy(n=8):
        waiting = pool.submit(server.post, "/v1/completions", **body, max_tokens=2)
        server.wait_for("num_requests_waiting", 1)
    assert waiting.result().status_code == 200
    server.post("/v1/completions", **body, max_tokens=1)
    monkeypatch.setattr(server.service, "_log_prompts", True)
    server.post("/v1/completions", **body, max_tokens=0, echo=True, logprobs=0)
    seconds = time.monotonic() - started

    def logged() -> list[dict[str, Any]]:
        return [line for line in map(json.loads, caplog.messages) if line.get("prompt_tokens") == 10]

    wait_until(lambda: len(logged()) == 3)
    first, *rest = logged()
    assert {**first, "queue_seconds": 0, "first_token_seconds": 0, "seconds": 0} == {
        "event": "request",
        "path": "/v1/completions",
        "status": 200,
        "texts": 1,
        "asked": "2",
        "trajectory": "2",
        "prompt_tokens": 10,
        "new_tokens": 2,
        "finish": ["length"],
        "queue_seconds": 0,
        "first_token_seconds": 0,
        "seconds": 0,
    }
    assert 0 < first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"] <= seconds
    assert [line["new_tokens"] for line in rest] == [1, 0]
    assert [line.get("prompts") for line in rest] == [None, [lm.need_tokenizer().decode([1] * 10, special=True)]]
    grown = {name: server.metric(name, budget="2") - before[name] for name in names}
    assert [grown[name] for name in names[:3]] == [30, 3, 3]
    assert [grown[f"{kind}_count"] for kind in kinds] == [2, 1, 3]  # a single token has no time after the first
    assert all(0 <= grown[f"{kind}_sum"] <= 3 * seconds for kind in kinds)
    assert all(grown[f"{kind}_sum"] > 0 for kind in (kinds[0], kinds[2]))  # two tokens may come together


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(server: RunningServer, stream: bool) -> None:
    server.wait_for("num_requests_running", 0)
    aborted = server.metric("request_success_total", finished_reason="abort")
    content = json.dumps({**LONG, "n": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        server.wait_for("num_requests_running", 3)
    server.wait_for("num_requests_running", 0)
    server.wait_for("kv_cache_usage_perc", 0)
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 3


def test_an_answer_that_takes_long_to_write_holds_nobody_up(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, complete = threading.Event(), threading.Event(), CompletionWriter.complete

    def slow(*given: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        return complete(*given)

    monkeypatch.setattr(CompletionWriter, "complete", slow)
    with ThreadPoolExecutor() as pool:
        # Written in a thread even if the text ends early: the prompt alone counts for enough log-probabilities.
        answer = pool.submit(server.post, "/v1/completions", prompt="its " * 50, logprobs=20, max_tokens=9)
        assert begun.wait(MAX_WAIT)
        assert server.get("/health").status_code == 200
        may_end.set()
        assert answer.result().status_code == 200


def test_a_slow_reader_holds_nobody_up(server: RunningServer) -> None:
    with server.busy():
        assert server.post("/v1/completions", prompt="its", max_tokens=5).status_code == 200
        server.wait_for("num_requests_running", 1)


def test_a_wrong_field_is_an_error_of_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x", logit_bias={"5": 10})
    assert refused.value.param == "logit_bias"
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError, match="above the model's 4 loops"):
        client.completions.create(model="tiny", prompt="x", extra_body={"budget": 9})
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="/etc", prompt="x")
    with pytest.raises(openai.BadRequestError, match="at most 4096"):
        client.completions.create(model="tiny", prompt=[1] * 5000)
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="content"):
        client.chat.completions.create(model="tiny", messages=picture)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"\xff\xfe{}", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "x", "model": "\\ud800"}', 404),
        (b'{"prompt": "x", "\\ud800": 1}', 400),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "x", "budget": 1e3}', 400),
        (b'{"prompt": "x", "budget": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
        (b'{"prompt": "x", "' + b"y" * 5000 + b'": 1}', 400),
        (b'{"prompt": "' + b"x" * (1 << 20) + b'"}', 413),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_hostile_bodies_are_refused(server: RunningServer, body: bytes, status: int) -> None:
    answer = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 600
    assert server.get("/health").status_code == 200


def test_other_hosts_methods_and_kinds_of_content_are_refused(server: RunningServer) -> None:
    client = server.client
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    plain = {"content-type": "text/plain"}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=plain)
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    answer = client.post("/v1/completions", json={"prompt": "x"}, headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_client_cannot_choose_the_address_that_it_counts_as(server: RunningServer) -> None:
    assert server.service is not None
    by_client = server.service.admission.by_client
    headers = {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "https", "forwarded": "for=192.0.2.7"}
    server.wait_for("num_clients", 0)
    with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers):
        assert dict(by_client) == {"127.0.0.1": 1}


def test_broken_connections_leave_it_answering(server: RunningServer) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
    for start in (b"", b"GET", b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", post, post + b'{"prompt"'):
        connection = socket.create_connection(address)
        connection.sendall(start)
        connection.shutdown(socket.SHUT_WR)
        connection.close()
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 13\r\nTransfer-Encoding: chunked", b"d\r\n" + b'{"prompt":""}' + b"\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 4", b"d\r\n" + b'{"prompt":""}' + b"\r\n0\r\n\r\n"),
        (b"Content-Length: 13\r\nContent-Length: 2", b'{"prompt":""}'),
        (b"Content-Length: 13, 2", b'{"prompt":""}'),
    ],
)
def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(
    server: RunningServer, head: bytes, body: bytes
) -> None:
    """What follows would otherwise be read as another request by one of two servers, and not by the other."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n" + body + smuggled
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(post)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def read_error(connection: socket.socket) -> bytes:
    """An answer with an error in OpenAI's form."""
    answer = b""
    while not answer.endswith(b"}}"):
        part = connection.recv(4096)
        assert part, answer
        answer += part
    return answer


@pytest.mark.parametrize(
    ("pieces", "size", "end", "status"), [(1041, 1, b"", 400), (5000, 64, b"\r\n0\r\n\r\n", 404)]
)
def test_a_body_in_thousands_of_tiny_pieces_is_refused(
    server: RunningServer, pieces: int, size: int, end: bytes, status: int
) -> None:
    body = b'{"prompt": "", "model": "other"}'.ljust(pieces * size)
    chunks = [b"%x\r\n%s" % (size, body[start : start + size]) for start in range(0, len(body), size)]
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(post + b"Transfer-Encoding: chunked\r\n\r\n" + b"\r\n".join(chunks) + end)
        answer = read_error(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (b"tiny pieces" in answer) == (status == 400)


def test_a_wrong_end_of_a_body_after_its_answer_just_closes_the_connection(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    post = b"POST /tokenize HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(post)
        assert read_error(connection).startswith(b"HTTP/1.1 403 ")
        connection.sendall(b"no length\r\n")
        assert connection.recv(4096) == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_a_websocket_is_never_opened(server: RunningServer) -> None:
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==",
        "sec-websocket-version": "13",
    }
    answer = server.get("/v1/completions", **upgrade)
    assert answer.status_code == 405
