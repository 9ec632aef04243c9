"""Clients of a completion server that cost little: HTTP/1.1 by hand over connections that are kept.

    echo '{"port": 8000, "until": 1234.5, "bodies": [[{"prompt": "Once"}, …], …]}' | python http_clients.py

One connection for each list of bodies; each sends its bodies one after the other, over and over, until the time
`until` of the clock that all processes share (`time.monotonic`), and then leaves what is under way. Standard
library only. What comes out is JSON: the CPU seconds of this process, the answers that were none, and of each
other request when it was sent, when its first bytes came and its last, its tokens (by the server's `usage`) and its
events.
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
    """One connection, and one request on it at a time."""

    def __init__(self, bodies: Sequence[object], port: int, until: float) -> None:
        self._requests = [_post(json.dumps(body).encode(), port) for body in bodies]
        self._until, self._next = until, 0
        self.answers: list[tuple[float, float, float, int, int]] = []
        self.failures: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        self._came, self._length, self._first = bytearray(), 0, 0.0
        self._began = time.monotonic()
        self.transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1

    def data_received(self, data: bytes) -> None:
        came = self._came
        came += data
        if not self._first:
            self._first = time.monotonic()
        if not self._length:
            head = came.find(b"\r\n\r\n")
            if head < 0:
                return
            found = LENGTH.search(came, 0, head)
            self._length = head + 4 + int(found[1]) if found else -1  # below zero: in chunks
        if came.endswith(LAST_CHUNK) if self._length < 0 else len(came) >= self._length:
            self._end()

    def _end(self) -> None:
        now, counts = time.monotonic(), TOKENS.findall(self._came)
        if self._came.startswith(b"HTTP/1.1 200") and counts:
            events = self._came.count(b"data: {")
            self.answers.append((self._began, self._first, now, int(counts[-1]), events))
        else:
            self.failures.append(self._came[:200].decode(errors="replace"))
        if now < self._until and len(self.failures) < 3:
            self._ask()


def _post(body: bytes, port: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def main() -> None:
    asked = json.load(sys.stdin)
    port, until = asked["port"], asked["until"]
    clients = [Client(bodies, port, until) for bodies in asked["bodies"]]
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
