"""A server under load, overload, attack and misfortune: does it stay right, whole and up?

    make soak                                                  # all of it, some 20 minutes on two cores
    python benchmarks/soak.py [load overload hostile misfortune] [--out results/serving/soak.json]

Every part starts `loopformer serve` with the model in the box on loopback, as a user does.

load        500 requests, 32 at a time: budgets, lengths, streams and not, some cancelled half way. Nothing fails,
            every text is that of a single run, and memory, keys and values and files return to what they were.
overload    twice the rate that the server sustains, with and without --degrade: how many are refused.
hostile     malformed and hostile requests (hostile.py): no 500, no hang, and it still answers.
misfortune  the engine or the server killed, time to drain that runs out, a second signal.

Parts that are not run again stay in the file. A promise that is not kept is listed in `broken`, with exit code 1.
Times are those of a client on the same machine; where others use it, too, take ratios and counts.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from hostile import attack
from serve_process import ServeProcess, wait_until

import loopformer
from loopformer.benchmark.machine import publish
from loopformer.config.model import BOX
from loopformer.loading.folder import HELD_OUT, located

Report = dict[str, Any]
DEPTHS: list[Report] = [{"budget": 1}, {"budget": 2}, {"budget": 4}, {"budget": 8}, {"trajectory": "4-2-1-1"}]
MARGIN = 0.1  # share of its memory by which a process may be larger afterwards
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "stream": True}


class Server(ServeProcess):
    """With the model in the box, on the CPU."""

    def __init__(self, *options: str) -> None:
        super().__init__("--device", "cpu", *options)

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        return httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, verify=False)

    def holdings(self) -> Report:
        """What the two processes hold while nothing runs."""
        self.settle()
        usage = self.metric("kv_cache_usage_perc")
        time.sleep(1)  # for connections to close
        return {"kv_usage": usage, "server": holdings(self.process.pid), "engine": holdings(self.engine)}


def holdings(process: int) -> Report:
    folder = Path(f"/proc/{process}")
    pages = int((folder / "statm").read_text().split()[1])
    names = {"files": "fd", "threads": "task"}
    counts = {name: len(list((folder / entry).iterdir())) for name, entry in names.items()}
    return {"rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1), **counts}


def is_alive(process: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    return False


@dataclass
class Answer:
    """What came of a request, and its times in seconds."""

    status: int = 0
    text: str = ""
    tokens: int = 0
    followed: Report = field(default_factory=dict)
    error: str | None = None  # in a stream that had begun
    first: float | None = None
    whole: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status != 200 or self.error is not None


async def ask(client: httpx.AsyncClient, body: Report, leave_after: int | None = None) -> Answer:
    """Ask for a completion; leave after so many tokens of a stream, or twentieths of a second of another."""
    answer, began = Answer(), time.perf_counter()
    if not body.get("stream"):
        limit = None if leave_after is None else leave_after / 20
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                said = await client.post("/v1/completions", json=body)
                answer.status, content = said.status_code, said.json()
                if answer.status == 200:
                    answer.text, answer.tokens = (
                        content["choices"][0]["text"],
                        content["usage"]["completion_tokens"],
                    )
                    answer.followed = content["loopformer"]
    else:
        options = {"logprobs": 0, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json={**body, **options}) as said:
            answer.status = said.status_code
            async for line in said.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                answer.first = answer.first or time.perf_counter() - began
                answer.error = event.get("error", {}).get("code")
                answer.followed = event.get("loopformer", answer.followed)
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.tokens += len(choice["logprobs"]["tokens"])
                if leave_after is not None and answer.tokens >= leave_after:
                    break
    answer.whole = time.perf_counter() - began
    return answer


def percentiles(values: Sequence[float]) -> Report:
    points = {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 95, 99)} if values else {}
    return {"count": len(values), **points}


# Load.


@dataclass(frozen=True)
class Case:
    body: Report
    leave_after: int | None

    @property
    def depth(self) -> str:
        return str(self.body.get("trajectory") or self.body["budget"])


def draw_cases(count: int, seed: int) -> list[Case]:
    """Beginnings of held-out texts; one in eight clients leaves half way."""
    draw = random.Random(seed)
    lines = (located(BOX) / HELD_OUT).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    cases = []
    for number in range(count):
        prompt, tokens = draw.choice(texts)[: draw.choice((10, 40, 150, 600))], draw.randint(2, 64)
        body = {"prompt": prompt, "max_tokens": tokens, "stream": draw.random() < 0.5}
        body |= {"temperature": 0} if number % 4 else {"temperature": 1, "seed": number}
        leave_after = max(1, tokens // 2) if draw.random() < 1 / 8 else None
        cases.append(Case({**body, **draw.choice(DEPTHS)}, leave_after))
    return cases


async def run_cases(server: Server, cases: Sequence[Case], at_once: int) -> list[Answer]:
    places = asyncio.Semaphore(at_once)
    async with server.client() as client:

        async def run(case: Case) -> Answer:
            async with places:
                return await ask(client, case.body, case.leave_after)

        return await asyncio.gather(*map(run, cases))


def load(asked: argparse.Namespace) -> Report:
    cases = draw_cases(asked.requests, asked.seed)
    with Server() as server:
        asyncio.run(run_cases(server, draw_cases(asked.requests // 4, asked.seed + 1), asked.at_once))  # warm
        before, began = server.holdings(), time.perf_counter()
        answers = asyncio.run(run_cases(server, cases, asked.at_once))
        seconds = time.perf_counter() - began
        held = [before, server.holdings()]
        asyncio.run(run_cases(server, cases, asked.at_once))  # what grows once more is a leak
        held.append(after := server.holdings())
        restarts = server.metric("engine_restarts_total")
    lm = loopformer.load(BOX)
    stayed = [pair for pair in zip(cases, answers, strict=True) if pair[0].leave_after is None]
    other = []
    for case, answer in stayed:
        body = {key: value for key, value in case.body.items() if key != "stream"}
        alone = lm.generate(body.pop("prompt"), **body)
        if answer.text != alone.text:
            other.append({"body": case.body, "served": answer.text, "alone": alone.text})
    by_depth = {}
    for depth in sorted({case.depth for case, _ in stayed}):
        those = [answer for case, answer in stayed if case.depth == depth]
        streams = [(each, each.first) for each in those if each.first is not None]
        gaps = [(each.whole - first) / (each.tokens - 1) for each, first in streams if each.tokens > 1]
        by_depth[depth] = {
            "first_token_seconds": percentiles([first for _, first in streams]),
            "seconds_per_token": percentiles(gaps),
            "whole_seconds": percentiles([each.whole for each in those]),
        }
    failed = [answer for answer in answers if answer.failed and answer.status]  # 0: left before an answer came
    larger = {name: after[name]["rss_mb"] / before[name]["rss_mb"] - 1 for name in ("server", "engine")}
    leaks = {
        "memory": max(larger.values()) > MARGIN,
        "keys and values": after["kv_usage"] > 0,
        "files": any(after[name]["files"] > before[name]["files"] for name in larger),
    }
    return {
        "requests": len(cases),
        "at_once": asked.at_once,
        "left": len(cases) - len(stayed),
        "greedy": sum(not case.body["temperature"] for case, _ in stayed),
        "seconds": seconds,
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "statuses": Counter(answer.status for answer in answers),
        "other_texts": other,
        "held_before_after_and_after_all_of_it_again": held,
        "margin": MARGIN,
        "larger": larger,
        "by_depth": by_depth,
        "broken": [
            *([f"{len(failed)} requests failed"] if failed else []),
            *([f"{len(other)} texts are not those of single runs"] if other else []),
            *([f"{restarts:g} engines were lost"] if restarts else []),
            *(f"leak of {what}" for what, so in leaks.items() if so),
        ],
    }


# Overload.

ROWS, QUEUE = 8, 32
STEADY = 1.33  # a machine that others use may become slower by this; else what was offered was not twice its rate


async def at_rate(server: Server, rate: float, count: int, seed: int) -> list[Answer]:
    """Requests of the full budget come at random times, however the others fare."""
    draw, prompts = random.Random(seed), [case.body["prompt"] for case in draw_cases(64, seed)]
    tasks: list[asyncio.Task[Answer]] = []
    async with server.client() as client:
        at = time.perf_counter()
        for _ in range(count):
            at += draw.expovariate(rate)
            await asyncio.sleep(at - time.perf_counter())
            body = {"prompt": draw.choice(prompts), "max_tokens": 32, "temperature": 1, "seed": len(tasks)}
            tasks.append(asyncio.create_task(ask(client, body)))
        return await asyncio.gather(*tasks)


async def sustained(server: Server, seconds: float, seed: int) -> float:
    """Requests per second that get done while all slots are busy, and some wait."""
    draw, prompts = random.Random(seed), [case.body["prompt"] for case in draw_cases(64, seed)]
    done, until = 0, time.perf_counter() + seconds
    async with server.client() as client:

        async def go_on() -> None:
            nonlocal done
            while time.perf_counter() < until:
                body = {"prompt": draw.choice(prompts), "max_tokens": 32, "temperature": 1}
                await ask(client, body)
                done += time.perf_counter() < until

        await asyncio.gather(*(go_on() for _ in range(ROWS + QUEUE // 4)))
    return done / seconds


def overload(asked: argparse.Namespace) -> Report:
    options = ("--rows", str(ROWS), "--queue", str(QUEUE))
    rounds = []
    for number in range(asked.rounds):
        with Server(*options) as plain, Server(*options, "--degrade") as degrading:
            asyncio.run(sustained(plain, 5, 0))
            rate = asyncio.run(sustained(plain, asked.seconds, number))
            row: Report = {"sustained_per_second": rate, "offered_per_second": 2 * rate}
            for name, server in (("plain", plain), ("degrade", degrading)):
                answers = asyncio.run(at_rate(server, 2 * rate, asked.requests, asked.seed + number))
                server.settle()
                done = [answer for answer in answers if answer.status == 200]
                row[name] = {
                    "requests": len(answers),
                    "refused": sum(answer.status == 429 for answer in answers),
                    "failed": sum(answer.status not in (200, 429) for answer in answers),
                    "budgets": Counter(answer.followed["budget"] for answer in done),
                    "whole_seconds": percentiles([answer.whole for answer in done]),
                }
            after = row["sustained_after_per_second"] = asyncio.run(sustained(plain, asked.seconds, number))
            row["steady"] = 1 / STEADY < after / rate < STEADY
            rounds.append(row)
            print(json.dumps(row), file=sys.stderr)
    steady = [row for row in rounds if row["steady"]]
    refused = {name: sum(row[name]["refused"] for row in steady) for name in ("plain", "degrade")}
    ratio = refused["degrade"] / max(1, refused["plain"])
    failed = sum(row[name]["failed"] for row in rounds for name in refused)
    return {
        "rows": ROWS,
        "queue": QUEUE,
        "rounds": rounds,
        "steady_rounds": len(steady),
        "refused": refused,
        "refused_with_degrade_to_without": ratio,
        "broken": [
            *(["--degrade does not halve the refusals"] if ratio > 0.5 or not refused["plain"] else []),
            *([f"{failed} requests failed"] if failed else []),
        ],
    }


# Attack and misfortune.


def hostile(asked: argparse.Namespace) -> Report:
    options = ["--max-prompt", "64", "--max-output", "16", "--rows", "8", "--queue", "8", "--timeout", "20"]
    with Server(*options) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        expected = httpx.post(f"{server.url}/v1/completions", json=body, verify=False).json()["choices"]
        before = server.holdings()
        report = attack(server.url, asked.seed, asked.examples)
        time.sleep(12)  # for connections that said nothing to be closed
        after = server.holdings()
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, verify=False).json()["choices"]
        restarts = server.metric("engine_restarts_total")
        server.log.seek(0)
        errors = [line for line in server.log if '"level": "error"' in line]
    report |= {"before": before, "after": after, "errors_in_the_log": errors[:20]}
    report["broken"] += [
        *(["another answer than before"] if again != expected else []),
        *([f"{restarts:g} engines were lost"] if restarts else []),
        *([f"{len(errors)} errors in the log"] if errors else []),
        *(["connections are left"] if after["server"]["files"] > before["server"]["files"] else []),
    ]
    return report


def misfortune(asked: argparse.Namespace) -> Report:
    """Each with 16 streams that run and 16 that wait."""
    bodies = [{**LONG, "budget": 1 + number % 8} for number in range(32)]
    short = {**LONG, "max_tokens": 4, "stream": False}
    report: Report = {"broken": []}

    def promise(name: str, kept: bool) -> None:
        if not kept:
            report["broken"].append(name)

    async def meanwhile(server: Server, act: Callable[[], object]) -> list[Answer | BaseException]:
        async with server.client() as client:
            tasks = [asyncio.create_task(ask(client, body)) for body in bodies]
            while not await asyncio.to_thread(server.metric, "num_requests_waiting"):
                await asyncio.sleep(0.1)
            act()
            return await asyncio.gather(*tasks, return_exceptions=True)

    def outcomes(answers: Sequence[Answer | BaseException]) -> Report:
        """The codes of errors, with the status or as an event; connections that broke."""
        return Counter(str(each.error or each.status) if isinstance(each, Answer) else "broken" for each in answers)

    with Server() as server:
        text = httpx.post(f"{server.url}/v1/completions", json=short, timeout=60, verify=False).json()["choices"]
        killed = asyncio.run(meanwhile(server, lambda: os.kill(server.engine, signal.SIGKILL)))
        report["engine killed"] = outcomes(killed)
        promise("all end when the engine is killed", all(isinstance(one, Answer) and one.failed for one in killed))
        began = time.perf_counter()
        wait_until(lambda: httpx.get(f"{server.url}/ready", verify=False).status_code == 200)
        report["seconds until it was ready again"] = time.perf_counter() - began
        again = httpx.post(f"{server.url}/v1/completions", json=short, timeout=60, verify=False).json()["choices"]
        promise("the same text after a restart", again == text)
        engines = [int(line.split()[-1].strip('".)}')) for line in logged(server, "runs again")]
        promise("one restart", len(engines) == 1)
        report["server killed"] = outcomes(asyncio.run(meanwhile(server, server.process.kill)))
        wait_until(lambda: not any(map(is_alive, engines)), 10)
    for name, options, signals in (
        ("time to drain over", ("--drain-seconds", "1"), 1),
        ("second signal", ("--drain-seconds", "600"), 2),
    ):
        with Server(*options) as server:

            def stop(server: Server = server, signals: int = signals) -> None:
                for _ in range(signals):
                    server.process.send_signal(signal.SIGTERM)
                    time.sleep(0.5)

            report[name] = outcomes(asyncio.run(meanwhile(server, stop)))
            code = server.process.wait(60)
            promise(f"{name}: it ends well", code == 0 and not is_alive(server.engine))
    return report


def logged(server: Server, words: str) -> list[str]:
    server.log.seek(0)
    return [line for line in server.log if words in line]


PARTS = {"load": load, "overload": overload, "hostile": hostile, "misfortune": misfortune}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument(
        "--requests", type=int, default=500, help="of load, and of each half of a round of overload"
    )
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="of overload")
    parser.add_argument("--seconds", type=float, default=20, help="to find what the server sustains")
    parser.add_argument("--examples", type=int, default=150, help="of schemathesis, for each route and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the engine, which shares the cores with its clients here
    kept: Report = json.loads(asked.out.read_text("utf-8")) if asked.out and asked.out.exists() else {}
    report: Report = kept | {
        "benchmark": "soak",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread of the engine",
        "torch": torch.__version__,
        "model": BOX,
    }
    facts = {"command": shlex.join(["python", *sys.argv]), "seed": asked.seed, "commit": asked.commit}
    try:
        for part in asked.parts or PARTS:
            print(part, file=sys.stderr)
            report[part] = facts | PARTS[part](asked)
            print(json.dumps(report[part]["broken"]), file=sys.stderr)
    finally:  # what was measured stays measured
        publish(report, asked.out)
    sys.exit(any(report[part]["broken"] for part in asked.parts or PARTS))


if __name__ == "__main__":
    main()
