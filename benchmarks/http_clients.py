"""Cheap clients of a completion server: hand-written HTTP/1.1 over persistent connections.

    echo '{"port": 8000, "until": 1234.5, "bodies": [[{"prompt": "Once"}, …], …]}' | python http_clients.py

There is a connection for each list of bodies. It sends its bodies in turn, over and over, until the time `until` of
`time.monotonic`, a clock that all processes share, and then drops the request that is running. Only the standard
library is used. The output is JSON: the CPU seconds of this process, the failures, and for each answered request
when it was sent, when its first and its last bytes came, its tokens (by the server's `usage`) and its events.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence

TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"


class Client(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, bodies: Sequence[object], port: int, until: float) -> None:
        self._requests = [_post(json.dumps(body).encode(), port) for body in bodies]
        self._until, self._next_request = until, 0
        self.answers: list[tuple[float, float, float, int, int]] = []
        self.failures: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send_next()

    def _send_next(self) -> None:
        self._received, self._length, self._first = bytearray(), 0, 0.0
        self._sent_at = time.monotonic()
        self.transport.write(self._requests[self._next_request % len(self._requests)])
        self._next_request += 1

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._first:
            self._first = time.monotonic()
        if not self._length:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            length = LENGTH.search(received, 0, head)
            self._length = head + 4 + int(length[1]) if length else -1  # negative: chunked encoding
        if received.endswith(LAST_CHUNK) if self._length < 0 else len(received) >= self._length:
            self._end()

    def _end(self) -> None:
        now, counts = time.monotonic(), TOKENS.findall(self._received)
        if self._received.startswith(b"HTTP/1.1 200") and counts:
            events = self._received.count(b"data: {")
            self.answers.append((self._sent_at, self._first, now, int(counts[-1]), events))
        else:
            self.failures.append(self._received[:200].decode(errors="replace"))
        if now < self._until and len(self.failures) < 3:
            self._send_next()


def _post(body: bytes, port: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def main() -> None:
    task = json.load(sys.stdin)
    port, until = task["port"], task["until"]
    clients = [Client(bodies, port, until) for bodies in task["bodies"]]
    before, loop = time.process_time(), asyncio.get_running_loop()
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(until - time.monotonic())
    for client in clients:
        client.transport.abort()
    answers = [answer for client in clients for answer in client.answers]
    failures = [failure for client in clients for failure in client.failures]
    json.dump({"cpu": time.process_time() - before, "answers": answers, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
